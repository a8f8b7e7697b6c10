"""What rows come to, as the host reads it from look to look: only what is new is fetched and decoded.

B batch rows, W places.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle_jax import decoding
from eagle_jax.text import Reader


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """What one prompt came to."""

    token_ids: list[int]  # the token that ended it, or completed a stop string, included
    text: str  # without either; "" where the target has no tokenizer
    logprobs: list[float]  # the target's raw log-softmax of each id, before any processor
    finish_reason: str  # "stop" or "length"
    rounds: int  # target forwards after the prefill
    accepted: list[int]  # accepted draft tokens of each round; the last round's may have been cut

    @property
    def tau(self) -> float:
        """Tokens a round: accepted draft tokens + 1 (the bonus token), on average; NaN at 0 rounds."""
        return sum(self.accepted) / self.rounds + 1 if self.rounds else math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one round added to a streamed text."""

    text: str  # whole characters only
    token_ids: list[int]
    accepted: int | None  # the round's accepted draft tokens; None for the prefill's token
    finish_reason: str | None  # None until the last chunk


class Row:
    """One row as far as the host has read it."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]):
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.accepted: list[int] = []
        self.finish_reason: str | None = None  # None while it is running
        self._reader = Reader(tokenizer, stop)

    @property
    def running(self) -> bool:
        return self.finish_reason is None

    def take(
        self,
        tokens: np.ndarray,  # i32[W], from the first one not read yet
        logprobs: np.ndarray,  # f32[W]
        accepted: np.ndarray,  # i32[W], from the first round not read yet
        emitted: int,
        rounds: int,
        finish: int,
    ) -> Chunk:
        """Reads on, from this row's part of the `News`."""
        before, rounds_before = len(self.token_ids), len(self.accepted)
        self.token_ids += tokens[: emitted - before].tolist()
        self.logprobs += logprobs[: emitted - before].tolist()
        self.accepted += accepted[: rounds - rounds_before].tolist()
        ended, stopped = finish != decoding.RUNNING, finish == decoding.STOPPED
        # The token that ends a text is none of it.
        end = emitted - 1 if stopped else emitted
        text = self._reader.read(self.token_ids[before:end], last=ended)
        if self._reader.cut is not None:
            self._cut(self._reader.cut)
        elif ended:
            self.finish_reason = "stop" if stopped else "length"
        return Chunk(
            text=text,
            token_ids=self.token_ids[before:],
            accepted=self.accepted[-1] if self.accepted else None,
            finish_reason=self.finish_reason,
        )

    def _cut(self, count: int) -> None:
        """Ends the row with its `count`-th token, which completed a stop string."""
        # Rounds that began after it were run for nothing and do not count.
        begun = np.cumsum([1] + [accepted + 1 for accepted in self.accepted])
        self.accepted = self.accepted[: int(np.searchsorted(begun, count))]
        self.token_ids, self.logprobs = self.token_ids[:count], self.logprobs[:count]
        self.finish_reason = "stop"

    def completion(self) -> Completion:
        """The row as it ended, or as far as it is: its `finish_reason` means nothing while it is running."""
        return Completion(
            token_ids=list(self.token_ids),
            text=self._reader.text,
            logprobs=list(self.logprobs),
            finish_reason=self.finish_reason or "length",
            rounds=len(self.accepted),
            accepted=list(self.accepted),
        )
