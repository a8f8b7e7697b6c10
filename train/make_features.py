"""Computes a target's features of conversations and keeps them in files, for `train_head.py --features`.

    python train/make_features.py --data conversations.jsonl --output features --dry-run    # what it will take
    python train/make_features.py --data "chats/*.jsonl" --output features

A run that was ended, by whatever, goes on at the first missing shard when it is started again. Several processes share
the work with --process-count N and --process-index 0 .. N-1, each on a device of its own. Expect two bytes a token and
hidden unit: 1.2 GB a million tokens for smollm2-135m, 8.2 GB for a 7B target. How long it will take is told from the
first batch on.
"""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from eagle_jax import data, features, loading, shards
from eagle_jax.data import Turns
from eagle_jax.script import require, run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    data: tuple[str, ...]  # conversations in JSONL: files or globs
    output: Path  # a directory of features, of these or not there yet
    target: str = "smollm2-135m"
    max_length: int = 512  # tokens a conversation is cut at
    turns: Turns = "all"  # decides which conversations are kept, so give training's
    dtype: shards.KeptDtype | None = None  # default: what OUTPUT has, or float16
    shard_tokens: int | None = None  # default: what OUTPUT has, or 131072; a process holds a shard in memory
    tokens_per_batch: int = 4096
    process_index: int = 0
    process_count: int = 1
    dry_run: bool = False  # say how much it will be, and stop

    def __post_init__(self):
        for name in ("max_length", "tokens_per_batch", "process_count", "shard_tokens"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} is {value}; it must be at least 1.")
        require(
            0 <= self.process_index < self.process_count,
            f"process_index is {self.process_index}; it must be below process_count, {self.process_count}.",
        )
        require(len(self.data) > 0, "Give at least one file of conversations.")


def main(options: Options) -> None:
    conversations = data.read_conversations(options.data)
    config, tokenizer = loading.describe_target(options.target)
    encoded = data.encode_all(tokenizer, conversations, options.max_length, options.turns)
    print(encoded.summary())
    form: dict[str, Any] = {"dtype": options.dtype, "shard_tokens": options.shard_tokens}
    layout = shards.lay_out(options.output, encoded.rows, config.hidden_size, **form)
    missing = layout.missing(options.process_index, options.process_count)
    print(
        f"{layout.tokens} tokens of {layout.width} numbers in {layout.dtype}: "
        f"{decimal(layout.bytes_of(layout.shards))} in {len(layout.shards)} shards, of which "
        f"{decimal(layout.bytes_of(missing))} in {len(missing)} are to be made here; "
        f"{decimal(shards.free_bytes(options.output))} are free",
        flush=True,
    )
    if options.dry_run:
        return
    target = loading.load_target(options.target)
    layout = features.claim(options.output, target, encoded.rows, **form)
    started = time.monotonic()

    def progress(done: int, total: int) -> None:
        seconds = time.monotonic() - started
        left = seconds / done * (total - done) / 60
        said = f"\r{done} of {total} tokens, {done / seconds:.0f} a second, {left:.1f} minutes left "
        print(said, end="", file=sys.stderr, flush=True)

    features.make(
        layout,
        target,
        encoded.rows,
        tokens_per_batch=options.tokens_per_batch,
        process_index=options.process_index,
        process_count=options.process_count,
        progress=progress,
    )
    print(f"\n{len(layout.shards) - len(layout.missing())} of {len(layout.shards)} shards are whole", file=sys.stderr)


if __name__ == "__main__":
    run(main, Options, __doc__)
