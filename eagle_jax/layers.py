"""The parts of a Llama-family decoder, called with a prefix of cached tokens and a block of new ones.

A block is whatever one forward pass takes in: a chunk of the prompt (causal mask) or a draft tree (ancestor mask).
Its tokens attend to the whole prefix of their row and, within the block, to what the block mask says; one softmax
runs over both. Nothing is written to the cache here.

B batch rows, T block tokens, S cache slots, E hidden size, KV key-value heads, G query heads per key-value head,
H head dimension.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from eagle_jax import cache as kv
from eagle_jax.config import ModelConfig
from eagle_jax.numerics import precision_for

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


def rms_norm(config: ModelConfig, *, dtype: Dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype, param_dtype=dtype, rngs=rngs)


def rotary_angles(positions: Array, config: ModelConfig) -> tuple[Array, Array]:
    """Cosine and sine of the rotary embedding (RoFormer, arXiv 2104.09864), f32[B, 1, T, H/2]."""
    exponent = jnp.arange(0, config.key_dim, 2, dtype=jnp.float32) / config.key_dim
    frequencies = config.rope_theta**-exponent
    angles = positions.astype(jnp.float32)[:, None, :, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, angles: tuple[Array, Array]) -> Array:
    """Turns x [B, heads, T, H] by its position; the two halves of H are the two coordinates of each plane."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def causal_mask(length: int) -> Array:
    """bool[1, T, T]: a token sees itself and what stands before it."""
    return jnp.tril(jnp.ones((1, length, length), bool))


def attend(
    queries: Array,  # [B, KV * G, T, H]
    block: tuple[Array, Array],  # keys and values, each [B, KV, U, H]
    block_mask: Array,  # bool[B or 1, T, U]
    prefix: tuple[Array, Array] | None = None,  # keys and values, each [B, KV, S, H]
    prefix_length: Array | None = None,  # i32[B]
) -> Array:  # [B, KV * G, T, H]
    """Softmax attention over a prefix of `prefix_length` tokens and a masked block beside it."""
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
        return jnp.einsum("bkqs,bksh->bkqh", weights, values, precision=precision)

    scores = score(block[0], block_mask[:, None, None])  # [B, KV, G, T, U]
    if prefix is None:
        mixed = mix(jax.nn.softmax(scores, axis=-1), block[1])
    else:
        assert prefix_length is not None
        slots = prefix[0].shape[2]
        seen = jnp.arange(slots) < prefix_length[:, None]  # [B, S]
        before = score(prefix[0], seen[:, None, None, None])
        weights = jax.nn.softmax(jnp.concatenate([before, scores], axis=-1), axis=-1)
        mixed = mix(weights[..., :slots], prefix[1]) + mix(weights[..., slots:], block[1])
    return mixed.reshape(batch, heads, tokens, dim)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, *, dtype: Dtype, rngs: nnx.Rngs):
        hidden, queries = config.hidden_size, config.num_attention_heads * config.key_dim
        keys, bias = config.kv_heads * config.key_dim, config.attention_bias
        self.key_dim = config.key_dim
        self.q_proj = linear(hidden, queries, bias=bias, dtype=dtype, rngs=rngs)
        self.k_proj = linear(hidden, keys, bias=bias, dtype=dtype, rngs=rngs)
        self.v_proj = linear(hidden, keys, bias=bias, dtype=dtype, rngs=rngs)
        self.o_proj = linear(queries, hidden, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Array,  # [B, T, E]
        angles: tuple[Array, Array],
        block_mask: Array,  # bool[B or 1, T, U]
        prefix: tuple[Array, Array] | None,
        prefix_length: Array | None,
        earlier: tuple[Array, Array] | None,  # block tokens of earlier calls, each [B, KV, U - T, H]
    ) -> tuple[Array, tuple[Array, Array]]:  # [B, T, E]; this call's keys and values, each [B, KV, T, H]
        def heads(y: Array) -> Array:
            return y.reshape(*y.shape[:2], -1, self.key_dim).swapaxes(1, 2)

        queries = rotate(heads(self.q_proj(x)), angles)
        rows = rotate(heads(self.k_proj(x)), angles), heads(self.v_proj(x))
        block = rows
        if earlier is not None:
            keys, values = (jnp.concatenate(pair, axis=2) for pair in zip(earlier, rows, strict=True))
            block = keys, values
        mixed = attend(queries, block, block_mask, prefix, prefix_length)
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


class Block(nnx.Module):
    """A pre-norm decoder layer. EAGLE's head leaves the first norm out: `fc` stands where it would."""

    def __init__(self, config: ModelConfig, *, input_norm: bool = True, dtype: Dtype, rngs: nnx.Rngs):
        self.input_layernorm = rms_norm(config, dtype=dtype, rngs=rngs) if input_norm else None
        self.self_attn = Attention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = rms_norm(config, dtype=dtype, rngs=rngs)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Array,
        angles: tuple[Array, Array],
        block_mask: Array,
        prefix: tuple[Array, Array] | None = None,
        prefix_length: Array | None = None,
        earlier: tuple[Array, Array] | None = None,
    ) -> tuple[Array, tuple[Array, Array]]:
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        mixed, rows = self.self_attn(normed, angles, block_mask, prefix, prefix_length, earlier)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), rows


def run_blocks(
    blocks: nnx.List,
    config: ModelConfig,
    x: Array,  # [B, T, E]
    positions: Array,  # i32[B or 1, T]
    block_mask: Array,  # bool[B or 1, T, U]
    prefix: kv.KVCache | None,
    earlier: kv.Rows | None,
) -> tuple[Array, kv.Rows]:
    """Runs the layers over a block of tokens.

    Args:
      prefix: what the rows have committed; None for a block that starts its rows.
      earlier: keys and values of block tokens that went before in calls of their own; the mask's first U - T columns.

    Returns:
      The last layer's output [B, T, E] and this block's keys and values.
    """
    angles = rotary_angles(positions, config)
    keys, values = [], []
    for index, block in enumerate(blocks):
        x, (key, value) = block(
            x,
            angles,
            block_mask,
            None if prefix is None else (prefix.keys[index], prefix.values[index]),
            None if prefix is None else prefix.length,
            None if earlier is None else (earlier.keys[index], earlier.values[index]),
        )
        keys.append(key)
        values.append(value)
    return x, kv.Rows(tuple(keys), tuple(values))


def parameter_count(state: object) -> int:
    """How many numbers a pytree of arrays (or of their shapes) holds."""
    return sum(leaf.size for leaf in jax.tree.leaves(state))
