"""The target's features of training rows, computed once and kept in a file.

A directory holds `features.npy` (float16, one vector a token, row after row) and `manifest.json`, which says for which
target and which tokens they were made; the manifest is written last, so its presence means that the file is whole.
float16 keeps 11 bits of a feature, against bfloat16's 8, and features lie far inside its range.

B batch rows, T tokens, E hidden size.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flax import nnx

from eagle_jax.data import FeatureRows, Row, epoch_plan, row_offsets
from eagle_jax.target import Target, features_of

Progress = Callable[[int, int], None]  # (tokens done, tokens in all)


def load_or_make(
    directory: str | Path,
    target: Target,
    rows: list[Row],
    *,
    tokens_per_batch: int = 4096,
    progress: Progress = lambda done, total: None,
) -> FeatureRows:
    """Features of `rows`, from `directory` if they are there, else computed and left there.

    Raises:
      ValueError: the directory holds features of another target or of other rows.
      OSError: the directory cannot be written.
    """
    directory = Path(directory)
    manifest = _manifest(target, rows)
    offsets = row_offsets(rows)
    if (directory / "manifest.json").exists():
        try:
            found = dict(json.loads((directory / "manifest.json").read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{directory / 'manifest.json'} cannot be read ({error}); delete it and run again."
            ) from error
        if found != manifest:
            differing = [key for key in manifest if found.get(key) != manifest[key]]
            pairs = ", ".join(f"{key} is {found.get(key)!r}, needed is {manifest[key]!r}" for key in differing)
            raise ValueError(f"{directory} holds other features ({pairs}); give another directory.")
    else:
        directory.mkdir(parents=True, exist_ok=True)
        _make(directory / "features.npy", target, rows, offsets, tokens_per_batch, progress)
        partial_file = directory / "manifest.json.partial"
        partial_file.write_text(json.dumps(manifest, indent=2) + "\n")
        os.replace(partial_file, directory / "manifest.json")
    return FeatureRows(rows, offsets, np.load(directory / "features.npy", mmap_mode="r"))


def _manifest(target: Target, rows: list[Row]) -> dict[str, object]:
    tokens = hashlib.sha256()
    for row in rows:
        tokens.update(row.tokens.tobytes() + b"|")
    # One matrix of the last layer tells a fine-tune from the model it started from.
    weights = np.asarray(target.model.layers[-1].mlp.down_proj.kernel[...], np.float32)
    return {
        "target": target.name,
        "dtype": str(target.dtype),
        "hidden_size": target.config.hidden_size,
        "layers": target.config.num_hidden_layers,
        "weights_sha256": hashlib.sha256(weights.tobytes()).hexdigest(),
        "tokens": sum(len(row.tokens) for row in rows),
        "rows_sha256": tokens.hexdigest(),
    }


def _make(
    path: Path, target: Target, rows: list[Row], offsets: np.ndarray, tokens_per_batch: int, progress: Progress
) -> None:
    graphdef, params = nnx.split(target.model)
    shape = (int(offsets[-1]), target.config.hidden_size)
    kept = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape)
    done = 0
    for plan in epoch_plan(
        [len(row.tokens) for row in rows], tokens_per_batch=tokens_per_batch, bucket=64, seed=0, epoch=0
    ):
        tokens = np.zeros((plan.size, plan.length), np.int32)
        for place, index in enumerate(plan.indices):
            tokens[place, : len(rows[index].tokens)] = rows[index].tokens
        features = np.asarray(features_of(graphdef, params, tokens), np.float16)
        for place, index in enumerate(plan.indices):
            count = len(rows[index].tokens)
            kept[offsets[index] : offsets[index] + count] = features[place, :count]
            done += count
        progress(done, shape[0])
    kept.flush()
