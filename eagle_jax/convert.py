"""Tensors of other formats, renamed and turned into this library's parameters.

One table per format says which parameter a tensor becomes; `build` walks it and lists whatever is missing, unexpected
or of another shape in one error.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from eagle_jax.config import ModelConfig
from eagle_jax.sharding import ShardingRules, shardings_for

Index = tuple[slice, ...]
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
    read: Callable[..., np.ndarray],
    source: str,
    mesh: Mesh | None = None,
) -> Any:
    """Makes a module whose parameters come from named tensors.

    Args:
      make: builds the module; it is traced for its shapes only, random weights are never made.
      table: which tensor each parameter comes from.
      shapes: the tensors there are, and their shapes.
      read: a tensor by its name, or with an index the part of it that the index selects; one tensor at a time is in
        memory, and none is read unless all fit.
      source: what the tensors come from, for errors.
      mesh: lays the parameters out over these devices. Of each a process reads only what its own devices hold.

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
    if mesh is None:
        values = (_on_device(transform(read(name), abstract.config), leaf.dtype) for _, leaf, name, transform in wanted)
    else:
        rules = ShardingRules(key_dim=abstract.config.key_dim)
        shaped = {_dotted(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf, *_ in wanted}
        places = shardings_for(shaped, mesh, rules)
        values = (
            _on_mesh(partial(_read_part, read, name, transform, abstract.config), leaf, places[_dotted(path)])
            for path, leaf, name, transform in wanted
        )
    flat = [(path, leaf.replace(value)) for (path, leaf, *_), value in zip(wanted, values, strict=True)]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def _read_part(
    read: Callable[..., np.ndarray], name: str, transform: Transform, config: ModelConfig, index: Index
) -> np.ndarray:
    """The part of a parameter that an index selects, from no more of its tensor than that takes."""
    if transform is unchanged:
        return read(name, index)
    if transform is transposed:
        return read(name, index[::-1]).T
    return transform(read(name), config)[index]


def _on_mesh(part: Callable[[Index], np.ndarray], leaf: Any, sharding: NamedSharding) -> jax.Array:
    parts: dict[tuple[int, ...], np.ndarray] = {}  # those that several devices hold are read once

    def of_device(index: Index | None) -> np.ndarray:
        assert index is not None
        bounds = tuple(slice(*one.indices(size)) for one, size in zip(index, leaf.shape, strict=True))
        key = tuple(one.start for one in bounds)
        if key not in parts:
            parts[key] = np.ascontiguousarray(part(bounds), leaf.dtype)
        return parts[key]

    return jax.make_array_from_callback(leaf.shape, sharding, of_device)


def _shape_after(transform: Transform, shape: Sequence[int], config: ModelConfig) -> tuple[int, ...] | None:
    """The shape a transform makes of another; None where it cannot."""
    try:
        return transform(np.broadcast_to(np.int8(0), tuple(shape)), config).shape
    except (ValueError, IndexError):
        return None


def _on_device(weight: np.ndarray, dtype: jnp.dtype) -> jax.Array:
    return jnp.asarray(np.ascontiguousarray(weight, dtype))


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def tensor_for(path: tuple[Any, ...], table: Table) -> tuple[str, Transform]:
    """The tensor name and the transform for a parameter's path."""
    dotted = _dotted(path)
    for pattern, name, transform in table:
        match = re.fullmatch(pattern, dotted)
        if match:
            return match.expand(name), transform
    raise ValueError(f"No tensor is known for the parameter {dotted}; add it to the conversion table.")
