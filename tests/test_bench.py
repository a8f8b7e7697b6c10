"""Measuring: what is counted, what is timed, and what is written about it."""

import csv
import dataclasses
import functools
import importlib.util
import json
import math
import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_rig import full_logits, make_head, make_medusa, make_target, random_prompts
from flax import nnx
from rig import tiny_config, word_tokenizer

import eagle_jax as ej
from eagle_jax import data, datastore, figures, measure, peers, report
from eagle_jax.config import RopeScaling
from eagle_jax.target import features_of

ROOT = Path(__file__).parent.parent
# One tree, one batch size and one bucket of prompt lengths for all tests, so that little is compiled.
TREE = ej.TreeConfig(kind="chain", nodes=4, depth=3)
SMALL_TREE = ("--methods", "chain", "--tree.nodes", "4", "--tree.depth", "3")


class Clock:
    """Seconds as the test says."""

    def __init__(self, step=1.0):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


class Fake:
    """A way that takes the seconds it is told to: a first call for a length of prompt takes 100 more."""

    same_text, drafting = True, ""

    def __init__(self, ids, decoding, accepted=(), early=1, log=None):
        self.ids, self.decoding, self.accepted, self.early, self.log = ids, decoding, list(accepted), early, log
        self.seen = set()

    def shape(self, prompts):
        return len(prompts[0])

    def __call__(self, prompts):
        if self.log is not None:
            self.log.append(self)
        compiling = 0 if len(prompts[0]) in self.seen else 100
        self.seen.add(len(prompts[0]))
        return measure.Timed([self.ids], self.accepted, self.early, 0.5 + compiling, self.decoding)


def no_difference(prompts, plain, other):
    return [] if plain.ids == other.ids else [measure.Difference(0, 0, 1.0, 2e-4)]


def turns(ways, prompts, **options):
    warm, samples = set(), []
    for group, prompt in enumerate(prompts):
        samples += measure.take_turns(ways, [prompt], group=group, warm=warm, judge=no_difference, **options)
    plain = [sample for sample in samples if sample.way == "plain"]
    return {way: figures.figures([one for one in samples if one.way == way], plain) for way in ways}


def test_P2_both_sides_count_ids_alike_and_leave_compilation_out():
    ids = list(range(9))
    plain, drafted = Fake(ids, 4.0, [0] * 8), Fake(ids, 2.0, [1] * 4)
    found = turns({"plain": plain, "drafted": drafted}, [[1, 2], [3, 4], [5]])
    for one in found.values():
        assert (one.texts, one.tokens, one.identical) == (3, 27, 3)
        assert one.compiling_seconds == 200  # two lengths of prompts
        assert one.prefill_seconds == 1.5
    # 8 ids come after the prefill's; compilation and prefill are in neither speed.
    assert found["plain"].tokens_per_second == 8 / 4 and found["drafted"].tokens_per_second == 8 / 2
    assert found["drafted"].tokens_per_second_with_prefill == 9 / 2.5
    assert (found["drafted"].ratio, found["plain"].ratio) == (2, 1)
    assert (found["drafted"].tau, found["plain"].tau) == (2, 1)


def test_P2_ids_that_come_with_the_prefill_are_no_decoding():
    ids = list(range(9))
    found = turns({"plain": Fake(ids, 4.0), "early": Fake(ids, 2.0, early=5)}, [[1]])
    assert found["early"].tokens_per_second == 4 / 2
    assert found["early"].ratio == 1


def test_P2_a_real_way_reads_the_clock_around_prefill_and_decoding_only(target, head):
    prompt = [1, 2, 3]
    plain = measure.Decoding(target=target, drafter=None, max_new_tokens=12, clock=Clock())
    drafted = dataclasses.replace(plain, drafter=head, tree=TREE)
    for way in (plain, drafted):
        timed = way([prompt])
        assert (timed.prefill, timed.decoding, timed.early, timed.tokens) == (1, 1, 1, 12)
        done = ej.generate(target, way.drafter, prompt, max_new_tokens=12, tree=TREE)
        assert (timed.ids, timed.accepted, figures.tau(timed.accepted)) == ([done.token_ids], done.accepted, done.tau)
    assert measure.time_rounds(drafted, prompt, 3) == (1, 3)


def test_a_shape_is_what_compiles(target, head):
    plain = measure.Decoding(target=target, drafter=None, max_new_tokens=12)
    short, longer = [[1] * 4], [[1] * 5]
    assert plain.shape(short) == plain.shape(longer) != plain.shape([[1] * 40])
    assert plain.shape(short) != dataclasses.replace(plain, drafter=head).shape(short)
    assert plain.shape(short) != dataclasses.replace(plain, sampling=ej.SamplingConfig(temperature=1)).shape(short)


def test_ways_take_turns_in_every_place():
    log = []
    ways = {name: Fake([1, 2], 1.0, log=log) for name in ("plain", "a", "b")}
    turns(ways, [[1]] * 3, repeats=2)
    names = {id(way): name for name, way in ways.items()}
    order = [names[id(way)] for way in log][3:]  # after the first calls
    assert sorted(tuple(order[i : i + 3]) for i in range(0, 18, 3)) == sorted(
        2 * [("plain", "a", "b"), ("a", "b", "plain"), ("b", "plain", "a")]
    )


def test_a_ratio_is_of_sums_and_its_spread_over_prompts():
    def sample(way, group, ids, seconds):
        return measure.Sample(way, group, measure.Timed([list(range(ids))], [], 1, 1.0, seconds), 0.0, [])

    plain = [sample("plain", group, 11, 10.0) for group in range(2)] + [sample("plain", 2, 1, 0.1)]
    drafted = [sample("a", 0, 11, 2.0), sample("a", 1, 11, 6.0), sample("a", 2, 1, 9.0)]
    found = figures.figures(drafted, plain)
    assert found.ratio == pytest.approx(20 / 8)  # the text of a single id has no decoding
    assert (found.ratio_min, found.ratio_max) == pytest.approx((10 / 6, 5))
    assert found.ratio_min <= found.ratio_low <= found.ratio <= found.ratio_high <= found.ratio_max
    assert math.isnan(figures.figures(drafted[2:], plain[2:]).ratio)


def test_acceptance_by_position():
    accepted = [0, 1, 3, 2]
    assert figures.acceptance(accepted, 4) == [0.75, 0.5, 0.25, 0]
    timed = measure.Timed([[1] * 10], accepted, 1, 1.0, 1.0)
    found = figures.figures([measure.Sample("a", 0, timed, 0.0, None)], [measure.Sample("plain", 0, timed, 0.0, [])])
    assert found.accepted_at_level == [0.75, 0.5, 0.25]
    assert found.accepted_given_previous == pytest.approx([0.75, 2 / 3, 1 / 2])
    assert found.tau == 2.5
    assert found.identical is None


def test_a_difference_is_found_with_its_gap(target):
    prompt, sampling = [1, 2, 3], ej.SamplingConfig(temperature=1.0)
    way = measure.Decoding(target=target, drafter=None, sampling=sampling, seed=5, max_new_tokens=8)
    plain = way([prompt])
    wrong = [*plain.ids[0][:4], (plain.ids[0][4] + 1) % 16, *plain.ids[0][5:]]
    judge = lambda ids: measure.differences(target, [prompt], plain, ids, seed=5, sampling=sampling)  # noqa: E731
    assert judge(plain) == []
    ((row, place, gap, _),) = judge(plain._replace(ids=[wrong]))
    assert (row, place) == (0, 4) and 0 < gap < math.inf
    assert judge(plain._replace(ids=[plain.ids[0][:4]]))[0].gap == math.inf


def test_repeats_are_of_one_text():
    """Under "same text" each counts once, and differs if it does in any repeat."""
    timed = measure.Timed([[1, 2, 3], [4, 5, 6]], [1], 2, 1.0, 1.0)
    excused, unexcused, equal = [measure.Difference(1, 0, 1e-5, 2e-4)], [measure.Difference(1, 0, 0.5, 2e-4)], []
    plain = [measure.Sample("plain", group, timed, 0.0, []) for group in (0, 0, 1, 1)]

    def of(*differences):
        return figures.figures(
            [measure.Sample("a", i // 2, timed, 0.0, one) for i, one in enumerate(differences)], plain
        )

    found = of(equal, equal, equal, equal)
    assert (found.texts, found.identical, found.excused, found.gaps, found.tokens) == (4, 4, 0, [], 24)
    found = of(excused, excused, unexcused, excused)
    assert (found.texts, found.identical, found.excused, found.gaps) == (4, 2, 1, [1e-5, 0.5])
    assert of(equal, excused, equal, equal).identical == 3


def test_values_are_plain_decodings_own_past_a_dynamic_window():
    """A prompt came in whole, later tokens each by itself: with other angles the best value is another token's."""
    scaling = RopeScaling(rope_type="dynamic", factor=4.0)
    target = make_target(max_position_embeddings=32, rope_scaling=scaling)
    prompt, sampling = random_prompts(1, [70])[0], ej.SamplingConfig()
    text = measure.Decoding(target=target, drafter=None, max_new_tokens=24)([prompt]).ids[0]
    for place in (0, 11, 23):
        values = measure.values_after(target, prompt, text[:place], 0, sampling)
        assert int(values.argmax()) == text[place]
    by_themselves = features_of(*nnx.split(target.model), jax.numpy.asarray([[*prompt, *text[:-1]]]))
    told = target.model.logits(by_themselves)[0, len(prompt) - 1 :].argmax(axis=-1).tolist()
    assert [told[place] == text[place] for place in (0, 11, 23)] != [True] * 3


def test_a_machine_is_named_by_its_processors_model(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel\t\t: 85\nmodel name\t: A Processor (R) 3\n")
    assert measure.processor(tmp_path / "cpuinfo") == "A Processor (R) 3"
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    (tmp_path / "other").write_text("CPU implementer : 0x41\n")
    assert measure.processor(tmp_path / "other") == measure.processor(tmp_path / "none") == "aarch64"
    assert measure.processor() in measure.machine()


# --- Questions --------------------------------------------------------------------------------------------------------


def test_questions_in_either_form(tmp_path):
    path = tmp_path / "questions.jsonl"
    chat = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    path.write_text('{"question_id": 1, "turns": ["a", "b"]}\n\n' + json.dumps({"messages": chat}) + "\n{broken\n")
    assert data.read_questions(path, 2) == [[{"role": "user", "content": "a"}], chat[:2]]
    with pytest.raises(ValueError, match="line 4 is not of the form"):
        data.read_questions(path)


@pytest.mark.parametrize("line", [b"{", b'{"turn": "a"}', b'{"turns": []}', b'{"turns": "a"}', b"[1]", b"1", b"\xff"])
def test_a_malformed_question_is_named(tmp_path, line):
    (tmp_path / "questions.jsonl").write_bytes(b'{"turns": ["a"]}\n' + line)
    with pytest.raises(ValueError, match="line 2 is not of the form"):
        data.read_questions(tmp_path / "questions.jsonl")


def test_no_question_is_an_error(tmp_path):
    (tmp_path / "questions.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no question"):
        data.read_questions(tmp_path / "questions.jsonl")


# --- The scripts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Runs a script on a tiny target with an untrained head; gives what it wrote."""
    target = dataclasses.replace(make_target(), tokenizer=word_tokenizer())
    monkeypatch.setattr(ej, "load_head", lambda *_, **__: make_head(target))
    for name in ("one", "two"):
        turns = [["a b c"], ["d e"], ["f"]]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"turns": turn}) + "\n" for turn in turns))

    def run(name, *arguments, target=target, loaded=None):
        def load_target(_, **options):
            if loaded is not None:
                loaded.update(options)
            return target

        monkeypatch.setattr(ej, "load_target", load_target)
        prompts = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
        output = tmp_path / "out"
        given = [f"{name}.py", "--prompts", *prompts, "--output", str(output), "--max-new-tokens", "8", *arguments]
        monkeypatch.setattr(sys, "argv", given)
        runpy.run_path(str(ROOT / f"decode/{name}.py"), run_name="__main__")
        return output

    return run


@pytest.fixture
def bench(script):
    return functools.partial(script, "bench")


def of_script(name):
    """Options that make a script draft as the other tests of this file do."""
    return SMALL_TREE if name == "bench" else ("--tree.kind", "chain", *SMALL_TREE[2:])


@pytest.mark.parametrize("name", ["bench", "compare"])
def test_all_prompts_are_checked_before_any_is_decoded(script, name, tmp_path, monkeypatch, capsys):
    def decode(*_):
        raise AssertionError("decoded before all prompts were checked")

    long = json.dumps({"turns": ["a " * 600]})
    (tmp_path / "two.jsonl").write_text(f'{{"turns": ["a"]}}\n{long}\n')
    monkeypatch.setattr(measure.Decoding, "__call__", decode)
    with pytest.raises(SystemExit) as caught:
        script(name, *of_script(name))
    expected = "two.jsonl, prompt 2: The prompt has 603 tokens, but the limit is 512"
    assert expected in str(caught.value.code) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["bench", "compare"])
def test_a_target_without_a_chat_template_is_for_plain_text(script, name, monkeypatch):
    without = dataclasses.replace(make_target(), tokenizer=word_tokenizer(template=None))
    with pytest.raises(SystemExit) as caught:
        script(name, *of_script(name), target=without)
    said = "error: The target random has no chat template; add --raw to decode prompts as plain text."
    assert caught.value.code == said
    with pytest.raises(SystemExit, match="The target random has no tokenizer"):
        script(name, *of_script(name), target=make_target())

    decoded, loaded, call = [], {}, measure.Decoding.__call__
    monkeypatch.setattr(
        measure.Decoding, "__call__", lambda way, prompts: decoded.append(prompts) or call(way, prompts)
    )
    script(name, "--raw", "--limit", "1", "--dtype", "float32", *of_script(name), target=without, loaded=loaded)
    assert all(prompts == [[4, 5, 6]] for prompts in decoded) and decoded  # "a b c", nothing around it
    assert loaded == {"dtype": "float32"}


def test_plain_text_of_a_chat_is_a_paragraph_a_message(target):
    reading = dataclasses.replace(target, tokenizer=word_tokenizer(template=None))
    chat = [{"role": "system", "content": "a b"}, {"role": "user", "content": "c"}]
    assert measure.encode_questions(reading, Path("chats.jsonl"), [chat], raw=True) == [[4, 5, 6]]


def test_bench_measures_medusa(bench, tmp_path):
    ej.save_head(make_medusa(make_target()), tmp_path / "medusa", dtype=jnp.float32)
    output = bench("--methods", "medusa", "--medusa", str(tmp_path / "medusa"), "--limit", "1", "--temperatures", "1")
    rows = json.loads((output / "bench.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["plain", "medusa"] * 2
    assert all(row["identical"] == row["texts"] == 1 for row in rows)
    assert {row["drafting"] for row in rows} == {"", "static, 62 nodes, depth 3"}


def test_bench_writes_what_it_measured(bench, capsys):
    output = bench("--limit", "2", "--temperatures", "0", "1", "--seed", "3", *SMALL_TREE)
    record = json.loads((output / "bench.json").read_text())
    assert record["complete"]
    settings = record["settings"]
    assert (settings["seed"], settings["top_p"], settings["max_new_tokens"]) == (3, 1.0, 8)
    assert settings["dtype"] == "float32" and "jax" in settings["machine"]
    rows = record["rows"]
    assert [(row["file"], row["temperature"], row["method"]) for row in rows] == [
        (file, temperature, method)
        for file in ("one.jsonl", "two.jsonl")
        for temperature in (0.0, 1.0)
        for method in ("plain", "chain")
    ]
    for row in rows:
        assert (row["texts"], row["identical"], row["tokens"]) == (2, 2, 16)
        assert row["method"] != "plain" or (row["tau"], row["ratio"], row["drafting"]) == (1, 1, "")
    assert {row["drafting"] for row in rows if row["method"] == "chain"} == {"chain, 4 nodes, depth 3"}
    assert len(record["samples"]) == len(rows) * 2
    with open(output / "bench.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["tau"]) for line in lines] == [row["tau"] for row in rows]
    assert all(line["seed"] == "3" and line["dtype"] == "float32" for line in lines)
    if importlib.util.find_spec("matplotlib"):
        assert (output / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "mean over files, temperature 1" in capsys.readouterr().out


def test_bench_runs_methods_that_have_no_head(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(ej, "load_head", None)
    documents = random_prompts(9, vocab=13)
    datastore.build_datastore(tmp_path / "store", documents, target="t", vocab_size=16, tokenizer=word_tokenizer())
    sizes = {"lookahead.window": 2, "lookahead.levels": 2, "lookahead.guesses": 2, "lookup.matches": 2}
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    methods = ("--methods", "lookup", "rest", "lookahead", "--datastore", str(tmp_path / "store"))
    output = bench("--limit", "1", "--tree.nodes", "5", "--tree.depth", "2", *methods, *options)
    record = json.loads((output / "bench.json").read_text())
    assert [row["method"] for row in record["rows"][:4]] == ["plain", "lookup", "rest", "lookahead"]
    assert all((row["texts"], row["identical"]) == (1, 1) for row in record["rows"])
    assert all(row["draft_seconds"] > 0 and row["forwards_seconds"] is None for row in record["rows"])
    drafting = [row["drafting"] for row in record["rows"][1:4]]
    assert drafting == ["5 nodes, depth 2", "5 nodes, depth 2", "9 nodes, depth 3"]  # of their own kind
    assert record["settings"]["lookup"] == "PromptLookup(max_ngram=3, min_ngram=1, matches=2)"
    assert record["settings"]["rest"] == str(tmp_path / "store")


def test_bench_keeps_what_was_measured_before_ctrl_c(bench, monkeypatch, tmp_path):
    calls = []

    def take_turns(*arguments, **options):
        calls.append(options["group"])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    original = measure.take_turns
    monkeypatch.setattr(measure, "take_turns", take_turns)
    with pytest.raises(SystemExit) as caught:
        bench(*SMALL_TREE)
    assert caught.value.code == 130
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert not record["complete"]
    assert [row["texts"] for row in record["rows"]] == [2, 2]
    assert not list(tmp_path.glob("out/*.partial"))


def test_bench_times_the_parts_of_a_round(bench, capsys):
    record = json.loads((bench("--limit", "1", *SMALL_TREE) / "bench.json").read_text())
    for row in record["rows"]:
        assert row["draft_seconds"] > 0 and row["verify_seconds"] > 0
        assert (row["forwards_seconds"] is None) == (row["method"] == "plain")
    assert all(len(one["rounds"][0]["verifying"]) > 0 for one in record["round_times"])
    assert "forwards" in capsys.readouterr().out


def test_bench_makes_first_calls_anew_for_programs_it_forgot(bench, monkeypatch):
    """Else compiling would be timed as decoding. Here the memory map is always too full."""
    forgotten, shapes, clear = [], [], jax.clear_caches
    monkeypatch.setattr(measure, "MANY_MAPPINGS", 0)
    monkeypatch.setattr(jax, "clear_caches", lambda: [forgotten.append(1), clear()])
    take_turns = measure.take_turns

    def watched(*arguments, warm, **options):
        shapes.append(len(warm))
        return take_turns(*arguments, warm=warm, **options)

    monkeypatch.setattr(measure, "take_turns", watched)
    bench("--limit", "2", "--rounds-timed", "0", *SMALL_TREE)
    assert len(forgotten) == len(shapes) == 4  # two prompts of two files
    assert not any(shapes)


def test_mappings_are_counted_where_the_system_tells(tmp_path):
    maps = tmp_path / "maps"
    assert not measure.crowded(maps)
    maps.write_text("7f00-7f01 r-xp\n" * (measure.MANY_MAPPINGS + 1))
    assert measure.crowded(maps)


def test_a_plot_says_what_to_install(bench, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    output = bench("--limit", "1", *SMALL_TREE)
    assert 'pip install "eagle_jax[plots]"' in capsys.readouterr().out.replace("\n", " ")
    assert json.loads((output / "bench.json").read_text())["complete"]


def test_numbers_that_are_none_become_null(tmp_path):
    report.write_json(tmp_path / "a.json", {"tau": math.nan, "gaps": [math.inf, 1.0]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"tau": None, "gaps": [None, 1.0]}


# --- The peer ---------------------------------------------------------------------------------------------------------

LLAMA3 = RopeScaling(rope_type="llama3", factor=4.0, original_max_position_embeddings=16)
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
FAMILIES = {
    "Llama": {"attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3},
    "Mistral": {"sliding_window": 5, "head_dim": 10, "rope_theta": 500.0},
    "Qwen2": {"attention_bias": True, "attention_output_bias": False, "tie_word_embeddings": True},
    "Qwen3": {"qk_norm": True, "sliding_window": 5, "layer_types": ("full_attention", "sliding_attention")},
    "Mixtral": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "yarn": {"rope_scaling": YARN},
}


def wandering(target):
    """Biases and norms of a fresh target are zeros and ones; with other numbers none can be forgotten."""
    graphdef, params = nnx.split(target.model)
    leaves, structure = jax.tree.flatten(params)
    random = np.random.default_rng(0)
    changed = [leaf + 0.3 * random.normal(size=leaf.shape).astype(leaf.dtype) for leaf in leaves]
    return dataclasses.replace(target, model=nnx.merge(graphdef, jax.tree.unflatten(structure, changed)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_peer_has_the_targets_weights(family):
    torch = pytest.importorskip("torch")
    config = tiny_config(max_position_embeddings=64, **FAMILIES[family])
    target = wandering(ej.Target.random(config))
    model = peers.torch_model(target)
    assert type(model).__name__ == family.replace("yarn", "Llama") + "ForCausalLM"
    tokens = np.random.default_rng(1).integers(0, 16, (2, 24))
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(full_logits(target, tokens), logits, rtol=0, atol=1e-4)


def test_no_peer_for_a_mixture_that_transformers_lacks():
    with pytest.raises(ValueError, match="no class for this target's mixture"):
        peers.peer_config(tiny_config(qk_norm=True, mlp_bias=True))
    with pytest.raises(ValueError, match="no class for this target's mixture"):
        peers.peer_config(tiny_config(qk_norm=True, num_local_experts=4, num_experts_per_tok=2))
    with pytest.raises(ValueError, match="rope type is 'factors'"):
        peers.peer_config(tiny_config(rope_scaling=RopeScaling(rope_type="factors", factors=(2.0,) * 8)))


def test_a_peer_says_what_to_install(monkeypatch, target):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="which is not installed; pip install"):
        peers.torch_model(target)


@pytest.mark.slow
@pytest.mark.parametrize("lookup", [False, True])
def test_a_peers_greedy_text_is_plain_decodings(lookup):
    pytest.importorskip("torch")
    target = make_target(eos=(7,))
    shared = {"target": target, "max_new_tokens": 24, "clock": Clock()}
    plain = measure.Decoding(drafter=None, **shared)
    peer = peers.TransformersDecoding(model=peers.torch_model(target), lookup=lookup, **shared)
    prompts = random_prompts(6)
    lengths = set()
    for prompt in prompts:
        timed, wanted = peer([prompt]), plain([prompt])
        assert timed.ids == wanted.ids
        lengths.add(timed.tokens)
        # What came with the prefill and what came in each round are all there is.
        assert timed.early + sum(timed.accepted) + len(timed.accepted) == timed.tokens
        assert timed.prefill == 2 and timed.decoding == len(timed.accepted) + 1  # one reading an arrival
    assert len(lengths) > 1 and max(lengths) == 24  # some end by themselves
    assert peer.same_text


def test_a_peers_text_ends_where_a_stretched_context_does():
    pytest.importorskip("torch")
    scaling = dataclasses.replace(YARN, original_max_position_embeddings=None)
    target = make_target(max_position_embeddings=32, rope_scaling=scaling)
    shared = {"target": target, "max_new_tokens": 200}
    peer = peers.TransformersDecoding(model=peers.torch_model(target), **shared)
    (prompt,) = random_prompts(1, [20])
    timed, wanted = peer([prompt]), measure.Decoding(drafter=None, **shared)([prompt])
    assert timed.tokens == wanted.tokens == 4 * 32 - 20
    assert timed.ids == wanted.ids


def run_alone(code, **environment):
    """Runs Python code in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    here = kept | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=here, check=True)


def test_importing_the_library_loads_neither_pytorch_nor_transformers():
    modules = "eagle_jax, eagle_jax.peers, eagle_jax.report, eagle_jax.viz"
    done = run_alone(f"import sys, {modules}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))")
    assert done.stdout.strip() == "[]"


def test_pytorchs_threads_sleep_while_they_wait():
    pytest.importorskip("torch")
    done = run_alone(
        "from eagle_jax import peers; peers.require_torch(); import transformers.modeling_utils; print(peers.about())",
        OMP_DISPLAY_ENV="VERBOSE",
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this PyTorch's OpenMP is not GNU's")
    assert "GOMP_SPINCOUNT = '0'" in done.stderr
    assert "OMP_WAIT_POLICY PASSIVE" in done.stdout


def test_a_peer_claims_nothing_that_came_too_late():
    pytest.importorskip("torch")
    code = "import torch; from eagle_jax import peers; peers.require_torch(); print(peers.about())"
    assert "OMP_WAIT_POLICY not set" in run_alone(code).stdout


def test_a_peer_samples_by_seed():
    pytest.importorskip("torch")
    target = make_target()
    sampling = ej.SamplingConfig(temperature=1.0, top_p=0.9, top_k=8, min_p=0.01, repetition_penalty=1.1)
    peer = peers.TransformersDecoding(
        target=target, model=peers.torch_model(target), sampling=sampling, seed=3, max_new_tokens=12
    )
    assert not peer.same_text
    first, again = peer([[1, 2, 3]]), peer([[1, 2, 3]])
    assert first.ids == again.ids != dataclasses.replace(peer, seed=4)([[1, 2, 3]]).ids


def test_bench_runs_a_peer_beside(bench):
    pytest.importorskip("torch")
    output = bench("--limit", "1", "--peer", "transformers", *SMALL_TREE)
    record = json.loads((output / "bench.json").read_text())
    assert "torch" in record["settings"]["peer"]
    methods = [row["method"] for row in record["rows"] if row["file"] == "one.jsonl"]
    assert methods == ["plain", "chain", "transformers", "prompt lookup"]
    assert all(row["identical"] == 1 for row in record["rows"])


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the system does not tell what a process holds")
def test_resident_memory_falls_where_peak_memory_stays():
    before = measure.resident_memory()
    held = np.ones(2**27, np.uint8)
    during, peak = measure.resident_memory(), measure.peak_memory()
    assert during - before > 0.9 * held.nbytes
    del held
    assert measure.resident_memory() - before < 2**26
    assert measure.peak_memory() > 0.95 * peak > 0.9 * during  # the system counts by thread, not to the page


@pytest.mark.slow
def test_bench_step_compares_the_two_steps(tmp_path):
    pytest.importorskip("torch")
    sizes = ["--widths", "64", "--vocab-size", "512", "--rows", "2", "--length", "16", "--steps", "1"]
    command = [sys.executable, str(ROOT / "train/bench_step.py"), *sizes, "--output", str(tmp_path / "out.json")]
    subprocess.run(command, check=True, stdout=subprocess.PIPE)
    (record,) = json.loads((tmp_path / "out.json").read_text())["records"]
    losses = record["first_loss"]
    np.testing.assert_allclose(losses["eagle_jax"], losses["torch"], rtol=1e-5)
    for memory in record["megabytes"].values():
        assert memory["peak"] > memory["before_first_step"] > 0
        assert memory["above"] == pytest.approx(memory["peak"] - memory["before_first_step"])


@pytest.mark.slow
def test_bench_measures_draft_models(bench):
    """The target drafts for itself, then its first layer does; drawn text is held against no other."""
    arguments = ("--draft-model", "small", "--first-layers", "1", *SMALL_TREE[2:])
    output = bench("--limit", "1", "--temperatures", "0", "1", "--methods", "speculative", "first-layers", *arguments)
    record = json.loads((output / "bench.json").read_text())
    assert (record["settings"]["draft_model"], record["settings"]["first_layers"]) == ("small", 1)
    rows = {(row["method"], row["temperature"]): row for row in record["rows"] if row["file"] == "one.jsonl"}
    for name in ("speculative", "first-layers"):
        assert (rows[name, 0.0]["identical"], rows[name, 1.0]["identical"]) == (1, None)
        assert rows[name, 0.0]["drafting"] == "chain, 4 nodes, depth 3, sampled"
    assert rows["speculative", 0.0]["tau"] > 3 and rows["speculative", 1.0]["tau"] > 3
