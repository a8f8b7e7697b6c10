"""The training step: what it learns from, what it leaves alone, and that a step repeats exactly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rig import tiny_target

import eagle_jax as ej
from eagle_jax import training
from eagle_jax.features import features_of

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
    sums = training.evaluate_step(state.head, ends, batch, graphdef=graphdef)
    _, quiet = run(target, [batch], RECIPE)
    _, loud = run(target, [batch], noisy)
    np.testing.assert_allclose(training.metrics_of(sums, RECIPE)["loss"], quiet["loss"], rtol=1e-6)
    assert loud["loss"] != quiet["loss"]
    # Noise 0 is no noise, bit for bit, whatever the seed; with noise the seed matters.
    seeds = [dataclasses.replace(RECIPE, seed=seed) for seed in (0, 1)]
    assert same(run(target, [batch], seeds[0])[0].head, run(target, [batch], seeds[1])[0].head)
    seeds = [dataclasses.replace(noisy, seed=seed) for seed in (0, 1)]
    assert not same(run(target, [batch], seeds[0])[0].head, run(target, [batch], seeds[1])[0].head)
    # With the head's input cut off from the features, noise changes nothing: the wanted features are clean.
    params = nnx.to_flat_state(state.head)
    cut = [
        (path, leaf.replace(leaf[...].at[64:].set(0.0)) if path == ("fc", "kernel") else leaf) for path, leaf in params
    ]
    head = nnx.from_flat_state(cut)
    noise = jax.random.uniform(jax.random.key(0), (4, 11, 64))
    clean, shaken = (training.head_sums(graphdef, head, ends, batch, n) for n in (0.0, noise))
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
    sums = training.evaluate_step(params, head.ends, batch_of(target), graphdef=graphdef)
    assert head.ends.lm_head.shape == (4, 64)
    np.testing.assert_array_equal(head.ends.lm_head, target.model.lm_matrix()[vocabulary])
    assert np.isfinite(sums.cross_entropy) and sums.cross_entropy / sums.count < 2 * np.log(4)


@pytest.mark.parametrize("field", ["steps", "learning_rate", "gradient_clip", "noise", "warmup_steps"])
def test_a_recipe_refuses_senseless_values(field):
    with pytest.raises(ValueError, match=field):
        training.TrainConfig(**{field: -1})
