"""Sampled text follows the target's processed distribution exactly, and every processor is Hugging Face's."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_rig import (
    CLEAR,
    TREE,
    Copy,
    full_logits,
    ids,
    make_head,
    make_target,
    mean_accepted,
    p_value,
    random_prompts,
    reference_keep,
    reference_penalty,
    softmax,
)

import eagle_jax as ej
from eagle_jax import sampling

FILTERS = {"top_k": 5, "top_p": 0.9}


# --- The noise --------------------------------------------------------------------------------------------------------


def test_a_tokens_noise_does_not_depend_on_which_others_are_asked_for():
    keys, index, vocab = sampling.row_keys(7, 3), jnp.asarray([0, 5, 70_000]), 5000
    whole = np.asarray(sampling.gumbel_noise(keys, index, jnp.arange(vocab)))
    some = np.random.default_rng(0).choice(vocab, 301, replace=False)
    np.testing.assert_array_equal(sampling.gumbel_noise(keys, index, jnp.asarray(some)), whole[:, some])
    with jax.threefry_partitionable(True):
        for row in range(3):
            wanted = jax.random.gumbel(jax.random.fold_in(keys[row], index[row]), (vocab,))
            np.testing.assert_array_equal(whole[row], wanted)


def test_the_noise_does_not_depend_on_the_default_generator_nor_on_how_jax_splits_it():
    def noise():
        return np.asarray(sampling.gumbel_noise(sampling.row_keys([3, 4], 2), jnp.asarray([1, 2]), jnp.arange(100)))

    usual = noise()
    with jax.default_prng_impl("rbg"), jax.threefry_partitionable(False):
        np.testing.assert_array_equal(noise(), usual)


# --- The law ----------------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
DRAWS = 20_000
PROMPT = [0, 3, 5]


@pytest.fixture(scope="module")
def small_target():
    return make_target(seed=2, **SMALL, max_position_embeddings=32)


def exact_law(target, config):
    """p(a, b, c) of the first three tokens after the prompt: f64[8, 8, 8]."""
    pairs = list(itertools.product(range(8), repeat=2))
    logits = full_logits(target, [PROMPT + list(pair) for pair in pairs])[:, len(PROMPT) - 1 :]  # [64, 3, 8]
    keep = np.asarray([[reference_keep(row, config) for row in rows] for rows in logits])
    laws = softmax(np.where(keep, logits.astype(np.float64) / config.temperature, -np.inf)).reshape(8, 8, 3, 8)
    return laws[0, 0, 0][:, None, None] * laws[:, 0, 1][:, :, None] * laws[:, :, 2]


def draw(target, head, config, tree):
    done = ej.generate(
        target, head, [PROMPT] * DRAWS, max_new_tokens=3, sampling=config, tree=tree, seed=list(range(DRAWS))
    )
    counts = np.zeros((8, 8, 8), np.int64)
    np.add.at(counts, tuple(np.asarray(ids(done)).T), 1)
    return done, counts


CONFIGS = [ej.SamplingConfig(temperature=1.0), ej.SamplingConfig(temperature=0.8, **FILTERS)]


@pytest.mark.parametrize(
    "config", [CONFIGS[0], pytest.param(CONFIGS[1], marks=pytest.mark.slow)], ids=["temperature", "filters"]
)
def test_C1_the_joint_law_of_three_tokens_is_the_targets(small_target, config):
    tree = ej.TreeConfig(nodes=24, depth=2, top_k=5)
    done, counts = draw(small_target, make_head(small_target), config, tree)
    assert mean_accepted(done) > 0.5
    law = exact_law(small_target, config)
    assert np.sum(law * DRAWS >= 5) > 50
    assert p_value(counts, law) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=["temperature", "filters"])
def test_C2_the_law_is_the_targets_where_the_worst_tokens_are_drafted_first(small_target, config):
    tree = ej.TreeConfig(nodes=20, depth=2, top_k=6)
    done, counts = draw(small_target, Copy(worst_first=True), config, tree)
    assert 0.2 < mean_accepted(done) < 1.5  # the tree holds some of what is drawn, never the best
    assert p_value(counts, exact_law(small_target, config)) > 1e-3


def test_the_chi_square_test_finds_a_wrong_law(small_target):
    """It sees a law whose temperature is a tenth off."""
    law = exact_law(small_target, CONFIGS[0])
    counts = np.random.default_rng(0).multinomial(DRAWS, law.ravel()).reshape(law.shape)
    assert p_value(counts, law) > 1e-3
    assert p_value(counts, exact_law(small_target, ej.SamplingConfig(temperature=1.1))) < 1e-6


# --- Processors -------------------------------------------------------------------------------------------------------

TINY = (1e-6, 1e-5, 1e-4)
# Every processor stands somewhere, so that one program serves all tests below.
ROWS = [
    ej.SamplingConfig(repetition_penalty=1.3),
    ej.SamplingConfig(repetition_penalty=0.8),
    ej.SamplingConfig(temperature=0.8, **FILTERS),
    ej.SamplingConfig(temperature=1.0, min_p=0.1, repetition_penalty=1.2),
    ej.SamplingConfig(temperature=1.5, top_p=0.7, min_p=0.2),
    *(ej.SamplingConfig(temperature=temperature, **FILTERS) for temperature in TINY),
]
PROMPTS = [[0, *prompt] for prompt in random_prompts(len(ROWS), seed=3)]
SEEDS = list(range(40, 40 + len(ROWS)))
NEW = 32


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module", params=["head", "copy"])
def done(request, target):
    head = make_head(target) if request.param == "head" else Copy()
    done = ej.generate(target, head, PROMPTS, max_new_tokens=NEW, sampling=ROWS, tree=TREE, seed=SEEDS)
    assert mean_accepted(done) > 0.5
    return done


def rescored(target, done):
    """Raw logits f32[V] for each emitted token, row by row."""
    whole = [prompt + row.token_ids for prompt, row in zip(PROMPTS, done, strict=True)]
    width = max(map(len, whole))
    logits = full_logits(target, [tokens + [0] * (width - len(tokens)) for tokens in whole])
    return [rows[len(prompt) - 1 :][:NEW] for rows, prompt in zip(logits, PROMPTS, strict=True)]


def test_D1_processors_with_noise_are_a_reference_loops(target, done):
    """At each token: penalty over prompt and text so far, filters, then argmax of logits + temperature * noise."""
    keys = sampling.row_keys(SEEDS, len(SEEDS))
    unlike_greedy = 0
    for row, (config, rows) in enumerate(zip(ROWS, rescored(target, done), strict=True)):
        tokens = list(PROMPTS[row])
        index = jnp.arange(len(tokens), len(tokens) + NEW)
        noise = np.asarray(sampling.gumbel_noise(jnp.repeat(keys[row : row + 1], NEW), index, jnp.arange(16)))
        for logits, gumbel, token in zip(rows, noise, done[row].token_ids, strict=True):
            scores = reference_penalty(logits, tokens, config.repetition_penalty)
            if config.temperature > 0:
                keep = reference_keep(scores, config)
                scores = np.where(keep, scores + config.temperature * gumbel, -np.inf)
            assert scores[token] >= scores.max() - CLEAR
            unlike_greedy += token != np.argmax(logits)
            tokens.append(token)
    assert unlike_greedy > NEW


def test_D5_logprobs_are_the_targets_own(target, done):
    """Raw log-softmax, before any processor."""
    for row, logits in zip(done, rescored(target, done), strict=True):
        expected = logits[np.arange(NEW), row.token_ids]
        expected -= np.log(np.sum(np.exp(logits), axis=-1))
        np.testing.assert_allclose(row.logprobs, expected, atol=1e-4)


def test_C5_a_tiny_temperature_is_greedy_and_finite(target, done):
    compared = 0
    for row, temperature in zip(range(len(ROWS) - len(TINY), len(ROWS)), TINY, strict=True):
        assert np.isfinite(done[row].logprobs).all()
        for logits, token in zip(rescored(target, done)[row], done[row].token_ids, strict=True):
            second, first = np.sort(logits)[-2:]
            if first - second > 20 * temperature + CLEAR:
                assert token == np.argmax(logits)
                compared += 1
    assert compared > 0.9 * NEW * len(TINY)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
    ],
)
def test_C5_settings_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        ej.SamplingConfig(**{field: value})


def test_keep_mask_is_hugging_faces():
    """Each processor alone and with others, over logits of several spreads."""
    random = np.random.default_rng(0)
    grid = itertools.product((0.3, 1.0, 2.5), (0, 1, 5, 40), (1.0, 0.95, 0.5, 1e-6), (0.0, 0.02, 0.3, 1.0))
    configs = [
        ej.SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for temperature, top_k, top_p, min_p in grid
    ]
    logits = (random.normal(size=(len(configs), 32)) * random.uniform(0.5, 6, (len(configs), 1))).astype(np.float32)
    params = sampling.params_for(configs, 32)
    keep = np.asarray(sampling.keep_mask(jnp.asarray(logits), params, sampling.processors_for(configs)))
    expected = np.asarray([reference_keep(row, config) for row, config in zip(logits, configs, strict=True)])
    np.testing.assert_array_equal(keep, expected)
    assert 1 < expected.sum(axis=1).mean() < 31


def test_keep_mask_keeps_tokens_that_tie_with_the_last_one_kept():
    config = ej.SamplingConfig(temperature=1.0, top_k=2)
    keep = sampling.keep_mask(
        jnp.asarray([[1.0, 3.0, 1.0, 0.0]]), sampling.params_for([config], 4), sampling.processors_for([config])
    )
    assert keep.tolist() == [[True, True, True, False]]


def test_top_p_renormalises_over_tokens_that_tie_with_the_last_of_top_k():
    """The best of the three kept has .576 of their mass, less than top_p: the tied ones stay."""
    config = ej.SamplingConfig(temperature=1.0, top_k=2, top_p=0.6)
    keep = sampling.keep_mask(
        jnp.asarray([[2.0, 1.0, 1.0, 0.0]]), sampling.params_for([config], 4), sampling.processors_for([config])
    )
    assert keep.tolist() == [[True, True, True, False]]


def test_filters_leave_greedy_rows_alone():
    configs = [ej.SamplingConfig(top_k=1, top_p=0.1), ej.SamplingConfig(temperature=1.0, top_k=1)]
    logits = jnp.asarray([[1.0, 3.0, 2.0]] * 2)
    keep = sampling.keep_mask(logits, sampling.params_for(configs, 3), sampling.processors_for(configs))
    assert keep.tolist() == [[True, True, True], [False, True, False]]
