"""Children ranked with the target's own noise: NumPy's scores, the target's text, and more of it at a time."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_rig import (
    Copy,
    greedy_sampler,
    ids,
    make_head,
    mean_accepted,
    random_prompts,
    reference_keep,
    reference_penalty,
    softmax,
)

import eagle_jax as ej
from eagle_jax import decoding, draft, generation, ranking, sampling
from eagle_jax.tree import NO_PARENT, ROOT

VOCAB = 24
VOCABULARY = np.asarray([0, 1, 3, 4, 7, 8, 9, 12, 13, 17, 20, 23])
CONFIGS = [
    ej.SamplingConfig(),
    ej.SamplingConfig(repetition_penalty=1.5),
    ej.SamplingConfig(temperature=1.0),
    ej.SamplingConfig(temperature=0.4, top_k=3),
    ej.SamplingConfig(temperature=1.2, top_p=0.8),
    ej.SamplingConfig(temperature=0.8, top_k=6, top_p=0.9, min_p=0.1, repetition_penalty=1.3),
    ej.SamplingConfig(temperature=1.0, top_k=1),
]
ROWS = len(CONFIGS)


def sampler_of(configs, vocab=VOCAB, seen=None):
    return sampling.Sampler(
        processors=sampling.processors_for(configs),
        params=sampling.params_for(configs, vocab),
        keys=sampling.row_keys(list(range(len(configs))), len(configs)),
        index=jnp.arange(len(configs)) * 3 + 5,
        seen=seen,
    )


def noise_of(sampler, row, level):
    """From its definition: the row's key, folded with the absolute index of the token."""
    key = jax.random.fold_in(sampler.keys[row], sampler.index[row] + level)
    return np.asarray(jax.random.gumbel(key, (VOCAB,)))


def slow_scores(logits, noise, config, seen, beta):
    """f64[W] of one node."""
    logits = logits.astype(np.float64)
    if config.temperature == 0:
        return np.log(softmax(logits))
    logits = reference_penalty(logits, seen, config.repetition_penalty)
    keep = reference_keep(logits, config)
    values = logits + config.temperature * noise
    # Dropped tokens follow the last one kept at the distance that the draft puts between them.
    dropped = values[keep].min() - (logits[keep].min() - logits)
    return np.log(softmax(beta * np.where(keep, values, dropped)))


@pytest.mark.parametrize("beta", [1.0, 2.5])
def test_scores_are_numpys(beta):
    """Rows of every setting in one batch, over a draft vocabulary, at the root and below it."""
    random = np.random.default_rng(0)
    seen = random.random((ROWS, VOCAB)) < 0.3
    sampler = sampler_of(CONFIGS, seen=jnp.asarray(seen))
    rank = ranking.rank_for(sampler, ej.TreeConfig(), jnp.asarray(VOCABULARY), beta=beta)
    logits = (random.normal(size=(ROWS, 3, len(VOCABULARY))) * 2).astype(np.float32)
    for level, given in ((0, logits[:, 0]), (2, logits)):
        found = np.asarray(rank(jnp.asarray(given), level))
        assert found.shape == given.shape and (found <= 0).all()
        for row, config in enumerate(CONFIGS):
            noise, known = noise_of(sampler, row, level)[VOCABULARY], np.flatnonzero(seen[row, VOCABULARY])
            for scores, one in zip(found[row].reshape(-1, 12), given[row].reshape(-1, 12), strict=True):
                wanted = slow_scores(one, noise, config, known, beta)
                np.testing.assert_allclose(scores, wanted, atol=2e-4)


def test_what_filters_drop_comes_last():
    """With one token left the draft's second best is still the second guess: the target's best may be that one."""
    config = ej.SamplingConfig(temperature=1.0, top_k=1)
    rank = ranking.rank_for(sampler_of([config] * 40), ej.TreeConfig())
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(40, VOCAB)), jnp.float32)
    np.testing.assert_array_equal(jnp.argsort(-rank(logits, 0)), jnp.argsort(-logits))


def test_plain_ranking_by_option_and_without_noise():
    plain = ej.TreeConfig(common_random_numbers=False)
    assert ranking.rank_for(sampler_of(CONFIGS), plain) is ranking.by_probability
    assert ranking.rank_for(greedy_sampler(2), ej.TreeConfig()) is ranking.by_probability


@pytest.mark.parametrize("candidates", [1, 5, 10])
def test_filters_that_look_at_few_tokens_leave_what_they_would_leave(candidates):
    """Or all, where that is as many as they look at."""
    random = np.random.default_rng(2)
    logits = (random.normal(size=(ROWS, VOCAB)) * random.uniform(1, 6, (ROWS, 1))).astype(np.float32)
    params, processors = sampling.params_for(CONFIGS, VOCAB), sampling.processors_for(CONFIGS)
    exact, few = (
        np.asarray(sampling.keep_mask(jnp.asarray(logits), params, processors, n)) for n in (None, candidates)
    )
    only_min_p = sampling.keep_mask(jnp.asarray(logits), params, sampling.Processors(noise=True, min_p=True))
    beyond = np.asarray([np.sum(row) for row in few]) >= candidates
    np.testing.assert_array_equal(few[~beyond], exact[~beyond])
    assert beyond.any() and (candidates == 1 or not beyond.all())
    for row in np.flatnonzero(beyond):
        assert (few[row] >= exact[row]).all() and (few[row] <= np.asarray(only_min_p)[row]).all()


# --- Hits -------------------------------------------------------------------------------------------------------------


def test_more_of_what_the_target_draws_is_among_four_children():
    """A draft that is somewhat off: hits by NumPy's count, plain, with the noise, and at temperature 0."""
    random = np.random.default_rng(3)
    rows, vocab = 500, 200
    p = random.normal(size=(rows, vocab)).astype(np.float32) * 1.5
    q = p + 0.4 * random.normal(size=p.shape).astype(np.float32)
    sampler = sampler_of([ej.SamplingConfig(temperature=1.0)] * rows, vocab)
    drawn = np.asarray(sampler.choose(jnp.asarray(p), 0, None))
    noise = np.asarray(sampler.noise(0, jnp.arange(vocab)))

    def children(config):
        return np.asarray(jax.lax.top_k(ranking.rank_for(sampler, config)(jnp.asarray(q), 0), 4)[1])

    def slow(values):
        return np.argsort(-values, axis=1, kind="stable")[:, :4]

    rates = {}
    for name, found, wanted, tokens in (
        ("plain", children(ej.TreeConfig(common_random_numbers=False)), slow(q), drawn),
        ("noise", children(ej.TreeConfig()), slow(q + noise), drawn),
        ("greedy", slow(q), slow(q), p.argmax(axis=1)),
    ):
        np.testing.assert_array_equal(found, wanted)
        rates[name] = np.mean((wanted == tokens[:, None]).any(axis=1))
    assert rates["plain"] < 0.4 and rates["noise"] > 0.9, rates
    assert abs(rates["noise"] - rates["greedy"]) < 0.1, rates


# --- Trees ------------------------------------------------------------------------------------------------------------

TREES = [  # a chain is a static tree
    ej.TreeConfig(nodes=12, depth=3, top_k=3),
    ej.TreeConfig(kind="static", choices=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 1, 1))),
]


@partial(jax.jit, static_argnames=("tree", "beta"))
def markov_tree(table, sampler, *, tree, beta=1.0):
    """Trees of rows whose logits are a row f32[V, V] of the table, for the token before."""
    batch, vocab = table.shape[:2]
    row = jnp.arange(batch)[:, None]

    def step(carry, frontier):
        return carry, table[row, frontier.tokens], frontier.features

    start, root = draft.Start(table[:, 0], jnp.zeros((batch, 1))), jnp.zeros((batch,), jnp.int32)
    rank = ranking.rank_for(sampler, tree, beta=beta)
    if tree.kind == "dynamic":
        return draft.draft_dynamic(step, (), start, root, lambda index: index, tree, rank)
    choices = draft.static_choices(tree, vocab)
    return draft.draft_static(step, (), start, root, lambda index: index, choices, rank)


MIXED = [ej.SamplingConfig(temperature=t) for t in (0.0, 1.0, 0.0, 1e-6, 0.5, 3.0)]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.kind)
def test_greedy_rows_rank_plainly_beside_others(tree):
    """The same trees to the last bit; those of the other rows are others."""
    table = jnp.asarray(np.random.default_rng(4).normal(size=(len(MIXED), VOCAB, VOCAB)) * 2, jnp.float32)
    mixed = markov_tree(table, sampler_of(MIXED), tree=tree, beta=3.0)
    plain = markov_tree(table, sampler_of([ej.SamplingConfig()] * len(MIXED)), tree=tree, beta=3.0)
    for row, config in enumerate(MIXED):
        same = [
            np.array_equal(one[row], two[row]) for one, two in zip(*map(jax.tree.leaves, (mixed, plain)), strict=True)
        ]
        # Where the noise is far below what the draft tells apart, it is no other tree either, but for rounding.
        assert config.temperature == 1e-6 or all(same) == (config.temperature == 0)


def test_a_tiny_temperature_ranks_as_none():
    """Trees keep their breadth: scores are not sharper for the noise being small."""
    table = jnp.asarray(np.random.default_rng(6).normal(size=(4, VOCAB, VOCAB)) * 2, jnp.float32)
    tiny, none = (
        markov_tree(table, sampler_of([ej.SamplingConfig(temperature=t)] * 4), tree=TREES[0]) for t in (1e-6, 0.0)
    )
    np.testing.assert_array_equal(tiny.tokens, none.tokens)
    np.testing.assert_allclose(tiny.log_scores, none.log_scores, atol=1e-4)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.kind)
def test_scores_never_rise_down_the_tree(tree):
    """Whatever the draft says, a head that has broken included."""
    table = np.random.default_rng(5).normal(size=(len(MIXED), VOCAB, VOCAB)).astype(np.float32) * 4
    table[:, ::5] = np.nan
    table[:, 1::5, :20] = -np.inf
    table[:, 0] = table[:, 2]
    drawn = markov_tree(jnp.asarray(table), sampler_of(MIXED), tree=tree, beta=4.0)
    parents, tokens, scores = (np.asarray(x) for x in (drawn.parents, drawn.tokens, drawn.log_scores))
    for row in range(len(MIXED)):
        assert not np.isnan(scores[row]).any()
        assert parents[row, ROOT] == NO_PARENT and (parents[row] < np.arange(len(parents[row]))).all()
        assert (scores[row, 1:] <= scores[row, parents[row, 1:]]).all()
        siblings = list(zip(parents[row], tokens[row], strict=True))
        assert len(set(siblings)) == len(siblings)
    assert np.isfinite(scores).mean() > 0.2


# --- Whole texts ------------------------------------------------------------------------------------------------------

# All with one set of processors, so that few programs are compiled.
DRAWN = [
    ej.SamplingConfig(),
    ej.SamplingConfig(temperature=1.0),
    ej.SamplingConfig(temperature=0.3),
    ej.SamplingConfig(temperature=1.5, top_k=5),
    ej.SamplingConfig(temperature=0.8, top_p=0.7),
    ej.SamplingConfig(temperature=1.0, top_p=0.9, min_p=0.1),
    ej.SamplingConfig(temperature=1.0, min_p=0.05, repetition_penalty=1.3),
]
PROMPTS = [*([0, *prompt] for prompt in random_prompts(6, seed=21)), [0]]
OPTIONS = {"max_new_tokens": 32, "sampling": DRAWN, "seed": list(range(7))}
WHOLE = [
    # All candidates are kept, so that none goes for its parent's sake.
    ej.TreeConfig(nodes=1 + 3 + 9, depth=2, top_k=3),
    ej.TreeConfig(kind="chain", nodes=5, depth=4),
]


@pytest.fixture(scope="module")
def plain(target):
    return ids(ej.generate(target, None, PROMPTS, **OPTIONS))


@pytest.mark.parametrize("tree", WHOLE, ids=lambda tree: tree.kind)
def test_what_the_target_itself_drafts_is_accepted_whole(target, plain, tree):
    """At every temperature as at 0: the noise is the verifier's own, level by level. The penalty alone may stop it."""
    done = ej.generate(target, Copy(), PROMPTS, tree=tree, **OPTIONS)
    assert ids(done) == plain
    for row in done[:-1]:
        assert set(row.accepted) == {tree.depth}


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.kind)
def test_the_text_is_the_targets_whatever_the_ranking(target, plain, tree):
    """A head with a draft vocabulary and a beta."""
    head = make_head(target, vocabulary=np.arange(1, 16, 2))
    head = dataclasses.replace(head, config=dataclasses.replace(head.config, ranking_beta=2.0))
    done = ej.generate(target, head, PROMPTS, tree=tree, **OPTIONS)
    assert ids(done) == plain
    assert mean_accepted(done) > 0.1


def test_greedy_programs_are_the_same_with_and_without(target, head):
    """What has no noise is not asked for any: not one operation more."""

    def text(common_random_numbers, temperature):
        tree = dataclasses.replace(TREES[0], common_random_numbers=common_random_numbers)
        sampling = ej.SamplingConfig(temperature=temperature)
        job = generation.prepare(target, head, [[1, 2, 3]], max_new_tokens=8, tree=tree, sampling=sampling)
        state = jax.eval_shape(job.empty)
        limit = jax.ShapeDtypeStruct((), jnp.int32)
        return decoding.run_rounds.lower(job.params, state, limit, program=job.program).as_text()

    assert text(True, 0.0) == text(False, 0.0)
    assert text(True, 1.0) != text(False, 1.0)
