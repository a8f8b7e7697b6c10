"""Medusa's trees: every level holds guesses of one head, the same below each node of the level above.

The heads (`medusa.py`) know nothing of each other's guesses. Their drafts are verified as any other's, so that the text
is the target's own. The original's typical acceptance (arXiv 2401.10774, section 2.3.1), which takes what is merely
likely, changes the text and is left out.

B batch rows, N nodes, D levels, E hidden size, W draft vocabulary, K heads.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from eagle_jax.config import Path, TreeConfig
from eagle_jax.draft import Committed, Frontier, Start, TreeDrafter, draft_tree, tree_ranks
from eagle_jax.head import FrozenEnds
from eagle_jax.numerics import top_k
from eagle_jax.ranking import rank_for
from eagle_jax.sampling import Sampler
from eagle_jax.tree import ROOT, Tree

# How many children each node of the published default tree (63 nodes below the root, 4 levels) has: its best tokens.
_CHILDREN: dict[Path, int] = {
    **{(): 10, (0,): 10, (1,): 7, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1, (8,): 1, (9,): 1},
    **{(0, 0): 10, (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1, (1, 0): 2, (2, 0): 1},
    (0, 0, 0): 2,
}
MEDUSA_CHOICES: tuple[Path, ...] = tuple(
    (*parent, rank) for parent, children in _CHILDREN.items() for rank in range(children)
)


class MedusaParams(NamedTuple):
    """What Medusa drafts with."""

    heads: nnx.State
    ends: FrozenEnds


def up_to(tree: TreeConfig, levels: int) -> TreeConfig:
    """The tree without what lies deeper; a static one without choices is the published default."""
    if tree.kind != "static":
        return dataclasses.replace(tree, depth=min(tree.depth, levels))
    choices = MEDUSA_CHOICES if tree.choices is None else tree.choices
    return dataclasses.replace(tree, choices=tuple(path for path in choices if len(path) <= levels))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaDrafter(TreeDrafter):
    """A tree over the heads' best tokens: level l holds guesses of head l.

    Static trees and chains have their shape given. A dynamic one keeps the nodes with the highest products of
    probabilities, which is EAGLE-2's growing and reranking over heads that know no path.

    Its memory is one feature, that of the last token the target has run. It needs no rewinding: no tree is drafted
    before the prompt's last token, whose feature takes the place of what was there, has been observed.
    """

    forwards = ("logits",)

    graphdef: nnx.GraphDef
    hidden_size: int

    def init(self, params: MedusaParams, batch: int, capacity: int) -> Array:
        return jnp.zeros((batch, self.hidden_size), params.ends.embedding.dtype)

    def observe(self, params: MedusaParams, state: Array, committed: Committed) -> Array:
        last = jnp.maximum(committed.count - 1, 0)
        feature = jnp.take_along_axis(committed.features, last[:, None, None], axis=1)[:, 0]
        return jnp.where((committed.count > 0)[:, None], feature, state)

    def logits(self, params: MedusaParams, features: Array) -> Array:
        """Of the heads that the tree has levels for, f32[B, D, W], from features [B, E]."""
        dtype = jax.tree.leaves(params.heads)[0].dtype  # may be another than the target's
        return nnx.merge(self.graphdef, params.heads)(features.astype(dtype), self.depth)

    def propose(self, params: MedusaParams, state: Array, root: Array, sampler: Sampler) -> tuple[Tree, Array]:
        logits = self.logits(params, state)
        rank = rank_for(sampler, self.tree, params.ends.vocabulary)
        ranked = jnp.stack([rank(logits[:, level], level) for level in range(self.depth)], axis=1)
        # The tree is grown over ranks, a few to a head, and gets its tokens at the end: no level looks at W again.
        ranks = tree_ranks(self.tree, self.draft_vocab_size)
        scores, best = top_k(ranked, ranks)  # [B, D, ranks]
        tokens = params.ends.token_ids(best).reshape(root.shape[0], -1)
        nothing = jnp.zeros((root.shape[0], 1, 0), jnp.float32)  # the heads predict no features

        def step(carry: tuple[()], frontier: Frontier) -> tuple[tuple[()], Array, Array]:
            batch, width = frontier.tokens.shape
            of_next = jnp.broadcast_to(scores[:, frontier.depth, None], (batch, width, ranks))
            return carry, of_next, jnp.broadcast_to(nothing, (batch, width, 0))

        start = Start(scores[:, 0], nothing[:, 0])
        tree = draft_tree(step, (), start, root, lambda index: index, self.tree, rank=lambda given, level: given)
        place = jnp.maximum(tree.depths - 1, ROOT) * ranks + tree.tokens
        below = jnp.take_along_axis(tokens, jnp.where(tree.depths > 0, place, 0), axis=1)
        return dataclasses.replace(tree, tokens=jnp.where(tree.depths > 0, below, tree.tokens)), state
