"""What is shown and recorded of a run, when it is fetched, and what a resumed run's log holds."""

import errno
import io
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

from eagle_jax import watching


class Value:
    """A figure on a device that tells when it is fetched."""

    def __init__(self, value, events):
        self.value, self.events = value, events

    def copy_to_host_async(self):
        pass

    def __float__(self):
        self.events.append(f"fetch {self.value:g}")
        return float(self.value)


def metrics(step):
    return {name: jnp.float32(step) for name in ("loss", "regression", "cross_entropy", "top1", "top3")}


def records(path):
    log = path / "log.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def watcher(path, **options):
    return watching.Watcher(path, **({"steps": 5, "console": Console(file=io.StringIO())} | options))


def test_a_step_is_fetched_when_the_next_has_begun(tmp_path):
    events = []
    with watcher(tmp_path, every=1) as watch:
        for step in (1, 2, 3):
            events.append(f"step {step}")
            watch.step(step, {"loss": Value(step, events)}, tokens=step)
        watch.flush()
        events.append("flushed")
    assert events == [
        "step 1",
        *("step 2", "fetch 1"),
        *("step 3", "fetch 2"),
        *("fetch 3", "flushed"),
    ]


def test_T3_steps_without_loss_are_warned_of_and_counted(tmp_path):
    with watcher(tmp_path) as watch, pytest.warns(UserWarning) as warned:
        for step, pairs in enumerate((0, 3, 0, 3), start=1):
            watch.step(step, {"pairs": jnp.float32(pairs)}, tokens=step)
    said = "Step {} had no token that carries loss and changed no parameter; steps like it: {}."
    assert [str(warning.message) for warning in warned] == [said.format(1, 1), said.format(3, 2)]


def test_records_come_at_intervals_with_notes_and_at_the_end(tmp_path):
    with watcher(tmp_path, every=2, steps=7) as watch:
        for step in range(1, 8):
            watch.step(step, metrics(step), tokens=10 * step)
            if step == 3:
                watch.note({"tau": 2.5, "held_out_top1": float("nan")})
    found = records(tmp_path)
    assert [record["step"] for record in found] == [2, 3, 4, 6, 7]
    assert found[0] == {"step": 2, "tokens": 20} | {name: 2.0 for name in metrics(2)}
    assert found[1]["tau"] == 2.5 and found[1]["held_out_top1"] is None


@pytest.mark.parametrize("tail", [b"", b'{"step": 5, "lo', b"\0\0\0\n", b"[1]\n", b'{"step": "5"}\n'])
def test_a_resumed_log_goes_on_from_its_step(tmp_path, tail):
    with watcher(tmp_path, every=1) as watch:
        for step in range(1, 5):
            watch.step(step, metrics(step), tokens=step)
    log = tmp_path / "log.jsonl"
    log.write_bytes(log.read_bytes() + tail)
    with watcher(tmp_path, every=1, begun=2, tokens=2) as watch:
        for step in range(3, 6):
            watch.step(step, metrics(step), tokens=step)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_the_bar_tells_losses_accuracy_speed_and_time_left(tmp_path):
    seconds = iter(range(100))
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=200)
    with watcher(tmp_path, console=console, clock=lambda: next(seconds), steps=3) as watch:
        for step in (1, 2, 3):
            watch.step(step, metrics(0.5), tokens=100 * step)
        watch.note({"tau": 2.25})
    said = shown.getvalue()
    assert "loss 0.500, regression 0.500, cross entropy 0.500, top1 50.0%, top3 50.0%" in said
    assert "tau 2.25" in said and "100 tokens/s" in said and "3/3" in said


def test_without_a_terminal_records_are_lines(tmp_path):
    said = io.StringIO()
    with watcher(tmp_path, console=Console(file=said, width=200), every=2) as watch:
        for step in range(1, 6):
            watch.step(step, metrics(1), tokens=step)
    lines = said.getvalue().strip().splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 2 of 5", "step 4 of 5", "step 5 of 5"]


def test_the_speed_is_in_no_record(tmp_path):
    """What depends on the machine would tell a resumed run from an unbroken one."""
    with watcher(tmp_path, every=1) as watch:
        watch.step(1, metrics(1), tokens=1)
    assert not any("second" in name for name in records(tmp_path)[0])


def test_senseless_intervals_are_refused(tmp_path):
    with pytest.raises(ValueError, match="every is 0"):
        watcher(tmp_path, every=0)


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(OSError, match=r"cannot be written \(.*No space left"), watcher(tmp_path) as watch:
        watch._path = Path("/dev/full")
        watch.step(5, metrics(1), tokens=1)
        watch.flush()


def test_a_log_that_cannot_be_cut_is_named_and_stays(tmp_path, monkeypatch):
    """A resumed run begins by taking off what is no longer true."""
    with watcher(tmp_path, every=1) as watch:
        watch.step(1, metrics(1), tokens=1)
    before = (tmp_path / "log.jsonl").read_bytes()
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(OSError, match=r"log.jsonl cannot be written \(.*No space left\); make room"):
        watcher(tmp_path)
    assert (tmp_path / "log.jsonl").read_bytes() == before


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_tensorboards_files_that_cannot_be_written_are_named(tmp_path, monkeypatch, kept):
    """From some record on, the device for full disks takes their place; the log has what was before."""
    record_writer, opened = pytest.importorskip("tensorboardX.record_writer"), []

    class Filling(io.FileIO):
        def write(self, data):
            with open("/dev/full", "wb", buffering=0) as full:
                return super().write(data) if len(records(tmp_path)) <= kept else full.write(data)

    def open_file(path):
        opened.append(io.BufferedWriter(Filling(path, "w")))
        return opened[-1]

    monkeypatch.setattr(record_writer, "open_file", open_file)
    with (
        pytest.raises(OSError, match=r"/tensorboard cannot be written \(.*No space left.*\); make room and go on\.$"),
        watcher(tmp_path, every=1, tensorboard=True) as watch,
    ):
        for step in range(1, 6):
            watch.step(step, metrics(step), tokens=step)
    assert [record["step"] for record in records(tmp_path)] == list(range(1, kept + 2))
    assert [file.closed for file in opened] == [True]


def test_tensorboard_has_what_the_log_has_and_the_speed(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with watcher(tmp_path, every=1, tensorboard=True) as watch:
        for step in (1, 2, 3):
            watch.step(step, metrics(step), tokens=step)
    with watcher(tmp_path, every=1, begun=2, tensorboard=True) as watch:
        watch.step(3, metrics(3), tokens=3)
    found = []
    for path in sorted((tmp_path / "tensorboard").iterdir()):
        content, place = path.read_bytes(), 0
        while place < len(content):
            size = int.from_bytes(content[place : place + 8], "little")
            found.append(Event.FromString(content[place + 12 : place + 12 + size]))
            place += size + 16
    values = {(event.step, one.tag): one.simple_value for event in found for one in event.summary.value}
    assert values[2, "loss"] == 2 and values[3, "tokens"] == 3 and (1, "tokens_per_second") in values
    # TensorBoard leaves out what an earlier process wrote of steps from here on.
    assert 3 in [event.step for event in found if event.HasField("session_log")]


def test_a_missing_tensorboard_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX.record_writer", None)
    with pytest.raises(RuntimeError, match=r"pip install \"eagle_jax\[tensorboard\]\""):
        watcher(tmp_path, tensorboard=True)
