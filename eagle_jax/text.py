"""Text out of token ids, a piece at a time: where it ends, and how much of it may be shown before it has."""

from collections.abc import Sequence
from typing import Any

HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of bytes that are no character yet


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of token ids, markers of structure left out."""
    return tokenizer.decode(ids, skip_special_tokens=True)


class Reader:
    """The text of one row whose ids come in pieces, up to a stop string if there are any.

    Only ids since the last place where the text was whole are decoded, so that the work grows with the text and not
    with its square. The ids of the piece before that place go along: the first token of a decode may lose the space
    it begins with.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.cut: int | None = None  # ids up to and including the one that completed a stop string
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._begin = 0  # the first id that is still decoded
        self._whole = 0  # ids whose text is whole
        self._known = 0  # characters of decode(ids[begin:]) that were read before
        self._held = ""  # read, but it may be the beginning of a stop string
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """All that has been shown."""
        return "".join(self._shown)

    def read(self, ids: Sequence[int], last: bool) -> str:
        """Takes in more ids, the `last` ones or not; returns what may be shown by now: no later id changes or cuts it.

        No more may be read once `cut` is set.
        """
        before = len(self._ids)
        self._ids += ids
        if self._tokenizer is None:
            return ""
        end = len(self._ids) if last else self._end_of_text()
        text = decode(self._tokenizer, self._ids[self._begin : end])
        whole = text if last else text.rstrip(HALF_A_CHARACTER)
        fresh = whole[self._known :]
        # What stands before `held` is no beginning of a stop string, so that none begins there.
        unshown = self._held + fresh
        if self._stop and (up_to := self._up_to_stop(before, unshown)) is not None:
            return self._show(up_to)
        self._held = "" if last else _beginning_of(self._stop, unshown)
        self._known = len(whole)
        if fresh and whole == text:
            self._begin, self._whole = self._whole, end
            self._known = len(decode(self._tokenizer, self._ids[self._begin : end]))
        return self._show(unshown[: len(unshown) - len(self._held)])

    def _show(self, text: str) -> str:
        self._shown.append(text)
        return text

    def _end_of_text(self) -> int:
        """Up to where ids have a text of their own: what a run of raw bytes says is open until the run has ended."""
        end = len(self._ids)
        while end > self._whole and _is_raw_byte(self._tokenizer, self._ids[end - 1]):
            end -= 1
        return end

    def _has_stop(self, text: str) -> bool:
        return any(string in text for string in self._stop)

    def _up_to_stop(self, before: int, unshown: str) -> str | None:
        """Looks for the first of the new ids that completes a stop string, sets `cut` and returns what stands before.

        Where one id completes several, the earliest one counts.
        """
        # A text keeps what it holds, all but a run of raw bytes: what that says may be undone by the next byte.
        raw = any(_is_raw_byte(self._tokenizer, token) for token in self._ids[before:])
        if not raw and not self._has_stop(unshown):
            return None
        for count in range(before + 1, len(self._ids) + 1):
            text = self._held + decode(self._tokenizer, self._ids[self._begin : count])[self._known :]
            if self._has_stop(text):
                self.cut = count
                return text[: min(text.index(string) for string in self._stop if string in text)]
        return None


def _is_raw_byte(tokenizer: Any, token: int) -> bool:
    """Whether a token is SentencePiece's spelling of one byte, such as <0xE2>, whose run's bytes are read together."""
    name_of = getattr(tokenizer, "convert_ids_to_tokens", None)
    name = name_of(token) if name_of else None
    return name is not None and len(name) == 6 and name.startswith("<0x") and name.endswith(">")


def _beginning_of(stop: Sequence[str], text: str) -> str:
    """The longest end of a text that a stop string may begin with."""
    longest = max((len(string) - 1 for string in stop), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-length:]) for string in stop):
            return text[-length:]
    return ""
