"""The target's features of training rows, computed once and kept in files.

The manifest beside them says for which target and which rows they are. A run that was killed goes on at the first
shard that is missing. Several processes make every n-th shard each, or where the target lies on devices of all of them,
compute every batch together and write every n-th shard each. float16 keeps 11 bits of a feature, against
bfloat16's 8, and features lie far inside its range.

B batch rows, T tokens, E hidden size.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.filesize import decimal

from eagle_jax.data import Row
from eagle_jax.distributed import from_main, in_all, is_main, main_first
from eagle_jax.pipeline import NO_ROW, BatchConfig, Pipeline
from eagle_jax.sharding import Share, mesh_of, process_share, row_multiple, shard_batch, spans_processes, to_host
from eagle_jax.shards import (
    MANIFEST,
    STORED,
    KeptDtype,
    KeptFeatures,
    Layout,
    Shard,
    free_bytes,
    lay_out,
    read_manifest,
    write_manifest,
    write_shard,
)
from eagle_jax.target import Target, features_of

Progress = Callable[[int, int], None]  # (tokens done, tokens to be done)
LATE = 60.0  # seconds that a network file system may take to show one machine what another has written


def load_or_make(
    directory: str | Path,
    target: Target,
    rows: Sequence[Row],
    *,
    tokens_per_batch: int = 4096,
    progress: Progress = lambda done, total: None,
) -> KeptFeatures:
    """Features of `rows`, from `directory` as far as they are there; the others are computed and left there.

    Several processes (`jax.process_count()`) all call this, with the same rows and a directory that they share.

    Raises:
      ValueError: the directory holds features of another target or of other rows.
      OSError: the directory cannot be written, or the processes do not share it.
      RuntimeError: another process raised one of these.
    """
    layout = claim(directory, target, rows)
    work = partial(make, layout, target, rows, tokens_per_batch=tokens_per_batch, progress=progress)
    if spans_processes(nnx.state(target.model)):
        work()
    else:
        in_all(partial(work, process_index=jax.process_index(), process_count=jax.process_count()))
    return in_all(partial(_opened, layout))


def _opened(layout: Layout) -> KeptFeatures:
    for shard in layout.missing() if jax.process_count() > 1 else ():
        if not _appears(shard.path.is_file):
            raise OSError(_not_shared(layout.directory, shard.path.name))
    return KeptFeatures(layout)


def _appears(there: Callable[[], bool]) -> bool:
    """Whether what another process has written is there, at once or after a while."""
    end = time.monotonic() + LATE
    while not there():
        if time.monotonic() >= end:
            return False
        time.sleep(0.2)
    return True


def _not_shared(directory: Path, name: str) -> str:
    return (
        f"Process {jax.process_index()} of {jax.process_count()} does not find {name} in {directory}, though it has "
        "been written: the processes do not share that directory; give one that they share."
    )


def claim(
    directory: str | Path,
    target: Target,
    rows: Sequence[Row],
    *,
    dtype: KeptDtype | None = None,
    shard_tokens: int | None = None,
) -> Layout:
    """Leaves a manifest in a directory that has none, or checks that the one there is for this target and these rows.

    Of several processes, all of which call this, the first one writes it.

    Args:
      dtype, shard_tokens: as `lay_out` takes them.

    Raises:
      ValueError: the directory holds other features, with both values of what differs.
      OSError: the directory cannot be written, or the processes do not share it.
      RuntimeError: another process raised one of these.
    """
    identity = _identity(target, rows)
    return main_first(
        lambda: _claim(
            Path(directory),
            identity,
            lambda: lay_out(directory, rows, target.config.hidden_size, dtype=dtype, shard_tokens=shard_tokens),
        )
    )


def _claim(directory: Path, identity: dict[str, Any], lay: Callable[[], Layout]) -> Layout:
    if not is_main() and not _appears(lambda: bool(read_manifest(directory))):
        raise OSError(_not_shared(directory, MANIFEST))
    layout = lay()
    needed = identity | {"dtype": layout.dtype, "shard_tokens": layout.shard_tokens}
    found = read_manifest(directory)
    # A target's name may be a path, and paths to one directory differ.
    differing = [key for key in needed if found and key != "target" and found.get(key) != needed[key]]
    if differing:
        shown = [key for key in ("target",) if found.get(key) != needed[key]] + differing
        pairs = ", ".join(f"{key} is {found.get(key)!r}, needed is {needed[key]!r}" for key in shown)
        raise ValueError(f"{directory} holds other features ({pairs}); give another directory.")
    if not found:
        directory.mkdir(parents=True, exist_ok=True)
        write_manifest(directory, needed)
    return layout


def _identity(target: Target, rows: Sequence[Row]) -> dict[str, Any]:
    tokens, weights = hashlib.sha256(), hashlib.sha256()
    for row in rows:
        tokens.update(row.tokens.tobytes() + b"|")
    # A row of every matrix tells a fine-tune from the model it started from.
    for leaf in jax.tree.leaves(nnx.state(target.model)):
        weights.update(np.asarray(to_host(leaf[(0,) * (leaf.ndim - 1)]), np.float32).tobytes())
    return {
        "target": target.name,
        "target_dtype": str(target.dtype),
        "hidden_size": target.config.hidden_size,
        "config_sha256": hashlib.sha256(repr(target.config).encode()).hexdigest(),
        "weights_sha256": weights.hexdigest(),
        "rows": len(rows),
        "tokens": sum(len(row.tokens) for row in rows),
        "rows_sha256": tokens.hexdigest(),
    }


def make(
    layout: Layout,
    target: Target,
    rows: Sequence[Row],
    *,
    tokens_per_batch: int = 4096,
    process_index: int = 0,
    process_count: int = 1,
    progress: Progress = lambda done, total: None,
) -> None:
    """Computes the shards that are missing, of every `process_count`-th one.

    Where the target lies on devices of several processes, all of them call this and compute every batch together; each
    then writes its share of the shards. On any mesh a batch's rows are split over its devices.

    Args:
      process_index, process_count: of processes that know nothing of each other, as `make_features.py` starts them.

    Raises:
      ValueError: features are beyond the range of the dtype they are kept in.
      OSError: the disk has not room enough, or cannot be written; whole shards stay.
      RuntimeError: another process raised one of these.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index is {process_index}; it must be below process_count, {process_count}.")
    graphdef, params = nnx.split(target.model)
    missing = layout.missing(process_index, process_count)
    together = spans_processes(params)
    if together:
        # As process 0 sees it: they must agree, and a network file system may show another machine less.
        names = {shard.path for shard in missing}
        wanted = from_main(np.asarray([shard.path in names for shard in layout.shards]))
        missing = [shard for shard, is_wanted in zip(layout.shards, wanted, strict=True) if is_wanted]
    agree = in_all if together else lambda work: work()
    agree(partial(_require_room, layout, missing))
    done, total = 0, sum(shard.tokens for shard in missing)
    for number, shard in enumerate(missing):
        features = None
        if not together or number % jax.process_count() == jax.process_index():
            features = np.empty((shard.tokens, layout.width), STORED[layout.dtype])
        starts = layout.starts[shard.rows.start :] - layout.starts[shard.rows.start]
        batches = _Batches([rows[index] for index in shard.rows], params, tokens_per_batch)
        steps = range(batches.order.steps_per_epoch)
        # One batch ahead, so that the device computes while the host stores.
        computed = (features_of(graphdef, params, batches.at(step)).astype(layout.dtype) for step in steps)
        for step, batch in zip(steps, _one_ahead(computed), strict=True):
            values = to_host(batch)
            if not np.isfinite(values).all():
                raise ValueError(_not_finite(layout, target))
            for place, index in enumerate(batches.order.at(step).rows.flat):
                if features is not None and index != NO_ROW:
                    begin, end = starts[index : index + 2]
                    features[begin:end] = values[place, : end - begin].view(features.dtype)
            done += batches.order.tokens_at(step)
            progress(done, total)
        agree(partial(_store, layout, shard, features))


def _not_finite(layout: Layout, target: Target) -> str:
    remedy = "look for what is wrong with the target"
    if layout.dtype == "float16":
        remedy = "make them with make_features.py --dtype bfloat16 in another directory, or train with --online"
    return f"Some features of {target.name} are not finite in {layout.dtype}; {remedy}."


def _require_room(layout: Layout, missing: Sequence[Shard]) -> None:
    needed, free = layout.bytes_of(missing), free_bytes(layout.directory)
    if needed > free:
        raise OSError(
            f"The features still to be made take {decimal(needed)}, but where {layout.directory} is only "
            f"{decimal(free)} are free; make room or give another directory."
        )


def _store(layout: Layout, shard: Shard, features: np.ndarray | None) -> None:
    """Writes a shard; without features, another process does."""
    if features is None:
        return
    try:
        write_shard(shard, features)
    except OSError as error:
        kept = len(layout.shards) - len(layout.missing())
        raise OSError(
            f"{error}; {kept} of {len(layout.shards)} shards are whole and stay: make room and run again, which "
            "goes on from there."
        ) from error


class _Batches:
    """A shard's rows as batches of tokens, on the mesh that the target's parameters lie on, if they do."""

    def __init__(self, rows: Sequence[Row], params: nnx.State, tokens_per_batch: int):
        self._mesh = mesh_of(params)
        multiple, share = 1, Share(process_index=0, process_count=1)
        if self._mesh is not None:
            multiple, share = row_multiple(self._mesh), process_share(self._mesh)
        config = BatchConfig(tokens_per_batch=tokens_per_batch, rows_multiple=multiple)
        self._pipeline = Pipeline(rows, config, **share)
        self.order = self._pipeline.order

    def at(self, step: int) -> Any:  # i32[R, T]
        tokens = self._pipeline.batch_at(step).tokens
        return tokens if self._mesh is None else shard_batch(tokens, self._mesh, self.order.at(step).rows.size)


def _one_ahead(items: Iterator[jax.Array]) -> Iterator[jax.Array]:
    """The same items, each asked for before the one before it is handed out."""
    waiting = next(items)
    for item in items:
        yield waiting
        waiting = item
    yield waiting
