"""How a token is chosen from logits: processors, then one argmax over logits + temperature * Gumbel noise.

The noise of a token depends on (row key, absolute index, token) only. So a row's text depends on its seed, not on how
many tokens a round tests, and greedy decoding is the case of temperature 0 (the Gumbel-max trick; EAGLE's claim of
losslessness, section 3.3, becomes equality token for token).

What a sampled tree needs beside that noise (`rejection.py`) comes from keys of its own.

B batch rows, K nodes, V vocabulary, W draft vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.random import threefry_2x32

from eagle_jax.config import SamplingConfig

# Tags of keys: for drawn children, for accepting them, for the token where none is. No token's index is so large.
DRAWN, ACCEPTED, RESIDUAL = range(2**31, 2**31 + 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processors:
    """Which processors a compiled program holds; their values are traced, so a new value compiles nothing."""

    noise: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    repetition_penalty: bool = False


class SamplingParams(NamedTuple):
    """Each row's settings."""

    temperature: Array  # f32[B]
    top_k: Array  # i32[B], vocabulary size where off
    top_p: Array  # f32[B]
    min_p: Array  # f32[B]
    repetition_penalty: Array  # f32[B]


def processors_for(rows: Sequence[SamplingConfig]) -> Processors:
    """The processors that at least one row needs. Greedy rows need none but the penalty: no filter drops the best."""
    drawn = [row for row in rows if row.temperature > 0]
    return Processors(
        noise=bool(drawn),
        top_k=any(row.top_k > 0 for row in drawn),
        top_p=any(row.top_p < 1 for row in drawn),
        min_p=any(row.min_p > 0 for row in drawn),
        repetition_penalty=any(row.repetition_penalty != 1 for row in rows),
    )


def params_for(rows: Sequence[SamplingConfig], vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=jnp.asarray([row.temperature for row in rows], jnp.float32),
        top_k=jnp.asarray([min(row.top_k, vocab_size) or vocab_size for row in rows], jnp.int32),
        top_p=jnp.asarray([row.top_p for row in rows], jnp.float32),
        min_p=jnp.asarray([row.min_p for row in rows], jnp.float32),
        repetition_penalty=jnp.asarray([row.repetition_penalty for row in rows], jnp.float32),
    )


def penalize(logits: Array, seen: Array, penalty: Array) -> Array:
    """Divides positive and multiplies negative logits of seen tokens by the penalty (CTRL, arXiv 1909.05858, 4.1).

    Args:
      logits: f32[B, V].
      seen: bool[B, V].
      penalty: f32[B].
    """
    weaker = jnp.where(logits > 0, logits / penalty[:, None], logits * penalty[:, None])
    return jnp.where(seen, weaker, logits)


def keep_mask(logits: Array, params: SamplingParams, processors: Processors, candidates: int | None = None) -> Array:
    """Which tokens top-k, top-p and min-p leave, in Hugging Face's order; at least the best one, bool[B, V].

    Tokens that tie with the last one kept are kept too.

    Args:
      candidates: top-k and top-p look at so many of the best tokens only, and where they would leave all of these they
        leave all tokens: enough for a draft, without a sort of the vocabulary. None: they look at all.
    """
    # Relative to the best logit, so that a tiny temperature gives -inf for the others and never a NaN.
    warm = (params.temperature > 0)[:, None]
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(warm, params.temperature[:, None], 1.0)
    keep = jnp.ones(logits.shape, bool)
    if processors.top_k or processors.top_p:
        few = min(candidates or scaled.shape[-1], scaled.shape[-1])
        all_of_them = few == scaled.shape[-1]
        ordered = -jnp.sort(-scaled, axis=-1) if all_of_them else jax.lax.top_k(scaled, few)[0]
        # A draft vocabulary, or its best tokens, may be fewer than top_k.
        kept = ordered >= jnp.take_along_axis(ordered, jnp.minimum(params.top_k, few)[:, None] - 1, axis=1)
        if processors.top_p:
            probabilities = jax.nn.softmax(jnp.where(kept, ordered, -jnp.inf), axis=-1)
            if not all_of_them:  # the candidates' share, where top-k has not made them all there is
                share = jnp.exp(jax.nn.logsumexp(ordered, axis=-1) - jax.nn.logsumexp(scaled, axis=-1))
                probabilities *= jnp.where(params.top_k <= few, 1.0, share)[:, None]
            before = jnp.cumsum(probabilities, axis=-1) - probabilities
            # The best token stays whatever top_p is; with top_p = 1 rounding must not cut the tail.
            enough = (before >= params.top_p[:, None]) & (params.top_p < 1)[:, None]
            kept &= ~enough.at[:, 0].set(False)
        last = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        if not all_of_them:
            last = jnp.where(jnp.all(kept, axis=-1, keepdims=True), -jnp.inf, last)
        keep &= scaled >= last
    if processors.min_p:
        # p >= min_p * p_best; the factor that top-k and top-p renormalise by stands on both sides.
        keep &= scaled >= jnp.log(params.min_p)[:, None]
    return keep | ~warm


def gumbel_noise(keys: Array, index: Array, tokens: Array) -> Array:
    """The noise of tokens i32[W] as the one at absolute `index` i32[B] of each row: f32[B, W].

    Each number is a function of (row key, index, token), so that a drafter pays for the tokens it drafts only. Over
    the whole vocabulary it is what `jax.random.gumbel` gives (under Threefry, partitionable, JAX's default). Keys are
    Threefry's, as `row_keys` makes them.
    """
    counters = jnp.concatenate([jnp.zeros_like(tokens), tokens]).astype(jnp.uint32)  # high words, low words

    def of_row(key: Array, at: Array) -> Array:
        high, low = jnp.split(threefry_2x32(jax.random.key_data(jax.random.fold_in(key, at)), counters), 2)
        # 23 bits as the mantissa of a number in [1, 2).
        bits = (high ^ low) >> 9 | jnp.uint32(0x3F800000)
        uniform = jax.lax.bitcast_convert_type(bits, jnp.float32) - 1
        return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))

    return jax.vmap(of_row)(keys, index)


def perturbed(
    logits: Array,  # f32[B, V], raw
    params: SamplingParams,
    processors: Processors,
    keys: Array,  # key[B]
    index: Array,  # i32[B], the absolute index of the token to be chosen
    seen: Array | None = None,  # bool[B, V], tokens of the row so far; needed by the repetition penalty
) -> Array:  # f32[B, V]
    """Processed logits + temperature * noise, -inf for tokens that are filtered out."""
    if processors.repetition_penalty:
        assert seen is not None
        logits = penalize(logits, seen, params.repetition_penalty)
    if processors.noise:
        keep = keep_mask(logits, params, processors)
        noise = params.temperature[:, None] * gumbel_noise(keys, index, jnp.arange(logits.shape[-1]))
        logits = jnp.where(keep, logits + noise, -jnp.inf)
    return logits


def choose(
    logits: Array, params: SamplingParams, processors: Processors, keys: Array, index: Array, seen: Array | None = None
) -> Array:
    """Each row's next token, i32[B]: the argmax of `perturbed`, whose arguments these are."""
    return jnp.argmax(perturbed(logits, params, processors, keys, index, seen), axis=-1).astype(jnp.int32)


def log_probabilities(
    logits: Array, params: SamplingParams, processors: Processors, seen: Array | None = None
) -> Array:  # f32[B, V]
    """The distribution that `choose` draws from, -inf for tokens that are filtered out.

    A greedy row's is that of its logits as they are, penalty aside.
    """
    if processors.repetition_penalty:
        assert seen is not None
        logits = penalize(logits, seen, params.repetition_penalty)
    keep = keep_mask(logits, params, processors)
    temperature = jnp.where(params.temperature > 0, params.temperature, 1.0)[:, None]
    # Relative to the best logit, so that a tiny temperature gives -inf for the others and never a NaN.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    return jax.nn.log_softmax(jnp.where(keep, scaled, -jnp.inf), axis=-1)


def row_keys(seed: int | Sequence[int], rows: int) -> Array:
    """key[B]. An int: row i uses fold_in(key(seed), i). A list: row i uses fold_in(key(seed_i), 0), as if alone."""
    # Named, so that a text does not depend on JAX's default generator.
    make = partial(jax.random.key, impl="threefry2x32")
    if isinstance(seed, int):
        key = make(seed)
        return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(rows))
    return jax.vmap(lambda one: jax.random.fold_in(make(one), 0))(jnp.asarray(np.asarray(seed, np.int64)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """How the rows of a round choose their tokens. Level l is the choice at a node l levels below the root."""

    processors: Processors = dataclasses.field(metadata={"static": True})
    params: SamplingParams
    keys: Array  # key[B]
    index: Array  # i32[B], the absolute index of the token chosen at the root
    seen: Array | None = None  # bool[B, V], tokens of the row up to its root; None where nothing asks for it

    def choose(self, logits: Array, level: Array | int, seen: Array | None) -> Array:
        """The token i32[B] that logits f32[B, V] at `level` give, after tokens `seen`."""
        return choose(logits, self.params, self.processors, self.keys, self.index + level, seen)

    def noise(self, level: Array | int, tokens: Array) -> Array:
        """f32[B, W], the Gumbel noise of tokens i32[W] that a choice at `level` will be made with."""
        return gumbel_noise(self.keys, self.index + level, tokens)

    def log_probs(self, logits: Array, seen: Array | None) -> Array:
        """f32[B, V], the distribution that `choose` draws from at any level."""
        return log_probabilities(logits, self.params, self.processors, seen)

    def draft_log_probs(self, logits: Array, seen: Array | None) -> Array:
        """A draft model's logits f32[B, K, W] as log-probabilities under the target's processors.

        Args:
          seen: bool[B, K, W], the tokens before each node; None where nothing asks for it.
        """
        over_nodes = jax.vmap(self.log_probs, in_axes=(1, None if seen is None else 1), out_axes=1)
        log_probs = over_nodes(logits, seen)
        return jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs)  # a broken model proposes nothing

    def keys_for(self, tag: int, level: Array | int) -> Array:
        """key[B] for what is drawn at `level` beside the walk's noise: a function of (row key, tag, absolute index)."""
        fold = jax.vmap(lambda key, index: jax.random.fold_in(jax.random.fold_in(key, tag), index))
        return fold(self.keys, self.index + level)
