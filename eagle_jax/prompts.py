"""Prompt files: what users ask, one conversation's questions a line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from eagle_jax.conversations import ROLES, Message, before_answer, lines_of

FORMS = '{"prompt": "..."}, {"turns": ["...", ...]} or {"messages": [{"role", "content"}, ...]}'


class Opening(NamedTuple):
    """What is given of a conversation."""

    messages: tuple[Message, ...]  # up to the first answer, which is to be written
    later: tuple[str, ...]  # the user's later turns


def read_openings(path: str | Path, limit: int | None = None) -> list[Opening]:
    """Reads a prompt file in one of the FORMS, each line in its own: the first `limit` lines, or all.

    Answers in it are left out: of `messages`, what goes before the first one is kept, and the user's turns after it.

    Raises:
      ValueError: a line is of none of the forms, with file and line number; or there is none.
    """
    openings: list[Opening] = []
    for where, fields in _values(path):
        if len(openings) == limit:
            break
        try:
            openings.append(_opening(fields))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where} is of none of the forms {FORMS} ({error!r}).") from error
    if not openings:
        raise ValueError(f"{path} holds no prompt; give a file with one JSON object a line.")
    return openings


def read_texts(path: str | Path) -> list[str]:
    """All texts in the lines of a JSONL file, whatever their names: questions, turns, reference answers.

    Raises:
      ValueError: a line is not JSON, with file and line number.
    """
    texts: list[str] = []
    for _, value in _values(path):
        left = [value]
        while left:
            value = left.pop()
            if isinstance(value, str):
                texts.append(value)
            elif isinstance(value, (dict, list)):
                left += value.values() if isinstance(value, dict) else value
    return texts


def _values(path: str | Path) -> Iterator[tuple[str, Any]]:
    """The JSON values of a file's lines, each with its place for errors."""
    for line, where in lines_of(path):
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not JSON ({error}).") from error


def _opening(fields: Any) -> Opening:
    if "messages" in fields:
        messages = [{"role": message["role"], "content": _text(message["content"])} for message in fields["messages"]]
        unknown = {message["role"] for message in messages} - set(ROLES)
        if unknown:
            raise TypeError(f"unknown role {unknown.pop()!r}")
        asked = before_answer(messages)
        if not asked or asked[-1]["role"] != "user":
            raise TypeError("no user's turn stands before the first answer")
        later = [message["content"] for message in messages[len(asked) :] if message["role"] == "user"]
        return Opening(tuple(asked), tuple(later))
    turns = [fields["prompt"]] if "prompt" in fields else fields["turns"]
    if not isinstance(turns, list):
        raise TypeError("turns are no list")
    first, *later = map(_text, turns)
    return Opening(({"role": "user", "content": first},), tuple(later))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"{value!r} is not a text")
    return value
