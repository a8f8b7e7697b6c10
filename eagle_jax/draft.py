"""Drafters: whoever fills the tree. Two ways to grow one with a draft model: dynamic (EAGLE-2) and static (EAGLE-1).

A drafter sees each token the target has committed together with its true feature, and proposes a `Tree` below the last
one. Verification and the decoding loop know nothing else about it.

B batch rows, N nodes, D levels, K frontier width and children per expanded node, E hidden size, W draft vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle_jax.config import Path, TreeConfig
from eagle_jax.numerics import top_k
from eagle_jax.ranking import Rank, by_probability
from eagle_jax.sampling import DRAWN, Sampler
from eagle_jax.tree import NO_PARENT, ROOT, Tree, root_only

# The default tree of EAGLE-1's published code: 25 nodes below the root, 5 levels.
EAGLE1_CHOICES: tuple[Path, ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


class Committed(NamedTuple):
    """Tokens the target has run, its features for them, and the token that follows each."""

    tokens: Array  # i32[B, R]
    features: Array  # [B, R, E]
    next_tokens: Array  # i32[B, R], the shifted tokens
    count: Array  # i32[B], how many of the R are there
    # i32[B, N], the target's best token after each node of the round's tree, the path or not; None for a drafter that
    # does not ask for them, and where no tree was tested
    choices: Array | None = None


class Drafter(Protocol):
    """Static and hashable; parameters and state are passed in and out.

    A prompt comes in chunks (`prefill`), a round's tokens at its end (`observe`); `propose` drafts below `root`. Tokens
    come with their features once the target has run them, so the root is seen only as the one that follows the last.
    """

    @property
    def nodes(self) -> int:
        """N, the nodes of every tree it proposes."""
        ...

    @property
    def depth(self) -> int:
        """D, the levels below the root."""
        ...

    @property
    def wants_choices(self) -> bool:
        """Whether `Committed.choices` are to be worked out."""
        ...

    def init(self, params: Any, batch: int, capacity: int) -> Any:
        """A state for rows of up to `capacity` tokens that has seen none.

        More capacity only makes arrays longer, and the first axis of each is the rows.
        """
        ...

    def prefill(self, params: Any, state: Any, chunk: Committed) -> Any:
        """Takes in a chunk of the prompt."""
        ...

    def propose(self, params: Any, state: Any, root: Array, sampler: Sampler) -> tuple[Tree, Any]:
        """Drafts a tree below `root` i32[B], the last committed token.

        Args:
          sampler: how the target's tokens are going to be chosen; level l of the tree holds guesses of the tokens that
            `sampler` chooses at level l - 1. Whatever a drafter does with it cannot change the text.
        """
        ...

    def observe(self, params: Any, state: Any, committed: Committed) -> Any:
        """Takes in what a round committed, at most D + 1 tokens; at first the prompt's last token alone."""
        ...

    def rewind(self, params: Any, state: Any, length: Array) -> tuple[Any, Array]:
        """Forgets what it saw after each row's first `length` i32[B] tokens, for a prompt that goes on from there.

        Returns how many tokens of each row it still knows, at most `length`: the prefill begins after them.
        """
        ...


class Memoryless:
    """What a drafter without parameters and memory does; others inherit what they do not state themselves."""

    wants_choices = False
    # Methods (params, array, ...) that run a model, which `round_times.py` times alone.
    forwards: ClassVar[tuple[str, ...]] = ()

    def init(self, params: Any, batch: int, capacity: int) -> Any:
        return ()

    def prefill(self, params: Any, state: Any, chunk: Committed) -> Any:
        return state

    def observe(self, params: Any, state: Any, committed: Committed) -> Any:
        return state

    def rewind(self, params: Any, state: Any, length: Array) -> tuple[Any, Array]:
        return state, length


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoDraft(Memoryless):
    """Plain decoding: a root and nothing below it."""

    nodes: int = 1
    depth: int = 0

    def propose(self, params: Any, state: tuple[()], root: Array, sampler: Sampler) -> tuple[Tree, tuple[()]]:
        return root_only(root), state


# --- Trees from a step function ---------------------------------------------------------------------------------------


class Frontier(NamedTuple):
    """Nodes about to be run through the draft model."""

    tokens: Array  # i32[B, K]
    features: Array  # [B, K, E], the predicted feature at each node's parent
    depth: int  # the nodes' level, 1 below the root
    ancestors: Array  # bool[B, K, R], over all nodes run so far, these included; R grows by K a level
    parent_tokens: Array  # i32[B, K]


# Runs frontier nodes: (carry, frontier) -> (carry, logits f32[B, K, W], features [B, K, E]).
StepFn = Callable[[Any, Frontier], tuple[Any, Array, Array]]


class Start(NamedTuple):
    """What the draft model says at the root."""

    logits: Array  # f32[B, W], of the root's children
    feature: Array  # [B, E], predicted at the root


def dynamic_nodes(config: TreeConfig, vocab_size: int) -> int:
    """N of a dynamic tree: as asked for, but no more than the pool of candidates holds."""
    width = min(config.top_k, vocab_size)
    return min(config.nodes, 1 + width + (config.depth - 1) * width * width)


def dynamic_depth(config: TreeConfig) -> int:
    """D of a dynamic tree: a node needs an ancestor at every level above it, so there are no more levels than nodes."""
    return min(config.depth, config.nodes - 1)


def draft_dynamic(
    step: StepFn,
    carry: Any,
    start: Start,
    root: Array,
    token_ids: Callable[[Array], Array],
    config: TreeConfig,
    rank: Rank = by_probability,
) -> Tree:
    """EAGLE-2's tree (section 4): expand the best nodes level by level, then rerank all candidates.

    Args:
      step: runs K nodes of one level.
      carry: what `step` hands on from level to level.
      start: the draft model's word at the root.
      root: i32[B].
      token_ids: maps draft-vocabulary indices to token ids.
      config: a "dynamic" tree.
      rank: turns logits into scores of at most 0, which add up along paths; `ranking.rank_for` knows which.
    """
    batch, vocab_size = start.logits.shape
    width, levels = min(config.top_k, vocab_size), dynamic_depth(config)
    rows = jnp.arange(batch)[:, None]

    # Every candidate ever scored stays in the pool; a parent is its index there.
    scores, best = top_k(rank(start.logits, 0), width)  # [B, K]
    tokens = token_ids(best)
    pool = [(tokens, jnp.full_like(tokens, NO_PARENT), jnp.ones_like(tokens), scores)]
    frontier_index = jnp.broadcast_to(jnp.arange(width), (batch, width))
    features = jnp.broadcast_to(start.feature[:, None], (batch, width, start.feature.shape[-1]))
    ancestors = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
    parent_tokens = jnp.broadcast_to(root[:, None], (batch, width))
    filled = width

    for depth in range(1, levels):
        carry, logits, features = step(carry, Frontier(tokens, features, depth, ancestors, parent_tokens))
        child_scores, best = top_k(rank(logits, depth), width)  # [B, K, K]
        child_scores = (child_scores + scores[:, :, None]).reshape(batch, -1)
        child_tokens = token_ids(best).reshape(batch, -1)
        parents = jnp.repeat(frontier_index, width, axis=1)
        pool.append((child_tokens, parents, jnp.full_like(parents, depth + 1), child_scores))
        if depth + 1 == levels:
            break
        # Next frontier: the K candidates of this level with the best paths (section 4.1).
        scores, chosen = top_k(child_scores, width)
        parent = chosen // width
        parent_tokens, tokens = tokens[rows, parent], child_tokens[rows, chosen]
        frontier_index = filled + chosen
        features = features[rows, parent]
        ancestors = jnp.concatenate(
            [ancestors[rows, parent], jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))], axis=-1
        )
        filled += width * width

    return rerank(root, *(jnp.concatenate(parts, axis=1) for parts in zip(*pool, strict=True)), nodes=config.nodes)


def rerank(root: Array, tokens: Array, parents: Array, depths: Array, scores: Array, *, nodes: int) -> Tree:
    """Keeps the N - 1 candidates with the best paths (section 4.2), arrays [B, pool].

    Scores never rise down the tree, and on ties `top_k` takes the lower index, which a parent has. So what is kept is
    closed under parents, and in ascending order of index parents come first.
    """
    batch, size = tokens.shape
    kept = min(nodes - 1, size)
    index = jnp.sort(top_k(scores, kept)[1], axis=1)  # [B, kept]
    rows = jnp.arange(batch)[:, None]
    node = jnp.zeros((batch, size), jnp.int32).at[rows, index].set(jnp.arange(1, kept + 1, dtype=jnp.int32))
    parent = parents[rows, index]
    new_parents = jnp.where(parent == NO_PARENT, ROOT, node[rows, jnp.maximum(parent, 0)])
    return _below(root, tokens[rows, index], new_parents, depths[rows, index], scores[rows, index])


def _below(root: Array, tokens: Array, parents: Array, depths: Array, scores: Array) -> Tree:
    """A tree from a root i32[B] and the nodes below it [B, N - 1]."""
    first = root_only(root)
    columns = {"tokens": tokens, "parents": parents, "depths": depths, "log_scores": scores}
    return Tree(
        **{
            name: jnp.concatenate([getattr(first, name), column.astype(getattr(first, name).dtype)], axis=1)
            for name, column in columns.items()
        }
    )


class StaticLevel(NamedTuple):
    """One level of a tree whose shape is known beforehand, as indices on the host."""

    parents: tuple[int, ...]  # for each node: the node it hangs on, counted over the whole tree
    expanded: tuple[int, ...]  # for each node: its parent's place among the nodes run at the level above
    ranks: tuple[int, ...]  # for each node: which of its parent's best tokens it carries
    inner: tuple[int, ...]  # the places in this level of nodes that have children


def static_levels(choices: tuple[Path, ...]) -> list[StaticLevel]:
    """A list of paths, level by level, in lexical order."""
    ordered = sorted(choices, key=lambda path: (len(path), path))
    index = {(): ROOT} | {path: i for i, path in enumerate(ordered, start=1)}
    with_children = {path[:-1] for path in ordered}
    levels: list[StaticLevel] = []
    above: list[Path] = [()]
    for depth in range(1, max(map(len, ordered)) + 1):
        level = [path for path in ordered if len(path) == depth]
        levels.append(
            StaticLevel(
                parents=tuple(index[path[:-1]] for path in level),
                expanded=tuple(above.index(path[:-1]) for path in level),
                ranks=tuple(path[-1] for path in level),
                inner=tuple(i for i, path in enumerate(level) if path in with_children),
            )
        )
        above = [path for path in level if path in with_children]
    return levels


def draft_static(
    step: StepFn,
    carry: Any,
    start: Start,
    root: Array,
    token_ids: Callable[[Array], Array],
    choices: tuple[Path, ...],
    rank: Rank = by_probability,
    sampler: Sampler | None = None,
) -> Tree:
    """EAGLE-1's tree (section 3.1): its shape is given, the draft model fills in the tokens. A chain is one of these.

    Other arguments are those of `draft_dynamic`.

    Args:
      choices: the paths, none of them with a rank at or over W.
      sampler: None gives nodes their best children. Else children are drawn without replacement from the draft's
        distribution under the target's processors, for `rejection.by_rejection`: of a node's children in `choices`, the
        first is what was drawn first, and so on.
    """
    batch, vocab_size = start.logits.shape
    levels = static_levels(choices)
    index = jnp.arange(vocab_size)
    ids = token_ids(index)
    seen = None if sampler is None or sampler.seen is None else sampler.seen[:, None, ids]  # bool[B, K, W]
    proposals = []
    logits, features = start.logits[:, None], start.feature[:, None]  # of the nodes run last
    run = root[:, None]  # their tokens
    path_scores = jnp.zeros((batch, 1), jnp.float32)
    ancestors = jnp.zeros((batch, 1, 0), bool)
    columns = []
    for depth, level in enumerate(levels, start=1):
        expanded = np.asarray(level.expanded)
        if sampler is None:
            ranks = np.asarray(level.ranks)
            best_scores, best = top_k(rank(logits, depth - 1), ranks.max() + 1)
        else:
            ranks = np.asarray([level.parents[:i].count(parent) for i, parent in enumerate(level.parents)])
            log_probs = sampler.draft_log_probs(jnp.where(jnp.isnan(logits), -jnp.inf, logits), seen)
            best_scores, best = draw_children(log_probs, depth - 1, ranks.max() + 1, sampler)
            proposals.append(log_probs)
        carried = best[:, expanded, ranks]
        tokens, scores = token_ids(carried), best_scores[:, expanded, ranks] + path_scores[:, expanded]
        shape = batch, len(ranks)
        parents = jnp.broadcast_to(np.asarray(level.parents), shape)
        if sampler is not None:
            # Where fewer tokens have a probability than children are wanted, the rest is padding.
            parents = jnp.where(jnp.isneginf(scores), NO_PARENT, parents)
        columns.append((tokens, parents, jnp.full(shape, depth), scores))
        if not level.inner:
            break
        inner = np.asarray(level.inner)
        width, parent = len(inner), expanded[inner]
        itself = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
        ancestors = jnp.concatenate([ancestors[:, parent], itself], axis=-1)
        path_scores = scores[:, inner]
        if seen is not None:
            seen = seen[:, parent] | (index == carried[:, inner, None])
        frontier = Frontier(tokens[:, inner], features[:, parent], depth, ancestors, run[:, parent])
        run = frontier.tokens
        carry, logits, features = step(carry, frontier)
    tree = _below(root, *(jnp.concatenate(parts, axis=1) for parts in zip(*columns, strict=True)))
    if sampler is None:
        return tree
    # Without a draft vocabulary `token_ids` hands back what it was given.
    return dataclasses.replace(
        tree,
        proposals=jnp.concatenate(proposals, axis=1),
        proposal_of=jnp.broadcast_to(np.asarray(_proposal_places(levels), np.int32), tree.tokens.shape),
        vocabulary=None if ids is index else ids,
    )


def draw_children(log_probs: Array, level: int, count: int, sampler: Sampler) -> tuple[Array, Array]:
    """Draws tokens for nodes at `level` without replacement (the Gumbel top-k trick, arXiv 1903.06059, section 3).

    One noise serves all nodes of a level: a walk comes to one of them, and which one that is was settled above.

    Args:
      log_probs: f32[B, K, W].
      count: C, how many to draw.

    Returns:
      Log-probabilities f32[B, K, C] and indices i32[B, K, C] in the order of the draws; in a greedy row the best ones.
    """
    draw = jax.vmap(lambda key: jax.random.gumbel(key, (log_probs.shape[-1],)))
    noise = draw(sampler.keys_for(DRAWN, level)) * (sampler.params.temperature > 0)[:, None]
    _, drawn = top_k(log_probs + noise[:, None], count)
    return jnp.take_along_axis(log_probs, drawn, axis=-1), drawn


def _proposal_places(levels: list[StaticLevel]) -> list[int]:
    """For the root and each node with children its place among these, level by level; 0 for the others."""
    places, count = [0], 1
    for level in levels:
        for i in range(len(level.parents)):
            places.append(count if i in level.inner else 0)
            count += i in level.inner
    return places


def static_choices(config: TreeConfig, vocab_size: int) -> tuple[Path, ...]:
    """The paths of a "static" or "chain" tree; ranks that the vocabulary does not have are left out."""
    if config.kind == "chain":
        return tuple((0,) * depth for depth in range(1, min(config.depth, config.nodes - 1) + 1))
    choices = EAGLE1_CHOICES if config.choices is None else config.choices
    return tuple(path for path in choices if max(path) < vocab_size)


# --- A tree of any kind -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeDrafter(Memoryless):
    """A drafter whose trees are of the kind and size that `tree` says."""

    tree: TreeConfig
    draft_vocab_size: int  # W

    @property
    def nodes(self) -> int:
        if self.tree.kind == "dynamic":
            return dynamic_nodes(self.tree, self.draft_vocab_size)
        return 1 + len(static_choices(self.tree, self.draft_vocab_size))

    @property
    def depth(self) -> int:
        if self.tree.kind == "dynamic":
            return dynamic_depth(self.tree)
        return max(map(len, static_choices(self.tree, self.draft_vocab_size)))


def tree_ranks(config: TreeConfig, vocab_size: int) -> int:
    """How many of a node's best tokens the tree may hold."""
    if config.kind == "dynamic":
        return min(config.top_k, vocab_size)
    return 1 + max(max(path) for path in static_choices(config, vocab_size))


def draft_tree(
    step: StepFn,
    carry: Any,
    start: Start,
    root: Array,
    token_ids: Callable[[Array], Array],
    config: TreeConfig,
    rank: Rank = by_probability,
    sampler: Sampler | None = None,
) -> Tree:
    """A tree of the kind that `config` names; arguments are those of `draft_dynamic` and `draft_static`."""
    if config.kind == "dynamic":
        return draft_dynamic(step, carry, start, root, token_ids, config, rank)
    choices = static_choices(config, start.logits.shape[-1])
    return draft_static(step, carry, start, root, token_ids, choices, rank, sampler)
