"""The fitted beta is the one that makes the target's choices likeliest, by a slow count in NumPy."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_rig import Letters, ids, make_head, random_prompts, softmax
from flax import nnx

import eagle_jax as ej
from eagle_jax import layers, ranking_fit, sampling
from eagle_jax.target import features_of

ROOT = Path(__file__).parent.parent
SCRIPT = str(ROOT / "train/fit_beta.py")
# One set of shapes for the library and for the script.
TREE = ej.TreeConfig(kind="chain", nodes=4, depth=3, top_k=2)
VOCABULARY = np.arange(0, 16, 2)
BETAS = (0.5, 1.0, 3.0)
NEW = 12


@pytest.fixture(scope="module")
def head(target):
    return make_head(target, vocabulary=VOCABULARY)


def slow_likelihood(values, choice, beta, children):
    """Of one node, from f64[W] and the choice's row, or None; and whether the choice was among the children."""
    probabilities = softmax(beta * values)
    best = np.argsort(-values, kind="stable")[:children]
    if choice in best:
        return np.log(probabilities[choice]), True
    return np.log(max(np.delete(probabilities, best).sum(), ranking_fit.LEAST)), False


WIDTH = 40


def predictor(head):
    """The head's features [P, E] from the shifted tokens' embeddings and features [P, E], compiled once."""

    @jax.jit
    def run(embeddings, inputs):
        pairs = jnp.arange(WIDTH - 1)[None]
        return head.model(embeddings[None], inputs[None], pairs, layers.causal_mask(WIDTH - 1))[0][0]

    return run


def slow_nodes(target, head, run, text, prompt_length, seed, temperature):
    """(log-likelihood of each beta, hit) of every node that the target came to: chains of the head's own guesses."""
    [key] = sampling.row_keys([seed], 1)
    size = len(text)
    tokens = jnp.asarray([text + [0] * (WIDTH - size)])
    truth = np.asarray(features_of(*nnx.split(target.model), tokens))[0]
    embeddings = head.ends.embedding[tokens[0, 1:]]
    for start in range(prompt_length - 1, size - 2):
        inputs = np.zeros((WIDTH - 1, truth.shape[-1]), np.float32)
        inputs[: start + 1] = truth[: start + 1]
        for pair in range(start, min(start + TREE.depth, size - 2)):
            predicted = run(embeddings, inputs)[pair]
            logits = np.asarray(head.ends.lm_head @ predicted, np.float64)
            noise = np.asarray(jax.random.gumbel(jax.random.fold_in(key, pair + 2), (16,)))[VOCABULARY]
            values = logits + temperature * noise
            choice = text[pair + 2] // 2 if text[pair + 2] % 2 == 0 else None
            found = [slow_likelihood(values, choice, beta, TREE.top_k) for beta in BETAS]
            yield [one for one, _ in found], found[0][1]
            if not found[0][1]:
                break
            inputs[pair + 1] = predicted


def test_the_fit_is_numpys(target, head):
    """Unequal prompts, two groups, a draft vocabulary that lacks half of what the target says."""
    prompts, temperature = random_prompts(4, lengths=(3, 1, 6), seed=2), 0.7
    options = {"max_new_tokens": NEW, "sampling": ej.SamplingConfig(temperature=temperature), "tree": TREE}
    run, wanted = predictor(head), []
    for seed in (5, 7):
        group = prompts[seed - 5 : seed - 3]
        texts = ids(ej.generate(target, head, group, seed=[seed, seed + 1], **options))
        for row, (prompt, text) in enumerate(zip(group, texts, strict=True)):
            wanted += slow_nodes(target, head, run, prompt + text, len(prompt), seed + row, temperature)
    found = ranking_fit.fit_beta(
        target, head, prompts, tree=TREE, temperature=temperature, betas=BETAS, seed=5, max_new_tokens=NEW, batch=2
    )
    assert found.nodes == len(wanted) > 4 * (NEW - 1)
    assert found.hits == pytest.approx(np.mean([hit for _, hit in wanted])) and 0.05 < found.hits < 0.95
    np.testing.assert_allclose(found.log_likelihoods, np.mean([of for of, _ in wanted], axis=0), rtol=1e-3)
    assert found.beta == BETAS[int(np.argmax(found.log_likelihoods))]


def test_scores_under_the_fitted_beta_are_shares():
    """A draft that is somewhat off: its best child is taken as often as its score says, which at beta 1 it is not."""
    random = np.random.default_rng(1)
    nodes, vocab, children = 4000, 60, 4
    p = random.normal(size=(nodes, vocab)).astype(np.float32) * 2
    q = p + 0.5 * random.normal(size=p.shape).astype(np.float32)
    noise = random.gumbel(size=p.shape).astype(np.float32)
    choice = np.argmax(p + noise, axis=1)
    config = ej.SamplingConfig(temperature=1.0)
    betas = np.asarray(ranking_fit.BETAS, np.float32)
    likely, hit = ranking_fit.likelihoods(
        jnp.asarray(q)[:, None], jnp.asarray(noise), jnp.asarray(choice), betas, None, config=config, children=children
    )
    for node in range(40):
        for index in (0, 40, 80):
            wanted, inside = slow_likelihood((q + noise)[node], choice[node], betas[index], children)
            np.testing.assert_allclose(likely[node, 0, index], wanted, atol=1e-3)
            assert hit[node, 0] == inside
    best = betas[int(np.argmax(np.asarray(likely)[:, 0].mean(axis=0)))]
    assert betas[0] < best < betas[-1]

    def off(beta):
        scores = softmax(beta * (q + noise)).max(axis=1)
        return abs(scores.mean() - np.mean(np.argmax(q + noise, axis=1) == choice))

    assert off(best) < 0.03 < off(1.0)


def test_no_temperature_no_fit(target, head):
    with pytest.raises(ValueError, match="temperature is 0"):
        ranking_fit.fit_beta(target, head, [[1]], temperature=0.0)


def test_drawn_children_have_no_fit(target, head):
    with pytest.raises(ValueError, match=r"children is 'sampled'.*set it to 'best'"):
        ranking_fit.fit_beta(target, head, [[1]], tree=dataclasses.replace(TREE, children="sampled"))


@pytest.fixture
def script(target, head, tmp_path, monkeypatch):
    """Runs the script on a small target that talks, and a head in a directory."""
    talking = dataclasses.replace(target, tokenizer=Letters())
    monkeypatch.setattr(ej, "load_target", lambda *_, **__: talking)
    ej.save_head(head, tmp_path / "head", dtype=jnp.float32)
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["abc", "d"]}\n{"turns": ["ef"]}\n')

    def run(*arguments):
        given = ["--head", tmp_path / "head", "--prompts", tmp_path / "prompts.jsonl", *arguments]
        monkeypatch.setattr(sys, "argv", ["fit_beta.py", *map(str, given)])
        runpy.run_path(SCRIPT, run_name="__main__")

    return run


SMALL = ["--raw", "--max-new-tokens", str(NEW), "--batch", "2", "--tree.kind", "chain", "--tree.nodes", "4"]
SMALL += ["--tree.depth", "3", "--tree.top-k", "2"]


def test_the_script_keeps_beta_with_the_head(script, target, head, tmp_path, capsys):
    config, weights = tmp_path / "head" / "config.json", tmp_path / "head" / "model.safetensors"
    before, stored = json.loads(config.read_text()), weights.read_bytes()
    script(*SMALL, "--dry-run")
    assert json.loads(config.read_text()) == before and before["ranking_beta"] == 1.0
    script(*SMALL)
    beta = json.loads(config.read_text())["ranking_beta"]
    assert beta in ranking_fit.BETAS and json.loads(config.read_text()) == before | {"ranking_beta": beta}
    assert weights.read_bytes() == stored and len(list((tmp_path / "head").iterdir())) == 2
    assert ej.load_head(tmp_path / "head", target).config == dataclasses.replace(head.config, ranking_beta=beta)
    assert f"beta {beta:.3g} (it was 1)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "0"], "temperature is 0.0"),
        (["--limit", "0"], "limit is 0"),
        (["--head", "smollm2-135m"], "There is no directory 'smollm2-135m' to keep beta in"),
    ],
)
def test_the_script_refuses(script, arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        script(*arguments)
    assert caught.value.code != 0
    assert message in " ".join((capsys.readouterr().err + str(caught.value.code)).split())
