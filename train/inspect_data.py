"""Shows conversations as the model is trained on them: which tokens there are, and which of them carry loss.

    python train/inspect_data.py --data conversations.jsonl --limit 3
    python train/inspect_data.py --data "chats/*.jsonl" --target path/of/a/model --turns last

Green carries loss; yellow is the assistant's too, but the first token of an answer is not drafted; the rest is dim.
"""

import dataclasses
from typing import Any

import numpy as np
import rich
from rich.text import Text

from eagle_jax import data, loading
from eagle_jax.data import Turns
from eagle_jax.script import require, run

GIVEN, FIRST, LOSS = "dim", "yellow", "bold green"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    data: tuple[str, ...]  # conversations in JSONL: files or globs
    target: str = "smollm2-135m"  # whose tokenizer and chat template are used
    limit: int = 2  # conversations shown
    begin: int = 0  # the first one shown, among those kept
    max_length: int = 512  # tokens a conversation is cut at
    turns: Turns = "all"  # the assistant's turns that carry loss

    def __post_init__(self):
        require(self.limit > 0, f"limit is {self.limit}; it must be at least 1.")
        require(self.begin >= 0, f"begin is {self.begin}; it must be 0 or more.")
        require(self.max_length > 0, f"max_length is {self.max_length}; it must be at least 1.")
        require(len(self.data) > 0, "Give at least one file of conversations.")


def coloured(tokenizer: Any, row: data.Row) -> Text:
    """The text of a row, markers of structure included, coloured by what carries loss."""
    # Pair j is trained on token j + 2, if the assistant wrote that and the one before it (see `losses.pair_mask`).
    loss = row.assistant & np.roll(row.assistant, 1)
    loss[:2] = False
    styles = np.where(loss, LOSS, np.where(row.assistant, FIRST, GIVEN))
    text = Text()
    begins = [0, *(np.flatnonzero(styles[1:] != styles[:-1]) + 1)]
    for begin, end in zip(begins, [*begins[1:], len(styles)], strict=True):
        # What a stretch adds to the text before it: decoded alone, it may lose the space it begins with.
        whole = tokenizer.decode(row.tokens[:end], skip_special_tokens=False)
        text.append(whole[len(text.plain) :], style=str(styles[begin]))
    return text


def main(options: Options) -> None:
    conversations = data.read_conversations(options.data)
    tokenizer = loading.describe_target(options.target).tokenizer
    encoded = data.encode_all(tokenizer, conversations, options.max_length, options.turns)
    rows = encoded.rows
    require(options.begin < len(rows), f"begin is {options.begin}, but {len(rows)} conversations are kept.")
    for index in range(options.begin, min(options.begin + options.limit, len(rows))):
        row = rows[index]
        rich.print(Text(f"--- {index}: {len(row.tokens)} tokens, {row.assistant.sum()} the assistant's"))
        rich.print(coloured(tokenizer, row))
    tokens, ours = sum(len(row.tokens) for row in rows), sum(int(row.assistant.sum()) for row in rows)
    rich.print(Text(encoded.summary()))
    rich.print(Text(f"{tokens} tokens, {ours} ({ours / tokens:.0%}) of them the assistant's"))


if __name__ == "__main__":
    run(main, Options, __doc__)
