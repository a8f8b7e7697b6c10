"""Conversations -> token rows with a loss mask.

A row is one conversation through the model's chat template. Loss falls on what the assistant wrote, its end token
included: in all of its turns, or in the last one only.

T tokens.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jinja2 import TemplateError

from eagle_jax.conversations import Message
from eagle_jax.conversations import read_conversations as read_conversations
from eagle_jax.conversations import read_questions as read_questions

Turns = Literal["all", "last"]  # of the assistant's turns, those that carry loss


class Row(NamedTuple):
    """One conversation as tokens."""

    tokens: np.ndarray  # i32[T]
    assistant: np.ndarray  # bool[T], whether the assistant wrote the token, in a turn that carries loss


def encode(tokenizer: Any, messages: Sequence[Message], turns: Turns = "all") -> Row:
    """A conversation through the chat template, with the assistant's tokens marked.

    The assistant's span is what a turn adds to the prompt that asks for it, so it ends with the template's end token.

    Raises:
      ValueError: the span cannot be told: the tokenizer is none, slow or without a template, or the template rewrites
        earlier turns, leaves a turn out or has no prompt that ends where the answer begins.
      jinja2.TemplateError: the template refuses the conversation.
    """
    _check(tokenizer)

    def render(count: int, prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)

    text = render(len(messages))
    spans = []
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for index in answers if turns == "all" else answers[-1:]:
        before, through = render(index, prompt=True), render(index + 1)
        if not (through.startswith(before) and text.startswith(through)):
            raise _untold("rewrites earlier turns", index, messages, "use a template that only appends")
        answer, added = messages[index]["content"].strip(), through[len(before) :]
        if answer not in added:
            raise _untold("leaves it out or changes it", index, messages, "use a template that keeps it")
        if not added.lstrip().startswith(answer) and before == render(index):
            raise _untold("ignores add_generation_prompt", index, messages, "use a template that heeds it")
        spans.append((len(before), len(before) + len(added.rstrip("\n"))))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    begins, ends = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
    assistant = np.zeros(len(begins), bool)
    for begin, end in spans:
        assistant |= (begin < ends) & (begins < end)
    return Row(np.asarray(encoded["input_ids"], np.int32), assistant)


def _check(tokenizer: Any) -> None:
    if tokenizer is None:
        raise ValueError("The target has no tokenizer, so that conversations cannot be made tokens.")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"The tokenizer is a {type(tokenizer).__name__}, which does not tell where its tokens stand in the text, "
            "so that the assistant's cannot be found; give the target a fast one (tokenizer.json)."
        )
    if not tokenizer.chat_template:
        raise ValueError("The tokenizer has no chat template, so that the assistant's turns cannot be told.")


def _untold(fault: str, index: int, messages: Sequence[Message], remedy: str) -> ValueError:
    return ValueError(
        f"The chat template {fault}, so what the assistant wrote in turn {index + 1} of {len(messages)} cannot be "
        f"told; {remedy}."
    )


class Encoded(NamedTuple):
    rows: list[Row]
    reasons: dict[str, int]  # why conversations were left out, and how many
    truncated: int  # conversations cut at max_length, those left out included

    @property
    def dropped(self) -> int:
        return sum(self.reasons.values())

    def summary(self) -> str:
        why = "".join(f"; {count} {reason}" for reason, count in self.reasons.items())
        return f"{len(self.rows)} conversations kept, {self.dropped} dropped{why} ({self.truncated} were cut)"


def encode_all(
    tokenizer: Any, conversations: Iterable[Sequence[Message]], max_length: int, turns: Turns = "all"
) -> Encoded:
    """Encodes conversations; those longer than `max_length` tokens are cut there, those without loss are left out.

    Raises:
      ValueError: none is left, with the reasons; or what `encode` refuses.
    """
    rows, reasons, truncated = [], Counter[str](), 0
    for messages in conversations:
        if reason := _teaches_nothing(messages, turns):
            reasons[reason] += 1
            continue
        try:
            row = encode(tokenizer, messages, turns)
        except TemplateError as error:
            reasons[f"refused by the chat template ({error})"] += 1
            continue
        truncated += len(row.tokens) > max_length
        row = Row(row.tokens[:max_length], row.assistant[:max_length])
        # A pair carries loss if its last two tokens are the assistant's (see `losses.pair_mask`).
        if np.any(row.assistant[1:-1] & row.assistant[2:]):
            rows.append(row)
        else:
            reasons[f"without an answer's beginning within {max_length} tokens"] += 1
    if not rows:
        why = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "there was none"
        raise ValueError(f"None of {sum(reasons.values())} conversations is left to train on: {why}.")
    return Encoded(rows, dict(reasons), truncated)


def _teaches_nothing(messages: Sequence[Message], turns: Turns) -> str | None:
    """Why a conversation has nothing to learn from, if it has nothing."""
    answers = [message["content"].strip() for message in messages if message["role"] == "assistant"]
    if not messages:
        return "without a message"
    if not answers:
        return "without a turn of the assistant's"
    if messages[0]["role"] == "assistant":
        return "beginning with the assistant's turn"
    if not any(answers if turns == "all" else answers[-1:]):
        return "with an empty answer"
    return None


def digest(rows: Iterable[Row]) -> str:
    """SHA-256 of rows, their order and their loss masks included."""
    found = hashlib.sha256()
    for row in rows:
        found.update(row.tokens.astype("<i4").tobytes() + row.assistant.tobytes() + b"|")
    return found.hexdigest()


def frequent_tokens(rows: Iterable[Row], count: int, vocab_size: int) -> np.ndarray:
    """The `count` most frequent tokens that the assistant wrote, i32, ascending: a draft vocabulary."""
    total = np.zeros(vocab_size, np.int64)
    for row in rows:
        np.add.at(total, row.tokens[row.assistant], 1)
    return np.sort(np.argsort(-total, kind="stable")[:count]).astype(np.int32)
