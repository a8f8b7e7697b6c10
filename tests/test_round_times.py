"""A round cut into its parts: what is timed, and that the forwards timed alone are the drafter's own."""

import jax.numpy as jnp
import numpy as np
from engine_rig import random_prompts
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
    return measure.Decoding(target=target, drafter=drafter, tree=TREE, max_new_tokens=16, clock=Clock(), **options)


def test_the_parts_of_each_round_are_timed_apart(target, head):
    times = round_times.time_rounds(way(target, head), PROMPTS, 2)
    assert times == round_times.RoundTimes([1, 1], [1, 1], [1, 1])
    assert round_times.time_rounds(way(target, ej.PromptLookup()), PROMPTS, 2) == ([1, 1], [1, 1], [])


def test_texts_that_end_early_have_fewer_rounds(target):
    """16 tokens: one from the prefill, and two rounds that only compile."""
    times = round_times.time_rounds(way(target, None), PROMPTS, 100)
    assert len(times.verifying) == 16 - 1 - 2


def test_forwards_alone_are_those_that_drafting_makes(target, head):
    job = way(target, head).job(PROMPTS)
    state = job.start()
    given_ = job.params.drafter, state, state.draft, None
    calls = round_times._calls(*given_, program=job.program)
    # The root's, then one a level that has another below it.
    assert [list(call) for call in calls] == [["run"], ["logits"]] * TREE.depth
    results = round_times._forwards(job.params.drafter, calls, program=job.program)
    tree, _ = decoding.propose(job.params.drafter, state, program=job.program)
    best = jnp.argmax(results[1], axis=-1)  # [B] of the root's children
    vocabulary = head.ends.vocabulary
    best = best if vocabulary is None else vocabulary[best]
    assert np.array_equal(best, tree.tokens[:, 1])


def test_a_median_of_all_groups():
    groups = [round_times.RoundTimes([1.0, 9.0], [3.0], []), round_times.RoundTimes([2.0], [5.0], [])]
    found = figures.round_figures(groups)
    assert (found.draft_seconds, found.verify_seconds, found.forwards_seconds) == (2, 4, None)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 200), st.integers(0, 2**32 - 1))
def test_the_best_of_many_values_by_groups(rows, k, more, seed):
    """Few values, so that many are equal: the first of them count, as in a stable sort."""
    width = 2 * k * numerics.GROUP - numerics.GROUP + 1 + more
    values = np.random.default_rng(seed).integers(-3, 4, (rows, 2, width)).astype(np.float32)
    values[values == 3] = -np.inf
    best, index = numerics.top_k(jnp.asarray(values), k)
    order = np.argsort(-values, axis=-1, kind="stable")[..., :k]
    assert np.array_equal(index, order)
    assert np.array_equal(best, np.take_along_axis(values, order, axis=-1))
