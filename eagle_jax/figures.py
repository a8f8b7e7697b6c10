"""From timed samples to figures: tau, acceptance by position, speeds and their ratio to plain, the parts of a round."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from eagle_jax.measure import Difference, Sample
from eagle_jax.round_times import RoundTimes

RESAMPLES = 1000  # of the prompts, for a ratio's interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """One way on one set of prompts; NaN where there is nothing to divide by."""

    texts: int  # repeats are of the same text, which counts once
    tokens: int  # of all repeats
    tau: float  # tokens a round, over all rounds
    accepted_at_level: list[float]  # share of rounds with at least 1, 2, ... accepted draft tokens
    accepted_given_previous: list[float]  # the same as a share of the level before
    tokens_per_second: float  # of decoding: ids after the prefill's, prefill left out
    tokens_per_second_with_prefill: float
    ratio: float  # of tokens_per_second to plain's
    ratio_low: float  # 95 % interval, prompts resampled
    ratio_high: float
    ratio_min: float  # over groups of prompts
    ratio_max: float
    prefill_seconds: float
    decoding_seconds: float
    compiling_seconds: float
    identical: int | None  # texts that are plain's in all repeats; None where they are not to be compared
    excused: int | None  # texts that are not, with gaps that rounding excuses
    gaps: list[float] | None  # one a text that is not


def figures(samples: Sequence[Sample], plain: Sequence[Sample]) -> Figures:
    """One way's figures, and their ratio to plain's on the same groups."""
    timed = [sample.timed for sample in samples]
    texts = sum({sample.group: len(sample.timed.ids) for sample in samples}.values())
    tokens = sum(one.tokens for one in timed)
    accepted = [count for one in timed for count in one.accepted]
    shares = acceptance(accepted, max(accepted, default=0))
    ratio = _ratio(samples, plain)
    compared = all(sample.differences is not None for sample in samples)
    differing = _worst_differences(samples)
    prefill, decoding = sum(one.prefill for one in timed), sum(one.decoding for one in timed)
    return Figures(
        texts=texts,
        tokens=tokens,
        tau=tau(accepted),
        accepted_at_level=shares,
        accepted_given_previous=[share / before for before, share in zip([1.0, *shares], shares, strict=False)],
        tokens_per_second=_divide(tokens - sum(one.early for one in timed), decoding),
        tokens_per_second_with_prefill=_divide(tokens, prefill + decoding),
        ratio=ratio.whole,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        ratio_min=ratio.least,
        ratio_max=ratio.most,
        prefill_seconds=prefill,
        decoding_seconds=decoding,
        compiling_seconds=sum(sample.compiling for sample in samples),
        identical=texts - len(differing) if compared else None,
        excused=sum(one.excused for one in differing) if compared else None,
        gaps=[one.gap for one in differing] if compared else None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundFigures:
    """What a round takes, medians over the rounds that were timed; None where none was."""

    draft_seconds: float | None
    verify_seconds: float | None
    forwards_seconds: float | None  # the draft model's own, alone; None for a drafter that has no model
    draft_over_forwards: float | None  # of the two in one round, between which a machine changes least


def round_figures(times: Sequence[RoundTimes]) -> RoundFigures:
    """One way's, over its groups of prompts."""
    draft, verify, forwards = ([one for each in times for one in each[i]] for i in range(3))
    pairs = [one.drafting[i] / alone for one in times for i, alone in enumerate(one.forwards)]
    draft, verify, forwards, ratio = (
        float(np.median(one)) if one else None for one in (draft, verify, forwards, pairs)
    )
    return RoundFigures(
        draft_seconds=draft, verify_seconds=verify, forwards_seconds=forwards, draft_over_forwards=ratio
    )


def _worst_differences(samples: Iterable[Sample]) -> list[Difference]:
    """For each text that differs in some repeat, the difference that rounding excuses least."""
    worst: dict[tuple[int, int], Difference] = {}
    for sample in samples:
        for one in sample.differences or ():
            text = sample.group, one.row
            worst[text] = max(worst.get(text, one), one, key=lambda other: other.gap - other.allowed)
    return list(worst.values())


def tau(accepted: Sequence[int]) -> float:
    """Tokens a round: accepted draft tokens + 1, on average; NaN at 0 rounds."""
    return sum(accepted) / len(accepted) + 1 if accepted else math.nan


def acceptance(accepted: Sequence[int], levels: int) -> list[float]:
    """The share of rounds in which at least 1, 2, ..., `levels` draft tokens were accepted."""
    return [float(np.mean(np.asarray(accepted) > level)) for level in range(levels)]


class _Ratio(NamedTuple):
    """Of two speeds."""

    whole: float
    low: float
    high: float
    least: float
    most: float


def _ratio(samples: Sequence[Sample], plain: Sequence[Sample]) -> _Ratio:
    """Speeds from ids and seconds summed over the groups of prompts; texts of a single id have nothing to decode."""
    own, base = _by_group(samples), _by_group(plain)
    both = np.stack([(own[group], base[group]) for group in own if own[group][0] > 0 and base[group][0] > 0] or [[]])
    if both.size == 0:
        return _Ratio(*[math.nan] * 5)
    # Fixed, so that the same samples give the same interval.
    drawn = np.random.default_rng(0).integers(0, len(both), (RESAMPLES, len(both)))
    low, high = np.quantile(_speed_ratio(both[drawn].sum(axis=1)), (0.025, 0.975))
    each = _speed_ratio(both)
    return _Ratio(float(_speed_ratio(both.sum(axis=0))), float(low), float(high), float(each.min()), float(each.max()))


def _speed_ratio(both: np.ndarray) -> np.ndarray:
    """From f64[..., 2, 2]: (ids, seconds) of the one and of the other."""
    speed = both[..., 0] / both[..., 1]
    return speed[..., 0] / speed[..., 1]


def _by_group(samples: Iterable[Sample]) -> dict[int, tuple[int, float]]:
    """Ids after the prefill's and seconds of decoding, summed over a group's repeats."""
    sums: dict[int, tuple[int, float]] = {}
    for sample in samples:
        ids, seconds = sums.get(sample.group, (0, 0.0))
        timed = sample.timed
        sums[sample.group] = ids + timed.tokens - timed.early, seconds + timed.decoding
    return sums


def _divide(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else math.nan
