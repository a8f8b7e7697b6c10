"""Products at the precision their dtype promises, the LM head's among them, and the best of many values."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


def precision_for(dtype: DTypeLike) -> jax.lax.Precision | None:
    """TPUs and recent GPUs round float32 operands to fewer bits unless told otherwise; float32 here means float32."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def lm_logits(features: Array, matrix: Array) -> Array:
    """f32[..., V] from features [..., E] and an LM head [V, E]."""
    return jnp.einsum(
        "...e,ve->...v", features, matrix, precision=precision_for(matrix.dtype), preferred_element_type=jnp.float32
    )


# Values to a group in `top_k`.
GROUP = 64


def top_k(values: Array, k: int) -> tuple[Array, Array]:
    """What `lax.top_k` gives over the last axis, sooner for a vocabulary's width.

    The k best lie in the k groups with the best maxima, so that only these are searched; in ascending order, for equal
    values come by index. XLA's CPU backend sorts whole rows of arrays of more than two axes, hence the flat one.
    """
    *leading, width = values.shape
    flat = values.reshape(-1, width)
    groups = -(-width // GROUP)
    if k == 0 or groups < 2 * k:
        best, index = jax.lax.top_k(flat, k)
    else:
        padded = jnp.pad(flat, ((0, 0), (0, groups * GROUP - width)), constant_values=-jnp.inf)
        grouped = padded.reshape(-1, groups, GROUP)
        group = jnp.sort(jax.lax.top_k(jnp.max(grouped, axis=-1), k)[1], axis=-1)  # [..., k]
        candidates = jnp.take_along_axis(grouped, group[:, :, None], axis=1).reshape(-1, k * GROUP)
        best, place = jax.lax.top_k(candidates, k)
        index = jnp.take_along_axis(group, place // GROUP, axis=-1) * GROUP + place % GROUP
    return best.reshape(*leading, k), index.reshape(*leading, k)
