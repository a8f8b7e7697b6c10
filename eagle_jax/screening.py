"""What is wrong with a written text: it goes in circles, or it holds a piece of what a model is evaluated on."""

import re
from collections.abc import Iterable, Sequence

import numpy as np

LEAST_LOOP = 32  # tokens; a ruled line or a row of a table is no loop


def loops(ids: Sequence[int], repeats: int) -> bool:
    """Whether a run of tokens, of any length, stands `repeats` times in a row and fills at least LEAST_LOOP tokens."""
    tokens = np.asarray(ids)
    for period in range(1, len(tokens) // repeats + 1):
        same = tokens[period:] == tokens[:-period]
        wanted = max(repeats * period, LEAST_LOOP) - period
        if same.sum() >= wanted and _longest_run(same) >= wanted:
            return True
    return False


def _longest_run(values: np.ndarray) -> int:
    """The most trues in a row of bool[n]."""
    breaks = np.flatnonzero(np.concatenate([[True], ~values, [True]]))
    return int(np.diff(breaks).max()) - 1


class Overlap:
    """Finds word n-grams of given texts, as GPT-3's authors did to clean their data (arXiv 2005.14165, appendix C).

    Words are runs of letters, digits and underscores, whatever their case. A given text of fewer than n words is found
    only where it is all there is: "What is love?" must not forbid every conversation about it.
    """

    def __init__(self, texts: Iterable[str], words: int = 13):
        self._words = words
        self._grams: set[tuple[str, ...]] = set()  # of n words
        self._short: set[tuple[str, ...]] = set()  # whole texts of fewer
        for text in texts:
            found = _words_of(text)
            if len(found) < words:
                self._short.add(found)
            self._grams.update(self._grams_of(found))
        self._short.discard(())

    def found_in(self, text: str) -> bool:
        words = _words_of(text)
        return words in self._short or any(gram in self._grams for gram in self._grams_of(words))

    def _grams_of(self, words: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
        return (words[i : i + self._words] for i in range(len(words) - self._words + 1))


def _words_of(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.lower()))
