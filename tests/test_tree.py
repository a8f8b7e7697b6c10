"""Draft trees and the walk down them, against slow versions with Python's lists, driven by a table model."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax import TreeConfig
from eagle_jax.draft import (
    EAGLE1_CHOICES,
    Start,
    draft_dynamic,
    draft_static,
    dynamic_nodes,
    static_choices,
    static_levels,
)
from eagle_jax.tree import NO_PARENT, ROOT, Tree, ancestor_mask, child_with, root_only
from eagle_jax.verify import by_choice, of_nodes, walk

# --- A table as the draft model ---------------------------------------------------------------------------------------
# A node's log-probabilities are a row of the table that its path picks in two ways at once: from its parent's feature
# and its own token, and from the tokens of its ancestors. So a wrong feature and a wrong mask both show.

STATES = 101
PRIMES = np.array([2, 3, 5, 7, 11, 13, 17, 19])  # by depth


def token_ids(index):
    """A draft vocabulary that is not the whole one."""
    return 3 * index + 1


def path_feature(feature, token):
    return (7 * feature + token + 1) % STATES


def table_row(feature, codes):
    return (feature + codes) % STATES


def step(codes, frontier):
    """Runs a frontier; `codes` i32[B, R] stand for the tokens of all nodes run so far."""
    codes = jnp.concatenate([codes[0], (frontier.tokens + 1) * PRIMES[frontier.depth]], axis=1), codes[1]
    features = path_feature(frontier.features[..., 0].astype(jnp.int32), frontier.tokens)
    path_codes = jnp.sum(jnp.where(frontier.ancestors, codes[0][:, None], 0), axis=-1)
    batch = jnp.arange(features.shape[0])[:, None]
    return codes, codes[1][batch, table_row(features, path_codes)], features[..., None].astype(jnp.float32)


def slow_log_probs(table, path):
    """f32[W] after a path of token ids, from one row's table f32[STATES, W]."""
    feature = 0
    for token in path:
        feature = path_feature(feature, token)
    return table[table_row(feature, sum((token + 1) * int(PRIMES[depth]) for depth, token in enumerate(path, 1)))]


@partial(jax.jit, static_argnames="config")
def draft_tree(table, root, *, config):
    batch, _, width = table.shape
    start = Start(table[:, 0], jnp.zeros((batch, 1)))
    carry = jnp.zeros((batch, 0), jnp.int32), table
    if config.kind == "dynamic":
        return draft_dynamic(step, carry, start, root, token_ids, config, as_given)
    return draft_static(step, carry, start, root, token_ids, static_choices(config, width), as_given)


def as_given(log_probs, level):
    """The table holds log-probabilities, whose sums are to be exact."""
    return log_probs


def best_first(log_probs, count):
    """Indices of the `count` largest, the lower one first among equals."""
    return sorted(range(len(log_probs)), key=lambda i: (-log_probs[i], i))[:count]


def slow_dynamic(table, config):
    """EAGLE-2's tree (section 4) as {path: score}, in the order of the tree's nodes."""
    width = min(config.top_k, table.shape[1])

    def children(path, score):
        log_probs = slow_log_probs(table, path)
        return [((*path, token_ids(i)), np.float32(log_probs[i] + score)) for i in best_first(log_probs, width)]

    level = children((), np.float32(0))
    pool = list(level)
    for _ in range(config.depth - 1):
        chosen = best_first([score for _, score in level], width)
        level = [child for i in chosen for child in children(*level[i])]
        pool += level
    kept = sorted(best_first([score for _, score in pool], config.nodes - 1))
    return dict(pool[i] for i in kept)


def slow_static(table, choices):
    """EAGLE-1's tree (section 3.1) as {path: score}, level by level."""
    found = {(): ((), np.float32(0))}  # by ranks
    for ranks in sorted(choices, key=lambda path: (len(path), path)):
        path, score = found[ranks[:-1]]
        log_probs = slow_log_probs(table, path)
        index = best_first(log_probs, ranks[-1] + 1)[-1]
        found[ranks] = ((*path, token_ids(index)), np.float32(log_probs[index] + score))
    return dict(list(found.values())[1:])


def paths_of(tree, row):
    """Each node's tokens from below the root, found by walking its parents."""
    parents, tokens = np.asarray(tree.parents)[row], np.asarray(tree.tokens)[row]
    paths = []
    for node in range(len(parents)):
        path = []
        while node != ROOT:
            path.append(int(tokens[node]))
            node = parents[node]
        paths.append(tuple(reversed(path)))
    return paths


def log_probabilities(seed, batch, width):
    logits = np.random.default_rng(seed).normal(size=(batch, STATES, width)) * 1.5
    return (logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))).astype(np.float32)


def check_against(slow, table, tree, roots):
    for row, root in enumerate(roots):
        wanted = slow(table[row])
        assert paths_of(tree, row) == [(), *wanted]
        np.testing.assert_array_equal(tree.log_scores[row], [0, *wanted.values()])
        np.testing.assert_array_equal(tree.depths[row], [0, *map(len, wanted)])
        assert (int(tree.tokens[row, ROOT]), int(tree.parents[row, ROOT])) == (root, NO_PARENT)


ROOTS = np.array([5, 0, 22], np.int32)


@pytest.mark.parametrize(
    ("config", "width", "nodes"),
    [
        (TreeConfig(nodes=12, depth=4, top_k=3), 8, 12),
        (TreeConfig(nodes=5, depth=6, top_k=2), 8, 5),
        (TreeConfig(nodes=4, depth=1, top_k=5), 8, 4),
        (TreeConfig(nodes=60, depth=3, top_k=10), 4, 1 + 4 + 16 + 16),  # over the vocabulary, and over the pool
        (TreeConfig(nodes=60, depth=1, top_k=3), 8, 1 + 3),
        (TreeConfig(nodes=60, depth=6, top_k=1), 8, 1 + 6),
        (TreeConfig(), 32, 60),
    ],
    ids=["usual", "few_nodes", "one_level", "clamped", "clamped_level", "single_file", "default"],
)
def test_dynamic_tree(config, width, nodes):
    table = log_probabilities(1, len(ROOTS), width)
    tree = draft_tree(table, ROOTS, config=config)
    assert tree.tokens.shape[1] == dynamic_nodes(config, width) == nodes
    check_against(partial(slow_dynamic, config=config), table, tree, ROOTS)


@pytest.mark.parametrize(
    ("config", "choices"),
    [
        (TreeConfig(kind="static"), EAGLE1_CHOICES),
        (TreeConfig(kind="chain", depth=4), ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))),
        (TreeConfig(kind="chain", depth=4, nodes=3), ((0,), (0, 0))),
        (TreeConfig(kind="static", choices=((1,), (4,), (1, 2), (1, 0), (4, 1), (4, 1, 3))), None),
        (TreeConfig(kind="static", choices=((0,), (7,), (8,), (7, 1), (8, 0))), ((0,), (7,), (7, 1))),
    ],
    ids=["default", "chain", "chain_of_nodes", "sparse", "clamped"],
)
def test_static_tree(config, choices):
    """Ranks that the vocabulary of 8 does not have are left out, with what hangs on them."""
    table = log_probabilities(2, len(ROOTS), 8)
    tree = draft_tree(table, ROOTS, config=config)
    check_against(partial(slow_static, choices=choices or config.choices), table, tree, ROOTS)


def test_default_static_tree_is_that_of_eagle_1():
    assert len(EAGLE1_CHOICES) + 1 == 26
    assert max(map(len, EAGLE1_CHOICES)) == 5
    assert [sum(len(path) == depth for path in EAGLE1_CHOICES) for depth in range(1, 6)] == [4, 8, 8, 3, 2]


# Few shapes, so that few programs are compiled. Quarters add up exactly, so that scores tie often, up to a child of
# probability 1 whose score is its parent's.
PROPERTY_CONFIGS = (
    TreeConfig(nodes=9, depth=4, top_k=2),
    TreeConfig(nodes=14, depth=3, top_k=4),
    TreeConfig(kind="static", choices=((0,), (1,), (3,), (0, 0), (0, 2), (3, 1), (0, 2, 0))),
)


@settings(max_examples=60)
@given(config=st.sampled_from(PROPERTY_CONFIGS), seed=st.integers(0, 2**31), coarse=st.booleans())
def test_properties_of_trees(config, seed, coarse):
    table = log_probabilities(seed, 2, 5)
    if coarse:
        table = np.round(table * 4 / 6) / 4 + 0.0  # a log-softmax has no -0
    roots = np.array([1, 2], np.int32)
    tree = draft_tree(table, roots, config=config)
    parents, tokens, depths, scores = (
        np.asarray(array) for array in (tree.parents, tree.tokens, tree.depths, tree.log_scores)
    )
    masks = np.asarray(ancestor_mask(tree.parents, config.depth))
    assert (parents[:, ROOT] == NO_PARENT).all() and (parents[:, 1:] >= ROOT).all()
    assert (parents < np.arange(tree.tokens.shape[1])).all()
    for row in range(2):
        assert (depths[row, 1:] == depths[row, parents[row, 1:]] + 1).all()
        assert (scores[row, 1:] <= scores[row, parents[row, 1:]]).all()
        siblings = list(zip(parents[row], tokens[row], strict=True))
        assert len(set(siblings)) == len(siblings)
        for node in range(tree.tokens.shape[1]):
            line = [node]
            while line[-1] != ROOT:
                line.append(int(parents[row, line[-1]]))
            assert set(np.flatnonzero(masks[row, node])) == set(line)
    slow = slow_static if config.kind == "static" else slow_dynamic
    check_against(lambda rows: slow(rows, config.choices if config.kind == "static" else config), table, tree, roots)


# --- Shapes given by the user -----------------------------------------------------------------------------------------


def test_static_levels_by_hand():
    first, second, third = static_levels(((1, 0, 2), (0,), (1,), (1, 0), (0, 3), (0, 1)))
    assert first == ((0, 0), (0, 0), (0, 1), (0, 1))
    assert second == ((1, 1, 2), (0, 0, 1), (1, 3, 0), (2,))
    assert third == ((5,), (0,), (2,), ())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (((0,), (1, 0)), r"holds \(1, 0\) without its parent \(1,\)"),
        (((0, 0),), r"holds \(0, 0\) without its parent \(0,\)"),
        (((0,), (0, 0, 0)), r"holds \(0, 0, 0\) without its parent \(0, 0\)"),
        (((0,), (1,), (0,)), r"holds the node \(0,\) twice"),
        (([0], [0, 1], [0, 1]), r"holds the node \(0, 1\) twice"),
        (((0,), (-1,)), r"holds \(-1,\)"),
        (((0,), ()), "empty path"),
    ],
)
def test_K2_static_tree_of_impossible_shape(choices, message):
    with pytest.raises(ValueError, match=message):
        TreeConfig(kind="static", choices=choices)


def test_choices_belong_to_a_static_tree():
    with pytest.raises(ValueError, match="kind is 'dynamic'"):
        TreeConfig(choices=((0,),))


# --- The walk ---------------------------------------------------------------------------------------------------------


def hand_made():
    """Two rows of one shape: 0 -> (1, 2), 1 -> (3, 4), 4 -> 5; node 6 is padding."""
    shape = np.array([NO_PARENT, 0, 0, 1, 1, 4, NO_PARENT])
    return Tree(
        tokens=jnp.array([[9, 3, 5, 3, 7, 2, 3], [9, 5, 3, 1, 0, 6, 3]]),
        parents=jnp.tile(jnp.asarray(shape), (2, 1)),
        depths=jnp.tile(jnp.array([0, 1, 1, 2, 2, 3, 0]), (2, 1)),
        log_scores=jnp.zeros((2, 7)),
    )


def test_ancestor_mask_by_hand():
    mask = np.asarray(ancestor_mask(hand_made().parents, depth=3))
    lines = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 1, 4, 5}, {6}]
    for row in range(2):
        assert [set(np.flatnonzero(seen)) for seen in mask[row]] == lines


@pytest.mark.parametrize(
    ("node", "token", "wanted"),
    [
        ((0, 0), (3, 3), ((1, True), (2, True))),
        ((1, 1), (3, 0), ((3, True), (4, True))),
        ((4, 4), (2, 2), ((5, True), (ROOT, False))),
        ((2, 0), (3, 9), ((ROOT, False), (ROOT, False))),
        ((6, 6), (3, 9), ((ROOT, False), (ROOT, False))),
    ],
)
def test_child_with(node, token, wanted):
    """Tokens of other nodes' children, of the root and of padding are never found."""
    index, found = child_with(hand_made(), jnp.array(node), jnp.array(token))
    assert list(zip(index.tolist(), found.tolist(), strict=True)) == list(wanted)


def greedy(logits, level, seen):
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@pytest.mark.parametrize(
    ("choices", "path", "tokens"),
    [
        ((8, 0, 0, 0, 0, 0, 0), (0,), (8,)),  # nothing accepted
        ((5, 3, 4, 0, 0, 0, 0), (0, 2), (5, 4)),  # a leaf above the last level
        ((3, 7, 0, 0, 9, 0, 0), (0, 1, 4), (3, 7, 9)),  # down, then off the tree
        ((3, 7, 0, 0, 2, 1, 0), (0, 1, 4, 5), (3, 7, 2, 1)),  # all of the deepest path
    ],
)
def test_walk(choices, path, tokens):
    """A row goes its own way: the other one here accepts nothing, or one token."""
    other = (5, 8, 0, 0, 0, 0, 0)
    logits = 4.0 * jax.nn.one_hot(jnp.array([choices, other]), 10)
    accepted = walk(hand_made(), of_nodes(logits), by_choice(hand_made(), greedy), depth=3)
    logprob = 4 - np.log(9 + np.exp(4))
    for row, (nodes, chosen) in enumerate([(path, tokens), ((0, 1), (5, 8))]):
        count = len(nodes)
        assert accepted.count[row] == count
        assert tuple(accepted.path[row, :count].tolist()) == nodes
        assert tuple(accepted.tokens[row, :count].tolist()) == chosen
        np.testing.assert_allclose(accepted.logprobs[row, :count], logprob, rtol=1e-5)


def test_walk_of_a_root_alone():
    tree = root_only(jnp.array([4, 4]))
    accepted = walk(tree, of_nodes(jax.nn.one_hot(jnp.array([[4], [2]]), 6)), by_choice(tree, greedy), depth=0)
    assert accepted.count.tolist() == [1, 1]
    assert accepted.tokens.tolist() == [[4], [2]]


def test_walk_tells_which_tokens_it_has_passed():
    """`seen` grows by each token chosen, so that a choice may depend on the path to it."""
    tree = hand_made()

    def unseen(logits, level, seen):
        return jnp.argmax(jnp.where(seen, -jnp.inf, logits), axis=-1).astype(jnp.int32)

    # Everywhere token 3 before 7 before 2: without its memory the walk would take 3 twice.
    logits = jnp.tile(jnp.zeros(10).at[jnp.array([3, 7, 2])].set(jnp.array([3.0, 2.0, 1.0])), (2, 7, 1))
    accepted = walk(tree, of_nodes(logits), by_choice(tree, unseen), depth=3, seen=jnp.zeros((2, 10), bool))
    assert accepted.path[0].tolist() == [0, 1, 4, 5]
    assert accepted.tokens[0].tolist()[:3] == [3, 7, 2]
    assert accepted.count.tolist() == [4, 2]
