"""EAGLE's autoregression head as a drafter, behind any of the tree shapes.

B batch rows, D levels, K nodes run at once, R pairs, E hidden size, W draft vocabulary, KV key-value heads,
H head dimension.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from eagle_jax import cache as kv
from eagle_jax import layers
from eagle_jax.config import HeadConfig, TreeConfig
from eagle_jax.draft import (
    Committed,
    Frontier,
    Memoryless,
    Start,
    StepFn,
    draft_tree,
    tree_depth,
    tree_nodes,
)
from eagle_jax.head import FrozenEnds, Head
from eagle_jax.numerics import lm_logits
from eagle_jax.sampling import Sampler
from eagle_jax.tree import Tree


class HeadParams(NamedTuple):
    """What the head drafts with."""

    head: nnx.State
    ends: FrozenEnds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftState:
    """The head's memory of committed pairs, and those it must still take in."""

    cache: kv.KVCache  # one layer
    fresh: kv.Rows  # of the pairs taken in last, [B, KV, D + 1, H]; they go into the cache when the next ones come
    fresh_count: Array  # i32[B]
    pending: Committed  # the last round's true features and shifted tokens, [B, D + 1, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadDrafter(Memoryless):
    """EAGLE's autoregression head behind one of the three tree shapes.

    Its guesses of a round are thrown away with the round: the next one starts from the target's true features. (Keys
    of drafted rows left in the cache cost acceptance.)
    """

    graphdef: nnx.GraphDef
    config: HeadConfig
    tree: TreeConfig
    draft_vocab_size: int

    @property
    def nodes(self) -> int:
        return tree_nodes(self.tree, self.draft_vocab_size)

    @property
    def depth(self) -> int:
        return tree_depth(self.tree, self.draft_vocab_size)

    def init(self, params: HeadParams, batch: int, capacity: int) -> DraftState:
        # The head may be of another dtype than its target: keys and values are the head's, features the target's.
        dtype, room = jax.tree.leaves(params.head)[0].dtype, self.depth + 1
        shape = {"layers": 1, "batch": batch, "kv_heads": self.config.kv_heads, "key_dim": self.config.key_dim}
        none = jnp.zeros((batch,), jnp.int32)
        fresh = kv.empty(capacity=room, dtype=dtype, **shape)
        return DraftState(
            cache=kv.empty(capacity=capacity, dtype=dtype, **shape),
            fresh=kv.Rows(fresh.keys, fresh.values, jnp.zeros((batch, room), jnp.int32)),
            fresh_count=none,
            pending=Committed(
                tokens=jnp.zeros((batch, room), jnp.int32),
                features=jnp.zeros((batch, room, self.config.hidden_size), params.ends.embedding.dtype),
                next_tokens=jnp.zeros((batch, room), jnp.int32),
                count=none,
            ),
        )

    def prefill(self, params: HeadParams, state: DraftState, chunk: Committed) -> DraftState:
        _, rows = self._extend(params, state.cache, chunk)
        return dataclasses.replace(state, cache=kv.commit(state.cache, rows, chunk.count))

    def observe(self, params: HeadParams, state: DraftState, committed: Committed) -> DraftState:
        room, given = self.depth + 1, committed.next_tokens.shape[1]
        fill = ((0, 0), (0, room - given))
        pending = Committed(
            tokens=jnp.pad(committed.tokens, fill),
            features=jnp.pad(committed.features, (*fill, (0, 0))),
            next_tokens=jnp.pad(committed.next_tokens, fill),
            count=committed.count,
        )
        return dataclasses.replace(state, pending=pending)

    def rewind(self, params: HeadParams, state: DraftState, length: Array) -> tuple[DraftState, Array]:
        cache = kv.commit(state.cache, state.fresh, state.fresh_count)
        _, rows = self._extend(params, cache, state.pending)
        known = jnp.minimum(length, cache.length + state.pending.count)
        none = jnp.zeros_like(known)
        return DraftState(
            cache=kv.rewound(kv.commit(cache, rows, state.pending.count), known),
            fresh=state.fresh,
            fresh_count=none,
            pending=state.pending._replace(count=none),
        ), known

    def propose(self, params: HeadParams, state: DraftState, root: Array, sampler: Sampler) -> tuple[Tree, DraftState]:
        # Written before anything reads it and not after: a compiled loop that reads a cache and then writes it, with
        # nothing to order the two, copies the whole cache every round.
        cache = kv.commit(state.cache, state.fresh, state.fresh_count)
        pending = state.pending
        predicted, fresh = self._extend(params, cache, pending)
        last = jnp.maximum(pending.count - 1, 0)
        feature = jnp.take_along_axis(predicted, last[:, None, None], axis=1)[:, 0]
        start = Start(self._log_probs(params, feature), feature)
        step = self._step(params, cache, pending.count)
        tree = draft_tree(step, fresh, start, root, params.ends.token_ids, self.tree)
        return tree, dataclasses.replace(state, cache=cache, fresh=fresh, fresh_count=pending.count)

    def _extend(self, params: HeadParams, cache: kv.KVCache, pairs: Committed) -> tuple[Array, kv.Rows]:
        """Takes in true pairs: predicted features [B, R, E], and their keys and values."""
        tokens = pairs.next_tokens if self.config.shifted else pairs.tokens
        length = tokens.shape[1]
        positions = cache.length[:, None] + jnp.arange(length)
        return nnx.merge(self.graphdef, params.head)(
            params.ends.embedding[tokens], pairs.features, positions, layers.causal_mask(length), cache
        )

    def _step(self, params: HeadParams, cache: kv.KVCache, fresh_count: Array) -> StepFn:
        """Runs a frontier over the cache, the fresh pairs and the nodes run before; the last two are the carry."""

        def step(carry: kv.Rows, frontier: Frontier) -> tuple[kv.Rows, Array, Array]:
            batch, width, nodes = frontier.ancestors.shape
            fresh = carry.keys[0].shape[2] - (nodes - width)
            there = jnp.arange(fresh) < fresh_count[:, None]
            mask = jnp.concatenate(
                [jnp.broadcast_to(there[:, None], (batch, width, fresh)), frontier.ancestors], axis=-1
            )
            # The root's pair is the last committed one; a node at level l stands l places after it.
            positions = (cache.length + fresh_count)[:, None] + frontier.depth - 1
            tokens = frontier.tokens if self.config.shifted else frontier.parent_tokens
            features, rows = nnx.merge(self.graphdef, params.head)(
                params.ends.embedding[tokens], frontier.features, positions, mask, cache, carry
            )
            return kv.join(carry, rows), self._log_probs(params, features), features

        return step

    def _log_probs(self, params: HeadParams, features: Array) -> Array:
        log_probs = jax.nn.log_softmax(lm_logits(features, params.ends.lm_head), axis=-1)
        # top_k ranks NaN first, which would put children before their parents. A broken head must not break a tree.
        return jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs)


def bind_head(head: Head, tree: TreeConfig) -> tuple[HeadDrafter, HeadParams]:
    """A head behind a tree's shape: what is static, and what it drafts with."""
    graphdef, params = nnx.split(head.model)
    drafter = HeadDrafter(graphdef=graphdef, config=head.config, tree=tree, draft_vocab_size=head.ends.lm_head.shape[0])
    return drafter, HeadParams(params, head.ends)
