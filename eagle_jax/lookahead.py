"""Lookahead decoding (arXiv 2402.02057): Jacobi iteration and the n-grams it leaves behind, as one tree.

A window of guesses stands ahead of the text. Its row 0 is a chain below the root, column c at depth c + 1; column c of
row r hangs below column c of row r - 1. So a column is a guess of R tokens in a row after row 0's beginning, and the
target's best token after it is one more: it becomes the window's last row, row 0 goes, and the column's R + 1 tokens
are an n-gram for the pool (the lookahead branch). The pool's n-grams that begin with the root are drafted beside the
window (the verification branch).

Window and n-grams are merged by `trie.merge`: where two of their paths begin alike they share nodes, and since what the
target says at a node depends on the path to it alone, both lose nothing.

Deviations from the paper, none of which can change the text:
* The walk may go down the window too, since it is in the tree: what the Jacobi iteration has got right is accepted.
* After accepted tokens the window's columns move up by as many, so that each guess keeps its place in the text; columns
  that come in at the end are filled from the row's own tokens, as the first window is, all rows of it at once.
* The pool has fixed room, by the first token modulo P; a bucket's entries are replaced in turn.
* N-grams are of the target's best tokens at any temperature, processors left out. So at a temperature above 0, where
  the text is drawn, less is accepted.
* Rewinding forgets window and pool, so that a text is drafted as if it were the first.

B batch rows, R rows and W columns of the window, L tokens of its longest path, P buckets of the pool, G entries of each
and n-grams drafted, N nodes.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle_jax import history, trie
from eagle_jax.config import TreeConfig
from eagle_jax.draft import Committed
from eagle_jax.history import History
from eagle_jax.sampling import Sampler
from eagle_jax.target import Target
from eagle_jax.tree import Tree

NO_TOKEN = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookahead:
    """Drafts n-grams that the target itself has guessed ahead of the text; in place of a head.

    The tree's size follows from these numbers, 1 + levels * (window + guesses) nodes; of a `TreeConfig`
    nothing is used but that `nodes=1` is plain decoding.
    """

    window: int = 10  # W
    levels: int = 4  # R, the paper's N - 1: n-grams have levels + 1 tokens
    guesses: int = 10  # G
    buckets: int = 1024  # tokens whose n-grams are kept apart

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ValueError(f"Lookahead.{field.name} is {value}; it must be at least 1.")

    def bind(self, target: Target, tree: TreeConfig) -> tuple["LookaheadDrafter", tuple[()]]:
        return LookaheadDrafter(options=self), ()


class Pool(NamedTuple):
    """N-grams by their first token, in the bucket that the token has modulo P."""

    keys: Array  # i32[B, P, G], the first tokens; NO_TOKEN where there is none
    rests: Array  # i32[B, P, G, R], what follows
    oldest: Array  # i32[B, P], the entry that is replaced next


class LookaheadState(NamedTuple):
    """What the drafter knows of a row."""

    history: History
    window: Array  # i32[B, R, W], NO_TOKEN where nothing has been guessed
    ends: Array  # i32[B, W], the nodes of the window's last row in the tree drafted last
    pool: Pool


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookaheadDrafter:
    """See `Lookahead`."""

    options: Lookahead
    wants_choices: bool = True

    @property
    def nodes(self) -> int:
        return 1 + self.options.levels * (self.options.window + self.options.guesses)

    @property
    def depth(self) -> int:
        return self.options.window + self.options.levels - 1

    def init(self, params: tuple[()], batch: int, capacity: int) -> LookaheadState:
        return self._begun(history.empty(batch, capacity))

    def prefill(self, params: tuple[()], state: LookaheadState, chunk: Committed) -> LookaheadState:
        return state._replace(history=history.extended(state.history, chunk))

    def rewind(self, params: tuple[()], state: LookaheadState, length: Array) -> tuple[LookaheadState, Array]:
        kept, known = history.rewound(state.history, length)
        return self._begun(kept), known

    def propose(
        self, params: tuple[()], state: LookaheadState, root: Array, sampler: Sampler
    ) -> tuple[Tree, LookaheadState]:
        window = jnp.where(state.window == NO_TOKEN, own_tokens(state.history, *state.window.shape[1:]), state.window)
        paths, lengths = window_paths(window)
        rests, found = recall(state.pool, root)
        room = paths.shape[2] - rests.shape[2]
        tree = trie.merge(
            root,
            jnp.concatenate([paths, jnp.pad(rests, ((0, 0), (0, 0), (0, room)))], axis=1),
            jnp.concatenate([lengths, jnp.where(found, rests.shape[2], 0)], axis=1),
            nodes=self.nodes,
        )
        return tree, state._replace(window=window, ends=trie.follow(tree, paths, lengths))

    def observe(self, params: tuple[()], state: LookaheadState, committed: Committed) -> LookaheadState:
        state = self.prefill(params, state, committed)
        if committed.choices is None:
            return state
        guessed = jnp.take_along_axis(committed.choices, state.ends, axis=1)[:, None]
        rows = jnp.concatenate([state.window, guessed], axis=1)  # i32[B, R + 1, W]

        def put(column: Array, pool: Pool) -> Pool:
            return remember(pool, rows[:, 0, column], rows[:, 1:, column], committed.count > 0)

        pool = jax.lax.fori_loop(0, self.options.window, put, state.pool)
        # A row's guesses are for one place further on than those of the row above it; so is the next root than this
        # one, if nothing was accepted.
        column = jnp.arange(self.options.window) + committed.count[:, None] - 1
        there = (column >= 0) & (column < self.options.window)
        moved = jnp.take_along_axis(rows[:, 1:], column[:, None], axis=2, mode="clip")
        return state._replace(window=jnp.where(there[:, None], moved, NO_TOKEN), pool=pool)

    def _begun(self, kept: History) -> LookaheadState:
        """Nothing guessed yet."""
        batch, options = kept.count.shape[0], self.options
        entries = (batch, options.buckets, options.guesses)
        return LookaheadState(
            history=kept,
            window=jnp.full((batch, options.levels, options.window), NO_TOKEN, jnp.int32),
            ends=jnp.zeros((batch, options.window), jnp.int32),
            pool=Pool(
                keys=jnp.full(entries, NO_TOKEN, jnp.int32),
                rests=jnp.zeros((*entries, options.levels), jnp.int32),
                oldest=jnp.zeros(entries[:2], jnp.int32),
            ),
        )


def own_tokens(text: History, levels: int, window: int) -> Array:
    """A window i32[B, R, W] of the row's own tokens, from places that look random but are the same every time."""
    drawn = np.random.default_rng(0).integers(0, 2**20, (levels, window))
    batch = text.count.shape[0]
    place = (drawn + text.count[:, None, None]) % jnp.maximum(text.count, 1)[:, None, None]
    return jnp.take_along_axis(text.tokens, place.reshape(batch, -1), axis=1).reshape(place.shape)


def window_paths(window: Array) -> tuple[Array, Array]:
    """The path to each column's last row, i32[B, W, L], and its length, i32[B, W]."""
    batch, levels, width = window.shape
    column, level = np.arange(width)[:, None], np.arange(width + levels - 1)
    # Along row 0 to the column, then down it.
    paths = window[:, np.clip(level - column, 0, levels - 1), np.minimum(level, column)]
    return paths, jnp.broadcast_to(jnp.arange(levels, levels + width), (batch, width))


def recall(pool: Pool, token: Array) -> tuple[Array, Array]:
    """What followed token i32[B] in n-grams: i32[B, G, R], and which of the G there are, bool[B, G]."""
    row, bucket = jnp.arange(token.shape[0]), token % pool.keys.shape[1]
    return pool.rests[row, bucket], pool.keys[row, bucket] == token[:, None]


def remember(pool: Pool, token: Array, rest: Array, wanted: Array) -> Pool:
    """The pool with one n-gram more in each row where bool[B] `wanted`; one that is there already changes nothing.

    Args:
      token: i32[B], where the n-gram begins.
      rest: i32[B, R].
    """
    row, (_, buckets, entries) = jnp.arange(token.shape[0]), pool.keys.shape
    bucket = token % buckets
    rests, found = recall(pool, token)
    fresh = wanted & ~jnp.any(found & jnp.all(rests == rest[:, None], axis=-1), axis=1)
    entry = jnp.where(fresh, pool.oldest[row, bucket], entries)
    return Pool(
        keys=pool.keys.at[row, bucket, entry].set(token, mode="drop"),
        rests=pool.rests.at[row, bucket, entry].set(rest, mode="drop"),
        oldest=pool.oldest.at[row, bucket].set((pool.oldest[row, bucket] + fresh) % entries),
    )
