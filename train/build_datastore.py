"""Builds a datastore for REST: texts through a target's tokenizer, and their suffix array.

    python train/build_datastore.py --data "chats/*.jsonl" notes.txt --output runs/datastore
    python decode/bench.py --prompts mt_bench.jsonl --methods rest --datastore runs/datastore

A `.jsonl` file holds a document a line, `{"text": "..."}` or a conversation, which goes through the chat template; any
other file is one document. No draft runs over a document's end. Expect 8 bytes a token. Sorting takes about
1 s of one core a million tokens (8.0 s for 8 million random ones in documents of 500) and 65 bytes of memory a token.
"""

import dataclasses
import time
from pathlib import Path

from rich.filesize import decimal

from eagle_jax import datastore, loading
from eagle_jax.script import require, run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    data: tuple[str, ...]  # texts: files or globs
    output: Path  # a directory that holds no datastore yet
    target: str = "smollm2-135m"

    def __post_init__(self):
        require(len(self.data) > 0, "Give at least one file of texts.")
        there = self.output / datastore.MANIFEST
        require(not there.exists(), f"{there} is there already; give another directory.")


def main(options: Options) -> None:
    config, tokenizer = loading.describe_target(options.target)
    begun = time.monotonic()
    documents = list(datastore.read_documents(options.data, tokenizer))
    read = time.monotonic()
    built = datastore.build_datastore(
        options.output, documents, target=options.target, vocab_size=config.vocab_size, tokenizer=tokenizer
    )
    print(
        f"{built.documents} documents, {built.tokens} tokens: read in {read - begun:.1f} s, sorted and written in "
        f"{time.monotonic() - read:.1f} s; {decimal(8 * built.tokens)} in {options.output}"
    )


if __name__ == "__main__":
    run(main, Options, __doc__)
