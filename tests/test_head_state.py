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
def forward(monkeypatch, target):
    """Makes the training forward of a head: predicted features [1, T - 1, E] from tokens i32[1, T] and features."""
    monkeypatch.setattr(losses, "loss_sums", lambda predicted, *rest: predicted)

    def of_head(inputs="feature+shifted_token"):
        head = make_head(target, SHARP, inputs=inputs)
        graphdef, params = nnx.split(head.model)

        @jax.jit
        def run(tokens, features):
            batch = training.Batch(tokens=tokens, assistant=jnp.ones(tokens.shape, bool), features=features)
            return training.head_sums(graphdef, params, head.ends, batch)[0]

        return run

    return of_head


@pytest.fixture
def predict(forward):
    return forward()


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


# --- EAGLE's ablation: heads that read less ---------------------------------------------------------------------------


def first_changed(run, tokens, features, *others):
    """The first pair whose prediction is another one with other tokens and features; None where all are the same."""
    changed = np.flatnonzero(np.any(np.asarray(run(tokens, features)[0] != run(*others)[0]), axis=-1))
    return int(changed[0]) if changed.size else None


def check_tree(target, predict, features, tree, lengths):
    """Every node against the training forward over the row's true pairs, with the head's guesses of its path behind."""
    for row, length in enumerate(lengths):
        known = {}

        def after(path, row=row, length=length, known=known):
            """Log-probabilities below a path of tokens and the feature predicted there."""
            if path not in known:
                tokens = np.zeros((1, LENGTH + DEPTH), np.int32)
                inputs = np.zeros((1, LENGTH + DEPTH, features.shape[-1]), np.float32)
                tokens[0, :length], inputs[0, : length - 1] = TOKENS[row, :length], features[row, : length - 1]
                for place, token in enumerate(path):
                    tokens[0, length + place] = token
                    inputs[0, length - 1 + place] = after(path[:place])[1]
                predicted = predict(tokens, inputs)[0, length - 2 + len(path)]
                known[path] = np.asarray(jax.nn.log_softmax(target.model.logits(predicted))), np.asarray(predicted)
            return known[path]

        paths, scores = {0: ()}, {0: 0.0}
        for node in range(1, tree.tokens.shape[1]):
            parent, token = int(tree.parents[row, node]), int(tree.tokens[row, node])
            paths[node] = (*paths[parent], token)
            scores[node] = scores[parent] + after(paths[parent])[0][token]
            np.testing.assert_allclose(tree.log_scores[row, node], scores[node], atol=1e-4)
        assert len(set(paths.values())) == len(paths) and max(map(len, paths.values())) == 3


TREES = {
    "dynamic": ej.TreeConfig(nodes=12, depth=3, top_k=3),
    "static": ej.TreeConfig(
        kind="static", choices=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 1))
    ),
}


@pytest.mark.parametrize(
    ("inputs", "of_token", "of_feature"),
    [
        ("token", -1, None),
        ("feature", None, 0),
        ("feature+token", 0, 0),
        pytest.param("feature+shifted_token", -1, 0, marks=pytest.mark.slow),  # the tests above are of this one
    ],
)
def test_M2_what_a_head_reads_in_training_it_reads_in_trees(target, features, forward, inputs, of_token, of_feature):
    """Pair j reads token j + 1, token j or none, and feature j or none; at each node of a tree the same is known."""
    run = forward(inputs)
    pad = ((0, 0), (0, DEPTH))
    tokens, whole = jnp.pad(TOKENS[:1], pad), jnp.pad(features[:1], (*pad, (0, 0)))
    other_token = tokens.at[0, 7].set((tokens[0, 7] + 1) % 16)
    other_feature = whole.at[0, 7].add(1.0)
    first = [first_changed(run, tokens, whole, *others) for others in ((other_token, whole), (tokens, other_feature))]
    assert first == [None if of is None else 7 + of for of in (of_token, of_feature)]

    roots = [TOKENS[jnp.arange(2), jnp.asarray(lengths) - 1] for lengths in ([6, 4], [9, 6])]
    # A static tree hands tokens down by the same fields, and only this head reads its parents'.
    for tree in TREES.values() if inputs == "feature+token" else [TREES["dynamic"]]:
        drafter, params = eagle.bind_head(make_head(target, SHARP, inputs=inputs), tree)

        @jax.jit
        def drafted(params, drafter=drafter):
            """The tree of a second round, in which the rows have committed 3 tokens and 2."""
            state = drafter.prefill(params, drafter.init(params, 2, 32), committed(features, [1, 1], [4, 2], 8))
            state = drafter.observe(params, state, committed(features, [5, 3], [1, 1], drafter.depth + 1))
            _, state = drafter.propose(params, state, roots[0], GREEDY)
            state = drafter.observe(params, state, committed(features, [6, 4], [3, 2], drafter.depth + 1))
            return drafter.propose(params, state, roots[1], GREEDY)[0]

        check_tree(target, run, features, drafted(params), [9, 6])


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


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
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
