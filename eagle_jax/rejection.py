"""Recursive rejection: the way down a tree whose children were drawn from the draft's own distribution.

At a node with the target's distribution p and the draft's q, its children in the order of their draws: a child x is
accepted with probability min(1, p(x) / q(x)); when it is not, p becomes norm(max(p - q, 0)) and q loses x. When none is
accepted, the token is drawn from what is left of p. What is emitted has the law p (one child: arXiv 2211.17192,
appendix A.1; several: SpecInfer, arXiv 2305.09781, section 4.3).

That takes draws that are independent of all that was drawn for other tokens, and shapes that no draw has a say in: keys
are folded from what they are for and the token's absolute index, and trees are static.

B batch rows, N nodes, V vocabulary, W draft vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import Array

from eagle_jax.sampling import ACCEPTED, RESIDUAL, Sampler
from eagle_jax.tree import Tree
from eagle_jax.verify import DescendFn, Taken


def by_rejection(tree: Tree, sampler: Sampler) -> DescendFn:
    """To the first child that is accepted. In a greedy row p is all on the best token, so that no other one can be."""
    assert tree.proposals is not None and tree.proposal_of is not None
    batch, nodes = tree.tokens.shape
    row = jnp.arange(batch)
    proposals, proposal_of = tree.proposals, tree.proposal_of

    def descend(logits: Array, node: Array, level: Array, seen: Array | None) -> Taken:
        # A greedy row's token is plain decoding's to the last bit, ties included.
        greedy = jax.nn.one_hot(sampler.choose(logits, level, seen), logits.shape[-1])
        warm = (sampler.params.temperature > 0)[:, None]
        p = jnp.where(warm, jnp.exp(sampler.log_probs(logits, seen)), greedy)  # [B, V]
        q = jnp.exp(proposals[row, proposal_of[row, node]])  # [B, W]
        if tree.vocabulary is not None:
            q = jnp.zeros_like(p).at[:, tree.vocabulary].set(q)
        uniforms = jax.vmap(lambda key: jax.random.uniform(key, (nodes,)))(sampler.keys_for(ACCEPTED, level))

        def unfinished(carry: tuple) -> Array:
            untried, _, _, _, found = carry
            return jnp.any(untried & ~found[:, None])

        def try_next(carry: tuple) -> tuple:
            untried, p, q, child, found = carry
            child = jnp.where(found, child, jnp.argmax(untried, axis=1))
            token = tree.tokens[row, child]
            # A child of which the draft says that it cannot be is padding.
            tried = jnp.any(untried, axis=1) & ~found & (q[row, token] > 0)
            accepted = tried & (uniforms[row, child] * q[row, token] < p[row, token])
            rejected = (tried & ~accepted)[:, None]
            others = q.at[row, token].set(0.0)
            p = jnp.where(rejected, _normalised(jnp.maximum(p - q, 0.0), otherwise=p), p)
            q = jnp.where(rejected, _normalised(others, otherwise=others), q)
            return untried.at[row, child].set(False), p, q, child, found | accepted

        untried = tree.parents == node[:, None]
        start = untried, p, q, jnp.zeros_like(node), jnp.zeros((batch,), bool)
        _, p, _, child, found = jax.lax.while_loop(unfinished, try_next, start)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, p.shape[1:]))(sampler.keys_for(RESIDUAL, level))
        left = jnp.argmax(jnp.log(p) + noise, axis=-1).astype(jnp.int32)
        return Taken(jnp.where(found, tree.tokens[row, child], left), child, found)

    return descend


def _normalised(weights: Array, otherwise: Array) -> Array:
    """Weights f32[B, V] that sum to 1 in each row; a row without any is what it would be `otherwise`."""
    mass = jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.where(mass > 0, weights / jnp.where(mass > 0, mass, 1.0), otherwise)
