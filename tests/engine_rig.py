"""The engine tests' rig: a small random target whose text wanders, and drafters that know it or mislead about it.

B batch rows, T tokens, M most tokens to emit, N nodes, D levels, V vocabulary.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.scipy.special import gammaincc
from rig import tiny_target

import eagle_jax as ej
from eagle_jax import decoding, draft, generation, layers, ranking, sampling
from eagle_jax.config import Inputs
from eagle_jax.target import features_of
from eagle_jax.tree import Tree

TREE = ej.TreeConfig(nodes=40, depth=4, top_k=8)
CLEAR = 2e-4  # choices whose scores lie closer may change places under float32's rounding


def make_target(seed: int = 0, sharpness: float = 10.0, eos: tuple[int, ...] = (), **overrides: Any) -> ej.Target:
    """The tiny target with its matrices scaled up: at their usual size all logits are almost the same."""
    target = tiny_target(seed, eos, **overrides)
    return dataclasses.replace(target, model=_sharpened(target.model, sharpness))


def make_head(
    target: ej.Target,
    sharpness: float = 3.0,
    vocabulary: np.ndarray | None = None,
    inputs: Inputs = "feature+shifted_token",
) -> ej.Head:
    """A head that has learned nothing; among so few tokens it is right now and then."""
    head = ej.Head.random(target, seed=1, vocabulary=vocabulary, inputs=inputs)
    return dataclasses.replace(head, model=_sharpened(head.model, sharpness))


def make_medusa(target: ej.Target, heads: int = 3, vocabulary: np.ndarray | None = None) -> ej.Medusa:
    """Medusa's heads that have learned nothing and say different things."""
    medusa = ej.Medusa.from_target(target, heads, vocabulary)
    graphdef, params = nnx.split(medusa.model)
    random = np.random.default_rng(3)
    scattered = lambda x: x + jnp.asarray(random.normal(size=x.shape) * 0.1, x.dtype)  # noqa: E731
    return dataclasses.replace(medusa, model=nnx.merge(graphdef, jax.tree.map(scattered, params)))


def in_bfloat16(target: ej.Target) -> ej.Target:
    """The same weights, rounded."""
    graphdef, _ = nnx.split(ej.Target.random(target.config, dtype=jnp.bfloat16).model)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(target.model))
    return dataclasses.replace(target, model=nnx.merge(graphdef, params))


def _sharpened(model: Any, factor: float) -> Any:
    graphdef, params = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x if x.ndim == 1 else x * factor, params))  # all but the norms


def random_prompts(count: int, lengths: Sequence[int] = (3, 5, 8, 13, 21), seed: int = 0, vocab: int = 16):
    """Prompts of token ids, their lengths taken from `lengths` in turn."""
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab, lengths[i % len(lengths)]).tolist() for i in range(count)]


def ids(completions: Sequence[ej.Completion]) -> list[list[int]]:
    return [done.token_ids for done in completions]


def mean_accepted(completions: Sequence[ej.Completion]) -> float:
    """Accepted draft tokens a round."""
    accepted = [n for done in completions for n in done.accepted]
    return float(np.mean(accepted))


def until(tokens: list[int], *stops: int) -> list[int]:
    """Tokens up to the first of `stops`, that one included."""
    ends = [i for i, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


def full_logits(target: ej.Target, tokens: Any) -> np.ndarray:
    """f32[B, T, V] of whole rows i32[B, T], in one causal forward without a cache."""
    features = features_of(*nnx.split(target.model), jnp.asarray(tokens, jnp.int32))
    return np.asarray(target.model.logits(features))


# --- Sampling in NumPy, written from Hugging Face's logits processors -------------------------------------------------


def reference_penalty(logits: np.ndarray, seen: Sequence[int], penalty: float) -> np.ndarray:
    """Logits f[V] with the repetition penalty on the tokens in `seen`."""
    logits = logits.copy()
    for token in set(seen):
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    return logits


def reference_keep(logits: np.ndarray, config: ej.SamplingConfig) -> np.ndarray:
    """Which tokens of f[V] temperature, top-k, top-p and min-p leave, each on what the one before left: bool[V]."""
    scores = logits.astype(np.float64) / config.temperature
    if config.top_k > 0:
        scores = np.where(scores < np.sort(scores)[::-1][min(config.top_k, len(scores)) - 1], -np.inf, scores)
    if config.top_p < 1:
        ascending = np.argsort(scores, kind="stable")
        removed = np.cumsum(softmax(scores)[ascending]) <= 1 - config.top_p
        removed[-1] = False
        scores[ascending[removed]] = -np.inf
    if config.min_p > 0:
        probabilities = softmax(scores)
        scores = np.where(probabilities < config.min_p * probabilities.max(), -np.inf, scores)
    return np.isfinite(scores)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Pearson's chi-square test of counts against a law; cells that expect fewer than 5 are pooled. `-s` shows it."""
    expected = law.ravel() * counts.sum()
    counts = counts.ravel()
    rare = expected < 5
    assert not counts[expected == 0].any()
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    expected, counts = expected[expected > 0], counts[expected > 0]
    statistic = np.sum((counts - expected) ** 2 / expected)
    p = float(gammaincc((len(expected) - 1) / 2, statistic / 2))
    print(f"chi-square {statistic:.1f} with {len(expected) - 1} degrees of freedom: p {p:.3g}")
    return p


def greedy_sampler(rows: int, vocab: int = 16) -> sampling.Sampler:
    """How rows choose that draw nothing."""
    return sampling.Sampler(
        processors=sampling.Processors(),
        params=sampling.params_for([ej.SamplingConfig()] * rows, vocab),
        keys=sampling.row_keys(0, rows),
        index=jnp.zeros((rows,), jnp.int32),
    )


# --- Drafters ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleDrafter(draft.Memoryless):
    """Proposes the next tokens of a text it was given, as a chain."""

    depth: int

    @property
    def nodes(self) -> int:
        return self.depth + 1

    def init(self, params: Array, batch: int, capacity: int) -> Array:
        return jnp.zeros((batch,), jnp.int32)  # tokens committed since the prompt

    def propose(self, params: Array, state: Array, root: Array, sampler: sampling.Sampler) -> tuple[Tree, Array]:
        level = jnp.broadcast_to(jnp.arange(self.nodes), (root.shape[0], self.nodes))
        known = jnp.take_along_axis(params, state[:, None] + level[:, 1:] - 1, axis=1, mode="clip")
        tokens = jnp.concatenate([root[:, None], known], axis=1)
        scores = jnp.zeros(level.shape, jnp.float32)
        return Tree(tokens=tokens, parents=level - 1, depths=level, log_scores=scores), state

    def observe(self, params: Array, state: Array, committed: draft.Committed) -> Array:
        return state + committed.count

    def rewind(self, params: Array, state: Array, length: Array) -> tuple[Array, Array]:
        return jnp.zeros_like(state), length


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Knows what the target will say, so that every path is accepted whole."""

    text: Sequence[Sequence[int]]  # for each prompt

    def bind(self, target: ej.Target, tree: ej.TreeConfig) -> tuple[OracleDrafter, Array]:
        return OracleDrafter(depth=tree.depth), jnp.asarray(self.text, jnp.int32)


class History(NamedTuple):
    """The tokens of a row so far, its root included."""

    tokens: Array  # i32[B, S + 1]
    count: Array  # i32[B]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyDrafter(draft.Memoryless):
    """Drafts with the target itself, which runs the whole history and the nodes so far at every level.

    It keeps only tokens that follow another, and takes a prompt's first one to be 0.
    """

    graphdef: nnx.GraphDef
    tree: ej.TreeConfig
    vocab_size: int
    worst_first: bool

    @property
    def nodes(self) -> int:
        if self.tree.kind == "dynamic":
            return draft.dynamic_nodes(self.tree, self.vocab_size)
        return 1 + len(draft.static_choices(self.tree, self.vocab_size))

    @property
    def depth(self) -> int:
        if self.tree.kind == "dynamic":
            return self.tree.depth
        return max(map(len, draft.static_choices(self.tree, self.vocab_size)))

    def init(self, params: nnx.State, batch: int, capacity: int) -> History:
        return History(jnp.zeros((batch, capacity + 1), jnp.int32), jnp.ones((batch,), jnp.int32))

    def prefill(self, params: nnx.State, state: History, chunk: draft.Committed) -> History:
        return self.observe(params, state, chunk)

    def observe(self, params: nnx.State, state: History, committed: draft.Committed) -> History:
        place = jnp.arange(committed.next_tokens.shape[1])
        slots = jnp.where(place < committed.count[:, None], state.count[:, None] + place, state.tokens.shape[1])
        row = jnp.arange(slots.shape[0])[:, None]
        return History(
            state.tokens.at[row, slots].set(committed.next_tokens, mode="drop"), state.count + committed.count
        )

    def rewind(self, params: nnx.State, state: History, length: Array) -> tuple[History, Array]:
        known = jnp.minimum(length, state.count - 1)
        return History(state.tokens, known + 1), known

    def propose(
        self, params: nnx.State, state: History, root: Array, sampler: sampling.Sampler
    ) -> tuple[Tree, History]:
        model = nnx.merge(self.graphdef, params)
        batch, length = state.tokens.shape
        places = jnp.broadcast_to(jnp.arange(length), (batch, length))
        causal = jnp.broadcast_to(layers.causal_mask(length), (batch, length, length))
        features, _ = model(state.tokens, places, causal)
        last = jnp.take_along_axis(features, state.count[:, None, None] - 1, axis=1)[:, 0]

        def logits_of(features: Array) -> Array:
            logits = model.logits(features)
            return -logits if self.worst_first else logits

        def step(block: tuple[Array, Array, Array], frontier: draft.Frontier) -> tuple[Any, Array, Array]:
            tokens, positions, mask = block
            width = frontier.tokens.shape[1]
            known = jnp.broadcast_to(places[:, None] < state.count[:, None, None], (batch, width, length))
            mask = jnp.concatenate(
                [jnp.pad(mask, ((0, 0), (0, 0), (0, width))), jnp.concatenate([known, frontier.ancestors], -1)], axis=1
            )
            level = jnp.broadcast_to(state.count[:, None] + frontier.depth - 1, (batch, width))
            tokens = jnp.concatenate([tokens, frontier.tokens], axis=1)
            positions = jnp.concatenate([positions, level], axis=1)
            features, _ = model(tokens, positions, mask)
            return (tokens, positions, mask), logits_of(features[:, -width:]), features[:, -width:]

        block = state.tokens, places, causal
        start, itself = draft.Start(logits_of(last), last), lambda index: index
        rank = ranking.rank_for(sampler, self.tree)
        if self.tree.kind == "dynamic":
            return draft.draft_dynamic(step, block, start, root, itself, self.tree, rank), state
        choices = draft.static_choices(self.tree, self.vocab_size)
        return draft.draft_static(step, block, start, root, itself, choices, rank), state


@dataclasses.dataclass(frozen=True)
class Copy:
    """Drafts what the target thinks best, or what it thinks worst."""

    worst_first: bool = False

    def bind(self, target: ej.Target, tree: ej.TreeConfig) -> tuple[CopyDrafter, nnx.State]:
        graphdef, params = nnx.split(target.model)
        drafter = CopyDrafter(
            graphdef=graphdef, tree=tree, vocab_size=target.config.vocab_size, worst_first=self.worst_first
        )
        return drafter, params


# --- Text -------------------------------------------------------------------------------------------------------------


class Letters:
    """A token a character; `^` begins a chat, `U` and `A` a message, `E` ends it."""

    bos_token = None
    characters = "^UAEabcdefghijkl"

    def apply_chat_template(self, chat, tokenize, add_generation_prompt):
        roles = {"system": "U", "user": "U", "assistant": "A"}
        return "^" + "".join(f"{roles[m['role']]}{m['content']}E" for m in chat) + "A"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [self.characters.index(character) for character in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(self.characters[token] for token in ids)


# --- Compilation ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the functions that are compiled inside the block, whether or not a cache on disk had them."""
    names: list[str] = []

    def listen(event: str, duration: float, **attributes: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(attributes["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def loop_and_layer_bytes(target: ej.Target, drafter: Any, tree: ej.TreeConfig, slots: int) -> tuple[int, int]:
    """What the compiled loop holds for a while, and what one layer of the target's cache takes with so many slots."""
    job = generation.prepare(target, drafter, [[1, 2, 3]], max_new_tokens=slots, tree=tree)
    assert job.capacity == slots
    options = {"program": job.program, "capacity": slots, "dtype": target.dtype}
    state = jax.eval_shape(lambda: decoding.init_state(job.params, job.settings, job.keys, **options))
    limit = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = decoding.run_rounds.lower(job.params, state, limit, program=job.program).compile()
    return compiled.memory_analysis().temp_size_in_bytes, state.cache.keys[0].size * 2 * 4
