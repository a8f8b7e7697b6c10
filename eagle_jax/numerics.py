"""Products at the precision their dtype promises, and the LM head's among them."""

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
