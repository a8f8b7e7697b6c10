"""A training run's directory: steps to go on from, and beside them the head as it decodes.

    OUTPUT/steps/200/         one step: head, optimizer, step and key (`state`), and what they belong to (`about`)
    OUTPUT/model.safetensors  with config.json: the best head so far, else the latest; `load_head` takes OUTPUT

A step is copied to the host at once and written in the background. It gets its name when it is whole, so a kill leaves
either a step or none. What a kill costs is what was trained since the last whole step: the interval between two, and
whatever runs while one is being written.
"""

import contextlib
import dataclasses
import json
import logging
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils

from eagle_jax import layers
from eagle_jax.checkpoint import save_head
from eagle_jax.head import Head
from eagle_jax.medusa import Medusa
from eagle_jax.training import TrainState
from eagle_jax.weights import WEIGHTS

STEPS = "steps"  # the directory of steps, within the run's
_Checkpoint = ocp.checkpoint_managers.PolicyCheckpointInfo


class Restored(NamedTuple):
    """What a run goes on from."""

    state: TrainState
    step: int
    progress: dict[str, Any]  # what was saved beside the state


class Run:
    """The steps of one run, saved and restored; a context manager, which ends with every step written.

    In a run of several processes each of them makes one, and all call every method; the directory is a shared one. No
    two runs may have it open: what is half written is taken for a killed run's and removed.
    """

    def __init__(
        self,
        directory: str | Path,
        head: Head | Medusa,
        config: Mapping[str, Any],
        *,
        defaults: Mapping[str, Any] | None = None,
        keep_last: int = 2,
        keep_best: int = 1,
        dtype: layers.Dtype = jnp.bfloat16,
    ):
        """Opens a directory, or makes one.

        Args:
          directory: the run's.
          head: what the parameters in a state are those of; its configuration and draft vocabulary go into the head
            that is left at the top.
          config: what a step may only be gone on with, in values that JSON has; paths and the like become texts.
          defaults: what a step had of that whose `config` does not name it, as it was saved before there was such a
            thing.
          keep_last: how many of the latest steps are kept, at least 1.
          keep_best: how many of those with the highest scores are kept beside them.
          dtype: of the head at the top.

        Raises:
          ValueError: the directory holds a head but no steps, so that a run would overwrite what is not its own.
        """
        for name, count, least in (("keep_last", keep_last, 1), ("keep_best", keep_best, 0)):
            if count < least:
                raise ValueError(f"{name} is {count}; it must be at least {least}.")
        self.directory = Path(directory).absolute()
        self._head, self._dtype = head, dtype
        self._config, self._defaults = _plain(config), _plain(defaults or {})
        self._keep_last, self._keep_best = keep_last, keep_best
        logging.getLogger("absl").addFilter(_no_orbax)
        self._manager = ocp.CheckpointManager(
            self.directory / STEPS,
            options=ocp.CheckpointManagerOptions(preservation_policy=_Policy(self), cleanup_tmp_directories=True),
        )
        self._exporter = ThreadPoolExecutor(1, "head")
        self._exporting: Future[None] | None = None
        self._writing: int | None = None  # the step that was saved or restored last
        self._scores = {step: self._score(step) for step in self._manager.all_steps()}
        if self.latest() is None and (self.directory / WEIGHTS).exists():
            self.close()
            raise ValueError(
                f"{self.directory} holds a head but no steps to go on from; give another output directory or remove it."
            )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # An error on the way out must not hide the one that led there.
        with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
            self.close()

    def latest(self) -> int | None:
        """The latest step there is, or None."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The step with the highest score, the latest of equals; the latest step where none has a score."""
        return max(self._manager.all_steps(), key=self._rank, default=None)

    def save(self, state: TrainState, *, score: float | None = None, progress: Mapping[str, Any] | None = None) -> None:
        """Saves a state as its own step, unless that is there already. `state` may be donated afterwards.

        Args:
          state: after so many optimizer steps.
          score: what tells a better head, such as tau; None where it was not measured.
          progress: what else a resumed loop needs, in values that JSON has.

        Raises:
          OSError: the disk is full, or this step or the one before could not be written. The last whole one stays.
        """
        self.wait()
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        arrays = _named_arrays(state)
        about = {
            "config": self._config,
            "arrays": _kinds(arrays),
            "progress": dict(progress or {}),
            "score": float(score) if score is not None and math.isfinite(score) else None,
        }
        self._require_room(step, arrays, state.head)
        self._scores[step] = about["score"]
        items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), about=ocp.args.JsonSave(about))
        self._writing = step
        with self._telling():
            self._manager.save(step, args=items, force=True)
        if self.best() == step:
            self._export(state.head)

    def wait(self) -> None:
        """Waits until everything is on disk.

        Raises:
          OSError: something could not be written.
        """
        with self._telling():
            self._manager.wait_until_finished()
            if self._exporting is not None:
                exporting, self._exporting = self._exporting, None
                exporting.result()

    def close(self) -> None:
        """Waits, then ends the threads that write."""
        try:
            self.wait()
        finally:
            self._exporter.shutdown()
            self._manager.close()

    def restore(self, like: TrainState) -> Restored | None:
        """The latest step that can be read, or None where there is no step.

        One that cannot be read, as a machine that lost power may leave it, is warned of and passed over.

        Args:
          like: the state a run would begin with, or its shapes, dtypes and shardings: values are restored onto the
            devices that these name, whichever they were saved from.

        Raises:
          ValueError: the step belongs to another configuration.
          OSError: there are steps, but none of them can be read.
        """
        self.wait()
        wanted = _named_arrays(like)
        broken: list[int] = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                about = self._read(step, about=ocp.args.JsonRestore())["about"]
                self._check(step, about, wanted)
                shapes = jax.tree.map(_abstract, wanted)
                arrays = self._read(step, state=ocp.args.StandardRestore(shapes))["state"]
            except _UnreadableError as error:
                warnings.warn(f"Step {step} in {self.directory} is passed over: {error}.", stacklevel=2)
                broken.append(step)
                continue
            for other in broken:
                self._manager.delete(other)
            state = _with_arrays(like, arrays)
            self._writing = step
            if self.best() == step:
                # A kill between a step and its head leaves the head before.
                self._export(state.head)
            return Restored(state, step, about["progress"])
        if broken:
            raise OSError(
                f"None of the steps {sorted(broken)} in {self.directory} can be read; give another output directory."
            )
        return None

    def _require_room(self, step: int, arrays: Mapping[str, jax.Array], head: nnx.State) -> None:
        """A full disk is best found before anything is written; quotas and other programs are not seen here."""
        exported = sum(leaf.size for leaf in jax.tree.leaves(head)) * jnp.dtype(self._dtype).itemsize
        needed = sum(array.nbytes for array in arrays.values()) + exported
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise OSError(
                f"Step {step} needs up to {needed / 1e6:,.1f} MB in {self.directory}, where {free / 1e6:,.1f} MB are "
                f"free; the last whole step there is {self.latest()}: make room and go on from that."
            )

    def _rank(self, step: int) -> tuple[float, int]:
        score = self._scores.get(step)
        return (-math.inf if score is None else score), step

    def _score(self, step: int) -> float | None:
        try:
            return self._read(step, about=ocp.args.JsonRestore())["about"]["score"]
        except _UnreadableError:
            return None

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # whatever is wrong with this step, another may be whole
            raise _UnreadableError(_one_line(error)) from error

    def _check(self, step: int, about: dict[str, Any], wanted: Mapping[str, jax.Array]) -> None:
        there, here = _flat(self._defaults) | _flat(about["config"]), _flat(self._config)
        # Where the options agree the arrays do, unless the library has changed since.
        if there == here:
            there, here = about["arrays"], _kinds(wanted)
        if there != here:
            names = [name for name in here | there if there.get(name, ...) != here.get(name, ...)]
            differing = [f"{name} is {_shown(there, name)} there and {_shown(here, name)} here" for name in names]
            raise ValueError(
                f"Step {step} in {self.directory} is of another configuration: {', '.join(differing)}; give the "
                f"options that it was begun with, or another output directory."
            )

    def _export(self, head: nnx.State) -> None:
        """Leaves a head at the top, in the background and after its step."""
        graphdef, _ = nnx.split(self._head.model)
        whole = jax.tree.map(lambda leaf: _whole(leaf.astype(self._dtype)), head)

        def write() -> None:
            self._manager.wait_until_finished()
            save_head(
                dataclasses.replace(self._head, model=nnx.merge(graphdef, whole)), self.directory, dtype=self._dtype
            )

        if jax.process_index() == 0:
            self._exporting = self._exporter.submit(write)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Says what a failure to write means."""
        try:
            yield
        except Exception as error:
            self._manager.reload()
            raise OSError(
                f"Step {self._writing} could not be written to {self.directory} ({_one_line(error)}); the last whole "
                f"step there is {self.latest()}: make room and go on from that."
            ) from error


class _UnreadableError(Exception):
    """A step that is not whole, or that this machine cannot read."""


class _Policy(ocp.checkpoint_managers.PreservationPolicy):
    """The latest steps and the best ones."""

    def __init__(self, run: Run):
        self._run = run

    def should_preserve(self, checkpoints: Sequence[_Checkpoint], *, context: Any) -> Sequence[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        scored = [step for step in steps if self._run._scores.get(step) is not None]
        best = sorted(scored, key=self._run._rank)[len(scored) - min(self._run._keep_best, len(scored)) :]
        kept = {*steps[-self._run._keep_last :], *best}
        return [step in kept for step in steps]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")


def _no_orbax(record: logging.LogRecord) -> bool:
    """Orbax also logs what it raises, with tracebacks, and from threads that outlive it."""
    return "orbax" not in record.pathname


# --- A state as named arrays ------------------------------------------------------------------------------------------


def _data(state: TrainState) -> TrainState:
    """The state with its key as plain numbers, which is how it is kept."""
    data = jax.eval_shape(jax.random.key_data, state.key)
    if isinstance(state.key, jax.ShapeDtypeStruct):
        return dataclasses.replace(state, key=jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=state.key.sharding))
    return dataclasses.replace(state, key=jax.random.key_data(state.key))


def _named_arrays(state: TrainState) -> dict[str, jax.Array]:
    """Every leaf by its place, such as "head.fc.kernel.value"; names do not depend on the classes of containers."""
    leaves = jax.tree_util.tree_leaves_with_path(_data(state))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _with_arrays(like: TrainState, arrays: Mapping[str, jax.Array]) -> TrainState:
    """The state that `_named_arrays` was given."""
    state = jax.tree.unflatten(jax.tree.structure(_data(like)), [arrays[name] for name in _named_arrays(like)])
    return dataclasses.replace(state, key=jax.random.wrap_key_data(state.key, impl=_generator(like.key)))


def _generator(key: Any) -> Any:
    """What generates from a key that may be known by its dtype only; JAX tells it of real keys and while tracing."""
    found = []
    jax.eval_shape(lambda traced: found.append(jax.random.key_impl(traced)), key)
    return found[0]


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _kinds(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    return {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}


def _whole(array: jax.Array) -> np.ndarray:
    """A copy on the host of all of it, also of what other processes hold."""
    if array.is_fully_addressable:
        return np.array(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from JSON."""
    return json.loads(json.dumps(dict(config), default=str))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _shown(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "missing"
