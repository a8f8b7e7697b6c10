"""What holds from one process to the next: ids, compiled programs, and that looking around costs no backend."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_rig import TREE, ids, make_head, make_target, random_prompts

import eagle_jax as ej

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(str(path) for folder in ("train", "decode") for path in (ROOT / folder).glob("*.py"))
SMALL_TREE = ej.TreeConfig(nodes=5, depth=2, top_k=2)
OPTIONS = {"max_new_tokens": 24, "sampling": ej.SamplingConfig(temperature=1.0), "seed": 9}

DECODE = """
import collections, json
import jax
import test_processes as here

target = here.make_target()
head = here.make_head(target)
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **attributes: events.update([event.rsplit("/", 1)[-1]]))
done = here.ej.generate(target, head, here.random_prompts(4), tree=here.SMALL_TREE, **here.OPTIONS)
print(json.dumps({"ids": here.ids(done), "hits": events["cache_hits"], "misses": events["cache_misses"]}))
"""

LOOK_AROUND = """
import contextlib, io, json, runpy, sys
from jax._src.xla_bridge import backends_are_initialized

import eagle_jax
started = {"import eagle_jax": backends_are_initialized()}
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            assert not end.code, (script, end.code)
    assert "usage" in printed.getvalue().lower(), script
    started[script] = backends_are_initialized()
print(json.dumps(started))
"""


def run(code, *arguments, **environment):
    """What a fresh process prints last, as JSON."""
    kept = {name: value for name, value in os.environ.items() if name not in ("EAGLE_JAX_CACHE", *CACHE_SETTINGS)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


CACHE_SETTINGS = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE", "XDG_CACHE_HOME")


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Two processes that decode alike: the first with nothing set, the second with its cache's place set."""
    caches = tmp_path_factory.mktemp("caches")
    every_program = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    compiled = caches / "first" / "eagle_jax" / "compiled"
    first = run(DECODE, XDG_CACHE_HOME=str(caches / "first"), **every_program)
    first["files"] = len(list(compiled.iterdir()))
    chosen = {"JAX_COMPILATION_CACHE_DIR": str(compiled), "XDG_CACHE_HOME": str(caches / "second")}
    second = run(DECODE, **chosen, **every_program)
    second["files"] = len(list((caches / "second").rglob("*")))
    return first, second


def test_D3_a_fresh_process_draws_the_same_text(processes):
    """Under the same seed, whatever the tree."""
    target = make_target()
    for head, tree in ((None, TREE), (make_head(target), TREE)):
        here = ids(ej.generate(target, head, random_prompts(4), tree=tree, **OPTIONS))
        assert [process["ids"] for process in processes] == [here, here]


def test_J3_compiled_programs_are_kept_without_being_asked_to(processes):
    first, _ = processes
    assert first["misses"] >= 4
    assert first["files"] >= first["misses"]


def test_J3_a_second_process_compiles_nothing(processes):
    """It also leaves the place alone that it would have chosen by itself."""
    _, second = processes
    assert second["hits"] >= 4
    assert (second["misses"], second["files"]) == (0, 0)


def test_J5_import_and_help_start_no_backend():
    assert len(SCRIPTS) >= 2
    started = run(LOOK_AROUND, *SCRIPTS)
    assert started == dict.fromkeys(["import eagle_jax", *SCRIPTS], False)
