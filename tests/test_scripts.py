"""Bad input to a script: one sentence, a non-zero exit, and nothing loaded before the options are checked."""

import dataclasses
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_rig import Letters

import eagle_jax as ej
from eagle_jax import loading

ROOT = Path(__file__).parent.parent
CHATS = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


@pytest.fixture
def refusal(monkeypatch, capsys):
    """Runs a script that must not get as far as loading a model; gives what it says."""

    def run(script, *arguments, loads=False):
        def load(*_, **__):
            raise AssertionError("loaded a model before the options were checked")

        if not loads:
            for module in (ej, loading):
                monkeypatch.setattr(module, "load_target", load)
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "500")
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        said = capsys.readouterr().err
        code = caught.value.code
        assert code != 0
        return said if isinstance(code, int) else str(code)

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give either a prompt or --chat"),
        (["a", "--chat", "b"], "Give either a prompt or --chat"),
        (["a", "--temperature", "-1"], "temperature is -1.0"),
        (["a", "--top-p", "0"], "top_p is 0.0"),
        (["a", "--max-new-tokens", "-3"], "max_new_tokens is -3"),
        (["a", "--max-length", "0"], "max_length is 0"),
        (["a", "--tree.nodes", "0"], "TreeConfig.nodes is 0"),
        (["a", "--tree.depth", "-2"], "TreeConfig.depth is -2"),
        (["a", "--stop", ""], "stop holds an empty string"),
        (["a", "--system", "b"], "--system is for a --chat"),
    ],
)
def test_generate_refuses(refusal, arguments, message):
    assert message in refusal("decode/generate.py", *arguments)


@pytest.mark.slow
def test_generate_talks_over_a_pipe(smollm2):
    """Two turns, the second one short to prefill, and a third after /reset; the text goes to stdout alone."""
    lines = ["Name a colour.", "Name another one.", "/reset", "", "Name a colour.", "/quit", "never read"]
    command = [sys.executable, ROOT / "decode/generate.py", "--chat", "--system", "Be brief.", "--max-new-tokens", "16"]
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, env=here)
    assert done.returncode == 0, done.stderr
    first, second, third, rest = done.stdout.split("\n\n")
    assert first == third and first != second and rest == ""
    figures = re.findall(r"(\d+) tokens in \d+ rounds, tau .* ended by \w+, (\d+) tokens prefilled", done.stderr)
    assert len(figures) == 3 and all(1 <= int(tokens) <= 16 for tokens, _ in figures)
    prefilled = [int(tokens) for _, tokens in figures]
    assert prefilled[0] == prefilled[2] and prefilled[1] < 16


def test_generate_talks_until_ctrl_d(target, monkeypatch, capsys):
    """Ctrl-C stops an answer only, and a chat that has become too long may be begun anew."""
    talking, lines = dataclasses.replace(target, tokenizer=Letters()), iter(["aaa", "a" * 99, "b", "/reset", "c"])
    interrupted = []

    def say(self, message):
        for chunk in conversation_say(self, message):
            yield chunk
            if message == "b" and len(interrupted) == 0:
                interrupted.append(message)
                raise KeyboardInterrupt

    conversation_say = ej.Conversation.say
    monkeypatch.setattr(ej.Conversation, "say", say)
    monkeypatch.setattr(ej, "load_target", lambda *_, **__: talking)
    monkeypatch.setattr("builtins.input", lambda _: next_line(lines))
    arguments = ["--chat", "--head", "none", "--max-new-tokens", "4", "--max-length", "90"]
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    runpy.run_path(str(ROOT / "decode/generate.py"), run_name="__main__")
    said = capsys.readouterr().err.splitlines()
    assert interrupted == ["b"]
    assert ["error" in line for line in said] == [False, True, False]
    assert "error: The prompt has" in said[1] and "limit is 90" in said[1]


def next_line(lines):
    try:
        return next(lines)
    except StopIteration:
        raise EOFError from None


def test_generate_refuses_an_unknown_target(refusal):
    said = refusal("decode/generate.py", "a", "--target", "nowhere", loads=True)
    known = "give an embedded model (smollm2-135m), a directory, a hub id or a .gguf file."
    assert said == f"error: There is no target 'nowhere': {known}"


def test_generate_refuses_an_unknown_head(refusal, smollm2, monkeypatch):
    monkeypatch.setattr(ej, "load_target", lambda *_, **__: smollm2)
    assert "There is no head 'nowhere'" in refusal("decode/generate.py", "a", "--head", "nowhere", loads=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "limit is 0"),
        (["--batch", "-1"], "batch is -1"),
        (["--max-new-tokens", "1"], "max_new_tokens is 1"),
    ],
)
def test_compare_refuses(refusal, tmp_path, arguments, message):
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["a"]}\n')
    assert message in refusal("decode/compare.py", "--prompts", tmp_path / "prompts.jsonl", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "nowhere.jsonl"], "There is no file of prompts 'nowhere.jsonl'"),
        (["--methods", "dynamic", "eager"], "There is no method 'eager'; known methods: dynamic, static, chain"),
        (["--temperatures", "0", "-1"], "temperature is -1.0"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--limit", "0"], "limit is 0"),
        (["--repeats", "0"], "repeats is 0"),
        (["--max-new-tokens", "1"], "max_new_tokens is 1"),
        (["--tree.nodes", "0"], "TreeConfig.nodes is 0"),
        (["--batch", "2", "--peer", "transformers"], "batch is 2; a peer decodes 1 prompt at a time"),
    ],
)
def test_bench_refuses(refusal, tmp_path, arguments, message):
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["a"]}\n')
    assert message in refusal("decode/bench.py", "--prompts", tmp_path / "prompts.jsonl", *arguments)


def test_bench_overwrites_nothing(refusal, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["a"]}\n')
    (tmp_path / "bench.json").write_text("{}")
    said = refusal("decode/bench.py", "--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path)
    assert "bench.json is there already" in said


def test_bench_shows_its_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--help"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "decode/bench.py"), run_name="__main__")
    assert caught.value.code == 0
    assert "--temperatures" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["compare", "bench"])
@pytest.mark.parametrize("line", ["{", '{"turn": "a"}', '{"turns": []}', "[1]"])
def test_a_malformed_line_is_named(refusal, tmp_path, line, script):
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["a"]}\n' + line + "\n")
    assert "line 2 is not of the form" in refusal(f"decode/{script}.py", "--prompts", tmp_path / "prompts.jsonl")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-length", "-5"], "max_length is -5"),
        (["--tokens-per-batch", "0"], "tokens_per_batch is 0"),
        (["--evaluate-every", "0"], "evaluate_every is 0"),
        (["--draft-vocabulary", "-1"], "draft_vocabulary is -1"),
        (["--held-out", "0"], "held_out is 0.0"),
        (["--recipe.learning-rate", "nan"], "learning_rate is nan"),
        (["--recipe.steps", "0"], "steps is 0"),
        ([], "has 1 conversations, of which 1 would be held out"),
    ],
)
def test_train_head_refuses(refusal, tmp_path, arguments, message):
    (tmp_path / "chats.jsonl").write_text(CHATS)
    paths = ["--data", tmp_path / "chats.jsonl", "--output", tmp_path / "out"]
    assert message in refusal("train/train_head.py", *paths, *arguments)
    assert not (tmp_path / "out").exists()


def test_train_head_overwrites_no_head(refusal, tmp_path):
    (tmp_path / "chats.jsonl").write_text(CHATS)
    (tmp_path / "model.safetensors").write_bytes(b"a head")
    said = refusal("train/train_head.py", "--data", tmp_path / "chats.jsonl", "--output", tmp_path)
    assert "model.safetensors is there already" in said
    assert (tmp_path / "model.safetensors").read_bytes() == b"a head"


def test_train_head_trains_a_head_that_loads(smollm2, tmp_path, monkeypatch, capsys):
    """The whole script, small: conversations in, a directory out that decodes as it is."""
    lines = [CHATS.replace('"b"', f'"{word} {word} {word}"') for word in ["one", "two", "three", "four", "five", "six"]]
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    output = tmp_path / "a head"
    arguments = ["--data", tmp_path / "chats.jsonl", "--output", output, "--draft-vocabulary", 64, "--held-out", 0.2]
    arguments += ["--tokens-per-batch", 128, "--evaluate-every", 3, "--recipe.steps", 4, "--recipe.optimizer", "muon"]
    monkeypatch.setattr(sys, "argv", ["train_head.py", *map(str, arguments)])
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: smollm2)
    runpy.run_path(str(ROOT / "train/train_head.py"), run_name="__main__")
    head = ej.load_head(output, smollm2)
    assert head.ends.lm_head.shape[0] <= 64 and np.all(np.diff(head.ends.vocabulary) > 0)
    assert "held_out_top1" in (output / "log.jsonl").read_text()
