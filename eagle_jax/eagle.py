"""EAGLE's autoregression head as a drafter, behind any of the tree shapes.

What it takes in is pairs: a true feature and the token after it. The last pair's token is the root, so that nothing
but committed pairs leads on to the root's children.

B batch rows, R pairs, E hidden size.
"""

import dataclasses
from typing import NamedTuple

import jax
from flax import nnx
from jax import Array

from eagle_jax import cache as kv
from eagle_jax.cached_drafter import Block, CachedDrafter, Kept
from eagle_jax.config import HeadConfig, TreeConfig
from eagle_jax.draft import Committed, Frontier
from eagle_jax.head import FrozenEnds, Head
from eagle_jax.numerics import lm_logits


class HeadParams(NamedTuple):
    """What the head drafts with."""

    head: nnx.State
    ends: FrozenEnds


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadDrafter(CachedDrafter):
    """EAGLE's autoregression head behind one of the three tree shapes."""

    @property
    def head_config(self) -> HeadConfig:
        assert isinstance(self.config, HeadConfig)
        return self.config

    def kept(self, params: HeadParams) -> Kept:
        # The head may be of another dtype than its target: keys and values are the head's, features the target's.
        return Kept(self.config.hidden_size, params.ends.embedding.dtype, jax.tree.leaves(params.head)[0].dtype)

    def committed_block(self, committed: Committed) -> Block:
        tokens = committed.next_tokens if self.head_config.shifted else committed.tokens
        return Block(tokens, committed.features, committed.count)

    def root_block(self, committed: Committed) -> Block:
        return self.committed_block(committed)

    def node_tokens(self, frontier: Frontier) -> Array:
        return frontier.tokens if self.head_config.shifted else frontier.parent_tokens

    def run(
        self,
        params: HeadParams,
        tokens: Array,
        features: Array,
        positions: Array,
        mask: Array,
        cache: kv.KVCache,
        earlier: kv.Rows | None = None,
    ) -> tuple[Array, kv.Rows]:
        head = nnx.merge(self.graphdef, params.head)
        return head(params.ends.embedding[tokens], features, positions, mask, cache, earlier)

    def logits(self, params: HeadParams, features: Array) -> Array:
        return lm_logits(features, params.ends.lm_head)

    def vocabulary(self, params: HeadParams) -> Array | None:
        return params.ends.vocabulary

    @property
    def beta(self) -> float:
        return self.head_config.ranking_beta


def bind_head(head: Head, tree: TreeConfig) -> tuple[HeadDrafter, HeadParams]:
    """A head behind a tree's shape: what is static, and what it drafts with."""
    graphdef, params = nnx.split(head.model)
    drafter = HeadDrafter(graphdef=graphdef, config=head.config, tree=tree, draft_vocab_size=head.ends.lm_head.shape[0])
    return drafter, HeadParams(params, head.ends)
