"""The decoding loop: prefill, then rounds of draft, verify, commit, as compiled functions from state to state.

A round is one pure function; `run_rounds` repeats it on the device until every row has ended or a given number of
rounds is done. That one program serves `generate` (no limit), `stream` (one round) and everything between.

Positions. A row's tokens t_0 .. t_{n-1} are committed; t_{n-1} is the root. The target's cache holds n - 1 tokens, for
the root has not been run. A node at level l has position n - 1 + l, and what is chosen there is token n + l.

B batch rows, M capacity in tokens (and cache slots), N nodes, D levels, E hidden size, V vocabulary.
"""

import dataclasses
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from eagle_jax import cache as kv
from eagle_jax import layers, rejection, sampling, verify
from eagle_jax.config import ModelConfig
from eagle_jax.draft import Committed, Drafter
from eagle_jax.tree import Tree, ancestor_mask

RUNNING, STOPPED, AT_LIMIT = 0, 1, 2  # finish


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What is static: the target's structure, the drafter, and which logits processors exist."""

    target: nnx.GraphDef
    config: ModelConfig
    drafter: Drafter
    processors: sampling.Processors
    # Where the LM head is applied: to the nodes walked over, one after the other, or to all nodes at once. On a CPU
    # the product's time grows with its rows; an accelerator's is that of reading the matrix, so once is best.
    logits_on_walk: bool

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __hash__(self) -> int:
        """Worked out once: each call looks its compiled program up by it, and a deep target's takes milliseconds."""
        return self._hash


class Params(NamedTuple):
    target: nnx.State
    drafter: Any


class RowSettings(NamedTuple):
    """What each row was asked for; traced, so rows may differ and new values compile nothing."""

    sampling: sampling.SamplingParams
    stop_ids: Array  # i32[B, X], tokens that end a row; -1 where there are fewer
    limit: Array  # i32[B], most tokens to emit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """All that a row has come to."""

    tokens: Array  # i32[B, M], emitted
    logprobs: Array  # f32[B, M], of the emitted tokens
    accepted: Array  # i32[B, M], accepted draft tokens of each round, before any cut
    rounds: Array  # i32[B]
    emitted: Array  # i32[B]
    prompt_length: Array  # i32[B]
    finish: Array  # i32[B], RUNNING, STOPPED or AT_LIMIT
    cache: kv.KVCache  # the target's
    draft: Any  # the drafter's state
    last_token: Array  # i32[B], the prompt's
    last_feature: Array  # [B, E], the target's for it
    seen: Array | None  # bool[B, V], tokens of the row; kept for the repetition penalty only
    keys: Array  # key[B]
    settings: RowSettings


@partial(jax.jit, static_argnames=("program", "capacity", "dtype"))
def init_state(
    params: Params,
    settings: RowSettings,
    keys: Array,
    *,
    program: Program,
    capacity: int,
    dtype: layers.Dtype,
) -> DecodeState:
    """A state for rows of up to `capacity` tokens, prompts not yet seen."""
    config, batch = program.config, settings.limit.shape[0]
    zeros = jnp.zeros((batch,), jnp.int32)
    seen = jnp.zeros((batch, config.vocab_size), bool) if program.processors.repetition_penalty else None
    return DecodeState(
        tokens=jnp.zeros((batch, capacity), jnp.int32),
        logprobs=jnp.zeros((batch, capacity), jnp.float32),
        accepted=jnp.zeros((batch, capacity), jnp.int32),
        rounds=zeros,
        emitted=zeros,
        prompt_length=zeros,
        finish=jnp.full((batch,), RUNNING, jnp.int32),
        cache=kv.empty(
            layers=config.num_hidden_layers,
            batch=batch,
            capacity=capacity,
            kv_heads=config.kv_heads,
            key_dim=config.key_dim,
            dtype=dtype,
        ),
        draft=program.drafter.init(params.drafter, batch, capacity),
        last_token=zeros,
        last_feature=jnp.zeros((batch, config.hidden_size), dtype),
        seen=seen,
        keys=keys,
        settings=settings,
    )


def prefill(
    params: Params, state: DecodeState, tokens: Array, count: Array, pairs: Array, length: Array, *, program: Program
) -> DecodeState:
    """Runs a chunk of the prompts through target and drafter.

    Two programs, one that reads the cache and one that writes it: in a single one nothing would order the two for the
    compiler, which then copies the cache.

    Args:
      state: donated.
      tokens: i32[B, C + 1], a chunk and the token after it, padded at the end.
      count: i32[B], how many of a prompt's tokens stand in the first C places; 0 for a prompt that has ended.
      pairs: i32[B], how many of those have their successor in the prompt: all but its last token.
      length: i32[B], of the whole prompts.
    """
    features, rows = _read_chunk(params.target, state.cache, tokens, length, target=program.target)
    return _write_chunk(params, state, features, rows, tokens, count, pairs, program=program)


@partial(jax.jit, static_argnames="target")
def _read_chunk(
    params: nnx.State, cache: kv.KVCache, tokens: Array, length: Array, *, target: nnx.GraphDef
) -> tuple[Array, kv.Rows]:
    width = tokens.shape[1] - 1
    positions = cache.length[:, None] + jnp.arange(width)
    return nnx.merge(target, params)(tokens[:, :-1], positions, layers.causal_mask(width), cache, length[:, None])


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def _write_chunk(
    params: Params,
    state: DecodeState,
    features: Array,
    rows: kv.Rows,
    tokens: Array,
    count: Array,
    pairs: Array,
    *,
    program: Program,
) -> DecodeState:
    row, place = jnp.arange(tokens.shape[0]), jnp.arange(tokens.shape[1] - 1)
    last = jnp.maximum(count - 1, 0)
    chunk = Committed(tokens[:, :-1], features, tokens[:, 1:], pairs)
    return dataclasses.replace(
        state,
        cache=kv.commit(state.cache, rows, count),
        draft=program.drafter.prefill(params.drafter, state.draft, chunk),
        prompt_length=state.prompt_length + count,
        last_token=jnp.where(count > 0, tokens[row, last], state.last_token),
        last_feature=jnp.where((count > 0)[:, None], features[row, last], state.last_feature),
        seen=_mark(state.seen, tokens[:, :-1], place < count[:, None]),
    )


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def first_token(params: Params, state: DecodeState, *, program: Program) -> DecodeState:
    """Draws the token after the prompt, the first root, from the prefill's last feature."""
    target = nnx.merge(program.target, params.target)
    logits = target.logits(state.last_feature)
    token = _sampler(program, state, state.prompt_length).choose(logits, 0, state.seen)
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)
    last = Committed(state.last_token[:, None], state.last_feature[:, None], token[:, None], jnp.ones_like(token))
    state, committed = _emit(state, last, logprob)
    return dataclasses.replace(state, draft=program.drafter.observe(params.drafter, state.draft, committed))


class Round(NamedTuple):
    """What one round saw: the drafted tree and the target's word on it, before any cut."""

    tree: Tree
    accepted: verify.Accepted


def run_round(params: Params, state: DecodeState, *, program: Program) -> tuple[DecodeState, Round]:
    """Draft, verify, cut, commit. Rows that have ended stay as they are."""
    tree, draft = propose(params.drafter, state, program=program)
    state, committed, seen = verify_tree(params.target, state, tree, program=program)
    return dataclasses.replace(state, draft=program.drafter.observe(params.drafter, draft, committed)), seen


def propose(params: Any, state: DecodeState, *, program: Program) -> tuple[Tree, Any]:
    """The drafter's tree below each row's last token, and the drafter's new state."""
    row = jnp.arange(state.emitted.shape[0])
    root = state.tokens[row, jnp.maximum(state.emitted - 1, 0)]
    sampler = _sampler(program, state, state.cache.length + 1)
    return program.drafter.propose(params, state.draft, root, sampler)


def verify_tree(
    params: nnx.State, state: DecodeState, tree: Tree, *, program: Program
) -> tuple[DecodeState, Committed, Round]:
    """One forward over the tree, the walk down it, and the cut: what is left of the walk is committed."""
    drafter, target = program.drafter, nnx.merge(program.target, params)
    row, running = jnp.arange(state.emitted.shape[0]), state.finish == RUNNING
    position = state.cache.length  # of the root
    sampler = _sampler(program, state, position + 1)
    features, rows = target(
        tree.tokens, position[:, None] + tree.depths, ancestor_mask(tree.parents, drafter.depth), state.cache
    )

    choices = None
    if program.logits_on_walk and not drafter.wants_choices:
        feature_at = verify.of_nodes(features)
        logits_at = lambda node: target.logits(feature_at(node))  # noqa: E731
    else:
        logits = target.logits(features)
        logits_at = verify.of_nodes(logits)
        if drafter.wants_choices:
            choices = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    sampled = tree.proposals is not None
    descend = rejection.by_rejection(tree, sampler) if sampled else verify.by_choice(tree, sampler.choose)
    accepted = verify.walk(tree, logits_at, descend, drafter.depth, running, state.seen)
    round_index = jnp.where(running, state.rounds, state.accepted.shape[1])
    state = dataclasses.replace(
        state,
        accepted=state.accepted.at[row, round_index].set(accepted.count - 1, mode="drop"),
        rounds=state.rounds + running,
    )
    walked = Committed(
        tokens=jnp.take_along_axis(tree.tokens, accepted.path, axis=1),
        features=jnp.take_along_axis(features, accepted.path[:, :, None], axis=1),
        next_tokens=accepted.tokens,
        count=accepted.count,
        choices=choices,
    )
    state, committed = _emit(state, walked, accepted.logprobs)
    state = dataclasses.replace(state, cache=kv.commit(state.cache, rows, committed.count, accepted.path))
    return state, committed, Round(tree, accepted)


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def run_rounds(params: Params, state: DecodeState, limit: Array, *, program: Program) -> DecodeState:
    """Runs rounds until every row has ended, at most `limit` i32[] of them. `state` is donated."""

    def unfinished(carry: tuple[Array, DecodeState]) -> Array:
        done, state = carry
        return (done < limit) & jnp.any(state.finish == RUNNING)

    def step(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        done, state = carry
        return done + 1, run_round(params, state, program=program)[0]

    return jax.lax.while_loop(unfinished, step, (jnp.zeros((), jnp.int32), state))[1]


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def watch_round(params: Params, state: DecodeState, *, program: Program) -> tuple[DecodeState, Round]:
    """One round, with what it drafted, for those who want to look at trees. `state` is donated."""
    return run_round(params, state, program=program)


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def rewind(
    params: Params,
    state: DecodeState,
    settings: RowSettings,
    keys: Array,
    tokens: Array,
    length: Array,
    *,
    program: Program,
) -> DecodeState:
    """Takes rows back to their beginnings, as a prefill of these would leave them, for prompts that go on from there.

    Args:
      state: donated.
      settings: of the new prompts.
      keys: key[B], of the new prompts.
      tokens: i32[B, M], the rows' own; their first `length` are read.
      length: i32[B], how many tokens to keep, at most what the cache holds. The drafter may keep fewer, and then so
        does the row: `prompt_length` says where the prefill has to begin.
    """
    draft, known = program.drafter.rewind(params.drafter, state.draft, length)
    none = jnp.zeros_like(known)
    return dataclasses.replace(
        state,
        rounds=none,
        emitted=none,
        prompt_length=known,
        finish=jnp.full_like(known, RUNNING),
        cache=kv.rewound(state.cache, known),
        draft=draft,
        seen=None
        if state.seen is None
        else _mark(jnp.zeros_like(state.seen), tokens, jnp.arange(tokens.shape[1]) < known[:, None]),
        keys=keys,
        settings=settings,
    )


@partial(jax.jit, static_argnames=("program", "capacity", "dtype"))
def grow(params: Params, state: DecodeState, *, program: Program, capacity: int, dtype: layers.Dtype) -> DecodeState:
    """The state with room for more tokens, `capacity` in all."""
    roomy = init_state(params, state.settings, state.keys, program=program, capacity=capacity, dtype=dtype)

    def into(large: Array, small: Array) -> Array:
        return small if small.shape == large.shape else jax.lax.dynamic_update_slice(large, small, (0,) * large.ndim)

    return jax.tree.map(into, roomy, state)


class News(NamedTuple):
    """What the host has not read yet of each row, W places of it."""

    tokens: Array  # i32[B, W]
    logprobs: Array  # f32[B, W]
    accepted: Array  # i32[B, W]
    emitted: Array  # i32[B], all in all
    rounds: Array  # i32[B], all in all
    finish: Array  # i32[B]


def all_news(state: DecodeState) -> News:
    """The news for a host that has read nothing."""
    return News(state.tokens, state.logprobs, state.accepted, state.emitted, state.rounds, state.finish)


@partial(jax.jit, static_argnames="width")
def news_since(state: DecodeState, emitted: Array, rounds: Array, *, width: int) -> News:
    """The news for a host that has read `emitted` tokens and `rounds` rounds of each row, both i32[B]."""

    def window(values: Array, begin: Array) -> Array:
        return jnp.take_along_axis(values, begin[:, None] + jnp.arange(width), axis=1, mode="clip")

    tokens, logprobs = window(state.tokens, emitted), window(state.logprobs, emitted)
    return News(tokens, logprobs, window(state.accepted, rounds), state.emitted, state.rounds, state.finish)


@partial(jax.jit, donate_argnames="state")
def end_rows(state: DecodeState, ended: Array) -> DecodeState:
    """Ends the running rows of bool[B]: the host has found a stop string in them. `state` is donated."""
    finish = jnp.where(ended & (state.finish == RUNNING), STOPPED, state.finish)
    return dataclasses.replace(state, finish=finish)


def _sampler(program: Program, state: DecodeState, index: Array) -> sampling.Sampler:
    """For the token at `index` i32[B] and those after it."""
    return sampling.Sampler(
        processors=program.processors,
        params=state.settings.sampling,
        keys=state.keys,
        index=index,
        seen=state.seen,
    )


def _emit(
    state: DecodeState,
    committed: Committed,  # R tokens a row; those that follow them are new
    logprobs: Array,  # f32[B, R], of the new ones
) -> tuple[DecodeState, Committed]:
    """Cuts new tokens at a stop id or at the row's limit and writes them; returns also what is left of `committed`."""
    tokens, count = committed.next_tokens, committed.count
    row, place = jnp.arange(tokens.shape[0])[:, None], jnp.arange(tokens.shape[1])
    stops = jnp.any(tokens[:, :, None] == state.settings.stop_ids[:, None, :], axis=-1) & (place < count[:, None])
    until_stop = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, count)
    count = jnp.minimum(until_stop, jnp.maximum(state.settings.limit - state.emitted, 0))
    emitted = state.emitted + count

    # A stop id that the limit cuts off was never emitted.
    stopped = jnp.any(stops & (place < count[:, None]), axis=1)
    ended = jnp.where(stopped, STOPPED, jnp.where(emitted >= state.settings.limit, AT_LIMIT, RUNNING))
    slots = jnp.where(place < count[:, None], state.emitted[:, None] + place, state.tokens.shape[1])
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[row, slots].set(tokens, mode="drop"),
        logprobs=state.logprobs.at[row, slots].set(logprobs, mode="drop"),
        emitted=emitted,
        finish=jnp.where(state.finish == RUNNING, ended, state.finish),
        seen=_mark(state.seen, tokens, place < count[:, None]),
    )
    return state, committed._replace(count=count)


def _mark(seen: Array | None, tokens: Array, valid: Array) -> Array | None:
    """Adds valid ones of tokens i32[B, R] to what each row has seen, where that is kept at all."""
    if seen is None:
        return None
    row = jnp.arange(tokens.shape[0])[:, None]
    return seen.at[row, jnp.where(valid, tokens, seen.shape[1])].set(True, mode="drop")
