"""What a head is worth: counts by hand, drafters that are always right, and agreement with `generate`."""

import dataclasses
import json
import math
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from engine_rig import Copy, Letters, Oracle, compilations, make_head, random_prompts
from flax import nnx
from test_training import batch_of

import eagle_jax as ej
from eagle_jax import data, evaluation, figures, training
from eagle_jax.evaluation import CHAIN

ROOT = Path(__file__).parent.parent
TREE = ej.TreeConfig(nodes=9, depth=3, top_k=3)
PROMPTS = random_prompts(5, seed=3)


def test_chain_acceptance_by_hand():
    """Rounds of a chain of 3 that accept 0, 1, 1, 3: the second place is reached by three of them, and taken by one."""
    found = evaluation.chain_acceptance([0, 1, 1, 3], places=3)
    assert [(place.reached, place.accepted) for place in found] == [(4, 3), (3, 1), (1, 1)]
    assert [place.alpha for place in found] == [3 / 4, 1 / 3, 1]
    assert [place.predicted for place in found] == [0, 1, 2]
    assert math.isnan(evaluation.chain_acceptance([0, 0], places=2)[1].alpha)


def test_calibration_by_hand():
    confidence = np.asarray([0.0, 0.05, 0.55, 0.59, 1.0], np.float32)
    taken = np.asarray([False, True, True, False, True])
    bins = evaluation.calibration(confidence, taken)
    assert [one.nodes for one in bins] == [2, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    assert (bins[0].low, bins[5].high, bins[-1].high) == (0, 0.6, 1)
    assert (bins[0].accepted, bins[5].accepted, bins[-1].accepted) == (0.5, 0.5, 1)
    np.testing.assert_allclose([bins[0].confidence, bins[5].confidence], [0.025, 0.57], rtol=1e-6)
    assert math.isnan(bins[1].confidence) and math.isnan(bins[1].accepted)
    wanted = (2 * (0.5 - 0.025) + 2 * (0.57 - 0.5) + 0) / 5
    np.testing.assert_allclose(evaluation.calibration_error(bins), wanted, rtol=1e-6)
    none = evaluation.calibration(confidence[:0], taken[:0])
    assert math.isnan(evaluation.calibration_error(none))


def test_a_drafter_that_knows_the_text_has_alphas_of_one(target):
    plain = ej.generate(target, None, PROMPTS, max_new_tokens=40)
    # A chain that is right in every place; its confidence is 1 throughout.
    knows = Oracle([done.token_ids + [0] * 8 for done in plain])
    rounds = evaluation.watch_rounds(target, knows, PROMPTS, tree=CHAIN, max_new_tokens=33)
    assert set(rounds.accepted) == {5} and rounds.taken.all() and (rounds.confidence == 1).all()
    assert [place.alpha for place in evaluation.chain_acceptance(rounds.accepted)] == [1.0] * 5
    assert evaluation.calibration_error(evaluation.calibration(rounds.confidence, rounds.taken)) == 0


def test_rounds_are_those_of_generate(target, head):
    """Rows of unequal lengths: each round counts once, and of its tree's nodes as many are taken as were accepted."""
    options = {"tree": TREE, "sampling": ej.SamplingConfig(temperature=1.0), "max_new_tokens": 24}
    done = ej.generate(target, head, PROMPTS, seed=[4] * len(PROMPTS), **options)
    found = evaluation.watch_rounds(target, head, PROMPTS, seed=4, **options)
    assert sorted(found.accepted) == sorted(count for one in done for count in one.accepted)
    assert len(found.taken) == len(found.confidence) == len(found.accepted) * (TREE.nodes - 1)
    assert found.taken.sum() == sum(found.accepted) > 0
    assert found.confidence.min() >= 0 and found.confidence.max() <= 1


def test_batches_add_up_to_one_evaluation(target, head):
    options = {"tree": CHAIN, "max_new_tokens": 24}
    found = evaluation.evaluate(target, head, PROMPTS[:4], batch=2, **options)
    parts = [evaluation.watch_rounds(target, head, PROMPTS[i : i + 2], **options) for i in (0, 2)]
    accepted = [count for part in parts for count in part.accepted]
    assert (found.prompts, found.rounds) == (4, len(accepted))
    assert found.tau == found.chain_tau == figures.tau(accepted)
    assert found.chain == evaluation.chain_acceptance(accepted)
    assert found.accepted_at_level == figures.acceptance(accepted, max(accepted))
    assert sum(one.nodes for one in found.calibration) == 5 * len(accepted)


def test_confidence_that_is_the_targets_own_is_calibrated(target):
    """Drafted by the target itself and sampled: a path is gone as often as its probability says."""
    prompts = [[0, *prompt] for prompt in random_prompts(16, seed=8)]
    sampling = ej.SamplingConfig(temperature=1.0)
    # A ranking that knows the noise would know the outcome.
    tree = ej.TreeConfig(nodes=13, depth=2, top_k=3, common_random_numbers=False)
    rounds = evaluation.watch_rounds(target, Copy(), prompts, tree=tree, sampling=sampling, max_new_tokens=96)
    bins = evaluation.calibration(rounds.confidence, rounds.taken)
    for one in bins:
        if one.nodes:
            spread = math.sqrt(max(one.confidence * (1 - one.confidence), 1e-3) / one.nodes)
            assert abs(one.confidence - one.accepted) < 5 * spread + 1e-3, one


def test_live_tau_is_compiled_once_for_a_run(target, head):
    tree = ej.TreeConfig(nodes=7, depth=2, top_k=2)
    _, other = (make_head(target, sharpness) for sharpness in (3.0, 5.0))
    params, others = nnx.state(head.model), nnx.state(other.model)
    first = evaluation.live_tau(target, head, params, PROMPTS, tree, max_new_tokens=20)
    with compilations() as compiled:
        second = evaluation.live_tau(target, head, others, PROMPTS, tree, max_new_tokens=20)
        again = evaluation.live_tau(target, head, params, PROMPTS, tree, max_new_tokens=20)
    assert compiled == []
    assert first == again and first != second
    done = ej.generate(target, head, PROMPTS, tree=tree, max_new_tokens=20)
    accepted = [count for one in done for count in one.accepted]
    shares = figures.acceptance(accepted, 2)
    assert first == {"tau": figures.tau(accepted), "accepted_1": shares[0], "accepted_2": shares[1]}


def test_accuracy_is_that_of_the_training_step(target, head):
    batch = batch_of(target, rows=3, length=12)
    rows = [data.Row(np.asarray(t), np.asarray(a)) for t, a in zip(batch.tokens, batch.assistant, strict=True)]
    graphdef, params = nnx.split(head.model)
    [sums] = jax.device_get(training.evaluate_step(params, head.ends, batch, graphdef=graphdef))
    found = evaluation.accuracy(target, head, rows, tokens_per_batch=128)
    count = float(sums.count)
    assert found == pytest.approx({"top1": float(sums.top1) / count, "top3": float(sums.top3) / count, "pairs": count})


@pytest.fixture
def script(target, head, tmp_path, monkeypatch):
    """Runs train/evaluate.py on a small target that talks."""
    talking = dataclasses.replace(target, tokenizer=Letters())
    monkeypatch.setattr(ej, "load_target", lambda *_, **__: talking)
    monkeypatch.setattr(ej, "load_head", lambda *_, **__: head)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["abc", "d"]}\n{"turns": ["ef"]}\n')

    def run(*arguments):
        given = ["--head", "a head", "--prompts", tmp_path / "prompts.jsonl", *arguments]
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, given)])
        runpy.run_path(str(ROOT / "train/evaluate.py"), run_name="__main__")

    return run


def test_the_script_writes_what_it_shows(script, tmp_path, capsys):
    # The chain's own tree, so that little is compiled.
    small = ["--tree.kind", "chain", "--tree.nodes", "6", "--tree.depth", "5", "--raw", "--max-new-tokens", "24"]
    script(*small, "--output", tmp_path / "new" / "figures.json")
    shown = capsys.readouterr().out
    assert "4-alpha" in shown and "calibration error" in shown and "temperature 1" in shown
    found = json.loads((tmp_path / "new" / "figures.json").read_text())
    greedy, sampled = found["files"]
    assert (greedy["temperature"], sampled["temperature"]) == (0, 1)
    assert greedy["prompts"] == 2 and [place["predicted"] for place in greedy["chain"]] == [0, 1, 2, 3, 4]
    assert {"alpha", "reached", "accepted"} <= greedy["chain"][0].keys()
    assert f"{greedy['tau']:.2f}" in shown and found["settings"]["tree"]["nodes"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "limit is 0"),
        (["--batch", "0"], "batch is 0"),
        (["--data", "nowhere.jsonl"], "There is no file 'nowhere.jsonl'"),
        (["--temperatures", "-1"], "temperature is -1.0"),
        (["--tree.nodes", "1"], "tree.nodes is 1"),
    ],
)
def test_the_script_refuses(script, arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        script(*arguments)
    assert caught.value.code != 0
    assert message in capsys.readouterr().err + str(caught.value.code)


def test_the_script_overwrites_nothing(script, tmp_path, capsys):
    (tmp_path / "figures.json").write_text("{}")
    with pytest.raises(SystemExit) as caught:
        script("--output", tmp_path / "figures.json")
    assert "is there already" in capsys.readouterr().err + str(caught.value.code)
