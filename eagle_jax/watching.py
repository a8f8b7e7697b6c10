"""Watching a run: a progress bar, records in JSONL, and TensorBoard by option.

What a step reports is fetched when the next one has been handed to the device, so that the host never stands between
two steps. The records are a function of the run alone: what depends on the machine, such as tokens/s, is in the bar and
in TensorBoard. So a run that was killed and resumed leaves the records of an unbroken one.
"""

import contextlib
import dataclasses
import importlib
import json
import math
import os
import socket
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eagle_jax.files import replacing

LOG = "log.jsonl"
SPEED_STEPS = 50  # that the shown speed is over
LOSSES = ("loss", "regression", "cross_entropy")
ACCURACIES = ("top1", "top3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reported:
    """What one step said, still on the device, and what was found out about its head."""

    step: int
    tokens: int
    metrics: Mapping[str, jax.Array]
    notes: dict[str, float]


class Watcher:
    """Takes in what each step reports; a context manager. Of several processes the first one shows and writes."""

    def __init__(
        self,
        directory: str | Path,
        *,
        steps: int,
        begun: int = 0,
        tokens: int = 0,
        every: int = 50,
        tensorboard: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Opens the log for more; what it holds of steps after `begun` is taken off.

        Args:
          directory: of the run; the log is `log.jsonl` there, TensorBoard's files are in `tensorboard/`.
          steps: optimizer steps of the whole run.
          begun: the step that the run goes on from.
          tokens: what it has been trained on up to there.
          every: optimizer steps between two records. The last step has one too, and so has every step with notes.

        Raises:
          RuntimeError: TensorBoard is wanted, but tensorboardX is not installed.
          OSError: the log cannot be written.
        """
        if every < 1:
            raise ValueError(f"every is {every}; it must be at least 1.")
        self._steps, self._every, self._clock = steps, every, clock
        self._writes = jax.process_index() == 0
        self._waiting: _Reported | None = None
        self._without_loss = 0  # steps
        self._speeds: deque[tuple[float, int]] = deque([(clock(), tokens)], maxlen=SPEED_STEPS + 1)
        self._console = console or Console(stderr=True)
        self._path = Path(directory).absolute() / LOG
        self._boards = self._path.with_name("tensorboard")
        self._board: _Board | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (self._writes and self._console.is_terminal),
        )
        self._task = self._bar.add_task("training", total=steps, completed=begun, said="")
        if self._writes:
            with _telling(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
            if tensorboard:
                with _telling(self._boards):
                    self._board = _Board(self._boards, begun)
            with _telling(self._path):
                cut_log(self._path, begun)
        self._bar.start()

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, step: int, metrics: Mapping[str, jax.Array], tokens: int) -> None:
        """Takes in what step `step` reports, and shows what the one before it did.

        Args:
          step: optimizer steps taken.
          metrics: `train_step`'s, on the device.
          tokens: that the run has been trained on, all in all.
        """
        for value in metrics.values():
            value.copy_to_host_async()
        self._show()
        self._waiting = _Reported(step=step, tokens=tokens, metrics=metrics, notes={})

    def note(self, values: Mapping[str, float]) -> None:
        """Adds figures of the head to the last step's record, such as `live_tau`'s."""
        assert self._waiting is not None
        self._waiting.notes.update(values)

    def flush(self) -> None:
        """Shows the last step too, so that its record is on the disk; to be called before a step is saved.

        Raises:
          OSError: the log cannot be written.
        """
        self._show()

    def close(self) -> None:
        """Shows what there is and ends the bar."""
        try:
            self._show()
        finally:
            self._bar.stop()
            if self._board is not None:
                with _telling(self._boards):
                    self._board.close()

    def _show(self) -> None:
        reported, self._waiting = self._waiting, None
        if reported is None or not self._writes:
            return
        step = reported.step
        values = {name: float(value) for name, value in jax.device_get(dict(reported.metrics)).items()} | reported.notes
        self._speeds.append((self._clock(), reported.tokens))
        if values.get("pairs") == 0:
            self._without_loss += 1
            warnings.warn(
                f"Step {step} had no token that carries loss and changed no parameter; steps like it: "
                f"{self._without_loss}.",
                stacklevel=2,
            )
        (begin, tokens), (end, more) = self._speeds[0], self._speeds[-1]
        speed = (more - tokens) / (end - begin) if end > begin else 0.0
        said = summary(values, speed)
        self._bar.update(self._task, completed=step, said=said)
        if not (step % self._every == 0 or step == self._steps or reported.notes):
            return
        record = {"step": step, "tokens": reported.tokens} | values
        with _telling(self._path), open(self._path, "a", encoding="utf-8") as log:
            log.write(json.dumps(_plain(record), allow_nan=False) + "\n")
            log.flush()
            os.fsync(log.fileno())
        if self._board is not None:
            with _telling(self._boards):
                self._board.add(step, values | {"tokens": reported.tokens, "tokens_per_second": speed})
        if self._bar.disable:
            self._console.print(f"step {step} of {self._steps}: {said}", markup=False, highlight=False)


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Says what could not be written."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error}); make room and go on.") from error


def summary(values: Mapping[str, float], speed: float) -> str:
    """A line for people: loss terms, accuracy, tau where it was measured, and tokens/s."""
    found = [f"{name.replace('_', ' ')} {values[name]:.3f}" for name in LOSSES if name in values]
    found += [f"{name} {values[name]:.1%}" for name in ACCURACIES if name in values]
    found += [f"tau {values['tau']:.2f}"] if "tau" in values else []
    return ", ".join([*found, f"{speed:,.0f} tokens/s"])


def cut_log(path: Path, step: int) -> None:
    """Takes off what a log holds of later steps than `step`, and a line that a kill cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
        except (ValueError, KeyError, TypeError):
            break
        kept.append(line)
    with replacing(path) as scratch:
        scratch.write_bytes(b"".join(kept))


def _plain(record: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no numbers that are none."""
    return {name: value if math.isfinite(value) else None for name, value in record.items()}


class _Board:
    """A file of TensorBoard's.

    Written at once: tensorboardX's own writer does it in a thread, and a full disk would end that and not the run.
    """

    def __init__(self, directory: Path, begun: int):
        try:
            records = importlib.import_module("tensorboardX.record_writer")
            self._event: Any = importlib.import_module("tensorboardX.proto.event_pb2")
            self._summary: Any = importlib.import_module("tensorboardX.proto.summary_pb2").Summary
        except ImportError as error:
            raise RuntimeError(
                'TensorBoard needs tensorboardX, which is not installed; pip install "eagle_jax[tensorboard]".'
            ) from error
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{begun}"
        self._records = records.RecordWriter(str(directory / name))
        self._write(file_version="brain.Event:2")
        # Of what an earlier process wrote, steps from there on are not shown.
        self._write(step=begun + 1, session_log=self._event.SessionLog(status=self._event.SessionLog.START))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        shown = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary(value=shown))

    def close(self) -> None:
        self._records.close()

    def _write(self, **content: Any) -> None:
        try:
            self._records.write(self._event.Event(wall_time=time.time(), **content).SerializeToString())
            self._records.flush()
        except OSError:
            with contextlib.suppress(OSError):
                self._records.close()  # which gives up what it could not write
            raise
