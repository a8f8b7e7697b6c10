"""Text out of token ids: where it ends, and how much of it may be shown before it has."""

from collections.abc import Sequence
from typing import Any, NamedTuple

HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of bytes that are no character yet


class Cut(NamedTuple):
    """Where a stop string ends a text."""

    tokens: int  # ids up to and including the one that completes the stop string
    text: str  # what stands before it


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of token ids, markers of structure left out."""
    return tokenizer.decode(ids, skip_special_tokens=True)


def find_stop(tokenizer: Any, ids: Sequence[int], stop: Sequence[str]) -> Cut | None:
    """The cut at the stop string that is complete first; where one token completes several, at the earliest."""

    def matches(count: int) -> bool:
        text = decode(tokenizer, ids[:count])
        return any(string in text for string in stop)

    if not stop or not matches(len(ids)):
        return None
    # A text that holds a stop string still does with more tokens, so the first such prefix is found by halving.
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if matches(middle) else (middle + 1, high)
    text = decode(tokenizer, ids[:low])
    return Cut(low, text[: min(text.index(string) for string in stop if string in text)])


def showable(text: str, stop: Sequence[str]) -> str:
    """The part of a growing text that no later token can change or cut: whole characters, no beginning of a stop."""
    text = text.rstrip(HALF_A_CHARACTER)
    longest = max((len(string) - 1 for string in stop), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-length:]) for string in stop):
            return text[:-length]
    return text
