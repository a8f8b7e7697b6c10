"""A row's own tokens so far, for drafters that look something up in them.

B batch rows, S capacity in tokens, R tokens taken in at once.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from eagle_jax.draft import Committed, Memoryless


class History(NamedTuple):
    """The tokens that the target has run: all but the root, which is not written until it has been run too."""

    tokens: Array  # i32[B, S]; what stands at `count` and behind it means nothing
    count: Array  # i32[B]


def empty(batch: int, capacity: int) -> History:
    return History(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros((batch,), jnp.int32))


def extended(history: History, committed: Committed) -> History:
    """The history and the committed tokens after it."""
    row, place = jnp.arange(history.count.shape[0])[:, None], jnp.arange(committed.tokens.shape[1])
    slots = jnp.where(place < committed.count[:, None], history.count[:, None] + place, history.tokens.shape[1])
    tokens = history.tokens.at[row, slots].set(committed.tokens, mode="drop")
    return History(tokens, history.count + committed.count)


def with_root(history: History, root: Array) -> Array:
    """i32[B, S], the tokens with the root i32[B] behind them, at `count`."""
    return history.tokens.at[jnp.arange(root.shape[0]), history.count].set(root, mode="drop")


def rewound(history: History, length: Array) -> tuple[History, Array]:
    """The first `length` i32[B] tokens of each row, or all that there are, and how many that is."""
    known = jnp.minimum(length, history.count)
    return history._replace(count=known), known


class Remembering(Memoryless):
    """What a drafter does whose state is the `History`."""

    def init(self, params: Any, batch: int, capacity: int) -> History:
        return empty(batch, capacity)

    def prefill(self, params: Any, state: History, chunk: Committed) -> History:
        return extended(state, chunk)

    def observe(self, params: Any, state: History, committed: Committed) -> History:
        return extended(state, committed)

    def rewind(self, params: Any, state: History, length: Array) -> tuple[History, Array]:
        return rewound(state, length)


def check_ngrams(method: str, fewest: int, most: int) -> None:
    """Raises ValueError unless some number of last tokens can be looked up."""
    if not 1 <= fewest <= most:
        raise ValueError(
            f"{method}.min_ngram is {fewest} and max_ngram {most}; the first must be at least 1 and at most the second."
        )
