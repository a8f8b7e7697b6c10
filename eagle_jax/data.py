"""Conversations in JSONL -> token rows with a loss mask -> batches of features; questions in JSONL -> chats to answer.

A row is one conversation through the model's chat template. Loss falls on what the assistant wrote, its end token
included. The order of batches is a pure function of (seed, step), so that a checkpoint needs to hold the step only.

B batch rows, T tokens, E hidden size.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from eagle_jax.training import Batch

Message = dict[str, str]
ROLES = ("system", "user", "assistant")


class Row(NamedTuple):
    """One conversation as tokens."""

    tokens: np.ndarray  # i32[T]
    assistant: np.ndarray  # bool[T], whether the assistant wrote the token


def read_conversations(path: str | Path) -> list[list[Message]]:
    """Reads `{"messages": [{"role", "content"}, ...]}`, one conversation a line.

    Raises:
      ValueError: a line is not of that form, with file and line number; or there is none.
    """
    conversations = []
    with open(path, "rb") as lines:  # as bytes, so that a line that is no UTF-8 is found with its number
        for number, line in enumerate(lines, start=1):
            if line.strip():
                conversations.append(_parse(line, f"{path}, line {number}"))
    if not conversations:
        raise ValueError(f"{path} holds no conversation; give a file with one JSON object a line.")
    return conversations


def _parse(line: bytes, where: str) -> list[Message]:
    try:
        messages = json.loads(line)["messages"]
        pairs = [(message["role"], message["content"]) for message in messages]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f'{where} is not of the form {{"messages": [{{"role", "content"}}, ...]}} ({error!r}).'
        ) from error
    for role, content in pairs:
        if role not in ROLES:
            raise ValueError(f"{where} has the role {role!r}; known roles: {', '.join(ROLES)}.")
        if not isinstance(content, str):
            raise ValueError(f"{where} has a message whose content is a {type(content).__name__}, not a text.")
    if not pairs or pairs[0][0] == "assistant":
        raise ValueError(
            f"{where} does not begin with a turn of the system's or the user's, which every conversation needs."
        )
    return [{"role": role, "content": content} for role, content in pairs]


def read_questions(path: str | Path, limit: int | None = None) -> list[list[Message]]:
    """Reads what is to be answered, one question a line: the first `limit` of them, or all.

    A line is `{"turns": ["...", ...]}` (MT-bench's form), of which the first turn is taken, or a conversation
    `{"messages": [...]}`, of which everything before the first answer is.

    Raises:
      ValueError: a line is not of that form, with file and line number; or there is no question.
    """
    questions = []
    with open(path, "rb") as lines:  # as bytes, so that a line that is no UTF-8 is found with its number
        for number, line in enumerate(lines, start=1):
            if len(questions) == limit:
                break
            if line.strip():
                questions.append(_question(line, f"{path}, line {number}"))
    if not questions:
        raise ValueError(f"{path} holds no question; give a file with one JSON object a line.")
    return questions


def _question(line: bytes, where: str) -> list[Message]:
    try:
        fields = json.loads(line)
        if "messages" not in fields:
            turn = fields["turns"][0]
            if not isinstance(fields["turns"], list) or not isinstance(turn, str):
                raise TypeError("turns must be a list of texts")
            return [{"role": "user", "content": turn}]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f'{where} is not of the form {{"turns": ["..."]}} ({error!r}).') from error
    messages = _parse(line, where)
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: answers[0]] if answers else messages


def encode(tokenizer: Any, messages: Sequence[Message]) -> Row:
    """A conversation through the chat template, with the assistant's tokens marked.

    The assistant's span is what a turn adds to the prompt that asks for it, so it ends with the template's end token.

    Raises:
      ValueError: the template rewrites earlier turns, so that the span cannot be told.
    """

    def render(count: int, prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)

    text = render(len(messages))
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, through = render(index, prompt=True), render(index + 1)
        if not (through.startswith(before) and text.startswith(through)):
            raise ValueError(
                f"The chat template rewrites earlier turns, so what the assistant wrote in turn {index + 1} of "
                f"{len(messages)} cannot be told; use a template that only appends."
            )
        spans.append((len(before), len(before) + len(through[len(before) :].rstrip("\n"))))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assistant = [any(start < e and s < end for s, e in spans) for start, end in encoded["offset_mapping"]]
    return Row(np.asarray(encoded["input_ids"], np.int32), np.asarray(assistant, bool))


class Encoded(NamedTuple):
    rows: list[Row]
    dropped: int  # conversations without an assistant's token within max_length
    truncated: int  # conversations cut at max_length


def encode_all(tokenizer: Any, conversations: Iterable[Sequence[Message]], max_length: int) -> Encoded:
    """Encodes conversations; those longer than `max_length` tokens are cut there, those without loss are left out."""
    rows, dropped, truncated = [], 0, 0
    for messages in conversations:
        row = encode(tokenizer, messages)
        truncated += len(row.tokens) > max_length
        row = Row(row.tokens[:max_length], row.assistant[:max_length])
        if row.assistant.any():
            rows.append(row)
        else:
            dropped += 1
    if not rows:
        raise ValueError(f"None of {dropped} conversations has an assistant's token within {max_length} tokens.")
    return Encoded(rows, dropped, truncated)


def frequent_tokens(rows: Iterable[Row], count: int, vocab_size: int) -> np.ndarray:
    """The `count` most frequent tokens that the assistant wrote, i32, ascending: a draft vocabulary."""
    total = np.zeros(vocab_size, np.int64)
    for row in rows:
        np.add.at(total, row.tokens[row.assistant], 1)
    return np.sort(np.argsort(-total, kind="stable")[:count]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class FeatureRows:
    """Rows with the target's features, which lie in a file of one vector a token."""

    rows: list[Row]
    offsets: np.ndarray  # i64[rows + 1], a row's first vector
    features: np.ndarray  # float16[tokens, E], memory-mapped

    def batch(self, indices: Sequence[int], length: int, size: int) -> Batch:
        """Rows `indices` padded to `length` tokens and to `size` rows."""
        tokens = np.zeros((size, length), np.int32)
        assistant = np.zeros((size, length), bool)
        features = np.zeros((size, length, self.features.shape[1]), self.features.dtype)
        for place, index in enumerate(indices):
            row, start = self.rows[index], self.offsets[index]
            count = len(row.tokens)
            tokens[place, :count] = row.tokens
            assistant[place, :count] = row.assistant
            features[place, :count] = self.features[start : start + count]
        return Batch(*map(jnp.asarray, (tokens, assistant, features)))


def row_offsets(rows: Sequence[Row]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([len(row.tokens) for row in rows])]).astype(np.int64)


class BatchPlan(NamedTuple):
    indices: tuple[int, ...]
    length: int  # tokens a row is padded to
    size: int  # rows the batch is padded to


def epoch_plan(lengths: Sequence[int], *, tokens_per_batch: int, bucket: int, seed: int, epoch: int) -> list[BatchPlan]:
    """The batches of one epoch: every row once, rows of like length together, all in an order drawn from the seed."""
    rng = np.random.default_rng((seed, epoch))
    groups: dict[int, list[int]] = {}
    for index in rng.permutation(len(lengths)):
        groups.setdefault(-(-lengths[index] // bucket) * bucket, []).append(int(index))
    plans = []
    for length, members in sorted(groups.items()):
        size = max(1, tokens_per_batch // length)
        plans += [BatchPlan(tuple(members[i : i + size]), length, size) for i in range(0, len(members), size)]
    return [plans[i] for i in rng.permutation(len(plans))]


def plan_from(
    lengths: Sequence[int], *, step: int, tokens_per_batch: int, bucket: int, seed: int
) -> Iterator[BatchPlan]:
    """The endless sequence of batches from optimizer step `step` on."""
    epoch = 0
    while True:
        plans = epoch_plan(lengths, tokens_per_batch=tokens_per_batch, bucket=bucket, seed=seed, epoch=epoch)
        yield from plans[step:]
        step, epoch = max(0, step - len(plans)), epoch + 1
