"""EAGLE's training loss (section 3.2): where the next feature lies, and which token it stands for.

Pair j = (f_j, t_{j+1}) predicts f_{j+1}, whose LM-head distribution is over t_{j+2}. So pair j carries loss only if the
assistant wrote both t_{j+1} and t_{j+2}. Heads that guess further ahead have the second term alone.

B batch rows, T tokens, P pairs (= T - 1), E hidden size, W draft vocabulary, C chunks.
"""

import math
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from eagle_jax.numerics import lm_logits
from eagle_jax.sharding import constrain

# What the logits of a chunk take of one device, in float32; its loss holds four arrays like them. But so many pairs at
# least: the LM head is read anew for each chunk, and an accelerator would wait for it.
LOGITS_BYTES, LEAST_PAIRS = 2**25, 256


class Batch(NamedTuple):
    """What one training step takes in; padding stands at the end of rows and is nobody's. Accumulated: [A, B, ...]."""

    tokens: Array  # i32[B, T]
    assistant: Array  # bool[B, T]
    features: Array | None  # [B, T, E]; None where the target computes them in the step


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


def ahead(x: Array, places: int) -> Array:
    """[B, P, ...] from [B, T, ...]: what stands so many places after each pair's feature; zeros beyond the row."""
    pairs = x.shape[1] - 1
    there = x[:, places : places + pairs]
    return jnp.pad(there, ((0, 0), (0, pairs - there.shape[1]), *((0, 0),) * (x.ndim - 2)))


def pair_mask(assistant: Array, steps: int = 1) -> Array:
    """bool[B, P] from bool[B, T]: whether pair j carries loss: the assistant wrote t_{j+1} to t_{j+1+steps}."""
    return reduce(jnp.logical_and, (ahead(assistant, 1 + step) for step in range(steps + 1)))


def smooth_l1(predicted: Array, wanted: Array) -> Array:
    """Huber's loss with threshold 1, averaged over the features' last axis: f32[...] from [..., E]."""
    error = jnp.abs(predicted.astype(jnp.float32) - wanted.astype(jnp.float32))
    return jnp.mean(jnp.where(error < 1, 0.5 * error**2, error - 0.5), axis=-1)


def loss_sums(
    predicted: Array,
    wanted: Array,
    mask: Array,
    lm_head: Array,
    labels: Array | None = None,
    *,
    chunk: int | None = None,
) -> LossSums:
    """The two losses of predicted features, summed over unmasked pairs.

    Args:
      predicted: [B, P, E], the head's features.
      wanted: [B, P, E], the target's features one token on; no gradient flows into them.
      mask: bool[B, P].
      lm_head: [W, E], rows of the frozen LM head; the distributions are over these tokens.
      labels: i32[B, P], for hard labels: the row of the text's own token; -1 where it has none, which counts for no
        cross-entropy. None: soft labels, the target's own distribution.
      chunk: pairs whose logits exist at once, so that [B, P, W] never does; None: as many as
        `LOGITS_BYTES` of each device hold.
    """
    sums = token_sums(predicted, None, wanted, mask, lm_head, labels, chunk=chunk)
    return sums._replace(regression=jnp.sum(smooth_l1(predicted, jax.lax.stop_gradient(wanted)) * mask))


def token_sums(
    hidden: Array,
    matrix: Array | None,
    wanted: Array,
    mask: Array,
    lm_head: Array,
    labels: Array | None = None,
    *,
    chunk: int | None = None,
) -> LossSums:
    """The cross-entropy of logits that a head makes, with a matrix of its own if it has one; there is no regression.

    Args:
      hidden: [B, P, E], what the matrix multiplies.
      matrix: [W, E], over the same tokens as `lm_head`; it is trained. None is the frozen LM head.
      wanted: [B, P, E], the target's features at which the guessed token is chosen.

    The other arguments are those of `loss_sums`.
    """
    chunk = chunk or _chunk_size(mask.size, lm_head.shape[0])
    hidden, wanted, weight = (_chunks(x, chunk) for x in (hidden, wanted, mask.astype(jnp.float32)))
    rows = None if labels is None else _chunks(labels, chunk)
    cross_entropy, top1, top3 = _distill((hidden, matrix), wanted, weight, rows, lm_head)
    return LossSums(jnp.zeros((), jnp.float32), cross_entropy, top1, top3, jnp.sum(weight))


def _chunks(x: Array, chunk: int) -> Array:
    """[C, chunk, ...] from [B, P, ...], padded at the end with zeros."""
    x = x.reshape(-1, *x.shape[2:])
    x = jnp.pad(x, ((0, -x.shape[0] % chunk),) + ((0, 0),) * (x.ndim - 1))
    # A chunk takes every C-th pair, not its neighbours: so each has a share of every device's rows.
    x = x.reshape(chunk, -1, *x.shape[1:]).swapaxes(0, 1)
    return constrain(x, None, "batch", *(None,) * (x.ndim - 2))


# What is trained: features or hidden states, and the matrix that makes logits of them; None is the frozen LM head.
Trained = tuple[Array, Array | None]


def _chunk_size(pairs: int, vocabulary: int) -> int:
    """Pairs of a chunk: a multiple of the mesh's devices, and chunks of about one size, so that padding is little."""
    devices = math.prod(jax.sharding.get_abstract_mesh().axis_sizes)
    most, share = max(LEAST_PAIRS, LOGITS_BYTES // (4 * vocabulary)), math.ceil(pairs / devices)
    return devices * math.ceil(share / math.ceil(share / most))


def _distill_chunk(
    trained: Trained, wanted: Array, weight: Array, labels: Array | None, lm_head: Array
) -> tuple[tuple[Array, Array, Array], Trained]:
    """A chunk's cross-entropy and hits, and the gradient of the first for what is trained.

    The gradient is written out (softmax of one less softmax of the other): the compiler then keeps fewer of the arrays
    as wide as the vocabulary than autodiff has it keep.
    """
    teacher = lm_logits(wanted, lm_head)
    student, pull = jax.vjp(lambda inputs, matrix: lm_logits(inputs, lm_head if matrix is None else matrix), *trained)
    own = jnp.take_along_axis(student, jnp.argmax(teacher, axis=-1)[:, None], axis=-1)
    # How many tokens the head prefers to the target's best; NaN, which is in no order, is no hit.
    above = jnp.sum(jnp.where(student <= own, 0.0, 1.0), axis=-1)
    hits = jnp.sum((above < 1) * weight), jnp.sum((above < 3) * weight)
    if labels is None:
        share = jax.nn.softmax(teacher)
    else:
        share = jax.nn.one_hot(labels, lm_head.shape[0])
        weight = weight * (labels >= 0)
    log_probs = jax.nn.log_softmax(student)
    entropy = -jnp.sum(share * log_probs, axis=-1)
    gradient = pull((jnp.exp(log_probs) - share) * weight[:, None])
    return (jnp.sum(entropy * weight), *hits), gradient


@jax.custom_vjp
def _distill(
    trained: Trained, wanted: Array, weight: Array, labels: Array | None, lm_head: Array
) -> tuple[Array, Array, Array]:
    """Cross-entropy and hits over chunks [C, chunk, ...]; see `_distill_forward` for why it has its own gradient."""
    inputs, matrix = trained

    def sums_of(part: tuple[Array, Array, Array, Array | None]) -> tuple[Array, Array, Array]:
        return _distill_chunk((part[0], matrix), *part[1:], lm_head)[0]

    entropy, top1, top3 = jax.lax.map(sums_of, (inputs, wanted, weight, labels))
    return jnp.sum(entropy), jnp.sum(top1), jnp.sum(top3)


def _distill_forward(
    trained: Trained, wanted: Array, weight: Array, labels: Array | None, lm_head: Array
) -> tuple[tuple[Array, Array, Array], Trained]:
    # The gradient of a sum of cross-entropies is known as soon as the chunk's logits are, up to one factor. Taking it
    # at once means three products with the LM head a chunk, where rematerialisation in the backward pass takes five.
    inputs, matrix = trained

    def step(total: Array | None, part: tuple[Array, Array, Array, Array | None]) -> tuple[Array | None, tuple]:
        sums, (gradient, of_matrix) = _distill_chunk((part[0], matrix), *part[1:], lm_head)
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, of_matrix), (sums, gradient)

    nothing = None if matrix is None else jnp.zeros(matrix.shape, jnp.float32)
    of_matrix, (sums, gradient) = jax.lax.scan(step, nothing, (inputs, wanted, weight, labels))
    entropy, top1, top3 = map(jnp.sum, sums)
    of_matrix = jax.tree.map(lambda total, like: total.astype(like.dtype), of_matrix, matrix)
    return (entropy, top1, top3), (gradient, of_matrix)


def _distill_backward(
    gradients: Trained, cotangents: tuple[Array, Array, Array]
) -> tuple[Trained, None, None, None, None]:
    scaled = jax.tree.map(lambda gradient: (gradient * cotangents[0]).astype(gradient.dtype), gradients)
    return scaled, None, None, None, None


_distill.defvjp(_distill_forward, _distill_backward)
