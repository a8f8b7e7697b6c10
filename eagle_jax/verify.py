"""Verification: the target's choice at each node leads down the tree until no child carries it.

What is emitted is the target's choice at every node, whatever the tree, be it grown with knowledge of the very noise
that the choices are made with. For a tree that knows nothing of it, "draw y from the target's distribution; if a child
carries y go there, else emit y" has the law of accepting each child by recursive rejection against a point mass
(SpecInfer, arXiv 2305.09781, section 4.3). So one walk serves greedy and sampled decoding.

Trees of drawn children need another way down, `rejection.py`'s.

B batch rows, N nodes, D levels, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from eagle_jax.tree import ROOT, Tree, child_with


class Accepted(NamedTuple):
    """What the target agreed to: nodes of the tree, and the tokens chosen at them."""

    path: Array  # i32[B, D + 1], node indices; path[:, 0] = ROOT
    tokens: Array  # i32[B, D + 1], what follows each node of the path; the last one of `count` is the bonus token
    logprobs: Array  # f32[B, D + 1], the target's raw log-probability of each
    count: Array  # i32[B], accepted draft tokens + 1


# node i32[B] -> the target's logits there, f32[B, V].
LogitsFn = Callable[[Array], Array]
# (logits f32[B, V], level i32[], seen) -> tokens i32[B]; `seen` is bool[B, V], or None where nothing asks for it.
ChooseFn = Callable[[Array, Array, Array | None], Array]


class Taken(NamedTuple):
    """What is emitted after a node, and where the walk goes."""

    token: Array  # i32[B]
    child: Array  # i32[B], the node that carries it, where there is one
    found: Array  # bool[B], whether there is one


# (logits f32[B, V] at a node, node i32[B], level i32[], seen) -> Taken.
DescendFn = Callable[[Array, Array, Array, Array | None], Taken]


def of_nodes(values: Array) -> Callable[[Array], Array]:
    """Looks up what is known of every node, [B, N, ...], at one node a row."""
    row = jnp.arange(values.shape[0])
    return lambda node: values[row, node]


def by_choice(tree: Tree, choose: ChooseFn) -> DescendFn:
    """To the child that carries the target's choice."""

    def descend(logits: Array, node: Array, level: Array, seen: Array | None) -> Taken:
        token = choose(logits, level, seen)
        return Taken(token, *child_with(tree, node, token))

    return descend


def walk(
    tree: Tree,
    logits_at: LogitsFn,
    descend: DescendFn,
    depth: int,
    running: Array | None = None,
    seen: Array | None = None,
) -> Accepted:
    """Walks from the root to the first token that no child carries.

    Args:
      tree: the draft.
      logits_at: the target's logits at one node a row.
      descend: the way down from one node a row.
      depth: D.
      running: bool[B], the rows that walk at all, with a count of 0 for the others; None for all.
      seen: bool[B, V], the tokens of each row up to its root; the walk adds what it passes.

    Only the nodes walked over are chosen at, and the walk ends when its longest row does.
    """
    batch = tree.tokens.shape[0]
    row = jnp.arange(batch)
    empty = jnp.zeros((batch, depth + 1), jnp.int32)

    def unfinished(carry: tuple) -> Array:
        level, walking, *_ = carry
        return (level <= depth) & jnp.any(walking)

    def step(carry: tuple) -> tuple:
        level, walking, node, seen, accepted = carry
        here = logits_at(node)
        token, child, found = descend(here, node, level, seen)
        logprob = here[row, token] - jax.nn.logsumexp(here, axis=-1)
        accepted = Accepted(
            path=accepted.path.at[:, level].set(node),
            tokens=accepted.tokens.at[:, level].set(token),
            logprobs=accepted.logprobs.at[:, level].set(logprob),
            count=accepted.count + walking,
        )
        if seen is not None:
            seen = seen.at[row, token].set(True)
        return level + 1, walking & found, child, seen, accepted

    nothing = Accepted(empty, empty, jnp.zeros(empty.shape, jnp.float32), jnp.zeros((batch,), jnp.int32))
    start = (
        jnp.zeros((), jnp.int32),
        jnp.ones((batch,), bool) if running is None else running,
        jnp.full((batch,), ROOT, jnp.int32),
        seen,
        nothing,
    )
    return jax.lax.while_loop(unfinished, step, start)[-1]
