"""How a node's children are ranked: by their probability, or by what the target's noise will make of it.

A token is drawn as the argmax of processed logits + T * g, and the noise g of a position is a function of row key and
token index: it is known before anything is drafted. So a draft may add the same g to its own logits (common random
numbers; drafter-invariant decoding, Daliri, Musco, Suresh 2024). Where it knows the target's distribution it knows the
token, as in greedy decoding, and what the target emits is the same under any tree.

A child's score is log_softmax(beta * (processed logits + T * g)), at most 0, so that scores fall down a tree. Beta
changes no order among siblings but weighs paths against each other: a draft that is close to its target may trust the
best child more than one that is not. It is fitted (`ranking_fit.py`). The sum is not divided by T: what a draft is
wrong by is wrong in its logits, at any T, and scores that know no doubt at a low T make trees of no breadth. So T -> 0
leads to the ranking of T = 0.

B batch rows, K nodes, V vocabulary, W draft vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from eagle_jax.config import TreeConfig
from eagle_jax.sampling import Processors, Sampler, SamplingParams, keep_mask, penalize

# Tokens that a draft's top-k and top-p look at. Sorting a vocabulary for each node would take a CPU longer than to run
# the nodes, and where filters leave more than this their border decides little.
CANDIDATES = 128

# (logits f32[B, ..., W], level) -> scores f32[B, ..., W] of the children of nodes at a level, 0 for the root.
Rank = Callable[[Array, int], Array]


def by_probability(logits: Array, level: int) -> Array:
    """EAGLE-2's ranking, and everybody's at temperature 0."""
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    # top_k ranks NaN first, which would put children before their parents. A broken head must not break a tree.
    return jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs)


def rank_for(sampler: Sampler, config: TreeConfig, vocabulary: Array | None = None, *, beta: float = 1.0) -> Rank:
    """The ranking that a tree's configuration asks for, in rows that choose their tokens so.

    Args:
      sampler: how the target's tokens are going to be chosen. Rows at temperature 0 rank by probability.
      vocabulary: i32[W], the draft vocabulary's token ids; None where it is the target's.
      beta: how far the scores are trusted.
    """
    if not (config.common_random_numbers and sampler.processors.noise):
        return by_probability
    seen = sampler.seen
    if seen is not None and vocabulary is not None:
        seen = seen[:, vocabulary]
    sharpness = jnp.where(sampler.params.temperature > 0, beta, 1.0)[:, None, None]

    def by_outcome(logits: Array, level: int) -> Array:
        noise = sampler.noise(level, jnp.arange(logits.shape[-1]) if vocabulary is None else vocabulary)
        nodes = logits.reshape(logits.shape[0], -1, logits.shape[-1])
        found = outcomes(nodes, noise, sampler.params, sampler.processors, seen)
        return by_probability(sharpness * found, level).reshape(logits.shape)

    return by_outcome


def outcomes(
    logits: Array,
    noise: Array,
    params: SamplingParams,
    processors: Processors,
    seen: Array | None = None,
) -> Array:
    """Processed logits + T * noise, as differences from the best one, f32[B, K, W]; plain logits for rows at T = 0.

    Tokens that the filters drop come after all they keep, in the draft's order: the target's filters may keep them.

    Args:
      logits: f32[B, K, W], raw.
      noise: f32[B, W], of the token to be chosen at these nodes.
      params: the rows' settings.
      processors: which of them there are.
      seen: bool[B, W], for the repetition penalty: the tokens up to the root. The target's penalty knows those of the
        node's own path as well; a draft goes without, for a mask of the vocabulary at each node.
    """
    batch, nodes, width = logits.shape

    def each(values: Array) -> Array:
        return jnp.repeat(values, nodes, axis=0)

    params, noise, values = jax.tree.map(each, params), each(noise), logits.reshape(-1, width)
    if processors.repetition_penalty:
        assert seen is not None
        warm = (params.temperature > 0)[:, None]
        values = jnp.where(warm, penalize(values, each(seen), params.repetition_penalty), values)
    moved = values + params.temperature[:, None] * noise  # the verifier's own arithmetic
    if processors.top_k or processors.top_p or processors.min_p:
        keep = keep_mask(values, params, processors, CANDIDATES)
        last, lowest = (jnp.min(jnp.where(keep, x, jnp.inf), axis=-1, keepdims=True) for x in (values, moved))
        moved = jnp.where(keep, moved, values - last + lowest)
    return (moved - jnp.max(moved, axis=-1, keepdims=True)).reshape(batch, nodes, width)
