"""The shell script that makes the embedded model's head from nothing: what each part leaves, and what it refuses."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import eagle_jax as ej

SCRIPT = Path(__file__).parent.parent / "train/embedded_on_gpu.sh"
THINGS = ["a colour", "a fruit", "a river", "a city", "an animal", "a tree", "a metal", "a planet", "a month", "a bird"]
QUESTIONS = {"skies.jsonl": "Why is the sky blue?", "moons.jsonl": "How far away is the moon?"}


def run(*arguments):
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["bash", SCRIPT, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_it_is_bash():
    checked = subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--presets", "tiny"], "unknown option --presets; there are --preset, --model, --prompts, --evaluate and"),
        (["tiny"], "unknown option tiny"),
        (["--preset"], "--preset needs a value"),
        (["--output", ""], "--output needs a value"),
        (["--prompts", "--output", "out"], "--prompts needs a value"),
        (["--preset", "h100"], "--preset is h100; it must be h200 or tiny"),
        (["--preset", "tiny", "--output", "out"], "--prompts, --evaluate and --output are needed"),
        (["--prompts", SCRIPT, "--evaluate", f"{SCRIPT} no.jsonl", "--output", "out"], "there is no file no.jsonl"),
        (["--prompts", "no.jsonl", "--evaluate", SCRIPT, "--output", "out"], "there is no file no.jsonl"),
    ],
)
def test_it_refuses_in_one_sentence(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    [said] = done.stderr.splitlines()
    assert said.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_tiny_preset_goes_through_every_part(smollm2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = [f"Name {thing}, and say why." for thing in THINGS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    for name, question in QUESTIONS.items():
        (tmp_path / name).write_text(json.dumps({"turns": [question]}) + "\n")
    files = ["--prompts", "prompts.jsonl", "--evaluate", " ".join(QUESTIONS), "--output", "the output"]
    done = run("--preset", "tiny", *files)
    assert done.returncode == 0, done.stderr
    parts = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    assert parts == ["== writing", "== training", "== evaluating"]

    output = tmp_path / "the output"
    text = (output / "chats.jsonl").read_text()
    chats = [json.loads(line) for line in text.splitlines()]
    assert text.endswith("\n") and len(chats) >= 8
    for chat in chats:
        assert [message["role"] for message in chat["messages"]] == ["user", "assistant"]
    asked = {chat["messages"][0]["content"] for chat in chats if chat["source"] == "prompt"}
    assert asked <= set(prompts)

    records = [json.loads(line) for line in (output / "head/log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 7))
    assert [record["step"] for record in records if "tau" in record] == [2, 4, 6]
    head = ej.load_head(output / "head", smollm2)
    tree = ej.TreeConfig(nodes=8, depth=3, top_k=3)
    drafted, plain = (ej.generate(smollm2, one, "The sky is", max_new_tokens=8, tree=tree) for one in (head, None))
    assert drafted.token_ids == plain.token_ids and drafted.tau >= 1

    figures = json.loads((output / "evaluation.json").read_text())["files"]
    settings = [(one["file"], one["temperature"]) for one in figures]
    assert settings == list(itertools.product(QUESTIONS, (0.0, 1.0)))
    assert all(1 <= one["tau"] <= 4 for one in figures)  # three levels and the bonus token
