"""Many drafted continuations as one tree: equal beginnings become one node.

A node scores the log of the share of the continuations' weight that goes through it, so that scores fall down the tree.
No two children of a node carry one token: the walk would go to the first of them alone.

B batch rows, G continuations, L tokens of the longest, N nodes.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from eagle_jax.config import TreeConfig
from eagle_jax.draft import rerank
from eagle_jax.tree import NO_PARENT, ROOT, Tree, child_with


def merge(root: Array, tokens: Array, lengths: Array, weights: Array | None = None, *, nodes: int) -> Tree:
    """The trie of continuations below a root; of more than N - 1 nodes the heaviest stay.

    On ties the higher node stays, then that of the earlier continuation.

    Args:
      root: i32[B].
      tokens: i32[B, G, L].
      lengths: i32[B, G], how many of the L tokens are there; 0 for no continuation.
      weights: f32[B, G], not negative; None is 1 for each. What weighs 0 is left out.
      nodes: N; the tree has no more than 1 + G * L.
    """
    batch, count, length = tokens.shape
    weights = jnp.ones(lengths.shape, jnp.float32) if weights is None else weights
    lengths = jnp.where(weights > 0, lengths, 0)
    there = jnp.arange(length) < lengths[:, :, None]  # bool[B, G, L]
    # [b, g, h, l]: continuations g and h are both l + 1 tokens long or more, and begin with the same l + 1.
    agree = (tokens[:, :, None] == tokens[:, None]) & there[:, :, None] & there[:, None]
    shared = jax.lax.cummin(agree.astype(jnp.int8), axis=3).astype(bool)
    through = jnp.sum(jnp.where(shared, weights[:, None, :, None], 0.0), axis=2)  # f32[B, G, L]
    first = jnp.argmax(shared, axis=2).astype(jnp.int32)  # the continuation that stands for the node
    own = there & (first == jnp.arange(count)[:, None])

    # Level by level, so that parents stand first. A parent is an index among these candidates.
    above = jnp.arange(length - 1)[:, None] * count + first.swapaxes(1, 2)[:, :-1]
    parents = jnp.concatenate([jnp.full((batch, 1, count), NO_PARENT, jnp.int32), above], axis=1)
    depths = jnp.broadcast_to(jnp.arange(1, length + 1)[:, None], (batch, length, count))
    # Ranked by weight and not by its log: sums over fewer terms are never more, rounded as they are.
    by_level = (tokens.swapaxes(1, 2), parents, depths, jnp.where(own, through, 0.0).swapaxes(1, 2))
    tree = rerank(root, *(column.reshape(batch, -1) for column in by_level), nodes=nodes)

    total = jnp.sum(jnp.where(lengths > 0, weights, 0.0), axis=1, keepdims=True)
    weight = tree.log_scores
    real = (weight > 0).at[:, ROOT].set(True)
    return dataclasses.replace(
        tree,
        tokens=jnp.where(real, tree.tokens, 0),
        parents=jnp.where(real, tree.parents, NO_PARENT),
        depths=jnp.where(real, tree.depths, 0),
        log_scores=jnp.where(real, jnp.log(weight / total), -jnp.inf).at[:, ROOT].set(0.0),
    )


def size(tree: TreeConfig, continuations: int, method: str) -> tuple[int, int, int]:
    """G, N and L of a method that fills trees of this shape with up to so many continuations; a chain holds one.

    Raises:
      ValueError: the shape is given by ranks, which only a model's scores give to tokens, or children are to be drawn.
    """
    if tree.children == "sampled":
        raise ValueError(
            f"TreeConfig.children is 'sampled', but {method} has no distribution to draw from; set it to 'best'."
        )
    if tree.kind == "static":
        raise ValueError(
            f"TreeConfig.kind is 'static', whose choices are ranks, but {method} ranks no tokens; use 'dynamic' or "
            "'chain'."
        )
    count = 1 if tree.kind == "chain" else continuations
    length = min(tree.depth, tree.nodes - 1)
    return count, min(tree.nodes, 1 + count * length), length


def follow(tree: Tree, tokens: Array, lengths: Array) -> Array:
    """The nodes i32[B, G] at the ends of paths i32[B, G, L] of lengths i32[B, G]; ROOT for one that is not there."""
    child = jax.vmap(child_with, in_axes=(None, 1, 1), out_axes=1)
    node, on = jnp.full(lengths.shape, ROOT, jnp.int32), jnp.ones(lengths.shape, bool)
    for level in range(tokens.shape[2]):
        below, found = child(tree, node, tokens[:, :, level])
        going = level < lengths
        on &= found | ~going
        node = jnp.where(going & on, below, node)
    return jnp.where(on, node, ROOT)
