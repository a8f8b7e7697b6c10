"""Prompt look-up: what followed the last few tokens when they stood in the text before.

It needs no model and no training, and helps where a text repeats itself or its prompt: code, summaries, edits. (Prompt
look-up decoding is known from transformers; the tree in place of one chain is this library's.)

B batch rows, S capacity in tokens, G continuations, L tokens of each, N nodes.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from eagle_jax import trie
from eagle_jax.config import TreeConfig
from eagle_jax.history import History, Remembering, check_ngrams, with_root
from eagle_jax.sampling import Sampler
from eagle_jax.target import Target
from eagle_jax.tree import Tree

MOST_MATCHES = 24  # so many powers of two add up exactly in float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup:
    """Drafts what followed the text's last tokens earlier in it; in place of a head.

    Of a `TreeConfig` it takes `nodes` and `depth`; a "chain" is the latest continuation alone.
    """

    max_ngram: int = 3  # the most last tokens that are looked up
    min_ngram: int = 1  # the fewest
    matches: int = 10  # the most earlier places that are taken, the latest first

    def __post_init__(self):
        check_ngrams("PromptLookup", self.min_ngram, self.max_ngram)
        if not 1 <= self.matches <= MOST_MATCHES:
            raise ValueError(f"PromptLookup.matches is {self.matches}; it must be from 1 to {MOST_MATCHES}.")

    def bind(self, target: Target, tree: TreeConfig) -> tuple["LookupDrafter", tuple[()]]:
        matches, nodes, depth = trie.size(tree, self.matches, "PromptLookup")
        drafter = LookupDrafter(
            nodes=nodes, depth=depth, matches=matches, max_ngram=self.max_ngram, min_ngram=self.min_ngram
        )
        return drafter, ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupDrafter(Remembering):
    """See `PromptLookup`. A continuation weighs twice the next one, so that the latest fills the tree first."""

    nodes: int
    depth: int
    matches: int
    max_ngram: int
    min_ngram: int

    def propose(self, params: tuple[()], state: History, root: Array, sampler: Sampler) -> tuple[Tree, History]:
        text = with_root(state, root)
        tokens, found = continuations(
            text,
            state.count + 1,
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
            matches=self.matches,
            length=self.depth,
        )
        weights = jnp.broadcast_to(0.5 ** jnp.arange(self.matches), found.shape)
        lengths = jnp.where(found, self.depth, 0)
        return trie.merge(root, tokens, lengths, weights, nodes=self.nodes), state


def continuations(
    text: Array, length_of: Array, *, max_ngram: int, min_ngram: int, matches: int, length: int
) -> tuple[Array, Array]:
    """What followed earlier occurrences of the longest suffix that has one, the latest first.

    One that runs into the text's end goes on as if the text repeated from there, as in LZ77: after "abcabc" it is
    "abcabcabc...", however long.

    Args:
      text: i32[B, S].
      length_of: i32[B], how many of the S tokens are the text.
      max_ngram, min_ngram: of the suffix.
      matches: G.
      length: L.

    Returns:
      tokens i32[B, G, L], and which of the G there are, bool[B, G].
    """
    slots = text.shape[1]
    place, last = jnp.arange(slots), length_of[:, None] - 1
    # How many tokens up to each place are the text's last ones.
    run = jnp.broadcast_to(place < last, text.shape)
    matched = jnp.zeros(text.shape, jnp.int32)
    for back in range(max_ngram):
        wanted = jnp.take_along_axis(text, last - back, axis=1, mode="clip")
        run &= (jnp.roll(text, back, axis=1) == wanted) & (place >= back)
        matched += run
    longest = jnp.max(matched, axis=1, keepdims=True)
    ends = (matched == longest) & (longest >= min_ngram)
    end, _ = jax.lax.top_k(jnp.where(ends, place, -1), matches)  # i32[B, G]
    period = jnp.maximum(last - end, 1)
    slot = end[:, :, None] + 1 + jnp.arange(length) % period[:, :, None]
    tokens = jnp.take_along_axis(text, slot.reshape(text.shape[0], -1), axis=1, mode="clip")
    return tokens.reshape(slot.shape), end >= 0
