"""Conversations and questions out of JSONL files: one a line, in the forms that are in use.

A conversation is `{"messages": [{"role", "content"}, ...]}` or, in ShareGPT's form,
`{"conversations": [{"from", "value"}, ...]}`. What is malformed is an error with file and line number; what merely
teaches nothing is left to `data.encode_all`.
"""

import glob
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

Message = dict[str, str]
Paths = str | Path | Sequence[str | Path]
Read = TypeVar("Read")

ROLES = ("system", "user", "assistant")
# ShareGPT's names for them, where they are others.
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
FORMS = (("messages", "role", "content"), ("conversations", "from", "value"))


def read_conversations(paths: Paths) -> list[list[Message]]:
    """Reads conversations, file after file.

    Args:
      paths: a file or a glob, or several of them; see `files_of`.

    Raises:
      ValueError: a line of neither form or with an unknown role, with file and line number; or there is none.
      OSError: a file cannot be read.
    """
    return [
        conversation for path in files_of(paths) for conversation in _read(path, parse_conversation, "conversation")
    ]


def read_questions(path: str | Path, limit: int | None = None) -> list[list[Message]]:
    """Reads what is to be answered, one question a line: the first `limit` of them, or all.

    A line is `{"turns": ["...", ...]}` (MT-bench's form), of which the first turn is taken, or a conversation, of which
    everything before the first answer is.

    Raises:
      ValueError: a line is not of that form, with file and line number; or there is no question.
    """
    return _read(path, _question, "question", limit)


def before_answer(messages: Sequence[Message]) -> list[Message]:
    """What stands before the first answer; all of it where there is none."""
    return list(itertools.takewhile(lambda message: message["role"] != "assistant", messages))


def files_of(paths: Paths) -> list[Path]:
    """The files that paths and globs name, each once; those of a glob in the order of their names.

    Raises:
      ValueError: a glob without a file.
    """
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        if Path(path).exists() or not glob.has_magic(str(path)):
            found.append(Path(path))
        elif matches := sorted(glob.glob(str(path), recursive=True)):
            found += map(Path, matches)
        else:
            raise ValueError(f"No file matches {str(path)!r}.")
    return list(dict.fromkeys(found))


def _read(path: str | Path, parse: Callable[[bytes, str], Read], what: str, limit: int | None = None) -> list[Read]:
    found: list[Read] = []
    for line, where in lines_of(path):
        if len(found) == limit:
            break
        found.append(parse(line, where))
    if not found:
        raise ValueError(f"{path} holds no {what}; give a file with one JSON object a line.")
    return found


def lines_of(path: str | Path) -> Iterator[tuple[bytes, str]]:
    """Lines that are not empty, and where each is."""
    with open(path, "rb") as lines:  # as bytes, so that a line that is no UTF-8 is found with its number
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield line, f"{path}, line {number}"


def parse_conversation(line: bytes, where: str) -> list[Message]:
    """A line of a file; `where` is said if it is malformed."""
    try:
        return _messages(json.loads(line), where)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if str(error).startswith(where):
            raise
        raise _not_of_the_form(where, error) from error


def _messages(fields: Any, where: str) -> list[Message]:
    """The messages of a line's object; raises whatever comes of another form, or says `where` a message is at fault."""
    name, speaker, text = FORMS[1] if FORMS[0][0] not in fields else FORMS[0]
    pairs = [(message[speaker], message[text]) for message in fields[name]]
    for role, content in pairs:
        if not isinstance(role, str) or SPEAKERS.get(role, role) not in ROLES:
            known = ", ".join((*ROLES, *SPEAKERS))
            raise ValueError(f"{where} has the role {role!r}; known roles: {known}.")
        if not isinstance(content, str):
            raise ValueError(f"{where} has a message whose content is a {type(content).__name__}, not a text.")
    return [{"role": SPEAKERS.get(role) or role, "content": content} for role, content in pairs]


def _question(line: bytes, where: str) -> list[Message]:
    try:
        fields = json.loads(line)
        if not any(name in fields for name, _, _ in FORMS):
            turn = fields["turns"][0]
            if not isinstance(fields["turns"], list) or not isinstance(turn, str):
                raise TypeError("turns must be a list of texts")
            return [{"role": "user", "content": turn}]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f'{where} is not of the form {{"turns": ["..."]}} ({error!r}).') from error
    question = before_answer(parse_conversation(line, where))
    if not question:
        raise ValueError(f"{where} asks nothing: no message of the system's or the user's stands before an answer.")
    return question


def _not_of_the_form(where: str, error: Exception) -> ValueError:
    forms = " or ".join(f'{{"{name}": [{{"{speaker}", "{text}"}}, ...]}}' for name, speaker, text in FORMS)
    return ValueError(f"{where} is not of the form {forms} ({error!r}).")
