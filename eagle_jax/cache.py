"""Key-value caches that hold committed tokens only.

The keys and values of tokens under test (a draft tree, a prompt's chunk) stand beside the cache until the target has
spoken; then the accepted ones are written once. So there is nothing to compact, and to go back is to say a shorter
length.

B batch rows, S cache slots, T block tokens, R tokens to write, KV key-value heads, H head dimension. Heads stand before
slots, as attention's products want them: the other way round, a CPU copies the whole cache into that order every round.
One array per layer: a stacked one would be copied whenever a layer reads its slice.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Rows(NamedTuple):
    """Keys and values of tokens that are not committed, one array per layer."""

    keys: tuple[Array, ...]  # per layer [B, KV, T, H]
    values: tuple[Array, ...]  # per layer [B, KV, T, H]
    positions: Array  # i32[B, T]


def join(first: Rows, second: Rows) -> Rows:
    """One block out of two."""

    def along(axis: int, pair: tuple[Array, Array]) -> Array:
        return jnp.concatenate(pair, axis=axis)

    return Rows(
        keys=tuple(along(2, pair) for pair in zip(first.keys, second.keys, strict=True)),
        values=tuple(along(2, pair) for pair in zip(first.values, second.values, strict=True)),
        positions=along(1, (first.positions, second.positions)),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """Committed keys and values; slot i of a row holds its i-th token, slots at or past `length` hold nothing."""

    keys: tuple[Array, ...]  # per layer [B, KV, S, H]
    values: tuple[Array, ...]  # per layer [B, KV, S, H]
    length: Array  # i32[B]

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]


def empty(
    *, layers: int, batch: int, capacity: int, kv_heads: int, key_dim: int, dtype: jax.typing.DTypeLike
) -> KVCache:
    """A cache with room for `capacity` tokens in each of `batch` rows."""
    shape = (batch, kv_heads, capacity, key_dim)
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
        values=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
        length=jnp.zeros((batch,), jnp.int32),
    )


def commit(cache: KVCache, rows: Rows, count: Array, path: Array | None = None) -> KVCache:
    """Appends the first `count` of `rows` to each row of the cache.

    Args:
      rows: keys and values, per layer [B, KV, T, H].
      count: i32[B], how many to append; 0 leaves a row as it is.
      path: i32[B, R], which of the T rows to append, in order; None takes them as they stand.
    """
    written = rows.keys[0].shape[2] if path is None else path.shape[1]
    offset = jnp.arange(written, dtype=jnp.int32)[None, :]
    # Out of range is dropped by the scatter; -1 would wrap to the last slot, so padding goes to index = capacity.
    slots = jnp.where(offset < count[:, None], cache.length[:, None] + offset, cache.capacity)  # [B, R]
    row = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]

    def write(cached: Array, new: Array) -> Array:
        if path is not None:
            new = jnp.take_along_axis(new, path[:, None, :, None], axis=2)
        # Indexing around a slice puts the indexed axes first: the update is [B, R, KV, H].
        return cached.at[row, :, slots].set(new.swapaxes(1, 2).astype(cached.dtype), mode="drop")

    return KVCache(
        keys=tuple(map(write, cache.keys, rows.keys)),
        values=tuple(map(write, cache.values, rows.values)),
        length=cache.length + count,
    )


def rewound(cache: KVCache, length: Array) -> KVCache:
    """The cache with the first `length` i32[B] tokens of each row, which are no more than it holds."""
    return dataclasses.replace(cache, length=length)
