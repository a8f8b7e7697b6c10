"""Draft trees as fixed-capacity arrays.

Node 0 is the root: the last committed token. Parents stand before their children. Padding nodes have no parent and are
never anyone's child, so no path reaches them.

B batch rows, N nodes (the root included), D levels below the root, X nodes with children, V vocabulary,
W draft vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

ROOT = 0
NO_PARENT = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """Drafted tokens with their places in a tree.

    A sampled tree, whose children were drawn at random, carries what they were drawn from: a node's children stand in
    the order of their draws, without replacement. Other trees leave these fields None.
    """

    tokens: Array  # i32[B, N]
    parents: Array  # i32[B, N], indices of nodes; NO_PARENT at the root and at padding
    depths: Array  # i32[B, N], 0 at the root
    log_scores: Array  # f32[B, N], how likely the draft takes the path from the root to be; 0 at the root
    proposals: Array | None = None  # f32[B, X, W], log-probabilities that children were drawn from
    proposal_of: Array | None = None  # i32[B, N], for a node with children its place among the X
    vocabulary: Array | None = None  # i32[W], a draft vocabulary's token ids, of all rows; None where W = V


def root_only(root: Array) -> Tree:
    """The tree of one node; verifying it is plain decoding. `root` is i32[B]."""
    one = root[:, None]
    return Tree(
        tokens=one,
        parents=jnp.full_like(one, NO_PARENT),
        depths=jnp.zeros_like(one),
        log_scores=jnp.zeros(one.shape, jnp.float32),
    )


def ancestor_mask(parents: Array, depth: int) -> Array:
    """bool[B, N, N]: [b, i, j] is true where node j is node i or one of its ancestors.

    Args:
      parents: i32[B, N].
      depth: levels below the root, at least as many as the tree has.
    """
    nodes = parents.shape[1]
    itself = jnp.eye(nodes, dtype=bool)[None]
    has_parent = (parents != NO_PARENT)[:, :, None]
    index = jnp.maximum(parents, ROOT)[:, :, None]
    mask = jnp.broadcast_to(itself, (parents.shape[0], nodes, nodes))
    for _ in range(depth):
        mask = itself | (jnp.take_along_axis(mask, index, axis=1) & has_parent)
    return mask


def child_with(tree: Tree, node: Array, token: Array) -> tuple[Array, Array]:
    """The child of `node` that carries `token`.

    Args:
      node: i32[B].
      token: i32[B].

    Returns:
      Its index i32[B] (ROOT where there is none) and whether there is one, bool[B].
    """
    matches = (tree.parents == node[:, None]) & (tree.tokens == token[:, None])
    return jnp.argmax(matches, axis=1).astype(jnp.int32), jnp.any(matches, axis=1)
