"""Tensors of other formats, renamed and turned into this library's parameters.

One table per format says which parameter a tensor becomes; `build` walks it and lists whatever is missing, unexpected
or of another shape in one error.
"""

import re
from collections.abc import Callable, Collection
from typing import Any

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
    make: Callable[[], Any], table: Table, names: Collection[str], read: Callable[[str], np.ndarray], source: str
) -> Any:
    """Makes a module whose parameters come from named tensors.

    Args:
      make: builds the module; it is traced for its shapes only, random weights are never made.
      table: which tensor each parameter comes from.
      names: the tensors there are.
      read: a tensor by its name; called once for each, so that one at a time is in memory.
      source: what the tensors come from, for errors.

    Raises:
      ValueError: lists every tensor that is missing, unexpected or wrongly shaped.
    """
    abstract = nnx.eval_shape(make)
    graphdef, state = nnx.split(abstract)
    flat, faults, used = [], [], set()
    for path, leaf in nnx.to_flat_state(state):
        name, transform = tensor_for(path, table)
        used.add(name)
        if name not in names:
            faults.append(f"missing {name}")
            continue
        stored = read(name)
        try:
            weight = transform(stored, abstract.config)
        except (ValueError, IndexError):  # a wrong shape may not even be transformed
            faults.append(f"{name} of shape {stored.shape} does not become {leaf.shape}")
            continue
        if weight.shape == leaf.shape:
            flat.append((path, leaf.replace(jnp.asarray(weight, leaf.dtype))))
        else:
            faults.append(f"{name} gives {weight.shape} where {leaf.shape} is needed")
    faults += [f"unexpected {name}" for name in names if name not in used]
    if faults:
        raise ValueError(f"The tensors of {source} do not fit its configuration: {'; '.join(sorted(faults))}.")
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def tensor_for(path: tuple[Any, ...], table: Table) -> tuple[str, Transform]:
    """The tensor name and the transform for a parameter's path."""
    dotted = ".".join(map(str, path))
    for pattern, name, transform in table:
        match = re.fullmatch(pattern, dotted)
        if match:
            return match.expand(name), transform
    raise ValueError(f"No tensor is known for the parameter {dotted}; add it to the conversion table.")
