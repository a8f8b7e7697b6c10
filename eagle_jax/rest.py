"""REST (arXiv 2311.08252): drafts are looked up in a datastore of texts, by the longest suffix of the context.

The datastore's suffix array stays on the device, so that a look-up is a binary search there, for suffixes of all
lengths at once. As in the paper, the continuations found form a trie whose heaviest nodes are drafted; other than
there, no more of them are taken than have static room, spread evenly over those found.

B batch rows, M tokens of the datastore, Q suffix lengths, K longest suffix, G continuations, L tokens of each.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle_jax import trie
from eagle_jax.config import TreeConfig
from eagle_jax.history import History, Remembering, check_ngrams, with_root
from eagle_jax.sampling import Sampler
from eagle_jax.target import Target
from eagle_jax.tree import Tree

DOCUMENT_END = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Datastore:
    """Texts as tokens, and where each of their suffixes stands in lexical order; see `ej.load_datastore`."""

    tokens: Array  # i32[M], documents with DOCUMENT_END behind each
    suffixes: Array  # i32[M - documents], the places of `tokens` ordered by what stands there up to the document's end
    vocab_size: int = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rest:
    """Drafts what follows the text's last tokens in a datastore; in place of a head.

    Of a `TreeConfig` it takes `nodes` and `depth`; a "chain" is a single continuation.
    """

    store: Datastore
    max_ngram: int = 16  # the most last tokens that are looked up
    min_ngram: int = 1  # the fewest
    matches: int = 64  # the most continuations that are taken, evenly from those found

    def __post_init__(self):
        check_ngrams("Rest", self.min_ngram, self.max_ngram)
        if self.matches < 1:
            raise ValueError(f"Rest.matches is {self.matches}; it must be at least 1.")

    def bind(self, target: Target, tree: TreeConfig) -> tuple["RestDrafter", Datastore]:
        if self.store.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"The datastore {self.store.name} is of a vocabulary of {self.store.vocab_size} tokens, but the target "
                f"{target.name} has {target.config.vocab_size}; build one with the target's tokenizer."
            )
        matches, nodes, depth = trie.size(tree, self.matches, "Rest")
        drafter = RestDrafter(
            nodes=nodes, depth=depth, matches=matches, max_ngram=self.max_ngram, min_ngram=self.min_ngram
        )
        return drafter, self.store


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestDrafter(Remembering):
    """See `Rest`."""

    nodes: int
    depth: int
    matches: int
    max_ngram: int
    min_ngram: int

    def propose(self, params: Datastore, state: History, root: Array, sampler: Sampler) -> tuple[Tree, History]:
        text, count = with_root(state, root), state.count + 1
        slots = count[:, None] - self.max_ngram + jnp.arange(self.max_ngram)
        # Places before the text are no token, and so match nothing.
        context = jnp.where(
            slots >= 0, jnp.take_along_axis(text, jnp.maximum(slots, 0), axis=1, mode="clip"), DOCUMENT_END - 1
        )
        begin, end, length = longest_match(params, context, self.min_ngram)
        tokens, lengths = continuations(params, begin, end, length, count=self.matches, length=self.depth)
        return trie.merge(root, tokens, lengths, nodes=self.nodes), state


def longest_match(store: Datastore, context: Array, min_ngram: int) -> tuple[Array, Array, Array]:
    """The suffixes in the datastore that begin with the longest suffix of the context that is there.

    Args:
      context: i32[B, K], its last tokens.
      min_ngram: the shortest suffix that counts.

    Returns:
      begin and end i32[B] of a range in `store.suffixes`, empty if there is none, and the suffix's length i32[B].
    """
    batch, most = context.shape
    lengths = np.arange(most, min_ngram - 1, -1)  # [Q]
    offset = np.arange(most)
    inside = offset < lengths[:, None]  # [Q, K]
    wanted = context[:, np.where(inside, most - lengths[:, None] + offset, 0)][:, :, None]  # [B, Q, 1, K]

    # The first suffix that is not below what is wanted, and the first that is above it, in two lanes.
    above = jnp.asarray([False, True])
    size = store.suffixes.shape[0]

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        place = store.suffixes[jnp.minimum(middle, size - 1)][..., None] + offset
        # Behind the last token, which is a document's end, are more of those.
        here = store.tokens[jnp.minimum(place, store.tokens.shape[0] - 1)]  # [B, Q, 2, K]
        order = jnp.where(inside[:, None], jnp.sign(here - wanted), 0)
        differs = jnp.argmax(order != 0, axis=-1, keepdims=True)
        order = jnp.take_along_axis(order, differs, axis=-1)[..., 0]
        right = (low < high) & ((order < 0) | (above & (order == 0)))
        return jnp.where(right, middle + 1, low), jnp.where(right | (low >= high), high, middle)

    none = jnp.zeros((batch, len(lengths), 2), jnp.int32)
    found, _ = jax.lax.fori_loop(0, size.bit_length(), halve, (none, jnp.full_like(none, size)))
    longest = jnp.argmax(found[:, :, 1] > found[:, :, 0], axis=1)  # the first of several: the longest
    begin, end = jnp.moveaxis(found[jnp.arange(batch), longest], 1, 0)
    return begin, end, jnp.asarray(lengths, jnp.int32)[longest]


def continuations(
    store: Datastore, begin: Array, end: Array, matched: Array, *, count: int, length: int
) -> tuple[Array, Array]:
    """Tokens i32[B, G, L] behind matches spread evenly over a range, and how many there are to a document's end.

    Args:
      begin, end: i32[B], a range in `store.suffixes`.
      matched: i32[B], the length of what was looked up.
      count: G.
      length: L.
    """
    found = (end - begin)[:, None]
    number = jnp.arange(count)
    # floor(number * found / count), whose product need not fit into 32 bits.
    spread = number * (found // count) + number * (found % count) // count
    index = begin[:, None] + jnp.where(found > count, spread, number)
    suffix = store.suffixes[jnp.minimum(index, store.suffixes.shape[0] - 1)]
    place = (suffix + matched[:, None])[:, :, None] + jnp.arange(length)
    tokens = store.tokens[jnp.minimum(place, store.tokens.shape[0] - 1)]
    inside = jax.lax.cummin((tokens != DOCUMENT_END).astype(jnp.int32), axis=2)
    return tokens, jnp.where(number < found, jnp.sum(inside, axis=2), 0)
