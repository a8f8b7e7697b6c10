"""Rotary positions (RoFormer, arXiv 2104.09864), and how models stretch them over longer texts.

Each plane of a head's coordinates turns by position * frequency. All variants but one change the frequencies once and
for all; "dynamic" goes by how long the text was when a token came in.

B batch rows, T tokens, H head dimension.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle_jax.config import ModelConfig, RopeScaling


def angles(positions: Array, config: ModelConfig, text_length: Array | None = None) -> tuple[Array, Array]:
    """Cosine and sine for each position, f32[B or 1, 1, T, H/2].

    Args:
      positions: i32[B or 1, T].
      text_length: i32[B or 1, T or 1], the length of the text each token came in with, where "dynamic" asks for it. A
        prompt comes in whole, whatever chunks it is run in, every later token by itself. None: all by themselves.
    """
    scaling = config.rope_scaling
    if scaling is not None and scaling.rope_type == "dynamic":
        frequencies = _dynamic(config, scaling, positions + 1 if text_length is None else text_length)
    else:
        frequencies = jnp.asarray(fixed_frequencies(config))
    turned = (positions.astype(jnp.float32)[:, :, None] * frequencies)[:, None]
    factor = attention_factor(config)
    return jnp.cos(turned) * factor, jnp.sin(turned) * factor


def rotate(x: Array, angles: tuple[Array, Array]) -> Array:
    """Turns x [B, heads, T, H] by its position; the two halves of H are the two coordinates of each plane."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def fixed_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a position, f32[H/2]; of "dynamic" those within the pretraining's length."""
    # In float32 and in this order, as the models' own code has it: at far positions a rounding is a visible angle.
    exponent = np.arange(0, config.key_dim, 2, dtype=np.float32) / np.float32(config.key_dim)
    plain = 1 / np.float32(config.rope_theta) ** exponent
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    original = scaling.original_max_position_embeddings or config.max_position_embeddings
    match scaling.rope_type:
        case "linear":
            scaled = plain / scaling.factor
        case "llama3":
            scaled = _llama3(plain, scaling, original)
        case "yarn":
            scaled = _yarn(plain, config, scaling, original)
        case "factors":
            scaled = plain / np.asarray(scaling.factors, np.float32)
        case _:
            scaled = plain
    return scaled.astype(np.float32)


def attention_factor(config: ModelConfig) -> float:
    """What cosine and sine are multiplied by: YaRN's temperature (arXiv 2309.00071, section 3.4), else 1."""
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def temperature(strength: float) -> float:
        return 0.1 * strength * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)


def _dynamic(config: ModelConfig, scaling: RopeScaling, text_length: Array) -> Array:
    """f32[B or 1, T or 1, H/2]: the base grows with the text (NTK-aware scaling, arXiv 2309.00071, section 3.3)."""
    dim, window = config.key_dim, config.max_position_embeddings
    length = jnp.maximum(text_length, window).astype(jnp.float32)
    stretch = (scaling.factor * length / window - (scaling.factor - 1)) ** (dim / (dim - 2))
    exponent = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    return 1 / (config.rope_theta * stretch[..., None]) ** exponent


def _llama3(plain: np.ndarray, scaling: RopeScaling, original: int) -> np.ndarray:
    """Slow planes are slowed by the factor, fast ones are not, those between are blended (Llama 3.1's model card)."""
    turns = original * plain / (2 * np.pi)  # over the pretraining's length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: np.ndarray, config: ModelConfig, scaling: RopeScaling, original: int) -> np.ndarray:
    """Blends as above, with a ramp over the planes' indices (YaRN, arXiv 2309.00071, section 3.2)."""
    dim = config.key_dim

    def plane_with(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = plane_with(scaling.beta_fast), plane_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    slowed = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return slowed * plain / scaling.factor + (1 - slowed) * plain
