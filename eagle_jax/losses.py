"""EAGLE's training loss (section 3.2): where the next feature lies, and which token it stands for.

Pair j = (f_j, t_{j+1}) predicts f_{j+1}, whose LM-head distribution is over t_{j+2}. So pair j carries loss only if the
assistant wrote both t_{j+1} and t_{j+2}.

B batch rows, T tokens, P pairs (= T - 1), E hidden size, W draft vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from eagle_jax.numerics import lm_logits
from eagle_jax.sharding import constrain


class LossSums(NamedTuple):
    """Sums over unmasked pairs, not means: batches, chunks and devices add up, and one division ends it."""

    regression: Array  # f32[], smooth L1
    cross_entropy: Array  # f32[]
    top1: Array  # f32[], pairs whose best token is the target's best
    top3: Array  # f32[], pairs whose three best hold it
    count: Array  # f32[], unmasked pairs

    @classmethod
    def zero(cls) -> "LossSums":
        return cls(*(jnp.zeros((), jnp.float32) for _ in cls._fields))


def pair_mask(assistant: Array) -> Array:
    """bool[B, P] from bool[B, T]: whether pair j carries loss."""
    return jnp.pad(assistant[:, 1:-1] & assistant[:, 2:], ((0, 0), (0, 1)))


def smooth_l1(predicted: Array, wanted: Array) -> Array:
    """Huber's loss with threshold 1, averaged over the features' last axis: f32[...] from [..., E]."""
    error = jnp.abs(predicted.astype(jnp.float32) - wanted.astype(jnp.float32))
    return jnp.mean(jnp.where(error < 1, 0.5 * error**2, error - 0.5), axis=-1)


def loss_sums(
    predicted: Array, wanted: Array, mask: Array, lm_head: Array, labels: Array | None = None, *, chunk: int = 1024
) -> LossSums:
    """The two losses of predicted features, summed over unmasked pairs.

    Args:
      predicted: [B, P, E], the head's features.
      wanted: [B, P, E], the target's features one token on; no gradient flows into them.
      mask: bool[B, P].
      lm_head: [W, E], rows of the frozen LM head; the distributions are over these tokens.
      labels: i32[B, P], for hard labels: the row of the text's own token; -1 where it has none, which counts for no
        cross-entropy. None: soft labels, the target's own distribution.
      chunk: pairs whose logits exist at once, so that [B, P, W] never does.
    """
    size = predicted.shape[-1]
    padding = -mask.size % chunk

    def chunks(x: Array, *tail: int) -> Array:
        x = jnp.pad(x.reshape(-1, *tail), ((0, padding),) + ((0, 0),) * len(tail))
        # A chunk takes every C-th pair, not its neighbours: so each has a share of every device's rows.
        return constrain(x.reshape(chunk, -1, *tail).swapaxes(0, 1), None, "batch", *(None,) * len(tail))

    parts = chunks(predicted, size), chunks(wanted, size), chunks(mask.astype(jnp.float32))
    regression = jnp.sum(smooth_l1(parts[0], jax.lax.stop_gradient(parts[1])) * parts[2])
    cross_entropy, top1, top3 = _distill(*parts, None if labels is None else chunks(labels), lm_head)
    return LossSums(regression, cross_entropy, top1, top3, jnp.sum(parts[2]))


def _distill_chunk(
    predicted: Array, wanted: Array, weight: Array, labels: Array | None, lm_head: Array
) -> tuple[Array, tuple[Array, Array]]:
    teacher, student = lm_logits(wanted, lm_head), lm_logits(predicted, lm_head)
    own = jnp.take_along_axis(student, jnp.argmax(teacher, axis=-1)[:, None], axis=-1)
    # How many tokens the head prefers to the target's best; NaN, which is in no order, is no hit.
    above = jnp.sum(~(student <= own), axis=-1)
    hits = jnp.sum((above < 1) * weight), jnp.sum((above < 3) * weight)
    log_probs = jax.nn.log_softmax(student)
    if labels is None:
        entropy = -jnp.sum(jax.nn.softmax(teacher) * log_probs, axis=-1)
    else:
        entropy = -jnp.take_along_axis(log_probs, jnp.maximum(labels, 0)[:, None], axis=-1)[:, 0]
        weight = weight * (labels >= 0)
    return jnp.sum(entropy * weight), hits


@jax.custom_vjp
def _distill(
    predicted: Array, wanted: Array, weight: Array, labels: Array | None, lm_head: Array
) -> tuple[Array, Array, Array]:
    """Cross-entropy and hits over chunks [C, chunk, E]; see `_distill_forward` for why it has its own gradient."""

    def sums_of(part: tuple[Array, Array, Array, Array | None]) -> tuple[Array, tuple[Array, Array]]:
        return _distill_chunk(*part, lm_head)

    entropy, hits = jax.lax.map(sums_of, (predicted, wanted, weight, labels))
    return jnp.sum(entropy), jnp.sum(hits[0]), jnp.sum(hits[1])


def _distill_forward(
    predicted: Array, wanted: Array, weight: Array, labels: Array | None, lm_head: Array
) -> tuple[tuple[Array, Array, Array], Array]:
    # The gradient of a sum of cross-entropies is known as soon as the chunk's logits are, up to one factor. Taking it
    # at once means three products with the LM head a chunk, where rematerialisation in the backward pass takes five.
    def step(_: None, part: tuple[Array, Array, Array, Array | None]) -> tuple[None, tuple[Array, ...]]:
        (entropy, hits), gradient = jax.value_and_grad(_distill_chunk, has_aux=True)(*part, lm_head)
        return None, (entropy, *hits, gradient)

    _, (*sums, gradient) = jax.lax.scan(step, None, (predicted, wanted, weight, labels))
    entropy, top1, top3 = (jnp.sum(x) for x in sums)
    return (entropy, top1, top3), gradient


def _distill_backward(gradient: Array, cotangents: tuple[Array, Array, Array]) -> tuple[Array, None, None, None, None]:
    return (gradient * cotangents[0]).astype(gradient.dtype), None, None, None, None


_distill.defvjp(_distill_forward, _distill_backward)
