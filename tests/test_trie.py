"""Continuations merged into a tree, against dictionaries of paths."""

from functools import partial

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax import trie
from eagle_jax.tree import NO_PARENT, ROOT, ancestor_mask

GROUPS, LENGTH = 5, 4
merge = jax.jit(trie.merge, static_argnames="nodes")


def slow_merge(tokens, lengths, weights, nodes):
    """{path: share} of one row, and the order in which paths are kept: heaviest, then highest, then earliest."""
    found = {}
    for level in range(LENGTH):
        for row, length, weight in zip(tokens, lengths, weights, strict=True):
            if level < length and weight > 0:
                path = tuple(row[: level + 1])
                found[path] = found.get(path, 0) + weight
    total = sum(weight for length, weight in zip(lengths, weights, strict=True) if length)
    kept = sorted(found, key=lambda path: -found[path])[: nodes - 1]
    return {path: found[path] / total for path in kept}


def paths_of(tree, row):
    """{path: node} of one row's tree."""
    tokens, parents = np.asarray(tree.tokens)[row].tolist(), np.asarray(tree.parents)[row].tolist()
    found = {ROOT: ()}
    for node in range(1, len(tokens)):
        if parents[node] != NO_PARENT:
            assert parents[node] < node
            found[node] = (*found[parents[node]], tokens[node])
    paths = {path: node for node, path in found.items()}
    assert len(paths) == len(found)  # no child twice
    return paths


row = st.tuples(
    st.lists(st.lists(st.integers(0, 2), min_size=LENGTH, max_size=LENGTH), min_size=GROUPS, max_size=GROUPS),
    st.lists(st.integers(0, LENGTH), min_size=GROUPS, max_size=GROUPS),
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0]), min_size=GROUPS, max_size=GROUPS),
)


@settings(max_examples=40)
@given(rows=st.tuples(row, row), nodes=st.sampled_from([2, 6, 40]))
def test_a_trie_is_a_dictionary_of_beginnings(rows, nodes):
    tokens, lengths, weights = (np.asarray(part) for part in zip(*rows, strict=True))
    tree = jax.device_get(merge(np.asarray([7, 8]), tokens, lengths, weights.astype(np.float32), nodes=nodes))
    assert tree.tokens.shape == (2, min(nodes, 1 + GROUPS * LENGTH))
    for i, one in enumerate(rows):
        paths = paths_of(tree, i)
        expected = slow_merge(*one, nodes)
        assert paths.pop(()) == ROOT and tree.tokens[i, ROOT] == 7 + i and tree.log_scores[i, ROOT] == 0
        assert set(paths) == set(expected)
        for path, node in paths.items():
            np.testing.assert_allclose(tree.log_scores[i, node], np.log(expected[path]), rtol=1e-6, atol=1e-6)
            assert tree.depths[i, node] == len(path)
        padding = np.setdiff1d(np.arange(1, tree.tokens.shape[1]), list(paths.values()))
        assert np.all(tree.log_scores[i, padding] == -np.inf) and np.all(tree.parents[i, padding] == NO_PARENT)


def test_unweighted_continuations_count_one_each():
    tokens = np.asarray([[[1, 2], [1, 3], [1, 2], [4, 2]]])
    tree = merge(np.asarray([0]), tokens, np.asarray([[2, 2, 2, 1]]), nodes=5)
    assert list(paths_of(tree, 0)) == [(), (1,), (4,), (1, 2), (1, 3)]
    np.testing.assert_allclose(np.exp(tree.log_scores[0]), [1, 3 / 4, 1 / 4, 2 / 4, 1 / 4], rtol=1e-6)
    assert np.asarray(ancestor_mask(tree.parents, 2))[0, 3].tolist() == [True, True, False, True, False]


def test_paths_are_followed_to_their_nodes():
    tokens, lengths = np.asarray([[[1, 2, 3], [1, 3, 0], [1, 2, 0]]]), np.asarray([[3, 2, 2]])
    tree = merge(np.asarray([0]), tokens, lengths, nodes=9)
    asked = np.asarray([[[1, 2, 3], [1, 3, 9], [1, 9, 3], [2, 2, 2], [5, 5, 5]]])
    nodes = partial(jax.jit(trie.follow), tree)(asked, np.asarray([[3, 2, 3, 1, 0]]))
    paths = paths_of(tree, 0)
    assert nodes.tolist() == [[paths[1, 2, 3], paths[1, 3], ROOT, ROOT, ROOT]]
