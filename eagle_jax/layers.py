"""The parts of a Llama-family decoder, called with a prefix of cached tokens and a block of new ones.

A block is whatever one forward pass takes in: a chunk of the prompt (causal mask) or a draft tree (ancestor mask).
Its tokens attend to the whole prefix of their row and, within the block, to what the block mask says; one softmax
runs over both. Nothing is written to the cache here.

B batch rows, T block tokens, S cache slots, E hidden size, KV key-value heads, G query heads per key-value head,
H head dimension.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from eagle_jax import cache as kv
from eagle_jax import rope
from eagle_jax.config import ModelConfig
from eagle_jax.numerics import precision_for
from eagle_jax.sharding import constrain

Dtype = jax.typing.DTypeLike


def linear(inputs: int, outputs: int, *, bias: bool, dtype: Dtype, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        precision=precision_for(dtype),
        kernel_init=nnx.initializers.normal(0.02),
        rngs=rngs,
    )


def rms_norm(size: int, config: ModelConfig, *, dtype: Dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(size, epsilon=config.rms_norm_eps, dtype=dtype, param_dtype=dtype, rngs=rngs)


def causal_mask(length: int) -> Array:
    """bool[1, T, T]: a token sees itself and what stands before it."""
    return jnp.tril(jnp.ones((1, length, length), bool))


def attend(
    queries: Array,  # [B, KV * G, T, H]
    block: tuple[Array, Array],  # keys and values, each [B, KV, U, H]
    block_mask: Array,  # bool[B or 1, T, U]
    prefix: tuple[Array, Array] | None = None,  # keys and values, each [B, KV, S, H]
    prefix_mask: Array | None = None,  # bool[B, T or 1, S]
) -> Array:  # [B, KV * G, T, H]
    """Softmax attention over a masked prefix and a masked block beside it."""
    batch, heads, tokens, dim = queries.shape
    kv_heads = block[0].shape[1]
    precision = precision_for(queries.dtype)
    # A key-value head's group of query heads lies along the tokens: one plain batched product, no copy of the keys.
    grouped = queries.reshape(batch, kv_heads, -1, dim) * dim**-0.5  # [B, KV, G * T, H]

    def score(keys: Array, mask: Array) -> Array:
        scores = jnp.einsum("bkqh,bksh->bkqs", grouped, keys, precision=precision, preferred_element_type=jnp.float32)
        scores = scores.reshape(batch, kv_heads, -1, tokens, keys.shape[2])
        return jnp.where(mask, scores, jnp.finfo(jnp.float32).min)

    def mix(weights: Array, values: Array) -> Array:
        weights = weights.astype(values.dtype).reshape(*grouped.shape[:3], -1)
        return jnp.einsum("bkqs,bksh->bkqh", weights, values, precision=precision, preferred_element_type=jnp.float32)

    scores = score(block[0], block_mask[:, None, None])  # [B, KV, G, T, U]
    if prefix is None:
        mixed = mix(jax.nn.softmax(scores, axis=-1), block[1])
    else:
        assert prefix_mask is not None
        slots = prefix[0].shape[2]
        before = score(prefix[0], prefix_mask[:, None, None])
        weights = jax.nn.softmax(jnp.concatenate([before, scores], axis=-1), axis=-1)
        mixed = mix(weights[..., :slots], prefix[1]) + mix(weights[..., slots:], block[1])
    # Rounded once, after the sum: where a token stands, in the prefix or in the block, must not show.
    return mixed.astype(queries.dtype).reshape(batch, heads, tokens, dim)


class Masks(NamedTuple):
    """Which tokens a layer's queries may see."""

    block: Array  # bool[B or 1, T, U]
    prefix: Array | None  # bool[B, T or 1, S]; None without a prefix


def masks_for(
    window: int | None, positions: Array, key_positions: Array, block_mask: Array, prefix: kv.KVCache | None
) -> Masks:
    """The masks of a layer that sees the last `window` tokens of a text, or all of it.

    Args:
      positions: i32[B or 1, T or 1], of the queries.
      key_positions: i32[B or 1, U], of the block's keys. A prefix's slot is its token's position.
      block_mask: bool[B or 1, T, U], which of the block's tokens come before which.
    """
    before = None
    if prefix is not None:
        slots = jnp.arange(prefix.capacity)
        before = (slots < prefix.length[:, None])[:, None]  # [B, 1, S]
        if window is not None:
            before &= positions[:, :, None] - slots < window
    if window is not None:
        block_mask &= positions[:, :, None] - key_positions[:, None, :] < window
    return Masks(block_mask, before)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, *, dtype: Dtype, rngs: nnx.Rngs):
        hidden, queries = config.hidden_size, config.num_attention_heads * config.key_dim
        keys, bias = config.kv_heads * config.key_dim, config.attention_bias
        self.key_dim = config.key_dim
        self.q_proj = linear(hidden, queries, bias=bias, dtype=dtype, rngs=rngs)
        self.k_proj = linear(hidden, keys, bias=bias, dtype=dtype, rngs=rngs)
        self.v_proj = linear(hidden, keys, bias=bias, dtype=dtype, rngs=rngs)
        self.o_proj = linear(queries, hidden, bias=bool(config.attention_output_bias), dtype=dtype, rngs=rngs)
        normed = partial(rms_norm, config.key_dim, config, dtype=dtype, rngs=rngs)
        self.q_norm, self.k_norm = (normed(), normed()) if config.qk_norm else (None, None)

    def __call__(
        self,
        x: Array,  # [B, T, E]
        angles: tuple[Array, Array],
        masks: Masks,
        prefix: tuple[Array, Array] | None,
        earlier: tuple[Array, Array] | None,  # block tokens of earlier calls, each [B, KV, U - T, H]
    ) -> tuple[Array, tuple[Array, Array]]:  # [B, T, E]; this call's keys and values, each [B, KV, T, H]
        def heads(y: Array, norm: nnx.RMSNorm | None = None) -> Array:
            y = y.reshape(*y.shape[:2], -1, self.key_dim)
            return (y if norm is None else norm(y)).swapaxes(1, 2)

        queries = rope.rotate(heads(self.q_proj(x), self.q_norm), angles)
        rows = rope.rotate(heads(self.k_proj(x), self.k_norm), angles), heads(self.v_proj(x))
        block = rows
        if earlier is not None:
            keys, values = (jnp.concatenate(pair, axis=2) for pair in zip(earlier, rows, strict=True))
            block = keys, values
        mixed = attend(queries, block, masks.block, prefix, masks.prefix)
        return self.o_proj(mixed.swapaxes(1, 2).reshape(*x.shape[:2], -1)), rows


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (GLU variants, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, *, dtype: Dtype, rngs: nnx.Rngs):
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = linear(hidden, inner, bias=bias, dtype=dtype, rngs=rngs)
        self.up_proj = linear(hidden, inner, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = linear(inner, hidden, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class MixtureOfExperts(nnx.Module):
    """Each token through the best of X MLPs, summed by the router's weights (Mixtral, arXiv 2401.04088, section 2.1).

    An expert that no token of the call chose is passed over and its weights are not read, which is what a step of
    decoding costs. One that any token chose runs over all of them, so that shapes are static, nothing is dropped and
    the products split over a mesh like any other MLP's; for a long text that is X / chosen times the least possible.
    """

    def __init__(self, config: ModelConfig, *, dtype: Dtype, rngs: nnx.Rngs):
        assert config.num_local_experts is not None and config.num_experts_per_tok is not None
        self.chosen = config.num_experts_per_tok
        self.router = linear(config.hidden_size, config.num_local_experts, bias=False, dtype=dtype, rngs=rngs)
        self.experts = nnx.List([MLP(config, dtype=dtype, rngs=rngs) for _ in range(config.num_local_experts)])

    def __call__(self, x: Array) -> Array:
        likely = jax.nn.softmax(self.router(x).astype(jnp.float32), axis=-1)  # [B, T, X]
        best, places = jax.lax.top_k(likely, self.chosen)
        best /= jnp.sum(best, axis=-1, keepdims=True)
        weights = jnp.sum(jax.nn.one_hot(places, likely.shape[-1]) * best[..., None], axis=-2)  # [B, T, X]
        mixed = jnp.zeros(x.shape, jnp.float32)
        for index, expert in enumerate(self.experts):
            weight = weights[..., index, None]
            add = partial(_add_weighted, expert, x, weight)
            # Not `> 0`: what is no number must show.
            mixed = jax.lax.cond(jnp.any(weight != 0), add, lambda others: others, mixed)
        return mixed.astype(x.dtype)


def _add_weighted(expert: MLP, x: Array, weight: Array, others: Array) -> Array:
    return others + weight * expert(x)


class Block(nnx.Module):
    """A pre-norm decoder layer. EAGLE's head leaves the first norm out: `fc` stands where it would."""

    def __init__(self, config: ModelConfig, *, input_norm: bool = True, dtype: Dtype, rngs: nnx.Rngs):
        self.input_layernorm = rms_norm(config.hidden_size, config, dtype=dtype, rngs=rngs) if input_norm else None
        self.self_attn = Attention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = rms_norm(config.hidden_size, config, dtype=dtype, rngs=rngs)
        mlp = MLP if config.num_local_experts is None else MixtureOfExperts
        self.mlp = mlp(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Array,
        angles: tuple[Array, Array],
        masks: Masks,
        prefix: tuple[Array, Array] | None,
        earlier: tuple[Array, Array] | None,
    ) -> tuple[Array, tuple[Array, Array]]:
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        mixed, rows = self.self_attn(normed, angles, masks, prefix, earlier)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), rows


def by_rows(x: Array) -> Array:
    """Activations [B, T, E] on a mesh: split over rows, never over E, as the parameters alone would have it."""
    return constrain(x, "batch", None, None)


def run_blocks(
    blocks: nnx.List,
    config: ModelConfig,
    x: Array,  # [B, T, E]
    positions: Array,  # i32[B or 1, T or 1]
    block_mask: Array,  # bool[B or 1, T, U]
    prefix: kv.KVCache | None,
    earlier: kv.Rows | None = None,
    text_length: Array | None = None,
) -> tuple[Array, kv.Rows]:
    """Runs the layers over a block of tokens.

    Args:
      prefix: what the rows have committed; None for a block that starts its rows.
      earlier: block tokens that went before in calls of their own; the mask's first U - T columns.
      text_length: see `rope.angles`.

    Returns:
      The last layer's output [B, T, E] and this block's keys and values.
    """
    angles = rope.angles(positions, config, text_length)
    own = jnp.broadcast_to(positions, x.shape[:2])
    key_positions = own if earlier is None else jnp.concatenate([earlier.positions, own], axis=1)
    masks = {w: masks_for(w, positions, key_positions, block_mask, prefix) for w in set(config.windows)}
    keys, values = [], []
    x = by_rows(x)
    for index, (block, window) in enumerate(zip(blocks, config.windows, strict=True)):
        x, (key, value) = block(
            x,
            angles,
            masks[window],
            None if prefix is None else (prefix.keys[index], prefix.values[index]),
            None if earlier is None else (earlier.keys[index], earlier.values[index]),
        )
        x = by_rows(x)
        keys.append(key)
        values.append(value)
    return x, kv.Rows(tuple(keys), tuple(values), own)


def parameter_count(state: object) -> int:
    """How many numbers a pytree of arrays (or of their shapes) holds."""
    return sum(leaf.size for leaf in jax.tree.leaves(state))
