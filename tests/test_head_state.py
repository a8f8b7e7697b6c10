"""What the head says while decoding is what it says in training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_rig import TREE, greedy_sampler, make_head, make_target, random_prompts
from flax import nnx

import eagle_jax as ej
from eagle_jax import draft, eagle, losses, training
from eagle_jax.target import features_of

DEPTH = 4
LENGTH = 16
GREEDY = greedy_sampler(2)
SHARP = 6.0  # so that a pair's position tells in its attention
TOKENS = jnp.asarray(random_prompts(2, lengths=(LENGTH,), seed=9), jnp.int32)


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def features(target):
    return features_of(*nnx.split(target.model), TOKENS)


@pytest.fixture
def predict(monkeypatch, target):
    """The training forward: predicted features [1, T - 1, E] from tokens i32[1, T] and features [1, T, E]."""
    monkeypatch.setattr(losses, "loss_sums", lambda predicted, *rest: predicted)
    head = make_head(target, SHARP)
    graphdef, params = nnx.split(head.model)

    @jax.jit
    def run(tokens, features):
        batch = training.Batch(tokens=tokens, assistant=jnp.ones(tokens.shape, bool), features=features)
        return training.head_sums(graphdef, params, head.ends, batch)[0]

    return run


def committed(features, lengths, counts, width):
    """Pairs from place `length - 1` on, `counts` of them, padded to `width` with tokens and features of no meaning."""
    rows, tokens, shifted = [], [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        begin = length - 1
        junk = jnp.full((width - count, features.shape[-1]), 7.0)
        rows.append(jnp.concatenate([features[row, begin : begin + count], junk]))
        for found, first in ((tokens, begin), (shifted, begin + 1)):
            found.append(jnp.concatenate([TOKENS[row, first : first + count], jnp.full(width - count, 3)]))
    return draft.Committed(*map(jnp.stack, (tokens, rows, shifted)), jnp.asarray(counts, jnp.int32))


def check_chain(target, predict, features, tree, lengths):
    """Each level against the training forward over the row's true pairs, with the head's own guesses behind them."""
    for row, length in enumerate(lengths):
        # Padded behind the row's end: what stands there is seen by nothing before it.
        tokens = np.zeros((1, LENGTH + DEPTH), np.int32)
        inputs = np.zeros((1, LENGTH + DEPTH, features.shape[-1]), np.float32)
        tokens[0, :length], inputs[0, : length - 1] = TOKENS[row, :length], features[row, : length - 1]
        score = 0.0
        for level in range(1, DEPTH + 1):
            predicted = predict(tokens, inputs)[0, length + level - 3]
            log_probs = jax.nn.log_softmax(target.model.logits(predicted))
            score += float(log_probs.max())
            assert tree.tokens[row, level] == jnp.argmax(log_probs)
            np.testing.assert_allclose(tree.log_scores[row, level], score, atol=1e-4)
            tokens[0, length + level - 1], inputs[0, length + level - 2] = tree.tokens[row, level], predicted


def test_M2_a_chain_is_the_training_forward(target, features, predict):
    """After a prompt, and after rounds that committed other numbers of tokens in each row."""
    drafter, params = eagle.bind_head(
        make_head(target, SHARP), ej.TreeConfig(kind="chain", nodes=DEPTH + 1, depth=DEPTH)
    )
    prompts = [5, 3]
    state = drafter.init(params, 2, 32)
    prefill, observe, propose = map(jax.jit, (drafter.prefill, drafter.observe, drafter.propose))
    state = prefill(params, state, committed(features, [1, 1], [n - 1 for n in prompts], 8))
    lengths = list(prompts)
    for counts in ([1, 1], [3, 1], [5, 4], [1, 2]):
        state = observe(params, state, committed(features, lengths, counts, DEPTH + 1))
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        root = TOKENS[jnp.arange(2), jnp.asarray(lengths) - 1]
        tree, state = propose(params, state, root, GREEDY)
        np.testing.assert_array_equal(tree.tokens[:, 0], root)
        check_chain(target, predict, features, tree, lengths)


def test_M2_a_chain_after_going_back_is_the_training_forward(target, features, predict):
    """One row forgets pairs that were in the cache, the other none: not those of the last two rounds either."""
    drafter, params = eagle.bind_head(
        make_head(target, SHARP), ej.TreeConfig(kind="chain", nodes=DEPTH + 1, depth=DEPTH)
    )
    prefill, observe, propose, rewind = map(
        jax.jit, (drafter.prefill, drafter.observe, drafter.propose, drafter.rewind)
    )
    state = prefill(params, drafter.init(params, 2, 32), committed(features, [1, 1], [4, 2], 8))
    state = observe(params, state, committed(features, [5, 3], [1, 1], DEPTH + 1))
    _, state = propose(params, state, TOKENS[:, 5], GREEDY)
    state = observe(params, state, committed(features, [6, 4], [3, 2], DEPTH + 1))
    state, known = rewind(params, state, jnp.asarray([8, 2]))
    assert known.tolist() == [8, 2]
    state = prefill(params, state, committed(features, [9, 3], [2, 4], 8))
    state = observe(params, state, committed(features, [11, 7], [1, 1], DEPTH + 1))
    tree, _ = propose(params, state, TOKENS[jnp.arange(2), jnp.asarray([11, 7])], GREEDY)
    check_chain(target, predict, features, tree, [12, 8])


def test_a_head_knows_no_more_than_it_saw(target, features):
    drafter, params = eagle.bind_head(make_head(target), TREE)
    state = drafter.prefill(params, drafter.init(params, 2, 32), committed(features, [1, 1], [4, 2], 8))
    _, known = drafter.rewind(params, state, jnp.asarray([9, 9]))
    assert known.tolist() == [4, 2]


def test_the_best_path_of_a_dynamic_tree_starts_with_the_chains_token(target, features):
    """One state, three shapes: their first levels agree."""
    trees = []
    for kind in ("chain", "static", "dynamic"):
        config = ej.TreeConfig(kind=kind, nodes=12, depth=3, top_k=4)
        drafter, params = eagle.bind_head(make_head(target), config)
        state = jax.jit(drafter.prefill)(params, drafter.init(params, 2, 32), committed(features, [1, 1], [4, 4], 8))
        state = drafter.observe(params, state, committed(features, [5, 5], [1, 1], 1))
        trees.append(jax.jit(drafter.propose)(params, state, TOKENS[:, 5], GREEDY)[0])
    for tree in trees[1:]:
        np.testing.assert_array_equal(tree.tokens[:, 1], trees[0].tokens[:, 1])
        np.testing.assert_allclose(tree.log_scores[:, 1], trees[0].log_scores[:, 1], atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_head_of_another_dtype_drafts_for_a_float32_target(target, dtype):
    """Its keys and values are its own dtype's; the text is the target's all the same."""
    head = ej.Head.random(target, seed=1, dtype=jnp.dtype(dtype))
    plain, drafted = (ej.generate(target, h, [1, 2, 3], max_new_tokens=24, tree=TREE) for h in (None, head))
    assert drafted.token_ids == plain.token_ids


def test_a_broken_head_changes_no_token(target):
    """NaN predictions come last in the tree, and the tree stays one."""
    head = ej.Head.random(target, seed=1)
    graphdef, params = nnx.split(head.model)
    broken = dataclasses.replace(head, model=nnx.merge(graphdef, jax.tree.map(lambda x: x * jnp.nan, params)))
    plain, drafted = (ej.generate(target, h, [1, 2, 3], max_new_tokens=24, tree=TREE) for h in (None, broken))
    assert drafted.token_ids == plain.token_ids
