"""The file that written conversations are appended to, so that a killed run goes on where it was.

Beside CHATS.jsonl stand CHATS.options.json, what it was made with, and CHATS.dropped.txt, an id and a reason a line. Of
conversations that are duplicates of each other the first in order stays, whichever was written first: so what a run
leaves does not depend on where it was interrupted.
"""

import collections
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagle_jax.data import Message
from eagle_jax.files import replacing

DUPLICATE = "duplicate"


def key_of(source: str, messages: Sequence[Message]) -> bytes:
    """What two kept conversations never share: all of it, or the user's first turn where that was written too."""
    told = messages if source == "prompt" else messages[:1]
    return hashlib.blake2b(json.dumps([source, list(told)], sort_keys=True).encode(), digest_size=16).digest()


class Journal:
    """What has been kept and dropped so far. Nothing is written before it is entered, as a context.

    Attributes:
      dropped: the reason, by id.
    """

    def __init__(self, path: Path, made_with: dict[str, Any], order: Callable[[str], Any]):
        """Reads what is there.

        Args:
          path: of a .jsonl file, there or not.
          made_with: the options that the conversations depend on, as JSON has them.
          order: sorts ids.

        Raises:
          ValueError: the file was made with other options, or it is none of this class's.
        """
        self.dropped: dict[str, str] = {}
        self._path, self._made_with, self._order = path, made_with, order
        self._options, self._reasons = path.with_suffix(".options.json"), path.with_suffix(".dropped.txt")
        self._owners: dict[bytes, str] = {}  # the id that is kept, by key
        (lines, self._end), (reasons, self._reasons_end) = _whole_lines(path), _whole_lines(self._reasons)
        if path.exists() or reasons:
            self._check_options()
        self.dropped = dict(reason.decode().split(" ", 1) for reason in reasons)
        self._unsaid: list[str] = []  # ids found to be duplicates in reading
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                if record["id"] in self.dropped:
                    continue
                loser = self._claim(record["id"], key_of(record["source"], record["messages"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is no written conversation ({error!r}); remove it.") from error
            if loser is not None:
                self.dropped[loser] = DUPLICATE
                self._unsaid.append(loser)
        self._kept = set(self._owners.values())

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def reasons(self) -> dict[str, int]:
        """How many were dropped, by reason."""
        return dict(collections.Counter(self.dropped.values()).most_common())

    def __contains__(self, name: str) -> bool:
        """Whether an id is settled."""
        return name in self._kept or name in self.dropped

    def is_duplicate(self, name: str, source: str, messages: Sequence[Message]) -> bool:
        """Whether a kept conversation that stands before `name` makes this one superfluous."""
        owner = self._owners.get(key_of(source, messages))
        return owner is not None and self._order(owner) < self._order(name)

    def __enter__(self) -> "Journal":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._options) as scratch:
            scratch.write_text(json.dumps(self._made_with, indent=1) + "\n")
        self._file, self._drops = open(self._path, "ab"), open(self._reasons, "ab")
        # A line that a kill cut in half is as if it had never been begun.
        self._file.truncate(self._end)
        self._drops.truncate(self._reasons_end)
        for name in self._unsaid:
            self.drop(name, DUPLICATE)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        self._drops.close()
        if kind is None:
            self._tidy()

    def keep(self, record: dict[str, Any]) -> None:
        """Appends a conversation, unless it is a duplicate of one that stands before it."""
        name = record["id"]
        loser = self._claim(name, key_of(record["source"], record["messages"]))
        if loser != name:
            self._kept.add(name)
            self._file.write(json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n")
            self._file.flush()
        if loser is not None:
            self.drop(loser, DUPLICATE)

    def drop(self, name: str, reason: str) -> None:
        """Remembers that an id came to nothing."""
        self._kept.discard(name)
        self.dropped[name] = reason
        self._drops.write(f"{name} {reason}\n".encode())
        self._drops.flush()

    def _claim(self, name: str, key: bytes) -> str | None:
        """Gives a key to the first in order of those that want it; returns the other one."""
        owner = self._owners.get(key)
        if owner is not None and self._order(owner) < self._order(name):
            return name
        self._owners[key] = name
        return owner

    def _tidy(self) -> None:
        """Leaves out what turned out to be a duplicate, and puts the rest in order."""
        lines = {json.loads(line)["id"]: line for line in _whole_lines(self._path)[0]}
        with replacing(self._path) as scratch:
            scratch.write_bytes(b"".join(lines[name] + b"\n" for name in sorted(self._kept, key=self._order)))

    def _check_options(self) -> None:
        if not self._options.exists():
            raise ValueError(f"{self._path} is there already, without {self._options.name}; give another output.")
        try:
            before = json.loads(self._options.read_bytes())
            names = [name for name in {**self._made_with, **before} if self._made_with.get(name) != before.get(name)]
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self._options} is damaged ({error}); give another output.") from error
        if names:
            raise ValueError(
                f"{self._path} was made with {names[0]} {before.get(names[0])!r}, not "
                f"{self._made_with.get(names[0])!r}; give another output, or the options it was made with."
            )


def _whole_lines(path: Path) -> tuple[list[bytes], int]:
    """A file's lines, and where the last one ends that was written to its end."""
    text = path.read_bytes() if path.exists() else b""
    end = text.rfind(b"\n") + 1
    return text[:end].split(b"\n")[:-1], end
