"""Kept features: the target's own, made once, and never taken for another target's, other rows' or whole ones."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import multihost_utils
from rig import tiny_target

from eagle_jax import features, shards, training
from eagle_jax.data import Row
from eagle_jax.head import Head
from eagle_jax.pipeline import NO_ROW, BatchConfig, Pipeline

FORM = {"shard_tokens": 64}  # several shards, even of little


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def some_rows(lengths=(5, 60, 12, 9, 70, 3, 31), seed=0):
    rng = np.random.default_rng(seed)
    return [Row(rng.integers(0, 16, n).astype(np.int32), np.arange(n) > 2) for n in lengths]


def make(directory, target, rows, **options):
    form = {key: options.pop(key) for key in ("dtype", "shard_tokens") if key in options}
    layout = features.claim(directory, target, rows, **(FORM | form))
    features.make(layout, target, rows, tokens_per_batch=128, **options)
    return layout


def alone(target, row):
    return np.asarray(features.features_of(*nnx.split(target.model), row.tokens[None])[0], np.float32)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_T9_features_of_padded_batches_are_those_of_single_rows(tmp_path, target, dtype, tolerance):
    rows = some_rows()
    kept = shards.KeptFeatures(make(tmp_path / "kept here", target, rows, dtype=dtype))
    assert len(kept) == len(rows) and kept[0].dtype == jnp.dtype(dtype)
    for index in (0, 4, 6):  # of each shard one
        np.testing.assert_allclose(np.asarray(kept[index], np.float32), alone(target, rows[index]), atol=tolerance)
    with pytest.raises(IndexError, match="no row 7 among 7"):
        kept[7]


def test_T9_a_batch_with_kept_features_is_the_batch_without_them_and_the_targets_features(tmp_path, target):
    rows = some_rows()
    config = BatchConfig(tokens_per_batch=256, bucket=32)
    kept = features.load_or_make(tmp_path, target, rows)
    offline, online = Pipeline(rows, config, features=kept), Pipeline(rows, config)
    for step in range(offline.order.steps_per_epoch):
        one, other = offline.batch_at(step), online.batch_at(step)
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.assistant, other.assistant)
        computed = features.features_of(*nnx.split(target.model), other.tokens)
        for place, index in enumerate(offline.order.at(step).rows[0]):
            count = 0 if index == NO_ROW else len(rows[index].tokens)
            np.testing.assert_allclose(one.features[place, :count], computed[place, :count], atol=2e-3)


def losses(target, rows, kept):
    """Of four steps of the pipeline's batches, noise included; features that are not kept are computed in the step."""
    recipe = training.TrainConfig(steps=4, learning_rate=1e-3, warmup_steps=0)
    pipeline = Pipeline(rows, BatchConfig(tokens_per_batch=256, bucket=128), features=kept)  # of one shape
    head = Head.random(target)
    (graphdef, params), (of_target, target_params) = nnx.split(head.model), nnx.split(target.model)
    state, found = training.init_state(params, recipe), []
    for batch in pipeline.batches(0, recipe.steps, threads=0):
        state, metrics = training.train_step(
            state, head.ends, batch, target_params, graphdef=graphdef, config=recipe, target_graphdef=of_target
        )
        found.append([metrics[name] for name in ("loss", "regression", "cross_entropy")])
    return np.asarray(found)


def test_T9_the_step_learns_the_same_from_kept_features_as_from_its_own(tmp_path, target):
    """Kept in 11 bits, a feature is off by 2**-11 of itself at most, and so are losses, which grow no faster."""
    rows = some_rows()
    online = losses(target, rows, None)
    assert np.abs(online[0] / online[-1] - 1).max() > 0.01  # it learns
    kept = shards.KeptFeatures(make(tmp_path / "kept", target, rows))
    np.testing.assert_allclose(losses(target, rows, kept), online, rtol=2.0**-11)
    other = shards.KeptFeatures(make(tmp_path / "other", tiny_target(seed=1), rows))
    assert np.abs(losses(target, rows, other) / online - 1).max() > 0.01  # other features would show


def test_shards_hold_consecutive_rows_and_the_size_is_known_before(tmp_path):
    layout = shards.lay_out(tmp_path, some_rows(), 64, shard_tokens=64)
    assert [(shard.path.name, shard.rows, shard.tokens) for shard in layout.shards] == [
        ("shard-00000.npy", range(0, 2), 65),
        ("shard-00001.npy", range(2, 5), 91),
        ("shard-00002.npy", range(5, 7), 34),
    ]
    assert layout.tokens == 190 and layout.bytes_of(layout.shards) == 190 * 64 * 2
    assert layout.missing() == list(layout.shards) and layout.missing(1, 2) == [layout.shards[1]]
    assert list(tmp_path.iterdir()) == []
    # A row longer than a shard has one of its own.
    assert [shard.tokens for shard in shards.lay_out(tmp_path, some_rows(), 64, shard_tokens=1).shards] == [
        len(row.tokens) for row in some_rows()
    ]
    with pytest.raises(ValueError, match="shard_tokens is -1"):
        shards.lay_out(tmp_path, some_rows(), 64, shard_tokens=-1)


def test_the_size_is_what_the_files_take(tmp_path, target):
    layout = make(tmp_path, target, some_rows())
    taken = sum(shard.path.stat().st_size - 128 for shard in layout.shards)  # 128: NumPy's header
    assert taken == layout.bytes_of(layout.shards)


def test_features_are_made_once(tmp_path, target):
    rows = some_rows()
    layout = make(tmp_path, target, rows)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    kept = features.load_or_make(tmp_path, target, rows, progress=lambda *_: pytest.fail("made twice"))
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(before) == len(layout.shards) + 1 and len(kept) == len(rows)


def test_features_of_another_target_or_other_rows_are_named_with_both_values(tmp_path, target):
    rows = some_rows()
    make(tmp_path, target, rows, dtype="bfloat16")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    found = manifest["rows_sha256"]

    def refused(message, target=target, rows=rows, **form):
        with pytest.raises(ValueError, match=message):
            features.claim(tmp_path, target, rows, **form)

    refused("rows is 7, needed is 3, tokens is 190, needed is 77, rows_sha256 is ", rows=rows[:3])
    refused(f"holds other features \\(rows_sha256 is '{found}', needed is '", rows=some_rows(seed=1))
    refused("hidden_size is 64, needed is 32", target=tiny_target(hidden_size=32))
    refused(r"\(weights_sha256 is ", target=tiny_target(seed=1))
    refused(r"\(config_sha256 is ", target=dataclasses.replace(target, config=tiny_target(rms_norm_eps=1e-3).config))
    refused("target is 'random', needed is 'b', weights_sha256", dataclasses.replace(tiny_target(seed=1), name="b"))
    refused("dtype is 'bfloat16', needed is 'float16'", dtype="float16")
    refused("shard_tokens is 64, needed is 65", shard_tokens=65)
    # A name may be a path of many; the target is the same.
    renamed = dataclasses.replace(target, name="elsewhere/random")
    assert features.claim(tmp_path, renamed, rows).dtype == "bfloat16"
    assert json.loads((tmp_path / "manifest.json").read_text()) == manifest


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"dtype": "float16"}', '{"dtype": "int8", "shard_tokens": 1}'])
def test_a_manifest_that_says_nothing_is_named(tmp_path, target, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest.json cannot be read"):
        features.claim(tmp_path, target, some_rows())


def test_processes_make_every_nth_shard_each(tmp_path, target):
    rows = some_rows()
    layout = make(tmp_path / "two", target, rows, process_index=1, process_count=2)
    assert [shard.path.exists() for shard in layout.shards] == [False, True, False]
    with pytest.raises(ValueError, match=r"lacks 2 of 3 shards, shard-00000.npy first"):
        shards.KeptFeatures(layout)
    make(tmp_path / "two", target, rows, process_index=0, process_count=2)
    one = make(tmp_path / "one", target, rows)
    for shared, single in zip(layout.shards, one.shards, strict=True):
        assert shared.path.read_bytes() == single.path.read_bytes()
    with pytest.raises(ValueError, match="process_index is 2; it must be below process_count, 2"):
        make(tmp_path / "two", target, rows, process_index=2, process_count=2)


class Killed(Exception):
    pass


def test_a_run_that_ended_goes_on_at_the_first_missing_shard(tmp_path, target):
    rows = some_rows()
    whole = make(tmp_path / "whole", target, rows)

    def end(done, total):
        if done > whole.shards[0].tokens:
            raise Killed

    with pytest.raises(Killed):
        make(tmp_path / "ended", target, rows, progress=end)
    said = []
    layout = make(tmp_path / "ended", target, rows, progress=lambda *counts: said.append(counts))
    assert said[-1] == (125, 125)  # of 190
    assert [shard.path.read_bytes() for shard in layout.shards] == [shard.path.read_bytes() for shard in whole.shards]


@pytest.mark.parametrize("size", [0, 50, 128, 1000])
def test_a_shard_that_was_cut_short_is_never_taken_for_whole(tmp_path, target, size):
    rows = some_rows()
    layout = make(tmp_path, target, rows)
    content = layout.shards[1].path.read_bytes()
    layout.shards[1].path.write_bytes(content[:size])
    assert layout.missing() == [layout.shards[1]]
    with pytest.raises(ValueError, match=r"lacks 1 of 3 shards, shard-00001.npy first"):
        shards.KeptFeatures(layout)
    make(tmp_path, target, rows)
    assert layout.shards[1].path.read_bytes() == content


KILL = """
import os, signal, sys
import numpy as np
import test_features as here

def kill(array, file):
    file.write(np.asarray(array).tobytes()[:1000])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

save, count = here.shards._save_array, []
def save_two(array, file):
    count.append(1)
    (save if len(count) < 3 else kill)(array, file)

here.shards._save_array = save_two
here.make(sys.argv[1], here.tiny_target(), here.some_rows())
"""


@pytest.mark.slow
def test_a_run_killed_while_it_wrote_a_shard_loses_that_one_only(tmp_path, target):
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    done = subprocess.run([sys.executable, "-c", KILL, tmp_path / "a b"], env=environment)
    assert done.returncode == -signal.SIGKILL
    left = sorted(path.name for path in (tmp_path / "a b").iterdir())
    assert left == ["manifest.json", "shard-00000.npy", "shard-00001.npy", "shard-00002.npy.partial"]
    layout = make(tmp_path / "a b", target, some_rows())
    assert not layout.missing() and not list((tmp_path / "a b").glob("*.partial"))


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path, target, monkeypatch):
    rows, calls, fsync = some_rows(), [], os.fsync

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:  # the manifest, one shard, and no more
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError, match=r"shard-00001.npy cannot be written \(No space left on device\); 1 of 3 shards are"
    ):
        make(tmp_path, target, rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "shard-00000.npy"]
    layout = make(tmp_path, target, rows)
    assert not layout.missing()


def test_a_disk_that_is_too_small_is_told_before(tmp_path, target, monkeypatch):
    monkeypatch.setattr(features, "free_bytes", lambda _: 20_000)
    with pytest.raises(OSError, match=r"take 24.3 kB, but where .* is only 20.0 kB are free"):
        make(tmp_path, target, some_rows())
    assert not list(tmp_path.glob("shard*"))


def test_features_beyond_float16s_range_are_not_kept_as_infinities(tmp_path):
    loud, rows = tiny_target(), some_rows((5, 9))
    loud.model.norm.scale[...] = loud.model.norm.scale[...] * 1e6
    with pytest.raises(ValueError, match="not finite in float16; make them with make_features"):
        make(tmp_path / "float16", loud, rows)
    kept = shards.KeptFeatures(make(tmp_path / "bfloat16", loud, rows, dtype="bfloat16"))
    assert np.abs(np.asarray(kept[1], np.float32)).max() > 1e6


@pytest.fixture
def second_of_two(monkeypatch):
    """This process is the second of two, and the first, who is elsewhere, has no complaints."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: np.stack([np.zeros_like(own), own]))
    monkeypatch.setattr(features, "LATE", 0.0)


def test_a_directory_that_is_not_shared_is_named(tmp_path, target, second_of_two):
    """Before anything is computed, or in the end where a manifest was there."""
    rows = some_rows()
    with pytest.raises(OSError, match=r"^Process 1 of 2 does not find manifest.json in .* that they share\.$"):
        features.load_or_make(tmp_path, target, rows)
    assert list(tmp_path.iterdir()) == []
    layout = shards.lay_out(tmp_path, rows, 64, shard_tokens=64)
    form = {"dtype": layout.dtype, "shard_tokens": layout.shard_tokens}
    shards.write_manifest(tmp_path, features._identity(target, rows) | form)
    with pytest.raises(OSError, match=r"^Process 1 of 2 does not find shard-00000.npy in .*do not share"):
        features.load_or_make(tmp_path, target, rows)
    # What was its own to make is there.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "shard-00001.npy"]


def test_what_another_process_writes_may_come_late(tmp_path, target, second_of_two, monkeypatch):
    rows = some_rows()
    monkeypatch.setattr(features, "LATE", 60.0)
    appearing = iter(("manifest.json", "shard-00000.npy", "shard-00002.npy"))
    with monkeypatch.context() as alone:
        alone.setattr(jax, "process_count", lambda: 1)
        alone.setattr(jax, "process_index", lambda: 0)
        whole = make(tmp_path / "whole", target, rows)

    def one_more(seconds):
        name = next(appearing)
        (tmp_path / "here").mkdir(exist_ok=True)
        (tmp_path / "here" / name).write_bytes((tmp_path / "whole" / name).read_bytes())

    monkeypatch.setattr(features.time, "sleep", one_more)
    kept = features.load_or_make(tmp_path / "here", target, rows, tokens_per_batch=128)
    assert len(kept) == len(rows) and list(appearing) == []
    for shard in whole.shards:
        assert (tmp_path / "here" / shard.path.name).read_bytes() == shard.path.read_bytes()


def test_free_bytes_of_a_directory_that_is_not_there_yet(tmp_path):
    assert shards.free_bytes(tmp_path / "not" / "yet") > 0


def test_R4_a_relative_directory(tmp_path, target, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = some_rows()
    features.load_or_make("in here/features", target, rows)
    assert features.load_or_make(tmp_path / "in here" / "features", target, rows, progress=lambda *_: pytest.fail())
