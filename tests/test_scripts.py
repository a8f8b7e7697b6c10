"""Bad input to a script: one sentence, a non-zero exit, and nothing loaded before the options are checked."""

import dataclasses
import importlib.util
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from engine_rig import Letters, make_target
from rig import tiny_config, tiny_target, word_tokenizer

import eagle_jax as ej
from eagle_jax import data, features, loading, script, sharding
from eagle_jax.pool import RowPool

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
        (
            ["--temperature", "0.5", "--tree.kind", "chain", "--tree.children", "sampled"],
            "temperature is 0.5 and tree.children 'sampled'",
        ),
    ],
)
def test_compare_refuses(refusal, tmp_path, arguments, message):
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["a"]}\n')
    assert message in refusal("decode/compare.py", "--prompts", tmp_path / "prompts.jsonl", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "nowhere.jsonl"], "There is no file of prompts 'nowhere.jsonl'"),
        (["--methods", "dynamic", "eager"], "There is no method 'eager'; known methods: dynamic, "),
        (["--methods", "medusa"], "give their directory with --medusa"),
        (["--methods", "rest"], "give its directory with --datastore"),
        (["--temperatures", "0", "-1"], "temperature is -1.0"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--limit", "0"], "limit is 0"),
        (["--repeats", "0"], "repeats is 0"),
        (["--max-new-tokens", "1"], "max_new_tokens is 1"),
        (["--tree.nodes", "0"], "TreeConfig.nodes is 0"),
        (["--methods", "speculative"], "name it with --draft-model"),
        (["--batch", "2", "--peer", "transformers"], "batch is 2; a peer decodes 1 prompt at a time"),
        (["--methods", "static", "--tree.choices", "0.1"], "TreeConfig.choices holds (0, 1) without its parent (0,)"),
        (["--methods", "dynamic", "chain", "--tree.choices", "0"], "none of dynamic, chain drafts one"),
        (["--tree.kind", "chain"], "tree.kind"),  # it is the method's
    ],
)
def test_bench_refuses(refusal, tmp_path, arguments, message):
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["a"]}\n')
    assert message in refusal("decode/bench.py", "--prompts", tmp_path / "prompts.jsonl", *arguments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trees:
    tree: ej.TreeConfig = ej.TreeConfig()


def test_paths_of_a_tree_are_given_with_dots(monkeypatch, capsys):
    def options(*arguments):
        monkeypatch.setattr(sys, "argv", ["script", *arguments])
        found = []
        script.run(found.append, Trees, None)
        return found[0].tree

    choices = ((0,), (1,), (0, 0), (0, 2), (0, 0, 12))
    given = options("--tree.kind", "static", "--tree.choices", "0", "1", "0.0", "0.2", "0.0.12")
    assert given == ej.TreeConfig(kind="static", choices=choices)
    assert options() == ej.TreeConfig()
    with pytest.raises(SystemExit):
        options("--tree.kind", "static", "--tree.choices", "0,1")
    assert "0,1" in capsys.readouterr().err


def test_training_says_what_to_install(refusal, monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "grain" else found(name, *rest)
    )
    said = refusal("train/train_head.py", "--data", tmp_path / "chats.jsonl", "--output", tmp_path / "head")
    assert 'pip install "eagle_jax[train]"' in said


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
        ([], "There are 1 conversations, of which 1 would be held out"),
        (["--online", "--features", "kept"], "but --online keeps none"),
        (
            ["--start", "last-layer", "--head-key-value-heads", "3"],
            "head_key_value_heads is 3, but the head begins as last",
        ),
        (["--mesh.tensor", "3"], "tensor 3"),
        (["--medusa-heads", "0"], "medusa_heads is 0"),
        (["--kind", "medusa", "--inputs", "token"], "inputs is 'token', which is for --kind eagle"),
        (["--kind", "medusa", "--start", "last-layer"], "start is 'last-layer', which is for --kind eagle"),
        (["--kind", "medusa", "--recipe.unroll", "2"], "unroll is 2, which is for --kind eagle"),
        (["--kind", "medusa", "--recipe.noise", "0.5"], "noise is 0.5, which is for --kind eagle"),
        (["--kind", "medusa", "--head-key-value-heads", "2"], "head_key_value_heads is 2, which is for --kind eagle"),
        (
            ["--kind", "medusa", "--tree.kind", "chain", "--tree.children", "sampled"],
            "tree.children is 'sampled', which is for --kind eagle",
        ),
    ],
)
def test_train_head_refuses(refusal, tmp_path, arguments, message):
    (tmp_path / "chats.jsonl").write_text(CHATS)
    paths = ["--data", tmp_path / "chats.jsonl", "--output", tmp_path / "out"]
    assert message in refusal("train/train_head.py", *paths, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-length", "0"], "max_length is 0"),
        (["--shard-tokens", "0"], "shard_tokens is 0"),
        (["--tokens-per-batch", "-1"], "tokens_per_batch is -1"),
        (["--process-index", "2", "--process-count", "2"], "process_index is 2; it must be below process_count, 2"),
        (["--data", "none*.jsonl"], "No file matches 'none*.jsonl'"),
        (["--data"], "Give at least one file"),
    ],
)
def test_make_features_refuses(refusal, tmp_path, arguments, message):
    (tmp_path / "chats.jsonl").write_text(CHATS)
    paths = ["--data", tmp_path / "chats.jsonl", "--output", tmp_path / "out"]
    assert message in refusal("train/make_features.py", *paths, *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "limit is 0"),
        (["--begin", "-1"], "begin is -1"),
        (["--max-length", "0"], "max_length is 0"),
        (["--begin", "1"], "begin is 1, but 1 conversations are kept"),
        (["--max-length", "3"], "None of 1 conversations is left to train on: 1 without an answer's beginning"),
    ],
)
def test_inspect_data_refuses(refusal, tmp_path, monkeypatch, arguments, message):
    (tmp_path / "chats.jsonl").write_text(CHATS)
    monkeypatch.setattr(loading, "describe_target", describe)
    assert message in refusal("train/inspect_data.py", "--data", tmp_path / "chats.jsonl", *arguments)


def describe(_name):
    return loading.Description(tiny_config(), word_tokenizer())


def test_inspect_data_shows_what_carries_loss(tmp_path, monkeypatch, capsys):
    chats = [[("system", "a"), ("user", "b"), ("assistant", "c d"), ("user", "e"), ("assistant", "f")], [("user", "a")]]
    lines = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in chats]
    (tmp_path / "some chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(loading, "describe_target", describe)
    monkeypatch.setattr(sys, "argv", ["inspect_data.py", "--data", str(tmp_path / "some *.jsonl")])
    script = runpy.run_path(str(ROOT / "train/inspect_data.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "<system> a </s> <user> b </s> <assistant> c d </s>" in said
    assert "1 conversations kept, 1 dropped; 1 without a turn of the assistant's" in said
    row = data.encode(word_tokenizer(), lines[0]["messages"])
    text = script["coloured"](word_tokenizer(), row)
    shown = [(text.plain[span.start : span.end].split(), span.style) for span in text.spans]
    loss, first, given = (script[name] for name in ("LOSS", "FIRST", "GIVEN"))
    assert shown == [
        (["<system>", "a", "</s>", "<user>", "b", "</s>", "<assistant>"], given),
        (["c"], first),
        (["d", "</s>"], loss),
        (["<user>", "e", "</s>", "<assistant>"], given),
        (["f"], first),
        (["</s>"], loss),
    ]


def test_make_features_says_what_it_will_take_and_makes_it(tmp_path, monkeypatch, capsys):
    """First a dry run, which leaves nothing, then the half that is another process's, then the whole."""
    lines = [CHATS.replace('"b"', f'"{"b c d " * count}"') for count in range(1, 9)]
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    target, output = dataclasses.replace(tiny_target(), tokenizer=word_tokenizer()), tmp_path / "the features"

    def run(*arguments, load):
        paths = ["--data", tmp_path / "chats.jsonl", "--output", output, "--shard-tokens", 48]
        monkeypatch.setattr(sys, "argv", ["make_features.py", *map(str, [*paths, *arguments])])
        monkeypatch.setattr(loading, "load_target", load)
        monkeypatch.setattr(loading, "describe_target", describe)
        runpy.run_path(str(ROOT / "train/make_features.py"), run_name="__main__")
        return capsys.readouterr()

    said = run("--dry-run", load=lambda *_: pytest.fail("loaded a model for a dry run")).out
    assert "148 tokens of 64 numbers in float16: 18.9 kB in 3 shards, of which 18.9 kB in 3 are to be made here" in said
    assert not output.exists()
    said = run("--process-index", 1, "--process-count", 2, load=lambda *_: target)
    assert "in 1 are to be made here" in said.out and "1 of 3 shards are whole" in said.err
    said = run(load=lambda *_: target)
    assert "in 2 are to be made here" in said.out and "3 of 3 shards are whole" in said.err
    assert "minutes left" in said.err
    rows = data.encode_all(target.tokenizer, data.read_conversations(tmp_path / "chats.jsonl"), 512).rows
    kept = features.load_or_make(output, target, rows, progress=lambda *_: pytest.fail("made twice"))
    assert len(kept) == 8


def test_train_head_overwrites_no_head(refusal, tmp_path):
    (tmp_path / "chats.jsonl").write_text(CHATS)
    (tmp_path / "model.safetensors").write_bytes(b"a head")
    said = refusal("train/train_head.py", "--data", tmp_path / "chats.jsonl", "--output", tmp_path)
    assert "model.safetensors is there already" in said
    assert (tmp_path / "model.safetensors").read_bytes() == b"a head"


@pytest.mark.slow
def test_R7_train_head_leaves_a_head_that_decodes(smollm2, tmp_path, monkeypatch, capsys):
    """The whole script, small: conversations in, a directory out that decodes as it is, and is gone on with."""
    lines = [CHATS.replace('"b"', f'"{word} {word} {word}"') for word in ["one", "two", "three", "four", "five", "six"]]
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: smollm2)

    def train(output, *more):
        arguments = [
            "--data",
            tmp_path / "chats.jsonl",
            "--output",
            output,
            "--draft-vocabulary",
            64,
            "--held-out",
            0.2,
        ]
        arguments += [
            "--tokens-per-batch",
            128,
            "--evaluate-every",
            3,
            "--recipe.steps",
            4,
            "--recipe.optimizer",
            "muon",
        ]
        arguments += ["--log-every", 1, "--tau-prompts", 1, "--tau-tokens", 6, *more]
        monkeypatch.setattr(sys, "argv", ["train_head.py", *map(str, arguments)])
        runpy.run_path(str(ROOT / "train/train_head.py"), run_name="__main__")
        return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]

    output = tmp_path / "a head"
    records = train(output)
    head = ej.load_head(output, smollm2)
    assert head.ends.lm_head.shape[0] <= 64 and np.all(np.diff(head.ends.vocabulary) > 0)
    done = ej.generate(smollm2, head, "one two", max_new_tokens=4, tree=ej.TreeConfig(kind="chain", nodes=3, depth=2))
    assert len(done.token_ids) == 4
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert {"held_out_top1", "tau"} <= records[2].keys() and "tau" not in records[1]
    assert train(output) == records  # nothing is left to do
    # Features kept in float16 and features made in the step teach the same.
    online = train(tmp_path / "online", "--online")
    np.testing.assert_allclose(*([r["loss"] for r in run] for run in (records, online)), rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [("--inputs", "feature"), ("--kind", "medusa", "--medusa-heads", 2)], ids=["feature", "medusa"]
)
def test_R7_train_head_trains_other_heads(tmp_path, monkeypatch, capsys, kind):
    """The whole script on a tiny target: what it leaves says what it is, decodes, is gone on with and begun from."""
    target = dataclasses.replace(make_target(vocab_size=13), tokenizer=word_tokenizer())
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: target)
    lines = [CHATS.replace('"b"', f'"{letter} b {letter} c d e"') for letter in "abcdefgh"]
    (tmp_path / "chats.jsonl").write_text("".join(lines))

    def train(output, *more):
        options = ["--data", tmp_path / "chats.jsonl", "--output", output, "--held-out", 0.2, "--draft-vocabulary", 8]
        options += ["--tokens-per-batch", 128, "--evaluate-every", 4, "--recipe.steps", 8, "--log-every", 1]
        options += [
            "--recipe.optimizer",
            "muon",
            "--tau-prompts",
            1,
            "--tau-tokens",
            6,
            "--tree.nodes",
            6,
            *kind,
            *more,
        ]
        monkeypatch.setattr(sys, "argv", ["train_head.py", *map(str, options)])
        runpy.run_path(str(ROOT / "train/train_head.py"), run_name="__main__")
        return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]

    records = train(tmp_path / "run")
    head = ej.load_head(tmp_path / "run", target)
    medusa = "--kind" in kind
    assert isinstance(head, ej.Medusa if medusa else ej.Head)
    assert head.config.medusa_num_heads == 2 if medusa else head.config.inputs == "feature"
    assert ("held_out_top1_2" in records[3]) == ("top1_2" in records[0]) == medusa and "tau" in records[3]
    assert records[-1]["cross_entropy"] < records[0]["cross_entropy"]
    plain, done = (ej.generate(target, drafter, "a b", max_new_tokens=8).token_ids for drafter in (None, head))
    assert plain == done
    assert train(tmp_path / "run") == records  # nothing is left to do
    again = train(tmp_path / "again", "--start", tmp_path / "run")
    assert again[0]["cross_entropy"] < records[0]["cross_entropy"]
    other = ["--kind", "eagle"] if medusa else ["--inputs", "token"]
    with pytest.raises(SystemExit, match=r"but the head in .* has"):
        train(tmp_path / "other", "--start", tmp_path / "run", *other)


@pytest.mark.slow
def test_train_head_goes_on_on_another_mesh_and_from_a_step_with_fewer_options(tmp_path, monkeypatch, capsys):
    """Its batches stay those that the run was begun with; with other conversations it does not go on."""
    target = dataclasses.replace(make_target(vocab_size=13), tokenizer=word_tokenizer())
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: target)
    chats = tmp_path / "chats.jsonl"
    lines = [CHATS.replace('"b"', f'"{letter} b {letter} c d e"') for letter in "abcdefgh" * 3]
    chats.write_text("".join(lines))

    def train(*more):
        options = ["--data", chats, "--output", tmp_path / "run", "--online", "--draft-vocabulary", 0]
        options += ["--tokens-per-batch", 320, "--recipe.steps", 6, "--recipe.accumulate", 1, "--tau-prompts", 0]
        options += ["--log-every", 1, "--save-every", 2, "--evaluate-every", 6, "--tree.nodes", 6, *more]
        monkeypatch.setattr(sys, "argv", ["train_head.py", *map(str, options)])
        runpy.run_path(str(ROOT / "train/train_head.py"), run_name="__main__")
        return [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]

    with monkeypatch.context() as four:
        four.setattr(sharding, "row_multiple", lambda mesh: 4)  # 4 rows a batch, where one device would take 5
        records = train()
    shutil.rmtree(tmp_path / "run/steps/6")
    about = tmp_path / "run/steps/4/about/metadata"
    content = json.loads(about.read_text())
    assert content["config"].pop("kind") == "eagle" and content["config"]["recipe"].pop("later_weight") == 1
    about.write_text(json.dumps(content))
    assert train() == records
    shutil.rmtree(tmp_path / "run/steps/6")
    chats.write_text("".join(lines[1:]))
    with pytest.raises(SystemExit, match=r"conversations is '23, and 1 held out, .* there and '22, and 1 held out"):
        train()


# --- Synthesis --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give --prompts, --from-nothing or both"),
        (["--from-nothing", "-1"], "Give --prompts, --from-nothing or both"),
        (["--prompts", "nowhere.jsonl"], "There is no file 'nowhere.jsonl'"),
        (["--from-nothing", "1", "--exclude", "nowhere.jsonl"], "There is no file 'nowhere.jsonl'"),
        (["--from-nothing", "1", "--rows", "0"], "rows is 0"),
        (["--from-nothing", "1", "--rounds", "0"], "rounds is 0"),
        (["--from-nothing", "1", "--limit", "0"], "limit is 0"),
        (["--from-nothing", "1", "--temperatures", "-1"], "temperature is -1.0"),
        (["--from-nothing", "1", "--weights", "1"], "There are 1 weights for 3 temperatures"),
        (["--from-nothing", "1", "--turns", "0"], "turns is 0"),
        (["--from-nothing", "1", "--tree.nodes", "0"], "TreeConfig.nodes is 0"),
        (["--from-nothing", "1", "--output", "chats"], "give it the ending .jsonl"),
    ],
)
def test_synthesize_refuses(refusal, tmp_path, arguments, message):
    assert message in refusal("train/synthesize.py", "--output", tmp_path / "chats.jsonl", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_synthesize_names_a_malformed_line(refusal, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"turn": "a"}\n')
    paths = ["--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path / "chats.jsonl"]
    assert "line 2 is of none of the forms" in refusal("train/synthesize.py", *paths)


def test_synthesize_touches_no_file_that_is_not_its_own(refusal, tmp_path):
    (tmp_path / "chats.jsonl").write_text(CHATS)
    said = refusal("train/synthesize.py", "--from-nothing", "1", "--output", tmp_path / "chats.jsonl")
    assert "is there already, without chats.options.json" in said
    assert (tmp_path / "chats.jsonl").read_text() == CHATS


@pytest.fixture
def synthesize(tmp_path, monkeypatch, capsys):
    """Runs the script on a tiny target; gives the lines it leaves and what it prints."""
    target = dataclasses.replace(make_target(vocab_size=13, eos=(3,)), tokenizer=word_tokenizer())
    monkeypatch.setattr(ej, "load_target", lambda *_, **__: target)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{letter}"}}\n' for letter in "abcdefgh"))

    def run(name, *arguments):
        output = tmp_path / name / "chats.jsonl"
        options = ["--rows", 4, "--max-new-tokens", 12, "--max-length", 48, "--loop-repeats", 0]
        paths = ["--prompts", tmp_path / "prompts.jsonl", "--output", output]
        monkeypatch.setattr(sys, "argv", ["synthesize.py", *map(str, [*paths, *options, *arguments])])
        runpy.run_path(str(ROOT / "train/synthesize.py"), run_name="__main__")
        return output.read_text(), capsys.readouterr().out

    run.said = lambda: capsys.readouterr().out
    return run


def test_synthesize_goes_on_after_an_interruption(synthesize, monkeypatch, tmp_path):
    """Ctrl-C ends it after the rounds it is at; the same command then leaves what an unbroken run leaves."""
    nothing = ["--from-nothing", "12"]
    whole, said = synthesize("whole", *nothing)
    records = [json.loads(line) for line in whole.splitlines()]
    assert f"{len(records)} conversations; dropped: " in said and "tokens/s" in said
    assert {"id", "messages", "temperature", "finished", "source", "seed"} == records[0].keys()
    assert {record["source"] for record in records} == {"prompt", "nothing"}
    assert len({json.dumps(record["messages"]) for record in records}) == len(records)

    step = RowPool.step
    steps = iter(range(4))

    def interrupted(pool):
        if next(steps, None) == 3:
            signal.raise_signal(signal.SIGINT)
        return step(pool)

    monkeypatch.setattr(RowPool, "step", interrupted)
    with pytest.raises(SystemExit) as caught:
        synthesize("broken", *nothing)
    assert caught.value.code == 130 and "the same command goes on from here" in synthesize.said()
    left = (tmp_path / "broken" / "chats.jsonl").read_text().splitlines()
    assert 0 < len(left) < len(records)
    assert synthesize("broken", *nothing, "--rows", "3")[0] == whole


def test_synthesize_may_be_asked_for_more(synthesize):
    """More prompts and more from nothing are added to those that are there; other options are refused."""
    whole, _ = synthesize("whole", "--from-nothing", "6")
    few, _ = synthesize("few", "--from-nothing", "3", "--limit", "4")
    assert 0 < len(few) < len(whole)
    assert synthesize("few", "--from-nothing", "6")[0] == whole
    with pytest.raises(SystemExit) as caught:
        synthesize("few", "--from-nothing", "6", "--turns", "2")
    assert "was made with turns 1, not 2" in str(caught.value.code)


def test_synthesize_keeps_evaluation_texts_out(synthesize, tmp_path):
    whole, _ = synthesize("whole")
    said = json.loads(whole.splitlines()[0])["messages"][1]["content"]
    (tmp_path / "questions.jsonl").write_text(json.dumps({"turns": [said.upper()]}) + "\n")
    rest, report = synthesize("rest", "--exclude", str(tmp_path / "questions.jsonl"))
    assert rest.splitlines() == whole.splitlines()[1:] and "1 overlap" in report


@pytest.mark.slow
def test_synthesize_killed_and_run_again_leaves_what_an_unbroken_run_leaves(smollm2, tmp_path):
    """With the embedded model, whatever was half written."""
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Name a {thing}."}) + "\n" for thing in ("colour", "fruit", "river", "city"))
    )
    options = ["--prompts", tmp_path / "prompts.jsonl", "--from-nothing", 8, "--rows", 4, "--rounds", 4]
    options += ["--max-new-tokens", 40, "--max-length", 128, "--output"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def command(name):
        return [sys.executable, *map(str, [ROOT / "train/synthesize.py", *options, tmp_path / name / "chats.jsonl"])]

    subprocess.run(command("whole"), check=True, capture_output=True, env=environment)
    broken, kills = tmp_path / "broken" / "chats.jsonl", 0
    for wanted in (1, 4):
        process = subprocess.Popen(command("broken"), stderr=subprocess.DEVNULL, env=environment)
        while process.poll() is None:
            if broken.exists() and broken.read_bytes().count(b"\n") >= wanted:
                process.kill()
                kills += process.wait() == -signal.SIGKILL
            time.sleep(0.01)
        with open(broken, "a") as file:
            file.write('{"id": "nothing-')
    subprocess.run(command("broken"), check=True, capture_output=True, env=environment)
    assert kills == 2
    assert broken.read_text() == (tmp_path / "whole" / "chats.jsonl").read_text()
    for line in broken.read_text().splitlines():
        record = json.loads(line)
        given = record["source"] == "prompt"
        done = ej.generate(
            smollm2,
            None,
            [record["messages"][:1]],
            seed=[record["seed"] + 1 - given],
            sampling=ej.SamplingConfig(temperature=record["temperature"]),
            max_new_tokens=40,
        )[0]
        assert record["messages"][1]["content"] == done.text.strip()
