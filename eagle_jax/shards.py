"""Features in files: a directory of shards, each with the features of consecutive rows, one vector a token.

`manifest.json` says what they are features of and how they are stored. A shard has its name only once it is whole, so
that one which was being written when its process died is never read. Reading is memory-mapped.

E hidden size.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from eagle_jax.data import Row
from eagle_jax.files import replacing

MANIFEST = "manifest.json"
KeptDtype = Literal["float16", "bfloat16"]
STORED = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16)}  # .npy files know no bfloat16
SHARD_TOKENS = 2**17


class Shard(NamedTuple):
    path: Path
    rows: range  # those whose features it holds
    tokens: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the features of rows are, or will be."""

    directory: Path
    starts: np.ndarray  # i64[rows + 1], a row's first token among all
    width: int  # E
    dtype: KeptDtype
    shard_tokens: int
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    def bytes_of(self, shards: Sequence[Shard]) -> int:
        return sum(shard.tokens for shard in shards) * self.width * STORED[self.dtype].itemsize

    def missing(self, process_index: int = 0, process_count: int = 1) -> list[Shard]:
        """The shards that one of several processes has yet to make."""
        return [shard for shard in self.shards[process_index::process_count] if not self._is_whole(shard)]

    def _is_whole(self, shard: Shard) -> bool:
        """Whether a shard is there; one that is shorter or longer than its rows was damaged, and is made again."""
        if not shard.path.is_file():
            return False
        try:
            stored = np.load(shard.path, mmap_mode="r")
        except (ValueError, EOFError):
            return False
        return stored.shape == (shard.tokens, self.width) and stored.dtype == STORED[self.dtype]


def free_bytes(directory: str | Path) -> int:
    """What is free on the disk that a directory is on, or will be."""
    directory = Path(directory).absolute()
    return shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists())).free


def lay_out(
    directory: str | Path,
    rows: Sequence[Row],
    width: int,
    *,
    dtype: KeptDtype | None = None,
    shard_tokens: int | None = None,
) -> Layout:
    """How features of `rows` are spread over files; nothing is written.

    Args:
      width: the target's hidden size.
      dtype: None is the directory's own, if it has one, or else float16.
      shard_tokens: a shard holds rows that begin within so many tokens; None is the directory's own, or SHARD_TOKENS.
    """
    directory = Path(directory)
    found = read_manifest(directory)
    stored: KeptDtype = found.get("dtype", "float16") if dtype is None else dtype
    most: int = found.get("shard_tokens", SHARD_TOKENS) if shard_tokens is None else shard_tokens
    if most < 1:
        raise ValueError(f"shard_tokens is {most}; it must be at least 1.")
    starts = np.concatenate([[0], np.cumsum([len(row.tokens) for row in rows], dtype=np.int64)])
    firsts = np.flatnonzero(np.diff(starts[:-1] // most, prepend=-1)).tolist()
    shards = [
        Shard(directory / f"shard-{number:05d}.npy", range(first, last), int(starts[last] - starts[first]))
        for number, (first, last) in enumerate(zip(firsts, [*firsts[1:], len(rows)], strict=True))
    ]
    return Layout(directory, starts, width, stored, most, tuple(shards))


class KeptFeatures:
    """The features [tokens, E] of each row, memory-mapped.

    Raises:
      ValueError: shards are missing.
    """

    def __init__(self, layout: Layout):
        if missing := layout.missing():
            raise ValueError(
                f"{layout.directory} lacks {len(missing)} of {len(layout.shards)} shards, {missing[0].path.name} "
                "first; make_features.py makes what is missing."
            )
        dtype = np.dtype(jnp.bfloat16 if layout.dtype == "bfloat16" else np.float16)
        self._layout = layout
        self._shards = [np.load(shard.path, mmap_mode="r").view(dtype) for shard in layout.shards]
        self._first_rows = np.asarray([shard.rows.start for shard in layout.shards])

    def __len__(self) -> int:
        return len(self._layout.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"There is no row {index} among {len(self)}.")
        shard = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        begin, end = self._layout.starts[index : index + 2] - self._layout.starts[self._first_rows[shard]]
        return self._shards[shard][begin:end]


def read_manifest(directory: Path) -> dict[str, Any]:
    """What a directory's manifest says; empty if there is none."""
    path = directory / MANIFEST
    if not path.exists():
        return {}
    try:
        found = dict(json.loads(path.read_text()))
        if found["dtype"] not in STORED or not found["shard_tokens"] >= 1:
            raise ValueError(f"dtype {found['dtype']!r}, shard_tokens {found['shard_tokens']!r}")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}); delete its directory and run again.") from error
    return found


def write_manifest(directory: Path, content: dict[str, Any]) -> None:
    # Under the process's number until it is whole, for several may write it at the same time.
    with _whole(directory / MANIFEST, f".{os.getpid()}.partial") as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def write_shard(shard: Shard, features: np.ndarray) -> None:
    """Stores the features of a shard's rows; a disk that takes no more leaves nothing behind."""
    with _whole(shard.path) as file:
        _save_array(features, file)


def _save_array(array: np.ndarray, file: BinaryIO) -> None:
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(array.data)  # unlike np.save, this says why a disk took no more


@contextmanager
def _whole(path: Path, suffix: str = ".partial") -> Iterator[BinaryIO]:
    """A file to write that is at `path` once it is whole; an error names `path`."""
    try:
        with replacing(path, suffix) as scratch, open(scratch, "wb") as file:
            yield file
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror or error})") from error
