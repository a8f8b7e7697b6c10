"""The training step: what it learns from, what it leaves alone, and that a step repeats exactly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rig import tiny_target

import eagle_jax as ej
from eagle_jax import cache, losses, training
from eagle_jax.layers import causal_mask
from eagle_jax.target import features_of

RECIPE = training.TrainConfig(steps=200, learning_rate=3e-3, warmup_steps=5, noise=0.0)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def batch_of(target, rows=4, length=12, seed=0, assistant_from=3):
    tokens = np.random.default_rng(seed).integers(0, target.config.vocab_size, (rows, length))
    assistant = np.broadcast_to(np.arange(length) >= assistant_from, tokens.shape)
    features = features_of(*nnx.split(target.model), jnp.asarray(tokens))
    return training.Batch(jnp.asarray(tokens), jnp.asarray(assistant), features)


def start(target, recipe=RECIPE):
    head = ej.Head.random(target)
    graphdef, params = nnx.split(head.model)
    return training.init_state(params, recipe), head.ends, graphdef


def run(target, batches, recipe=RECIPE):
    state, ends, graphdef = start(target, recipe)
    for batch in batches:
        state, metrics = training.train_step(state, ends, batch, graphdef=graphdef, config=recipe)
    return state, metrics


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_a_head_learns_one_batch(target):
    batch = batch_of(target)
    state, ends, graphdef = start(target)
    _, first = training.train_step(state, ends, batch, graphdef=graphdef, config=RECIPE)
    _, last = run(target, [batch] * 200)
    assert first["top1"] < 0.6
    assert last["top1"] > 0.9
    assert last["regression"] < 0.1 * first["regression"]


def test_T3_a_wholly_masked_batch_changes_no_parameter_and_has_a_finite_loss(target):
    batch = batch_of(target)
    masked = batch._replace(assistant=jnp.zeros_like(batch.assistant))
    before, _ = run(target, [batch] * 2)
    after, metrics = run(target, [batch] * 2 + [masked])
    assert same(before.head, after.head) and same(before.optimizer, after.optimizer)
    assert int(after.step) == 3 and metrics["pairs"] == 0
    assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_is_of_matrices_and_not_of_norms(target, name):
    recipe = dataclasses.replace(RECIPE, optimizer=name, weight_decay=0.1, warmup_steps=0)
    params, optimizer = nnx.state(ej.Head.random(target).model), training.optimizer(recipe)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    rate = recipe.learning_rate if name == "adamw" else recipe.muon_learning_rate
    leaves = zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True)
    assert {weight.ndim for _, weight in leaves} == {1, 2}
    for update, weight in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(update, -0.1 * rate * weight if weight.ndim > 1 else 0 * weight, rtol=1e-5)


def test_T4_padding_changes_neither_loss_nor_gradient(target):
    batch = batch_of(target, length=12)
    wider = batch_of(target, length=40)

    def padded(tail, rows):
        """The same rows, padded at the end with `tail` garbage tokens, and with `rows` wholly masked rows below."""
        fill = lambda x, y: jnp.concatenate([x, y[:, 12 : 12 + tail]], axis=1)  # noqa: E731
        whole = training.Batch(*(fill(x, y) for x, y in zip(batch, wider, strict=True)))
        whole = whole._replace(assistant=whole.assistant & (jnp.arange(12 + tail) < 12))
        extra = whole._replace(assistant=jnp.zeros_like(whole.assistant))
        return training.Batch(*(jnp.concatenate([x, y[:rows]]) for x, y in zip(whole, extra, strict=True)))

    state, metrics = run(target, [batch])
    for tail, rows in ((4, 0), (28, 1)):
        other, padded_metrics = run(target, [padded(tail, rows)])
        for name in ("loss", "top1", "top3", "pairs"):
            np.testing.assert_allclose(metrics[name], padded_metrics[name], rtol=1e-5)
        for a, b in zip(jax.tree.leaves(state.optimizer), jax.tree.leaves(other.optimizer), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_T7_noise_touches_the_input_features_only(target):
    batch = batch_of(target)
    noisy = dataclasses.replace(RECIPE, noise=0.5)
    state, ends, graphdef = start(target, noisy)
    # Evaluation knows no noise: its sums are those of a step without it.
    [sums] = training.evaluate_step(state.head, ends, batch, graphdef=graphdef)

    def stepped(recipe, seed):
        begun = dataclasses.replace(start(target, recipe)[0], key=jax.random.key(seed))
        return training.train_step(begun, ends, batch, graphdef=graphdef, config=recipe)

    (still, quiet), (shaken, loud) = stepped(RECIPE, 0), stepped(noisy, 0)
    np.testing.assert_allclose(training.metrics_of([sums], RECIPE)["loss"], quiet["loss"], rtol=1e-6)
    assert loud["loss"] != quiet["loss"]
    # Noise 0 is no noise, bit for bit, whatever the seed; with noise the seed matters.
    assert same(still.head, stepped(RECIPE, 1)[0].head)
    assert not same(shaken.head, stepped(noisy, 1)[0].head)
    # With the head's input cut off from the features, noise changes nothing: the wanted features are clean.
    params = nnx.to_flat_state(state.head)
    cut = [
        (path, leaf.replace(leaf[...].at[64:].set(0.0)) if path == ("fc", "kernel") else leaf) for path, leaf in params
    ]
    head = nnx.from_flat_state(cut)
    noise = jax.random.uniform(jax.random.key(0), (4, 11, 64))
    clean, shaken = (training.head_sums(graphdef, head, ends, batch, n)[0] for n in (0.0, noise))
    np.testing.assert_array_equal(clean, shaken)


def test_steps_repeat_exactly(target):
    batches = [batch_of(target, seed=seed) for seed in range(3)]
    noisy = dataclasses.replace(RECIPE, noise=0.1)
    first, second = (run(target, batches, noisy)[0] for _ in range(2))
    assert same((first.step, first.head, first.optimizer), (second.step, second.head, second.optimizer))


def test_a_draft_vocabulary_restricts_the_cross_entropy(target):
    vocabulary = np.asarray([1, 4, 5, 9], np.int32)
    head = ej.Head.random(target, vocabulary=vocabulary)
    graphdef, params = nnx.split(head.model)
    [sums] = training.evaluate_step(params, head.ends, batch_of(target), graphdef=graphdef)
    assert head.ends.lm_head.shape == (4, 64)
    np.testing.assert_array_equal(head.ends.lm_head, target.model.lm_matrix()[vocabulary])
    assert np.isfinite(sums.cross_entropy) and sums.cross_entropy / sums.count < 2 * np.log(4)


@pytest.mark.parametrize("field", ["steps", "learning_rate", "gradient_clip", "noise", "warmup_steps"])
def test_a_recipe_refuses_senseless_values(field):
    with pytest.raises(ValueError, match=field):
        training.TrainConfig(**{field: -1})


# --- Unrolled over the head's own guesses -----------------------------------------------------------------------------


def chain(head, ends, tokens, features, pair, level):
    """What the `level`-th guess of a chain gives that comes to `pair` [1, E]: as the decoder drafts it."""
    config, begin = head.config, pair - level + 1  # the chain's first pair, with the target's feature
    shape = {"layers": 1, "batch": 1, "kv_heads": config.kv_heads, "key_dim": config.key_dim}
    prefix = cache.empty(capacity=16, dtype=jnp.float32, **shape)
    embeddings = ends.embedding[tokens[1:]][None]
    out, rows = head(
        embeddings[:, : begin + 1], features[None, : begin + 1], positions(0, begin + 1), causal_mask(begin + 1)
    )
    prefix = cache.commit(prefix, rows, jnp.asarray([begin + 1]))
    guess = out[:, -1:]
    for place in range(begin + 1, pair + 1):
        guess, rows = head(embeddings[:, place : place + 1], guess, positions(place, place + 1), causal_mask(1), prefix)
        prefix = cache.commit(prefix, rows, jnp.asarray([1]))
    return guess[0]


def positions(begin, end):
    return jnp.arange(begin, end)[None]


@pytest.mark.parametrize("window", [None, 3])
def test_unrolled_passes_are_the_levels_of_a_chain(window, monkeypatch):
    """Pairs of every pass against a chain that was drafted level by level behind a cache of true pairs."""
    target = tiny_target(sliding_window=window)
    batch = batch_of(target, rows=2, length=8)
    head = ej.Head.random(target)
    graphdef, params = nnx.split(head.model)
    given = []

    def kept(predicted, wanted, mask, *rest):
        given.append((np.asarray(predicted), np.asarray(mask)))
        return losses.LossSums.zero()

    monkeypatch.setattr(losses, "loss_sums", kept)
    training.head_sums(graphdef, params, head.ends, batch, unroll=3)
    assert len(given) == 3
    whole = np.asarray(losses.pair_mask(batch.assistant))
    for level, (predicted, mask) in enumerate(given, start=1):
        np.testing.assert_array_equal(mask, whole & (np.arange(7) >= level - 1))
        for row, pair in {(0, level - 1), (0, 6), (1, 4)}:
            wanted = chain(head.model, head.ends, batch.tokens[row], batch.features[row], pair, level)
            np.testing.assert_allclose(predicted[row, pair], wanted[-1], rtol=0, atol=1e-5)


def test_unrolling_once_is_eagle(target):
    batch = batch_of(target)
    state, ends, graphdef = start(target)
    one, three = (training.head_sums(graphdef, state.head, ends, batch, unroll=n) for n in (1, 3))
    np.testing.assert_array_equal(one[0], three[0])
    metrics = training.metrics_of(three, RECIPE)
    total = sum(RECIPE.regression_weight * s.regression + RECIPE.cross_entropy_weight * s.cross_entropy for s in three)
    np.testing.assert_allclose(metrics["loss"], total / sum(s.count for s in three), rtol=1e-6)
    assert {"top1_2", "top1_3"} <= metrics.keys()


@pytest.mark.slow
def test_unrolled_training_keeps_the_later_levels_right(target):
    """At the same first pass a head that was trained on its own guesses errs less on them."""
    batch = batch_of(target)
    accuracy = {}
    for unroll in (1, 3):
        recipe = dataclasses.replace(RECIPE, unroll=unroll, steps=120)
        state, _ = run(target, [batch] * 120, recipe)
        _, ends, graphdef = start(target)
        sums = training.head_sums(graphdef, state.head, ends, batch, unroll=3)
        accuracy[unroll] = [float(one.top1 / one.count) for one in sums]
    assert accuracy[3][2] > accuracy[1][2] + 0.05


# --- Batches in pieces, labels, dtypes, beginnings --------------------------------------------------------------------


@pytest.mark.parametrize("unroll", [1, 2])
def test_T4_a_batch_in_pieces_is_the_whole_batch(target, unroll):
    """Pieces with unlike numbers of pairs: means of means would differ."""
    batch = batch_of(target, rows=4)
    batch = batch._replace(assistant=batch.assistant.at[0, 5:].set(False).at[1].set(False))
    whole = dataclasses.replace(RECIPE, unroll=unroll)
    pieces = jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]), batch)
    state, metrics = run(target, [batch] * 3, whole)
    other, in_pieces = run(target, [pieces] * 3, dataclasses.replace(whole, accumulate=2))
    for name in metrics:
        np.testing.assert_allclose(metrics[name], in_pieces[name], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(state.head), jax.tree.leaves(other.head), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_features_made_in_the_step_are_those_from_a_file(target):
    batch = batch_of(target)
    graphdef, params = nnx.split(target.model)
    state, ends, head_graphdef = start(target)
    options = {"graphdef": head_graphdef, "config": RECIPE}
    online, metrics = training.train_step(
        state, ends, batch._replace(features=None), params, target_graphdef=graphdef, **options
    )
    state, *_ = start(target)
    offline, wanted = training.train_step(state, ends, batch, **options)
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(online.head), jax.tree.leaves(offline.head), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [None, np.asarray([1, 4, 5, 9, 11], np.int32)])
def test_hard_labels_are_the_texts_own_tokens(target, vocabulary):
    batch = batch_of(target)
    head = ej.Head.random(target, vocabulary=vocabulary)
    graphdef, params = nnx.split(head.model)
    [sums] = training.head_sums(graphdef, params, head.ends, batch, labels="hard")
    tokens, features = np.asarray(batch.tokens), batch.features
    predicted, _ = head.model(
        head.ends.embedding[batch.tokens[:, 1:]], features[:, :-1], positions(0, 11), causal_mask(11)
    )
    log_probs = np.asarray(jax.nn.log_softmax(predicted @ head.ends.lm_head.T))
    rows = list(range(16)) if vocabulary is None else vocabulary.tolist()
    wanted = [
        -log_probs[row, pair, rows.index(tokens[row, pair + 2])]
        for row in range(4)
        for pair in range(2, 10)  # both tokens the assistant's, from the fourth token on
        if tokens[row, pair + 2] in rows
    ]
    assert 5 < len(wanted) <= 32
    np.testing.assert_allclose(sums.cross_entropy, sum(wanted), rtol=1e-5)
    gradient = jax.grad(lambda x: losses.loss_sums(x, features[:, 1:], mask, head.ends.lm_head, labels).cross_entropy)
    mask, labels = losses.pair_mask(batch.assistant), head.ends.rows_of(losses.ahead(batch.tokens, 2))
    by_hand = (np.exp(log_probs) - (np.asarray(labels)[..., None] == np.arange(len(rows)))) @ np.asarray(
        head.ends.lm_head
    )
    counted = (np.asarray(mask) & (np.asarray(labels) >= 0))[..., None]
    np.testing.assert_allclose(gradient(predicted), np.where(counted, by_hand, 0), rtol=0, atol=1e-5)


def test_bfloat16_targets_train_float32_masters(target):
    """The head computes in its target's dtype; steps too small for bfloat16 are not lost."""
    narrow = ej.Target.random(target.config, dtype=jnp.bfloat16)
    head = ej.Head.random(narrow, dtype=jnp.float32)
    recipe = dataclasses.replace(RECIPE, learning_rate=1e-5, warmup_steps=0)
    state = training.init_state(nnx.split(head.model)[1], recipe)
    before = jax.tree.map(np.asarray, state.head)
    graphdef = training.compute_graphdef(head.config, jnp.bfloat16)
    predicted = nnx.eval_shape(lambda: nnx.merge(graphdef, state.head))
    assert predicted.fc.dtype == jnp.bfloat16
    batch = batch_of(narrow)
    assert batch.features.dtype == jnp.bfloat16
    for _ in range(3):
        state, metrics = training.train_step(state, head.ends, batch, graphdef=graphdef, config=recipe)
    assert np.isfinite(metrics["loss"])
    leaves = zip(jax.tree.leaves(before), jax.tree.leaves(state.head), strict=True)
    for old, new in leaves:
        assert new.dtype == jnp.float32 and np.any(old != np.asarray(new))


def test_a_head_may_begin_as_the_targets_last_layer(target):
    head = ej.Head.from_last_layer(target)
    last, own = target.model.layers[-1], head.model.layers[0]
    np.testing.assert_array_equal(own.self_attn.q_proj.kernel[...], last.self_attn.q_proj.kernel[...])
    np.testing.assert_array_equal(own.post_attention_layernorm.scale[...], last.post_attention_layernorm.scale[...])
    features = jax.random.normal(jax.random.key(0), (1, 3, 64))
    joined = head.model.fc(jnp.concatenate([jnp.zeros_like(features), features], axis=-1))
    np.testing.assert_allclose(joined, features, rtol=0, atol=1e-6)


def test_a_head_of_features_alone_may_begin_as_the_last_layer_but_one_of_tokens_may_not(target):
    head = ej.Head.from_last_layer(target, inputs="feature")
    features = jax.random.normal(jax.random.key(0), (1, 3, 64))
    np.testing.assert_allclose(head.model.fc(features), features, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"inputs are 'token'.*\.$"):
        ej.Head.from_last_layer(target, inputs="token")


def test_four_conversations_are_learned_by_heart(target):
    """With a target and four rows this small, over 95 % of the target's best tokens."""
    recipe = dataclasses.replace(RECIPE, steps=400, cross_entropy_weight=1.0, decay="cosine")
    _, metrics = run(target, [batch_of(target, length=24)] * 400, recipe)
    assert metrics["top1"] > 0.95
