"""A round cut into its parts: what is timed, and that the forwards timed alone are the drafter's own."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_rig import Copy, make_medusa, random_prompts
from hypothesis import given
from hypothesis import strategies as st

import eagle_jax as ej
from eagle_jax import decoding, figures, measure, numerics, round_times

TREE = ej.TreeConfig(nodes=5, depth=2, top_k=2)
PROMPTS = random_prompts(2, seed=3)


class Clock:
    """A second later every time it is read."""

    now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


def way(target, drafter, **options):
    options = {"tree": TREE, "max_new_tokens": 16} | options
    return measure.Decoding(target=target, drafter=drafter, clock=Clock(), **options)


def test_the_parts_of_each_round_are_timed_apart(target, head):
    times = round_times.time_parts(way(target, head), PROMPTS, 2)
    assert times == round_times.RoundTimes([1, 1], [1, 1], [1, 1])
    assert round_times.time_parts(way(target, ej.PromptLookup()), PROMPTS, 2) == ([1, 1], [1, 1], [])


@pytest.mark.parametrize("name", ["plain", "head", "drawn", "lookup", "lookahead", "medusa", "copy"])
def test_rounds_cut_in_two_are_decodings(target, head, name):
    """A drafter that is told something else, or not told at all, needs another number of rounds."""
    drafter = {
        "plain": None,
        "lookup": ej.PromptLookup(),
        "lookahead": ej.Lookahead(window=2, levels=2, guesses=2),
        "medusa": make_medusa(target),
        "copy": Copy(),
    }.get(name, head)
    tree = ej.TreeConfig(kind="chain", nodes=3, depth=2, children="sampled") if name == "drawn" else TREE
    warm = ej.SamplingConfig(temperature=1.0)
    one = way(target, drafter, tree=tree, sampling=warm, max_new_tokens=32)
    done = ej.generate(
        target, drafter, PROMPTS, tree=tree, sampling=warm, max_new_tokens=32, seed=[one.seed] * len(PROMPTS)
    )
    assert len(round_times.time_parts(one, PROMPTS, 100).verifying) + 2 == max(row.rounds for row in done)


def test_forwards_alone_are_those_that_drafting_makes(target, head):
    job = way(target, head).job(PROMPTS)
    state = job.start()
    calls = round_times._calls(job.params.drafter, state, state.draft, None, program=job.program)
    # The root's, then one a level that has another below it.
    assert [list(call) for call in calls] == [["run"], ["logits"]] * TREE.depth
    cache = [leaf for leaf in jax.tree.leaves(calls) if leaf.shape == state.draft.cache.keys[0].shape]
    assert len(cache) == 2  # keys and values, once
    results = round_times._forwards(job.params.drafter, calls, program=job.program)
    tree, _ = decoding.propose(job.params.drafter, state, program=job.program)
    root, inner = (jax.nn.log_softmax(results[place]) for place in (1, 3))  # [B, W], [B, K, W]
    best, _ = jax.lax.top_k(root, TREE.top_k)
    paths = (best[:, :, None] + jax.lax.top_k(inner, TREE.top_k)[0]).reshape(len(PROMPTS), -1)
    # The pool's best, of both levels, are the tree's.
    pool = jnp.sort(jnp.concatenate([best, paths], axis=1), axis=1)[:, ::-1]
    assert np.allclose(np.sort(tree.log_scores[:, 1:])[:, ::-1], pool[:, : TREE.nodes - 1], atol=1e-5)


def test_medusas_forwards_are_of_the_heads_that_have_a_level(target):
    job = way(target, make_medusa(target, heads=4), tree=ej.TreeConfig(kind="chain", nodes=3, depth=2)).job(PROMPTS)
    state = job.start()
    [call] = round_times._calls(job.params.drafter, state, state.draft, None, program=job.program)
    [logits] = round_times._forwards(job.params.drafter, [call], program=job.program)
    assert logits.shape[1] == 2


@dataclasses.dataclass(frozen=True)
class Echo:
    """A program and its drafter in one."""

    @property
    def drafter(self):
        return self

    def run(self, params, array):
        return array


def test_each_forward_waits_for_the_one_before():
    """A result that is no number shows in the next call."""
    calls = [{"run": (jnp.asarray([math.nan]),)}, {"run": (jnp.asarray([1.0]),)}, {"run": (jnp.asarray([1.0]),)}]
    _, second, third = round_times._forwards((), calls, program=Echo())
    assert (second.item(), third.item()) == (2, 1)


def test_a_median_of_all_groups():
    groups = [round_times.RoundTimes([1.0, 9.0], [3.0, 5.0], [1.0, 3.0]), round_times.RoundTimes([2.0], [7.0], [1.0])]
    found = figures.round_figures(groups)
    assert (found.draft_seconds, found.verify_seconds, found.forwards_seconds) == (2, 5, 1)
    assert found.draft_over_forwards == 2  # of 1, 3 and 2: pairs of one round
    assert dataclasses.asdict(figures.round_figures([])) == dict.fromkeys(dataclasses.asdict(found))


@given(st.sampled_from([(1, 129), (3, 400), (5, 640)]), st.integers(0, 2**32 - 1))
def test_the_best_of_many_values_by_groups(size, seed):
    """Few values, so that many are equal: the first of them count, as in a stable sort."""
    k, width = size
    assert width > numerics.GROUP * (2 * k - 1)  # enough for groups
    values = np.random.default_rng(seed).integers(-3, 4, (2, 2, width)).astype(np.float32)
    values[values == 3] = -np.inf
    best, index = jax.jit(numerics.top_k, static_argnums=1)(values, k)
    order = np.argsort(-values, axis=-1, kind="stable")[..., :k]
    assert np.array_equal(index, order)
    assert np.array_equal(best, np.take_along_axis(values, order, axis=-1))


def test_the_best_none_of_many_values():
    best, index = numerics.top_k(jnp.ones((2, 3)), 0)
    assert best.shape == index.shape == (2, 0)
