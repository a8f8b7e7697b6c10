"""Rows -> batches: every row once an epoch, rows of like length together, the order a pure function of (seed, step).

So a run goes on at any step, with any number of processes, and a checkpoint holds the step and no state of an iterator.
All rows are shuffled first and put into buckets of like length; what a bucket's last batch lacks is filled with the
rows of the next longer one, so that an epoch has one incomplete batch at most, padded with rows that are nobody's. Each
process then takes its slice of a batch's rows, and reads no others.

R rows of a batch, over all processes; A pieces of an accumulated batch; B rows of a piece in one process; T tokens.
"""

import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from eagle_jax.data import Row
from eagle_jax.training import Batch

if TYPE_CHECKING:
    import grain

NO_ROW = -1
GROWTH = 1.25  # of a bucket over the last: each costs a compilation, and a row's padding is below a quarter of it


def require_grain() -> None:
    """Raises RuntimeError where grain, which reads batches ahead, is not installed."""
    if importlib.util.find_spec("grain") is None:
        raise RuntimeError('grain reads batches ahead, but is not installed; pip install "eagle_jax[train]".')


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How rows become batches."""

    tokens_per_batch: int = 4096  # of all processes and pieces together, padding included
    bucket: int = 64  # tokens; rows are padded to a multiple
    accumulate: int = 1  # pieces a batch comes in
    rows_multiple: int = 1  # rows of a piece are a multiple of it: of the devices or processes that share them
    seed: int = 0

    def __post_init__(self):
        for name in ("tokens_per_batch", "bucket", "accumulate", "rows_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"BatchConfig.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.seed < 0:
            raise ValueError(f"BatchConfig.seed is {self.seed}; it must not be negative.")


class StepRows(NamedTuple):
    """What one step takes in."""

    rows: np.ndarray  # i32[A, R / A], indices; NO_ROW is padding
    length: int  # tokens that rows are padded to


class Order:
    """Which rows each step takes, of rows that have `lengths` tokens."""

    def __init__(self, lengths: Sequence[int], config: BatchConfig):
        if len(lengths) == 0 or min(lengths) < 1:
            raise ValueError(f"There are {len(lengths)} rows, the shortest of {min(lengths, default=0)} tokens.")
        self.lengths = np.asarray(lengths, np.int64)
        self.config = config
        buckets = _bucket_lengths(int(self.lengths.max()), config.bucket)
        self._length_of = buckets[np.searchsorted(buckets, self.lengths)]  # i64[rows], padded
        # Two: prefetching reaches into the next epoch before it has left the last.
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        self.steps_per_epoch = len(self._epoch(0))  # in every epoch, for it depends on lengths alone

    def at(self, step: int) -> StepRows:
        """The rows of a step, counted from 0 over all epochs."""
        epoch, place = divmod(int(step), self.steps_per_epoch)
        return self._epoch(epoch)[place]

    def tokens_at(self, step: int) -> int:
        """Tokens in a step's batch, padding left out."""
        rows = self.at(step).rows
        return int(self.lengths[rows[rows != NO_ROW]].sum())

    def _make_epoch(self, epoch: int) -> list[StepRows]:
        shuffled = _permutation(len(self.lengths), self.config.seed, epoch, 0)
        batches, left = [], shuffled[:0]
        lengths = np.unique(self._length_of).tolist()
        for length in lengths:
            waiting = np.concatenate([left, shuffled[self._length_of[shuffled] == length]])
            size = self._rows_of(length)
            if length == lengths[-1]:
                waiting = np.pad(waiting, (0, -len(waiting) % size), constant_values=NO_ROW)
            whole = len(waiting) - len(waiting) % size
            batches += [(rows, length) for rows in waiting[:whole].reshape(-1, size)]
            left = waiting[whole:]
        return [
            StepRows(rows.astype(np.int32).reshape(self.config.accumulate, -1), length)
            for rows, length in (batches[place] for place in _permutation(len(batches), self.config.seed, epoch, 1))
        ]

    def _rows_of(self, length: int) -> int:
        multiple = self.config.accumulate * self.config.rows_multiple
        return max(1, self.config.tokens_per_batch // length // multiple) * multiple


def _bucket_lengths(longest: int, bucket: int) -> np.ndarray:
    """Multiples of `bucket` up to the one that holds `longest`, each at least GROWTH times the last."""
    most = -(-longest // bucket) * bucket
    lengths = [bucket]
    while lengths[-1] < most:
        grown = -(-int(lengths[-1] * GROWTH) // bucket) * bucket
        lengths.append(min(most, max(lengths[-1] + bucket, grown)))
    return np.asarray(lengths)


def _permutation(count: int, *key: int) -> np.ndarray:
    """i64[count]. By sorting raw bits, which NumPy promises to keep; its own permutations may change with a version."""
    bits = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(bits, kind="stable")


class RowFeatures(Protocol):
    """The features [tokens, E] of each row, such as `features.KeptFeatures`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> np.ndarray: ...


class Pipeline:
    """One process's batches.

    Args:
      rows: all rows, the same in every process.
      features: those that are kept; None leaves them to the training step.
      rows_multiple: rows that are nobody's fill a piece up to a multiple of it; None is the order's own. A run that
        goes on with other devices keeps the order it was begun with.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        config: BatchConfig,
        *,
        features: RowFeatures | None = None,
        rows_multiple: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ):
        rows_multiple = config.rows_multiple if rows_multiple is None else rows_multiple
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index is {process_index}; it must be below process_count, {process_count}.")
        if rows_multiple % process_count:
            raise ValueError(
                f"rows_multiple is {rows_multiple}, which {process_count} processes cannot share; "
                "make it a multiple of them."
            )
        if features is not None and len(features) != len(rows):
            raise ValueError(f"There are features of {len(features)} rows, but {len(rows)} rows.")
        self.order = Order([len(row.tokens) for row in rows], config)
        self._rows, self._features, self._rows_multiple = rows, features, rows_multiple
        self._index, self.process_count = process_index, process_count

    def batch_at(self, step: int) -> Batch:
        """The batch of a step: NumPy arrays [A, B, T, ...], without the axis A where nothing is accumulated."""
        return self._read(self._slice(self.order.at(step)))

    def dataset(self, steps: int) -> "grain.MapDataset[Batch]":
        """The batches of `steps` steps from step 0 on, by their index."""
        import grain

        return grain.MapDataset.range(steps).map(self.order.at).map(self._slice).map(self._read)

    def batches(self, start: int, stop: int, *, threads: int = 2) -> Iterator[Batch]:
        """The batches of steps `start` to `stop` (left out), read ahead by threads; 0 reads each when it is wanted."""
        if threads == 0:
            yield from map(self.batch_at, range(start, stop))
        elif start < stop:
            import grain

            ahead = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
            yield from self.dataset(stop)[start:].to_iter_dataset(ahead)

    def _slice(self, step: StepRows) -> StepRows:
        """This process's rows of each piece."""
        spare = -step.rows.shape[1] % self._rows_multiple
        rows = np.pad(step.rows, ((0, 0), (0, spare)), constant_values=NO_ROW)
        share = rows.shape[1] // self.process_count
        return step._replace(rows=rows[:, self._index * share : (self._index + 1) * share])

    def _read(self, step: StepRows) -> Batch:
        shape = step.rows.shape if self.order.config.accumulate > 1 else step.rows.shape[1:]
        tokens = np.zeros((step.rows.size, step.length), np.int32)
        assistant = np.zeros((step.rows.size, step.length), bool)
        features = None
        if self._features is not None:
            first = self._features[0]
            features = np.zeros((step.rows.size, step.length, first.shape[1]), first.dtype)
        for place, index in enumerate(step.rows.flat):
            if index == NO_ROW:
                continue
            row = self._rows[index]
            tokens[place, : len(row.tokens)] = row.tokens
            assistant[place, : len(row.tokens)] = row.assistant
            if features is not None and self._features is not None:
                features[place, : len(row.tokens)] = self._features[index]
        whole: list[Any] = [
            None if x is None else x.reshape(*shape, *x.shape[1:]) for x in (tokens, assistant, features)
        ]
        return Batch(*whole)
