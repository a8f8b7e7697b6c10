"""Tensors of other formats, renamed and turned into this library's parameters.

One table per format says which parameter a tensor becomes; `build` walks it and lists whatever is missing, unexpected
or of another shape in one error.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.config import ModelConfig

Transform = Callable[[np.ndarray, ModelConfig], np.ndarray]
Table = tuple[tuple[str, str, Transform], ...]  # (parameter path, tensor name, transform); the path is a regex


def unchanged(weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return weight


def transposed(weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return weight.T


def build(
    make: Callable[[], Any],
    table: Table,
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str], np.ndarray],
    source: str,
) -> Any:
    """Makes a module whose parameters come from named tensors.

    Args:
      make: builds the module; it is traced for its shapes only, random weights are never made.
      table: which tensor each parameter comes from.
      shapes: the tensors there are, and their shapes.
      read: a tensor by its name; called once for each, so that one at a time is in memory, and only if all fit.
      source: what the tensors come from, for errors.

    Raises:
      ValueError: lists every tensor that is missing, unexpected or wrongly shaped.
    """
    abstract = nnx.eval_shape(make)
    graphdef, state = nnx.split(abstract)
    wanted = [(path, leaf, *tensor_for(path, table)) for path, leaf in nnx.to_flat_state(state)]
    faults = [f"unexpected {name}" for name in shapes.keys() - {name for *_, name, _ in wanted}]
    for _, leaf, name, transform in wanted:
        if name not in shapes:
            faults.append(f"missing {name}")
            continue
        given = _shape_after(transform, shapes[name], abstract.config)
        if given is None:  # a wrong shape may not even be transformed
            faults.append(f"{name} of shape {tuple(shapes[name])} does not become {leaf.shape}")
        elif given != leaf.shape:
            faults.append(f"{name} gives {given} where {leaf.shape} is needed")
    if faults:
        raise ValueError(f"The tensors of {source} do not fit its configuration: {'; '.join(sorted(faults))}.")
    flat = [
        (path, leaf.replace(_on_device(transform(read(name), abstract.config), leaf.dtype)))
        for path, leaf, name, transform in wanted
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def _shape_after(transform: Transform, shape: Sequence[int], config: ModelConfig) -> tuple[int, ...] | None:
    """The shape a transform makes of another; None where it cannot."""
    try:
        return transform(np.broadcast_to(np.int8(0), tuple(shape)), config).shape
    except (ValueError, IndexError):
        return None


def _on_device(weight: np.ndarray, dtype: jnp.dtype) -> jax.Array:
    return jnp.asarray(np.ascontiguousarray(weight, dtype))


def tensor_for(path: tuple[Any, ...], table: Table) -> tuple[str, Transform]:
    """The tensor name and the transform for a parameter's path."""
    dotted = ".".join(map(str, path))
    for pattern, name, transform in table:
        match = re.fullmatch(pattern, dotted)
        if match:
            return match.expand(name), transform
    raise ValueError(f"No tensor is known for the parameter {dotted}; add it to the conversion table.")
