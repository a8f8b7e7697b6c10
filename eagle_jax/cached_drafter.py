"""Drafting with a decoder that keeps a cache of what is committed, behind any of the tree shapes.

EAGLE's head and a draft model of its own differ in what they run: pairs of a feature and the token after it, or tokens.
What they share is here: which of it is cached and when, how a tree's nodes are run over the cache, and going back.

B batch rows, D levels, K nodes run at once, R places of a block, U block places so far, E hidden size, W draft
vocabulary, KV key-value heads, H head dimension.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from eagle_jax import cache as kv
from eagle_jax import layers
from eagle_jax.config import ModelConfig
from eagle_jax.draft import Committed, Frontier, Start, StepFn, TreeDrafter, draft_tree
from eagle_jax.ranking import rank_for
from eagle_jax.sampling import Sampler
from eagle_jax.tree import Tree


class Block(NamedTuple):
    """What is run at once, padded at the end."""

    tokens: Array  # i32[B, R]
    features: Array  # [B, R, F]; F = 0 for a model that takes tokens alone
    count: Array  # i32[B]


class Kept(NamedTuple):
    """What a drafter keeps of the committed tokens beside keys and values."""

    feature_size: int  # F; 0 keeps no features
    feature_dtype: jnp.dtype
    cache_dtype: jnp.dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftState:
    """The memory of what was committed, and what must still be taken in."""

    cache: kv.KVCache
    fresh: kv.Rows  # of what was taken in last, [B, KV, D + 1, H]; they go into the cache when the next ones come
    fresh_count: Array  # i32[B]
    pending: Committed  # the last round's tokens, true features and shifted tokens, [B, D + 1, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedDrafter(TreeDrafter):
    """A decoder behind one of the three tree shapes.

    Its guesses of a round are thrown away with the round: the next one starts from what was committed. (Keys of drafted
    rows left in the cache cost acceptance.)
    """

    forwards = ("run", "logits")

    graphdef: nnx.GraphDef
    config: ModelConfig

    # --- What a drafter says of its decoder ---------------------------------------------------------------------------

    def kept(self, params: Any) -> Kept:
        """What is kept of committed tokens."""
        raise NotImplementedError

    def committed_block(self, committed: Committed) -> Block:
        """What of committed tokens is run for good: its rows stay in the cache."""
        raise NotImplementedError

    def root_block(self, committed: Committed) -> Block:
        """The same and what leads on to the root: after its last place the root's children are guessed."""
        raise NotImplementedError

    def node_tokens(self, frontier: Frontier) -> Array:
        """The tokens i32[B, K] that nodes are run with."""
        return frontier.tokens

    def run(
        self,
        params: Any,
        tokens: Array,  # i32[B, R]
        features: Array,  # [B, R, F]
        positions: Array,  # i32[B, R or 1]
        mask: Array,  # bool[B or 1, R, U]
        cache: kv.KVCache,
        earlier: kv.Rows | None = None,
    ) -> tuple[Array, kv.Rows]:
        """What the LM head is applied to, [B, R, E], and the block's keys and values."""
        raise NotImplementedError

    def logits(self, params: Any, features: Array) -> Array:
        """f32[..., W] from features [..., E]."""
        raise NotImplementedError

    def vocabulary(self, params: Any) -> Array | None:
        """The draft vocabulary's token ids i32[W]; None where it is the target's whole one."""
        return None

    @property
    def beta(self) -> float:
        """How far scores made with the target's noise are trusted (see `ranking.py`)."""
        return 1.0

    # --- What follows from it -----------------------------------------------------------------------------------------

    def init(self, params: Any, batch: int, capacity: int) -> DraftState:
        kept, room = self.kept(params), self.depth + 1
        none = jnp.zeros((batch,), jnp.int32)

        def empty(capacity: int) -> kv.KVCache:
            return kv.empty(
                layers=self.config.num_hidden_layers,
                batch=batch,
                capacity=capacity,
                kv_heads=self.config.kv_heads,
                key_dim=self.config.key_dim,
                dtype=kept.cache_dtype,
            )

        fresh = empty(room)
        return DraftState(
            cache=empty(capacity),
            fresh=kv.Rows(fresh.keys, fresh.values, jnp.zeros((batch, room), jnp.int32)),
            fresh_count=none,
            pending=Committed(
                tokens=jnp.zeros((batch, room), jnp.int32),
                features=jnp.zeros((batch, room, kept.feature_size), kept.feature_dtype),
                next_tokens=jnp.zeros((batch, room), jnp.int32),
                count=none,
            ),
        )

    def prefill(self, params: Any, state: DraftState, chunk: Committed) -> DraftState:
        # This reads the cache and then writes it, and so copies it, once in a chunk; `propose` must not, once a round.
        _, rows = self._extend(params, state.cache, self.committed_block(chunk))
        return dataclasses.replace(state, cache=kv.commit(state.cache, rows, chunk.count))

    def observe(self, params: Any, state: DraftState, committed: Committed) -> DraftState:
        room, given = self.depth + 1, committed.next_tokens.shape[1]
        fill = ((0, 0), (0, room - given))
        pending = Committed(
            tokens=jnp.pad(committed.tokens, fill),
            features=jnp.pad(committed.features[:, :, : self.kept(params).feature_size], (*fill, (0, 0))),
            next_tokens=jnp.pad(committed.next_tokens, fill),
            count=committed.count,
        )
        return dataclasses.replace(state, pending=pending)

    def rewind(self, params: Any, state: DraftState, length: Array) -> tuple[DraftState, Array]:
        cache = kv.commit(state.cache, state.fresh, state.fresh_count)
        _, rows = self._extend(params, cache, self.committed_block(state.pending))
        known = jnp.minimum(length, cache.length + state.pending.count)
        none = jnp.zeros_like(known)
        return DraftState(
            cache=kv.rewound(kv.commit(cache, rows, state.pending.count), known),
            fresh=state.fresh,
            fresh_count=none,
            pending=state.pending._replace(count=none),
        ), known

    def propose(self, params: Any, state: DraftState, root: Array, sampler: Sampler) -> tuple[Tree, DraftState]:
        # Written before anything reads it and not after: a compiled loop that reads a cache and then writes it, with
        # nothing to order the two, copies the whole cache every round.
        cache = kv.commit(state.cache, state.fresh, state.fresh_count)
        block = self.root_block(state.pending)
        features, rows = self._extend(params, cache, block)
        last = jnp.maximum(block.count - 1, 0)
        feature = jnp.take_along_axis(features, last[:, None, None], axis=1)[:, 0]
        # In a batch of greedy rows the drawn children are the best.
        draws = self.tree.children == "sampled" and sampler.processors.noise
        start = Start(self.logits(params, feature), feature)
        step = self._step(params, cache, block.count)
        vocabulary = self.vocabulary(params)
        rank = rank_for(sampler, self.tree, vocabulary, beta=self.beta)

        def token_ids(indices: Array) -> Array:
            return indices if vocabulary is None else vocabulary[indices]

        tree = draft_tree(step, rows, start, root, token_ids, self.tree, rank, sampler if draws else None)
        room = self.depth + 1
        fresh = kv.Rows(
            keys=tuple(keys[:, :, :room] for keys in rows.keys),
            values=tuple(values[:, :, :room] for values in rows.values),
            positions=rows.positions[:, :room],
        )
        return tree, dataclasses.replace(state, cache=cache, fresh=fresh, fresh_count=state.pending.count)

    def _extend(self, params: Any, cache: kv.KVCache, block: Block) -> tuple[Array, kv.Rows]:
        """Runs a block that follows the cache: features [B, R, E], and its keys and values."""
        length = block.tokens.shape[1]
        positions = cache.length[:, None] + jnp.arange(length)
        return self.run(params, block.tokens, block.features, positions, layers.causal_mask(length), cache)

    def _step(self, params: Any, cache: kv.KVCache, count: Array) -> StepFn:
        """Runs a frontier over the cache, the root's block and the nodes run before; the last two are the carry."""

        def step(carry: kv.Rows, frontier: Frontier) -> tuple[kv.Rows, Array, Array]:
            batch, width, nodes = frontier.ancestors.shape
            places = carry.keys[0].shape[2] - (nodes - width)
            there = jnp.arange(places) < count[:, None]
            mask = jnp.concatenate(
                [jnp.broadcast_to(there[:, None], (batch, width, places)), frontier.ancestors], axis=-1
            )
            # The block's last place is the root's; a node at level l stands l places after it.
            positions = (cache.length + count)[:, None] + frontier.depth - 1
            features, rows = self.run(
                params, self.node_tokens(frontier), frontier.features, positions, mask, cache, carry
            )
            return kv.join(carry, rows), self.logits(params, features), features

        return step
