"""Where arrays lie on a mesh of devices, as one table of rules; models and training know nothing of it.

The mesh has three axes. `data` splits the rows of a batch and repeats the parameters. `fsdp` splits rows as well, and
parameters along a dimension that is gathered where they are used (ZeRO, arXiv 1910.02054). `tensor` splits the products
themselves, heads and inner width (Megatron-LM, arXiv 1909.08053). Arrays are placed by `shard`; `jax.jit`, which is
what pjit has become, then makes one program for all devices of them, under `jax.set_mesh`.

B batch rows, V vocabulary, E hidden size, X experts.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")
MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many ways each axis splits; -1, for one axis at most, is all that the others leave."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1

    def __post_init__(self):
        for name in AXES:
            size = getattr(self, name)
            if size != -1 and size < 1:
                raise ValueError(f"MeshConfig.{name} is {size}; it must be at least 1, or -1 for what is left.")
        if self.sizes.count(-1) > 1:
            raise ValueError(f"MeshConfig has {self.sizes.count(-1)} axes of -1; only 1 can be what is left.")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in AXES)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over all devices of all processes, or over some.

    Raises:
      ValueError: the axes do not come to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    stated = math.prod(size for size in config.sizes if size != -1)
    left = len(devices) // stated
    if stated * left != len(devices) or (left != 1 and -1 not in config.sizes):
        least = "a multiple of " if -1 in config.sizes else ""
        wanted = ", ".join(f"{name} {size}" for name, size in zip(AXES, config.sizes, strict=True))
        raise ValueError(
            f"The mesh ({wanted}) needs {least}{stated} devices, but there are {len(devices)}; change one of them."
        )
    sizes = tuple(left if size == -1 else size for size in config.sizes)
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Logical axes and the mesh axes that each is split over; None is over none.

    An axis that its mesh axes do not divide is repeated instead. A head is never cut: where there are fewer key-value
    heads than `tensor` has devices, or not a multiple of it, keys and values are repeated and only queries are split.
    """

    batch: MeshAxes = ("data", "fsdp")
    vocab: MeshAxes = "tensor"
    embed: MeshAxes = "fsdp"
    heads: MeshAxes = "tensor"
    kv: MeshAxes = "tensor"
    mlp: MeshAxes = "tensor"
    joined: MeshAxes = "tensor"  # what `fc` makes of embedding and feature, and Medusa's residual layer of a feature
    key_dim: int = 1  # columns of a head

    def spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Any) -> P:
        """The partition of an array of this shape, whose dimensions are these logical axes."""
        chosen = []
        for axis, size in zip(axes, shape, strict=True):
            over = None if axis is None else getattr(self, axis)
            names = (over,) if isinstance(over, str) else over or ()
            unit = self.key_dim if axis in ("heads", "kv") else 1
            divides = size % (unit * math.prod(mesh.shape[name] for name in names)) == 0
            chosen.append(over if divides else None)
        return P(*chosen)


RULES = ShardingRules()

# The end of a parameter's path and its dimensions. What is not here and has one dimension (norms, the residual stream's
# biases, counters) is repeated. An optimizer's moments end like the parameter that they are kept of.
PARAMETERS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(embed_tokens|lm_head)\.embedding|embedding|lm_head", ("vocab", "embed")),  # the last two are `FrozenEnds`'
    (r"q_proj\.kernel", ("embed", "heads")),
    (r"q_proj\.bias", ("heads",)),
    (r"(k|v)_proj\.kernel", ("embed", "kv")),
    (r"(k|v)_proj\.bias", ("kv",)),
    (r"o_proj\.kernel", ("heads", "embed")),
    (r"(gate|up)_proj\.kernel", ("embed", "mlp")),
    (r"(gate|up)_proj\.bias", ("mlp",)),
    (r"down_proj\.kernel", ("mlp", "embed")),
    (r"router\.kernel", ("embed", None)),
    (r"(fc|linear)\.kernel", ("embed", "joined")),
)


def axes_of(path: str, dimensions: int) -> tuple[str | None, ...]:
    """The logical axes of the parameter at a dotted path."""
    for pattern, axes in PARAMETERS:
        if len(axes) == dimensions and re.fullmatch(rf"(.*\.)?({pattern})(\.value)?", path):
            return axes
    if dimensions > 1:
        raise ValueError(f"No sharding is known for {path} of {dimensions} dimensions; add it to the table.")
    return (None,) * dimensions


def shardings_for(tree: Any, mesh: Mesh, rules: ShardingRules = RULES) -> Any:
    """A `NamedSharding` for each array of a model, a training state or the frozen ends, or for each of their shapes."""

    def place(path: Any, leaf: Any) -> NamedSharding:
        dotted = jax.tree_util.keystr(path, simple=True, separator=".")
        return NamedSharding(mesh, rules.spec(axes_of(dotted, len(leaf.shape)), leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(place, tree)


def shard(tree: Any, mesh: Mesh, rules: ShardingRules = RULES) -> Any:
    """The same arrays over the mesh. Every process gives the same ones, or arrays that lie on a mesh already."""
    return jax.tree.map(_placed, tree, shardings_for(tree, mesh, rules))


def _placed(value: Any, sharding: NamedSharding) -> Array:
    if isinstance(value, Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = _placed(jax.random.key_data(value), NamedSharding(sharding.mesh, P()))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    if jax.process_count() == 1:
        return jax.device_put(value, sharding)
    if isinstance(value, Array) and not value.is_fully_addressable:
        return jax.jit(_same, out_shardings=sharding)(value)
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def create(make: Callable[..., Any], *args: Any, mesh: Mesh, rules: ShardingRules = RULES) -> Any:
    """`make(*args)`, of which every device makes its own part only, so that no device ever holds the whole.

    Numbers drawn from a key are the same on any mesh.
    """
    shardings = shardings_for(jax.eval_shape(make, *args), mesh, rules)
    return jax.jit(make, out_shardings=shardings)(*args)


def in_place(step: Callable[..., tuple[Any, Any]], state: Any) -> Callable[..., tuple[Any, Any]]:
    """A training step, (state, ...) -> (state, metrics), compiled so that a state stays where it lies.

    Left to itself the compiler may lay the next state out otherwise, which costs a second compilation and the donation.
    """
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(step, out_shardings=(places, None), donate_argnums=0)


def batch_sharding(mesh: Mesh, *, axis: int = 0, rules: ShardingRules = RULES) -> NamedSharding:
    """Of arrays of which one dimension is the batch's rows: the first, or the second where pieces are accumulated."""
    return NamedSharding(mesh, P(*(None,) * axis, rules.batch))


def row_multiple(mesh: Mesh) -> int:
    """The number of rows of a batch is a multiple of this; rows without loss, which change nothing, fill one up."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def process_rows(mesh: Mesh, rows: int) -> slice:
    """Which rows of a batch's `rows` this process has to bring: those that lie on its devices.

    Raises:
      ValueError: the rows are no multiple of `row_multiple`, or the process's devices lie apart in the mesh.
    """
    ways = row_multiple(mesh)
    if rows % ways:
        raise ValueError(f"A batch of {rows} rows does not divide over data x fsdp = {ways}; add rows without loss.")
    parts = batch_sharding(mesh).addressable_devices_indices_map((rows,)).values()
    bounds = sorted({index[0].indices(rows)[:2] for index in parts if index is not None})
    begin, end = bounds[0][0], bounds[-1][1]
    if sum(high - low for low, high in bounds) != end - begin:
        raise ValueError(f"This process has rows {bounds} of the mesh, which are not one piece; order the devices.")
    return slice(begin, end)


class Share(TypedDict):
    """Which of so many equal pieces of a batch's rows a process brings."""

    process_index: int
    process_count: int


def process_share(mesh: Mesh) -> Share:
    """This process's piece of any batch; processes whose devices hold the same rows bring the same one."""
    ways = row_multiple(mesh)
    own = process_rows(mesh, ways)
    return Share(process_index=own.start // (own.stop - own.start), process_count=ways // (own.stop - own.start))


def shard_batch(batch: Any, mesh: Mesh, rows: int, *, axis: int = 0) -> Any:
    """A batch of `rows` rows over all processes, from the rows of `process_rows` that this process brings."""
    sharding = batch_sharding(mesh, axis=axis)

    def place(own: Any) -> Array:
        own = np.asarray(own)
        whole = (*own.shape[:axis], rows, *own.shape[axis + 1 :])
        return jax.make_array_from_process_local_data(sharding, own, whole)

    return jax.tree.map(place, batch)


def to_host(tree: Any) -> Any:
    """Whole NumPy arrays on every process, whatever devices they lie on; all processes have to call it."""

    def whole(value: Array) -> Array:
        if value.is_fully_addressable or value.is_fully_replicated:
            return value
        assert isinstance(value.sharding, NamedSharding)
        return jax.jit(_same, out_shardings=NamedSharding(value.sharding.mesh, P()))(value)

    return jax.device_get(jax.tree.map(whole, tree))


def _same(x: Array) -> Array:  # one function, so that it is compiled once for a shape
    return x


def spans_processes(tree: Any) -> bool:
    """Whether arrays lie on devices of other processes too, so that all have to compute with them together."""
    return not jax.tree.leaves(tree)[0].is_fully_addressable


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that arrays have been laid out over; None where they lie on one device."""
    sharding = jax.tree.leaves(tree)[0].sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None


def constrain(x: Array, *axes: str | None, rules: ShardingRules = RULES) -> Array:
    """`x` with its dimensions split as these logical axes are, under the mesh of `jax.set_mesh`; without one, `x`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names != AXES:
        return x
    return jax.lax.with_sharding_constraint(x, rules.spec(axes, x.shape, mesh))
