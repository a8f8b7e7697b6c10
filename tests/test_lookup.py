"""Prompt look-up's proposals, against a search through lists."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_rig import greedy_sampler, make_target
from test_trie import paths_of

import eagle_jax as ej
from eagle_jax import draft
from eagle_jax.lookup import continuations

TREE = ej.TreeConfig(nodes=9, depth=4)
SLOTS = 40


def slow_continuations(text, options, length):
    """Of the longest suffix that stood there before: what followed, the latest first."""
    for size in range(options.max_ngram, options.min_ngram - 1, -1):
        suffix = text[len(text) - size :]
        ends = [end for end in range(size, len(text)) if len(suffix) == size and text[end - size : end] == suffix]
        if ends:
            found = []
            for end in ends[::-1][: options.matches]:
                going_on = list(text)
                for place in range(end, end + length):
                    going_on.append(going_on[place])  # the copy may copy what it has written
                found.append(going_on[len(text) :])
            return found
    return []


def slow_tree(text, options, tree):
    """The set of paths in a look-up's tree: of the latest continuation first, until the tree is full."""
    found = slow_continuations(text, options, tree.depth)
    paths = {tuple(one[: level + 1]) for one in found for level in range(len(one))}
    score = {path: sum(2.0**-i for i, one in enumerate(found) if tuple(one[: len(path)]) == path) for path in paths}
    return set(sorted(paths, key=lambda path: (-score[path], len(path)))[: tree.nodes - 1])


def committed(rows, width, choices=None):
    """Tokens of unequal rows that the target has run; without features and successors, which no look-up reads."""
    tokens = np.asarray([[*row, *[0] * (width - len(row))] for row in rows], np.int32)
    return draft.Committed(tokens, (), (), np.asarray([len(row) for row in rows], np.int32), choices)


def seen(drafter, params, texts, chunk):
    """The state after texts whose last tokens are their roots, taken in by chunks."""
    state = drafter.init(params, len(texts), SLOTS)
    prefill = jax.jit(drafter.prefill)
    for begin in range(0, max(map(len, texts)), chunk):
        rows = [text[:-1][begin : begin + chunk] for text in texts]
        state = prefill(params, state, committed(rows, chunk))
    return state


def texts_of(symbols, count=32, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, symbols, 1 + i).tolist() for i in range(count)]


@pytest.mark.parametrize("symbols", [2, 3])
def test_proposals_are_what_followed_before(symbols):
    options = ej.PromptLookup(max_ngram=3, min_ngram=1 if symbols == 2 else 2, matches=4)
    drafter, params = options.bind(make_target(), TREE)
    texts = texts_of(symbols, seed=symbols)
    state = seen(drafter, params, texts, 7)
    root = jnp.asarray([text[-1] for text in texts])
    tree, _ = jax.jit(drafter.propose)(params, state, root, greedy_sampler(len(texts)))
    assert tree.tokens.shape == (len(texts), drafter.nodes) and drafter.nodes == 9
    sizes = set()
    for i, text in enumerate(texts):
        paths = set(paths_of(tree, i)) - {()}
        assert paths == slow_tree(text, options, TREE), text
        sizes.add(len(paths))
    assert {0, 8} <= sizes


def test_the_latest_comes_first_and_what_overlaps_the_end_repeats():
    find = partial(continuations, max_ngram=2, min_ngram=1, length=5)
    text = jnp.asarray([[1, 2, 3, 1, 2, 4, 1, 2, 0, 0], [5, 5, 5, 6, 7, 6, 7, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0, 0, 0, 0]])
    tokens, found = find(text, jnp.asarray([8, 7, 4]), matches=3)
    assert found.tolist() == [[True, True, False], [True, False, False], [False] * 3]
    assert tokens[0, :2].tolist() == [[4, 1, 2, 4, 1], [3, 1, 2, 4, 1]]
    assert tokens[1, 0].tolist() == [6, 7, 6, 7, 6]


def test_a_rewound_state_is_one_that_has_seen_no_more():
    drafter, params = ej.PromptLookup(matches=4).bind(make_target(), TREE)
    texts = [text * 2 for text in texts_of(3, 8, seed=4)]
    length = np.asarray([len(text) // 2 for text in texts])
    state, known = drafter.rewind(params, seen(drafter, params, texts, 40), jnp.asarray(length))
    assert known.tolist() == np.minimum(length, [len(text) - 1 for text in texts]).tolist()
    short = seen(drafter, params, [text[: n + 1] for text, n in zip(texts, length, strict=True)], 5)
    root = jnp.zeros(len(texts), jnp.int32)
    propose = jax.jit(drafter.propose)
    one, two = (propose(params, each, root, greedy_sampler(len(texts)))[0] for each in (state, short))
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_a_tree_is_no_larger_than_what_can_be_found():
    target = make_target()
    drafter, _ = ej.PromptLookup(matches=2).bind(target, TREE)
    assert (drafter.nodes, drafter.depth) == (9, 4)
    drafter, _ = ej.PromptLookup(matches=2).bind(target, dataclasses.replace(TREE, nodes=60))
    assert (drafter.nodes, drafter.depth) == (9, 4)
    drafter, _ = ej.PromptLookup().bind(target, dataclasses.replace(TREE, nodes=4))
    assert (drafter.nodes, drafter.depth) == (4, 3)
    drafter, _ = ej.PromptLookup().bind(target, dataclasses.replace(TREE, kind="chain"))
    assert (drafter.nodes, drafter.depth) == (5, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_ngram": 0}, "min_ngram is 0 and max_ngram 3"),
        ({"max_ngram": 2, "min_ngram": 3}, "min_ngram is 3 and max_ngram 2"),
        ({"matches": 25}, "matches is 25; it must be from 1 to 24"),
        ({"matches": 0}, "matches is 0"),
    ],
)
def test_senseless_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ej.PromptLookup(**options)


def test_trees_that_need_a_distribution_are_refused():
    target = make_target()
    with pytest.raises(ValueError, match="PromptLookup ranks no tokens; use 'dynamic' or 'chain'"):
        ej.PromptLookup().bind(target, ej.TreeConfig(kind="static"))
    with pytest.raises(ValueError, match="PromptLookup has no distribution to draw from; set it to 'best'"):
        ej.PromptLookup().bind(target, ej.TreeConfig(kind="chain", children="sampled"))
