"""Drafted text is the target's own, token for token, whatever drafts and whatever the tree."""

import dataclasses

import jax.numpy as jnp
import pytest
from engine_rig import TREE, Copy, Oracle, ids, in_bfloat16, make_head, mean_accepted, random_prompts

import eagle_jax as ej
from eagle_jax.measure import Timed, allowed_gap, differences

PROMPTS = random_prompts(50)
NEW = 64


@pytest.fixture(scope="module")
def plain(target):
    return ids(ej.generate(target, None, PROMPTS, max_new_tokens=NEW))


def test_the_plain_text_wanders(plain):
    """A text that repeats itself would hide most faults."""
    assert sum(len(set(row)) for row in plain) / len(plain) > 6


def test_B1_greedy_is_plain(target, head, plain):
    done = ej.generate(target, head, PROMPTS, max_new_tokens=NEW, tree=TREE)
    assert ids(done) == plain
    assert mean_accepted(done) > 0.5


def test_B1_greedy_is_plain_where_whole_chains_are_accepted(target, plain):
    chain = ej.TreeConfig(kind="chain", nodes=13, depth=12)
    done = ej.generate(target, Oracle(plain), PROMPTS, max_new_tokens=NEW, tree=chain)
    assert ids(done) == plain
    assert all(row.accepted[:-1] == [12] * 4 for row in done)


def test_B1_greedy_is_plain_where_the_target_drafts(target):
    prompts = [[0, *prompt] for prompt in PROMPTS]
    done = ej.generate(target, Copy(), prompts, max_new_tokens=NEW, tree=TREE)
    assert ids(done) == ids(ej.generate(target, None, prompts, max_new_tokens=NEW))
    assert mean_accepted(done) > 2


# A dozen points of depth 1..10 x nodes 1..60, corners included.
GRID = [(1, 2), (1, 60), (2, 1), (2, 17), (3, 33), (4, 52), (5, 9), (6, 60), (7, 26), (8, 40), (10, 2), (10, 60)]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_B2_bfloat16_is_plain_up_to_two_units_in_the_last_place(target, temperature):
    """With weights this large one rounding the other way is far more than in a trained model."""
    target = in_bfloat16(target)
    head = make_head(target)
    seeds = list(range(len(PROMPTS)))
    options = {"max_new_tokens": NEW, "sampling": ej.SamplingConfig(temperature=temperature), "seed": seeds}
    plain, drafted = (ej.generate(target, drafter, PROMPTS, tree=TREE, **options) for drafter in (None, head))
    assert target.dtype == jnp.bfloat16 and mean_accepted(drafted) > 0.5
    differing = []
    for seed, prompt, one, two in zip(seeds, PROMPTS, plain, drafted, strict=True):
        pair = (Timed([done.token_ids], done.accepted, early=1, prefill=0, decoding=0) for done in (one, two))
        differing += differences(target, [prompt], *pair, seed=seed, sampling=options["sampling"])
    assert all(one.excused for one in differing)
    assert len(differing) <= 2


def test_B2_units_in_the_last_place():
    """bfloat16 has 8 bits of precision: between 4 and 8 its numbers are 2**-5 apart."""
    assert allowed_gap(jnp.dtype(jnp.bfloat16), 5.0) == 2 * 2**-5
    assert float(jnp.bfloat16(4 + 2**-5)) == 4 + 2**-5 and float(jnp.bfloat16(4 + 2**-7)) == 4
    assert allowed_gap(jnp.dtype(jnp.float32), 5.0) == 2e-4


QUICK = {(1, 2), (3, 33), (6, 60), (10, 2)}


@pytest.mark.parametrize(
    ("depth", "nodes"),
    [pytest.param(*point, marks=() if point in QUICK else pytest.mark.slow) for point in GRID],
)
def test_B4_the_tree_changes_no_token(target, head, mixed, depth, nodes):
    tree = ej.TreeConfig(nodes=nodes, depth=depth, top_k=8)
    done = ej.generate(target, head, PROMPTS[:8], max_new_tokens=24, sampling=HALF_GREEDY, tree=tree, seed=7)
    assert ids(done) == mixed
    if nodes > 8:
        assert mean_accepted(done) > 0.3


HALF_GREEDY = [ej.SamplingConfig(temperature=float(row % 2)) for row in range(8)]


@pytest.fixture(scope="module")
def mixed(target):
    return ids(ej.generate(target, None, PROMPTS[:8], max_new_tokens=24, sampling=HALF_GREEDY, seed=7))


@pytest.mark.parametrize("top_k", [1, 4])
def test_B5_top_k_changes_no_token(target, head, top_k):
    """One prompt is longer than a chunk of the prefill."""
    prompts = random_prompts(3, lengths=(2, 40, 600), seed=5)
    target = dataclasses.replace(target, config=dataclasses.replace(target.config, max_position_embeddings=1024))
    plain = ids(ej.generate(target, None, prompts, max_new_tokens=24))
    done = ej.generate(target, head, prompts, max_new_tokens=24, tree=ej.TreeConfig(nodes=20, depth=3, top_k=top_k))
    assert ids(done) == plain
    assert sum(sum(row.accepted) for row in done) > 0


@pytest.mark.parametrize("kind", ["dynamic", "chain"])
def test_K1_one_drafted_token_changes_no_token(target, head, plain, kind):
    tree = ej.TreeConfig(kind=kind, nodes=2, depth=1, top_k=1)
    done = ej.generate(target, head, PROMPTS, max_new_tokens=NEW, tree=tree)
    assert ids(done) == plain
    assert {n for row in done for n in row.accepted} == {0, 1}


def test_a_static_tree_changes_no_token(target, head, plain):
    done = ej.generate(target, head, PROMPTS, max_new_tokens=NEW, tree=ej.TreeConfig(kind="static"))
    assert ids(done) == plain
    assert {n for row in done for n in row.accepted} >= {0, 1, 2}


@pytest.mark.parametrize(
    "inputs",
    ["feature+token", *(pytest.param(inputs, marks=pytest.mark.slow) for inputs in ("token", "feature"))],
)
def test_a_head_that_reads_less_changes_no_token(target, mixed, inputs):
    tree = ej.TreeConfig(nodes=20, depth=3, top_k=6)
    options = {"max_new_tokens": 24, "sampling": HALF_GREEDY, "tree": tree, "seed": 7}
    done = ej.generate(target, make_head(target, inputs=inputs), PROMPTS[:8], **options)
    assert ids(done) == mixed
    assert mean_accepted(done) > 0.2
