"""Runs that end in the middle: what is kept, what is gone on with, and what is refused."""

import dataclasses
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from engine_rig import Letters
from flax import nnx
from test_processes import run as run_process
from training_run import Plan, Stopped, batch_of, last_state, open_run, parts, same, train

import eagle_jax as ej
from eagle_jax import runs, training, watching

ROOT = Path(__file__).parent.parent
SMALL = Plan(size=32)


@pytest.fixture(scope="module")
def small():
    """A target, its head, and a state after each of three steps."""
    target, head = parts(SMALL.size)
    graphdef, params = nnx.split(head.model)
    state, states = training.init_state(params, SMALL.recipe), []
    for step in range(1, 6):
        batch = batch_of(target, step)
        state, _ = training.train_step(state, head.ends, batch, graphdef=graphdef, config=SMALL.recipe)
        states.append(jax.tree.map(lambda leaf: leaf.copy(), state))
    return target, head, states


def steps_in(output: Path) -> set[int]:
    return {int(path.name) for path in (output / runs.STEPS).iterdir() if path.name.isdigit()}


def begin(head: ej.Head) -> training.TrainState:
    return training.init_state(nnx.state(head.model), SMALL.recipe)


def exported(output: Path, target: ej.Target) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(ej.load_head(output, target).model))]


def rounded(state: training.TrainState) -> list[np.ndarray]:
    """Parameters as a head's file has them."""
    return [np.asarray(leaf.astype("bfloat16").astype("float32")) for leaf in jax.tree.leaves(state.head)]


def equal(one: list[np.ndarray], two: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("stop", [pytest.param(10, marks=pytest.mark.slow), 13])
def test_R1_twenty_steps_are_ten_a_resume_and_ten(tmp_path, stop):
    """Parameters, optimizer and key bit for bit, the log byte for byte; also where it ran on after the last save."""
    plan = Plan(evaluate_every=5)
    whole = train(tmp_path / "whole", plan)
    with pytest.raises(Stopped):
        train(tmp_path / "parts", dataclasses.replace(plan, stop=stop))
    assert steps_in(tmp_path / "parts") == {5, 10}
    records = (tmp_path / "parts" / "log.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["step"] == stop
    begun = []
    resumed = train(tmp_path / "parts", plan, say=begun.append)
    assert begun[0] == "begun 10"
    assert same(whole, resumed) and int(resumed.step) == 20
    logs = [(tmp_path / name / "log.jsonl").read_bytes() for name in ("whole", "parts")]
    assert logs[0] == logs[1] and len(logs[0].splitlines()) == 20 and b'"tau"' in logs[0]


def test_T8_intervals_count_optimizer_steps_and_evaluation_changes_no_loss(tmp_path):
    plan = Plan(steps=10, save_every=3, keep_last=9)
    train(tmp_path / "quiet", plan)
    train(tmp_path / "evaluated", dataclasses.replace(plan, evaluate_every=4))
    for name in ("quiet", "evaluated"):
        assert steps_in(tmp_path / name) == {3, 6, 9, 10}
    quiet, evaluated = (
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("quiet", "evaluated")
    )
    assert [record["step"] for record in evaluated if "tau" in record] == [4, 8]
    assert quiet == [{name: record[name] for name in quiet[0]} for record in evaluated]


def test_R4_relative_paths_and_spaces(small, tmp_path, monkeypatch):
    target, head, states = small
    monkeypatch.chdir(tmp_path)
    with open_run("a run/of mine", SMALL, head) as run:
        monkeypatch.chdir("/")
        run.save(states[0])
    monkeypatch.chdir(tmp_path)
    assert same(last_state("a run/of mine", SMALL), states[0])
    assert equal(exported(Path("a run/of mine"), target), rounded(states[0]))
    assert list(tmp_path.iterdir()) == [tmp_path / "a run"]


RESHARDED = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
from pathlib import Path
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
import test_runs as here

mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

def placed(leaf):
    split = leaf.ndim > 0 and leaf.shape[0] % 8 == 0 and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("fsdp") if split else PartitionSpec()))

_, head = here.parts(here.SMALL.size)
like = jax.tree.map(placed, here.begin(head))
with here.open_run(sys.argv[1], here.SMALL, head) as run:
    found = run.restore(like)
kernels = [leaf for leaf in jax.tree.leaves(found.state.head) if leaf.ndim == 2]
devices = [len({shard.index[0].start for shard in kernel.addressable_shards}) for kernel in kernels]
with here.open_run(sys.argv[2], here.SMALL, head) as run:
    run.save(found.state)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)
    again = run.restore(abstract)
print(json.dumps({"devices": devices, "same": here.same(found.state, again.state)}))
"""


def test_R5_saved_on_one_device_restored_on_eight_and_the_other_way(small, tmp_path):
    target, head, states = small
    with open_run(tmp_path / "one", SMALL, head) as run:
        run.save(states[1])
    said = run_process(RESHARDED, str(tmp_path / "one"), str(tmp_path / "eight"))
    assert set(said["devices"]) == {8} and said["same"]
    assert same(last_state(tmp_path / "eight", SMALL), states[1])
    assert equal(exported(tmp_path / "eight", target), rounded(states[1]))


def test_R7_the_output_directory_decodes_as_it_is(tmp_path, monkeypatch, capsys):
    plan = Plan(steps=4, save_every=2, size=32)
    state = train(tmp_path / "run", plan)
    target, _ = parts(plan.size)
    head = ej.load_head(tmp_path / "run", target)
    assert equal([np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(head.model))], rounded(state))
    talking = dataclasses.replace(target, tokenizer=Letters())
    monkeypatch.setattr(ej, "load_target", lambda *_, **__: talking)
    arguments = [
        "abc",
        "--head",
        str(tmp_path / "run"),
        "--max-new-tokens",
        "8",
        "--tree.nodes",
        "4",
        "--tree.depth",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    runpy.run_path(str(ROOT / "decode/generate.py"), run_name="__main__")
    tree = ej.TreeConfig(nodes=4, depth=2)
    done = ej.generate(talking, ej.load_head(tmp_path / "run", talking), "abc", max_new_tokens=8, tree=tree)
    assert capsys.readouterr().out.strip() == done.text.strip() != ""


def test_the_head_at_the_top_is_there_with_its_first_step(small, tmp_path):
    target, head, states = small
    with open_run(tmp_path, SMALL, head) as run:
        assert run.latest() is None and run.best() is None and run.restore(begin(head)) is None
        for state in states[:3]:
            run.save(state)
            run.wait()
            assert equal(exported(tmp_path, target), rounded(state))
        run.save(states[2])  # is there already
        assert (run.latest(), run.best()) == (3, 3)
    assert {path.name for path in tmp_path.iterdir()} == {runs.STEPS, "model.safetensors", "config.json"}


def test_the_last_and_the_best_are_kept(small, tmp_path):
    target, head, states = small
    scores = [1.5, 2.5, 2.0, float("nan"), None]
    with open_run(tmp_path, SMALL, head, keep_best=1) as run:
        for state, score in zip(states[:3], scores[:3], strict=True):
            run.save(state, score=score)
    with open_run(tmp_path, SMALL, head, keep_best=1) as run:  # scores are kept too
        for state, score in zip(states[3:], scores[3:], strict=True):
            run.save(state, score=score)
        assert (run.latest(), run.best()) == (5, 2)
    assert steps_in(tmp_path) == {2, 4, 5}
    assert equal(exported(tmp_path, target), rounded(states[1]))
    assert same(last_state(tmp_path, SMALL), states[4])


def test_a_head_whose_writing_was_cut_short_is_written_again(small, tmp_path):
    target, head, states = small
    with open_run(tmp_path, SMALL, head) as run:
        run.save(states[0])
        run.wait()
        before = (tmp_path / "model.safetensors").read_bytes()
        run.save(states[1])
    (tmp_path / "model.safetensors").write_bytes(before)
    (tmp_path / "model.safetensors.partial").write_bytes(b"half")
    assert same(last_state(tmp_path, SMALL), states[1])
    assert equal(exported(tmp_path, target), rounded(states[1]))
    assert not list(tmp_path.glob("*.partial"))


def test_a_half_written_step_is_passed_over(small, tmp_path):
    _, head, states = small
    with open_run(tmp_path, SMALL, head) as run:
        for state in states[:2]:
            run.save(state)
    unnamed = tmp_path / runs.STEPS / "3.orbax-checkpoint-tmp"
    unnamed.mkdir()
    (unnamed / "manifest.ocdbt").write_bytes(b"half")
    assert same(last_state(tmp_path, SMALL), states[1])
    assert not unnamed.exists()


@pytest.mark.parametrize("damaged", ["state", "about"])
def test_a_step_that_cannot_be_read_is_passed_over_with_a_warning(small, tmp_path, damaged):
    """A machine that lost power may leave a step's name without its contents."""
    _, head, states = small
    with open_run(tmp_path, SMALL, head) as run:
        for state in states[:2]:
            run.save(state)
    for path in (tmp_path / runs.STEPS / "2" / damaged).rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with open_run(tmp_path, SMALL, head) as run:
        with pytest.warns(UserWarning, match="Step 2 in .* is passed over"):
            found = run.restore(begin(head))
        assert same(found.state, states[0])
        run.save(states[1])
    assert same(last_state(tmp_path, SMALL), states[1])


def test_steps_that_are_all_unreadable_are_an_error_and_stay(small, tmp_path):
    _, head, states = small
    with open_run(tmp_path, SMALL, head) as run:
        run.save(states[0])
    for path in (tmp_path / runs.STEPS / "1" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with (
        open_run(tmp_path, SMALL, head) as run,
        pytest.warns(UserWarning, match="Step 1"),
        pytest.raises(OSError, match=r"None of the steps \[1\]"),
    ):
        run.restore(begin(head))
    assert steps_in(tmp_path) == {1}


def test_a_step_of_another_configuration_is_refused_with_what_differs(small, tmp_path):
    _, head, states = small
    with open_run(tmp_path, SMALL, head) as run:
        run.save(states[0])
    other = dataclasses.replace(SMALL, learning_rate=0.5)
    with open_run(tmp_path, other, head) as run, pytest.raises(ValueError) as caught:
        run.restore(begin(head))
    said = "recipe.learning_rate is 0.001 there and 0.5 here; give the options that it was begun with"
    assert said in str(caught.value) and "seed" not in str(caught.value)
    larger, config = parts(64)[1], {"recipe": dataclasses.asdict(SMALL.recipe), "size": SMALL.size}
    with (
        runs.Run(tmp_path, larger, config) as run,
        pytest.raises(ValueError, match=r"float32\[.*\]' there and 'float32"),
    ):
        run.restore(begin(larger))
    with runs.Run(tmp_path, head, config | {"new": 1}) as run, pytest.raises(ValueError, match="new is missing there"):
        run.restore(begin(head))
    # An option that there was not yet had its default; another value is another configuration.
    new = {"recipe": {"new": None, "learning_rate": 0.5}}
    changed = config | {"recipe": config["recipe"] | {"new": 2}}
    with (
        runs.Run(tmp_path, head, changed, defaults=new) as run,
        pytest.raises(ValueError, match=r"configuration: recipe\.new is None there and 2 here; give"),
    ):
        run.restore(begin(head))
    changed["recipe"]["new"] = None
    with runs.Run(tmp_path, head, changed, defaults=new) as run:
        found = run.restore(begin(head))
        assert found is not None and found.step == 1
    assert steps_in(tmp_path) == {1}


def test_a_full_disk_is_one_sentence_and_the_last_step_stays(small, tmp_path, monkeypatch):
    _, head, states = small
    with open_run(tmp_path, SMALL, head) as run:
        run.save(states[0])
        run.wait()
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=30_000))
        with pytest.raises(OSError) as caught:
            run.save(states[1])
    assert re.match(r"Step 2 needs up to 0\.\d MB in .*, where 0\.0 MB are free; ", str(caught.value))
    assert str(caught.value).endswith("the last whole step there is 1: make room and go on from that.")
    assert steps_in(tmp_path) == {1}
    assert same(last_state(tmp_path, SMALL), states[0])


class Full:
    """`open` on a disk that fills: from the moment that it is told to, files are the device for full disks."""

    def __init__(self):
        self.now = False

    def __call__(self, path, *arguments, **options):
        return open("/dev/full" if self.now else path, *arguments, **options)


def test_a_log_that_cannot_be_written_ends_a_run_that_is_gone_on_with(tmp_path, monkeypatch):
    """One sentence that names it; the step that was saved stays, and what follows is what an unbroken run leaves."""
    plan, log = Plan(steps=10, size=32), tmp_path / "run" / "log.jsonl"
    whole, full, said = train(tmp_path / "whole", plan), Full(), []

    def say(text):
        said.append(text)
        full.now |= text == "step 6"

    with monkeypatch.context() as disk:
        disk.setattr(watching, "open", full, raising=False)
        with pytest.raises(OSError) as caught:
            train(tmp_path / "run", plan, say=say)
    assert str(caught.value) == f"{log} cannot be written ([Errno 28] No space left on device); make room and go on."
    assert said[-1] == "step 6"  # whose record is written when step 7 has been handed to the device
    assert steps_in(tmp_path / "run") == {5}
    assert equal(exported(tmp_path / "run", parts(plan.size)[0]), rounded(last_state(tmp_path / "run", plan)))
    resumed = train(tmp_path / "run", plan)
    assert same(whole, resumed)
    assert log.read_bytes() == (tmp_path / "whole" / "log.jsonl").read_bytes()


NO_ROOM = """
import resource, sys
import test_runs as here


_, head = here.parts(here.SMALL.size)
state = here.begin(head)
run = here.open_run(sys.argv[1], here.SMALL, head)
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))  # no file may grow beyond that
try:
    with run:
        run.save(here.dataclasses.replace(state, step=state.step + 2))
        run.wait()
except OSError as error:
    sys.exit(f"error: {error}")
"""


def test_a_disk_that_fills_while_a_step_is_written_leaves_the_last_one(small, tmp_path):
    """Other programs write too, and quotas are not seen beforehand."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    _, head, states = small
    with open_run(tmp_path, SMALL, head) as run:
        run.save(states[0])
    command = [sys.executable, "-c", NO_ROOM, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    [said] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said.startswith(f"error: Step 2 could not be written to {tmp_path} (")
    assert said.endswith("the last whole step there is 1: make room and go on from that.")
    assert steps_in(tmp_path) == {1}
    assert same(last_state(tmp_path, SMALL), states[0])


def test_what_is_there_is_not_overwritten(small, tmp_path):
    _, head, _ = small
    (tmp_path / "model.safetensors").write_bytes(b"a head")
    with pytest.raises(ValueError, match="holds a head but no steps"):
        open_run(tmp_path, SMALL, head)
    assert (tmp_path / "model.safetensors").read_bytes() == b"a head"
    for options in ({"keep_last": 0}, {"keep_best": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            runs.Run(tmp_path / "other", head, {}, **options)


# --- Kills ------------------------------------------------------------------------------------------------------------

KILLS = 20
KILLED = Plan(steps=60, save_every=2, evaluate_every=20, size=512)


def start(output: Path, caches: Path) -> subprocess.Popen:
    kept = {"JAX_COMPILATION_CACHE_DIR": str(caches), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, ROOT / "tests/training_run.py", output, json.dumps(dataclasses.asdict(KILLED))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | kept | path, text=True)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_never_was(tmp_path):
    """SIGKILL at 20 random moments, before, in and after saves: final state bit for bit, log byte for byte."""
    whole = start(tmp_path / "whole", tmp_path / "caches")
    whole.communicate()
    assert whole.returncode == 0
    draw, killed, unfinished = random.Random(0), 0, 0
    outputs, (target, _) = [tmp_path / "killed"], parts(KILLED.size)
    while killed < KILLS:
        output = outputs[-1]
        process = start(output, tmp_path / "caches")
        lines = iter(process.stdout.readline, "")
        begun = int(next(lines).split()[1])
        # A kill goes with a line, and a little beyond it: most land in a save.
        word = draw.choice(["saving", f"step {min(begun + draw.randint(1, 4), KILLED.steps)}\n"])
        for line in lines:
            if line.startswith(word):
                break
        time.sleep(draw.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if process.returncode == 0:  # a fast machine was at the end before
            outputs.append(tmp_path / f"killed {len(outputs)}")
            continue
        assert process.returncode == -signal.SIGKILL
        killed += 1
        unfinished += any("tmp" in path.name for path in (output / runs.STEPS).iterdir())
        # Whatever the moment, what is at the top is a head, once there is a step.
        if (output / "model.safetensors").exists():
            ej.load_head(output, target)
    last = start(outputs[-1], tmp_path / "caches")
    last.communicate()
    assert last.returncode == 0
    print(f"{unfinished} of {KILLS} kills left a half-written step")
    for output in outputs:
        assert same(last_state(tmp_path / "whole", KILLED), last_state(output, KILLED))
        assert (tmp_path / "whole/log.jsonl").read_bytes() == (output / "log.jsonl").read_bytes()
