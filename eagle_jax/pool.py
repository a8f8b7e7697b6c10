"""Continuous batching: a fixed number of rows, each given another prompt as soon as its text has ended.

Newcomers are prefilled a few at a time in a small state of their own, those of one length bucket together, and are then
written into the places of rows that have ended. So no row waits for the longest, and shapes are few: after the first
use of each bucket nothing compiles. The host looks at the rows every few rounds only; while it reads what has ended,
the device is at the next rounds.

B rows, R newcomers, M capacity in tokens (and cache slots).
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle_jax import decoding, generation
from eagle_jax import sampling as sampling_rows
from eagle_jax.completion import Completion, Row
from eagle_jax.config import SamplingConfig, TreeConfig
from eagle_jax.head import Head
from eagle_jax.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and how it is to go on."""

    tokens: Sequence[int]
    seed: int  # as in `generate`'s list of seeds: the text is that of the prompt alone under it
    sampling: SamplingConfig
    max_new_tokens: int
    end: int | None = None  # a token that ends the text, besides the target's own
    stop: tuple[str, ...] = ()  # strings that end it


class Ended(NamedTuple):
    """A request whose text has ended."""

    tag: Any  # what the caller gave along with it
    request: Request
    completion: Completion


class _Place(NamedTuple):
    """Who is in a row of the device's, and what has been read of it."""

    tag: Any
    request: Request
    read: Row


class RowPool:
    """B rows that are never idle for long.

    Attributes:
      emitted: tokens written so far, by the last look.
    """

    def __init__(
        self,
        target: Target,
        head: Head | generation.BindsDrafter | None,
        *,
        rows: int,
        max_length: int,
        sampling: Sequence[SamplingConfig],
        tree: TreeConfig = TreeConfig(),
        rounds: int = 8,
        newcomers: int | None = None,
    ):
        """An empty pool.

        Args:
          target: writes.
          head: drafts for it; None decodes plainly.
          rows: B, decoded together. Enough of them make the device busy; their caches must fit.
          max_length: most tokens of a prompt and its text together, if the target's limit is not lower.
          sampling: all settings that requests will have; others must need no further processors.
          tree: the shape of the head's trees.
          rounds: rounds between two looks.
          newcomers: R, rows that are prefilled together; None is a sixteenth of all.
        """
        self.max_length = min(max_length, target.config.context_length)
        self.emitted = self._written = 0
        self._target, self._rounds = target, rounds
        self._program, self._params = generation.compose(target, head, tree, sampling)
        self._capacity = -(-self.max_length // generation.SMALLEST_BUCKET) * generation.SMALLEST_BUCKET
        self._newcomers = max(1, rows // 16) if newcomers is None else min(newcomers, rows)
        self._places: list[_Place | None] = [None] * rows
        self._waiting: dict[int, deque[tuple[Any, Request]]] = {}  # by length bucket
        nobody = Request(tokens=[0], seed=0, sampling=sampling[0], max_new_tokens=0)
        empty = self._job([nobody] * rows, self._capacity).empty()
        self._state = dataclasses.replace(empty, finish=jnp.full_like(empty.finish, decoding.AT_LIMIT))

    @property
    def wanted(self) -> int:
        """How many more requests should wait, for newcomers to find others of their bucket."""
        free = sum(place is None for place in self._places)
        return free + 8 * self._newcomers - self._waiting_count()

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return self._waiting_count() > 0 or any(place is not None for place in self._places)

    def add(self, request: Request, tag: Any = None) -> None:
        """Lets a request wait for a row."""
        if not 0 < len(request.tokens) < self.max_length:
            raise ValueError(f"A prompt has {len(request.tokens)} tokens; it must have 1 to {self.max_length - 1}.")
        bucket = generation.length_bucket(len(request.tokens))
        self._waiting.setdefault(bucket, deque()).append((tag, request))

    def step(self) -> list[Ended]:
        """Waits for the rounds that are running, fills rows that have ended, and sets off the next rounds."""
        ended = self._look()
        self._refill()
        if any(place is not None for place in self._places):
            limit = jax.device_put(np.int32(self._rounds))
            self._state = decoding.run_rounds(self._params, self._state, limit, program=self._program)
        return ended

    def _waiting_count(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _look(self) -> list[Ended]:
        """Reads the rows that have ended, and those that a stop string may end."""
        taken = [(row, place) for row, place in enumerate(self._places) if place is not None]
        if not taken:
            return []
        finish, emitted = jax.device_get((self._state.finish, self._state.emitted))
        ended: list[Ended] = []
        to_read = [(row, place) for row, place in taken if finish[row] != decoding.RUNNING or place.request.stop]
        news = jax.device_get(decoding.all_news(self._state)) if to_read else None
        for row, (tag, request, read) in to_read:
            assert news is not None
            tokens, rounds = len(read.token_ids), len(read.accepted)
            fresh = news.tokens[row, tokens:], news.logprobs[row, tokens:], news.accepted[row, rounds:]
            read.take(*fresh, int(emitted[row]), int(news.rounds[row]), int(finish[row]))
            if not read.running:
                ended.append(Ended(tag, request, read.completion()))
                self._places[row] = None
        if any(finish[row] == decoding.RUNNING and self._places[row] is None for row, _ in to_read):
            free = np.asarray([place is None for place in self._places])
            self._state = decoding.end_rows(self._state, jax.device_put(free))
        self._written += sum(len(one.completion.token_ids) for one in ended)
        self.emitted = self._written + sum(int(emitted[row]) for row, _ in taken if self._places[row] is not None)
        return ended

    def _refill(self) -> None:
        """Gives free rows to those who wait, R at a time."""
        free = [row for row, place in enumerate(self._places) if place is None]
        while free and self._waiting_count():
            running = len(free) < len(self._places)
            if running and len(free) < self._newcomers <= self._waiting_count():
                return  # more rows will end soon, and a prefill costs the same for one as for all R
            group = self._next_group(min(self._newcomers, len(free)))
            rows, free = free[: len(group)], free[len(group) :]
            spare = self._newcomers - len(group)
            job = self._job([request for _, request in [*group, *group[-1:] * spare]])
            places = np.asarray(rows + [len(self._places)] * spare, np.int32)
            self._state = seat(self._state, job.start(), jax.device_put(places))
            for row, (tag, request) in zip(rows, group, strict=True):
                self._places[row] = _Place(tag, request, Row(self._target.tokenizer, request.stop))

    def _next_group(self, most: int) -> list[tuple[Any, Request]]:
        """Up to `most` requests of the bucket in which most of them wait, the oldest first."""
        bucket = max(self._waiting, key=lambda bucket: len(self._waiting[bucket]))
        queue = self._waiting[bucket]
        return [queue.popleft() for _ in range(min(most, len(queue)))]

    def _job(self, requests: Sequence[Request], capacity: int | None = None) -> generation.Job:
        """Requests as rows of their own; `capacity` is their length bucket's unless given."""
        lengths = np.asarray([len(request.tokens) for request in requests])
        most = np.asarray([request.max_new_tokens for request in requests])
        ends = [(*self._target.eos_token_ids, -1 if request.end is None else request.end) for request in requests]
        return generation.Job(
            target=self._target,
            program=self._program,
            params=self._params,
            prompts=[list(request.tokens) for request in requests],
            settings=decoding.RowSettings(
                sampling=sampling_rows.params_for(
                    [request.sampling for request in requests], self._target.config.vocab_size
                ),
                stop_ids=jnp.asarray(ends, jnp.int32),
                limit=jnp.asarray(np.minimum(self.max_length - lengths, most), jnp.int32),
            ),
            keys=sampling_rows.row_keys([request.seed for request in requests], len(requests)),
            capacity=capacity or min(generation.length_bucket(int(lengths.max())), self._capacity),
            stop=(),
        )


@partial(jax.jit, donate_argnames="state")
def seat(state: decoding.DecodeState, newcomers: decoding.DecodeState, places: Array) -> decoding.DecodeState:
    """Writes the rows of one state over rows of another, which has as much room or more.

    Args:
      state: B rows; donated.
      newcomers: R rows.
      places: i32[R], where each is to stand; at B or more it is left out.

    What an earlier text left behind a newcomer's last token stays: lengths and counts tell that it is not there.
    """

    def write(old: Array, new: Array) -> Array:
        return old.at[(places, *(slice(0, size) for size in new.shape[1:]))].set(new, mode="drop")

    return jax.tree.map(write, state, newcomers)
