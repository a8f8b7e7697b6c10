"""The target's features of training rows, computed once and kept in files.

The manifest beside them says for which target and which rows they are. A run that was killed goes on at the first
shard that is missing; several processes make every n-th shard each. float16 keeps 11 bits of a feature, against
bfloat16's 8, and features lie far inside its range.

B batch rows, T tokens, E hidden size.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.filesize import decimal

from eagle_jax.data import Row
from eagle_jax.pipeline import NO_ROW, BatchConfig, Pipeline
from eagle_jax.sharding import to_host
from eagle_jax.shards import (
    STORED,
    KeptDtype,
    KeptFeatures,
    Layout,
    free_bytes,
    lay_out,
    read_manifest,
    write_manifest,
    write_shard,
)
from eagle_jax.target import Target, features_of

Progress = Callable[[int, int], None]  # (tokens done, tokens to be done)


def load_or_make(
    directory: str | Path,
    target: Target,
    rows: Sequence[Row],
    *,
    tokens_per_batch: int = 4096,
    progress: Progress = lambda done, total: None,
) -> KeptFeatures:
    """Features of `rows`, from `directory` as far as they are there; the others are computed and left there.

    Raises:
      ValueError: the directory holds features of another target or of other rows.
      OSError: the directory cannot be written.
    """
    layout = claim(directory, target, rows)
    make(layout, target, rows, tokens_per_batch=tokens_per_batch, progress=progress)
    return KeptFeatures(layout)


def claim(
    directory: str | Path,
    target: Target,
    rows: Sequence[Row],
    *,
    dtype: KeptDtype | None = None,
    shard_tokens: int | None = None,
) -> Layout:
    """Leaves a manifest in a directory that has none, or checks that the one there is for this target and these rows.

    Args:
      dtype, shard_tokens: as `lay_out` takes them.

    Raises:
      ValueError: the directory holds other features, with both values of what differs.
      OSError: the directory cannot be written.
    """
    layout = lay_out(directory, rows, target.config.hidden_size, dtype=dtype, shard_tokens=shard_tokens)
    needed = _identity(target, rows) | {"dtype": layout.dtype, "shard_tokens": layout.shard_tokens}
    found = read_manifest(layout.directory)
    # A target's name may be a path, and paths to one directory differ.
    differing = [key for key in needed if found and key != "target" and found.get(key) != needed[key]]
    if differing:
        shown = [key for key in ("target",) if found.get(key) != needed[key]] + differing
        pairs = ", ".join(f"{key} is {found.get(key)!r}, needed is {needed[key]!r}" for key in shown)
        raise ValueError(f"{directory} holds other features ({pairs}); give another directory.")
    if not found:
        layout.directory.mkdir(parents=True, exist_ok=True)
        write_manifest(layout.directory, needed)
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

    Raises:
      ValueError: features are beyond the range of the dtype they are kept in.
      OSError: the disk has not room enough, or cannot be written; whole shards stay.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index is {process_index}; it must be below process_count, {process_count}.")
    missing = layout.missing(process_index, process_count)
    needed, free = layout.bytes_of(missing), free_bytes(layout.directory)
    if needed > free:
        raise OSError(
            f"The features still to be made take {decimal(needed)}, but where {layout.directory} is only "
            f"{decimal(free)} are free; make room or give another directory."
        )
    graphdef, params = nnx.split(target.model)
    done, total = 0, sum(shard.tokens for shard in missing)
    for shard in missing:
        features = np.empty((shard.tokens, layout.width), STORED[layout.dtype])
        starts = layout.starts[shard.rows.start :] - layout.starts[shard.rows.start]
        pipeline = Pipeline([rows[index] for index in shard.rows], BatchConfig(tokens_per_batch=tokens_per_batch))
        steps = range(pipeline.order.steps_per_epoch)
        # One batch ahead, so that the device computes while the host stores.
        computed = map(partial(_computed, graphdef, params, pipeline, layout.dtype), steps)
        for step, batch in zip(steps, _one_ahead(computed), strict=True):
            values = np.asarray(batch)
            if not np.isfinite(values).all():
                raise ValueError(f"Some features of {target.name} are not finite in {layout.dtype}; try bfloat16.")
            for place, index in enumerate(pipeline.order.at(step).rows.flat):
                if index != NO_ROW:
                    begin, end = starts[index : index + 2]
                    features[begin:end] = values[place, : end - begin].view(features.dtype)
            done += pipeline.order.tokens_at(step)
            progress(done, total)
        try:
            write_shard(shard, features)
        except OSError as error:
            kept = len(layout.shards) - len(layout.missing())
            raise OSError(
                f"{error}; {kept} of {len(layout.shards)} shards are whole and stay: make room and run again, which "
                "goes on from there."
            ) from error


def _computed(graphdef: nnx.GraphDef, params: nnx.State, pipeline: Pipeline, dtype: KeptDtype, step: int) -> jax.Array:
    return features_of(graphdef, params, pipeline.batch_at(step).tokens).astype(dtype)


def _one_ahead(items: Iterator[jax.Array]) -> Iterator[jax.Array]:
    """The same items, each asked for before the one before it is handed out."""
    waiting = next(items)
    for item in items:
        yield waiting
        waiting = item
    yield waiting
