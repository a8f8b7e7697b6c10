"""REST's datastore on disk: texts through a target's tokenizer, and their suffix array.

A directory holds `tokens.npy` and `suffixes.npy`, both memory-mapped when read, and a `manifest.json` that names the
target and its vocabulary and is written last. On disk and on the device a token takes 8 bytes.

M tokens, document ends included.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jinja2 import TemplateError

from eagle_jax.conversations import Paths, files_of, lines_of, parse_conversation
from eagle_jax.rest import DOCUMENT_END, Datastore
from eagle_jax.shards import MANIFEST, write_manifest
from eagle_jax.target import Target

TOKENS, SUFFIXES = "tokens.npy", "suffixes.npy"
FORM = "datastore 1"
MOST_TOKENS = 2**31 - 2**16  # a place, and the places read after it, fit into 32 bits


class Built(NamedTuple):
    """What came of a build."""

    documents: int
    tokens: int  # without document ends


def read_documents(paths: Paths, tokenizer: Any) -> Iterator[np.ndarray]:
    """Token ids i32[...] of documents, without special tokens of the tokenizer's own.

    A `.jsonl` file holds one a line, `{"text": "..."}` or a conversation, which goes through the chat template; any
    other file is one.

    Raises:
      ValueError: there is no tokenizer, a file is not UTF-8, or a line is of neither form or refused by the template,
        with file and line number.
      OSError: a file cannot be read.
    """
    if tokenizer is None:
        raise ValueError("The target has no tokenizer, so that texts cannot be made tokens.")
    for path in files_of(paths):
        if path.suffix != ".jsonl":
            yield _encode(tokenizer, _read_text(path))
            continue
        for line, where in lines_of(path):
            yield _encode(tokenizer, _text_of(line, where, tokenizer))


def build_datastore(
    directory: str | Path,
    documents: Iterable[Sequence[int] | np.ndarray],
    *,
    target: str,
    vocab_size: int,
    tokenizer: Any = None,
) -> Built:
    """Writes a datastore of documents i32[...], which is not to be there yet.

    Args:
      directory: where to; made if need be.
      documents: token ids; empty ones are left out.
      target: the name of the target they are for.
      vocab_size: the target's.
      tokenizer: the target's; None leaves its vocabulary unchecked at loading.

    Raises:
      ValueError: the directory holds a datastore, there is no token, or one is outside the vocabulary.
    """
    directory = Path(directory)
    if (directory / MANIFEST).exists():
        raise ValueError(f"{directory} holds a {MANIFEST} already; give another directory.")
    end = np.asarray([DOCUMENT_END], np.int32)
    kept = [np.asarray(document, np.int32) for document in documents if len(document) > 0]
    if not kept:
        raise ValueError("The documents hold no token; give texts that are not empty.")
    tokens = np.concatenate([part for document in kept for part in (document, end)])
    words = tokens[tokens != DOCUMENT_END]
    if len(words) + len(kept) != len(tokens) or words.min() < 0 or words.max() >= vocab_size:
        outside = next(int(token) for document in kept for token in document if not 0 <= token < vocab_size)
        raise ValueError(f"The documents hold token id {outside}, but the vocabulary has {vocab_size} tokens.")
    if len(tokens) > MOST_TOKENS:
        raise ValueError(f"The documents have {len(tokens)} tokens; a datastore holds {MOST_TOKENS} at most.")
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / TOKENS, tokens)
    np.save(directory / SUFFIXES, suffix_array(tokens))
    manifest = {
        "form": FORM,
        "target": target,
        "vocab_size": vocab_size,
        "vocabulary_sha256": None if tokenizer is None else vocabulary_hash(tokenizer),
        "documents": len(kept),
        "tokens": len(words),
    }
    write_manifest(directory, manifest)
    return Built(len(kept), len(words))


def load_datastore(directory: str | Path, target: Target) -> Datastore:
    """Reads a datastore that `train/build_datastore.py` wrote, for `ej.Rest`, onto the device.

    Raises:
      ValueError: it is none, is damaged, or is of another vocabulary than the target's.
      OSError: a file cannot be read.
    """
    directory = Path(directory)
    if not (directory / MANIFEST).is_file():
        raise ValueError(f"{directory} holds no {MANIFEST}, so it is no datastore; train/build_datastore.py makes one.")
    try:
        manifest = dict(json.loads((directory / MANIFEST).read_text()))
        form, vocab_size, built_for = manifest["form"], int(manifest["vocab_size"]), str(manifest["target"])
        vocabulary = manifest["vocabulary_sha256"]
        shapes = {TOKENS: manifest["tokens"] + manifest["documents"], SUFFIXES: manifest["tokens"]}
        arrays = {name: np.load(directory / name, mmap_mode="r") for name in shapes}
    except (ValueError, TypeError, KeyError, EOFError) as error:
        raise ValueError(f"The datastore {directory} cannot be read ({error!r}); build it again.") from error
    for name, array in arrays.items():
        if form != FORM or array.shape != (shapes[name],) or array.dtype != np.int32:
            raise ValueError(
                f"{directory / name} is {array.dtype}{list(array.shape)} of the form {form!r}, but "
                f"int32[{shapes[name]}] of {FORM!r} is expected; build it again."
            )
    known = None if target.tokenizer is None else vocabulary_hash(target.tokenizer)
    if vocab_size != target.config.vocab_size or (None not in (vocabulary, known) and vocabulary != known):
        raise ValueError(
            f"The datastore {directory} is of the vocabulary of {built_for}, {vocab_size} tokens, but the target "
            f"{target.name} has another one, {target.config.vocab_size} tokens; build one with the target's tokenizer."
        )
    return Datastore(
        tokens=jnp.asarray(arrays[TOKENS]),
        suffixes=jnp.asarray(arrays[SUFFIXES]),
        vocab_size=vocab_size,
        name=str(directory),
    )


def suffix_array(tokens: np.ndarray) -> np.ndarray:
    """The places of i32[M] `tokens` in lexical order of what stands there up to the document's end.

    By prefix doubling: places are sorted by pairs of ranks until all ranks differ, O(M log^2 M). An end differs from
    every other, so that nothing is compared beyond it. Returned without the ends' own places.
    """
    is_end = tokens == DOCUMENT_END
    # Ends in their order below all tokens.
    rank = np.where(is_end, np.cumsum(is_end) - 1, tokens.astype(np.int64) + np.count_nonzero(is_end))
    size, compared = len(tokens), 0
    while True:
        after = np.zeros(size, np.int64)
        if compared:
            after[: size - compared] = rank[compared:] + 1
        pairs = rank * (size + 1) + after
        order = np.argsort(pairs)
        differs = np.diff(pairs[order], prepend=-1) != 0
        rank[order] = np.cumsum(differs) - 1
        if differs.all():
            return order[~is_end[order]].astype(np.int32)
        compared = max(1, 2 * compared)


def vocabulary_hash(tokenizer: Any) -> str:
    """SHA-256 of which text each id stands for."""
    words = sorted((int(index), word) for word, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it.") from error


def _encode(tokenizer: Any, text: str) -> np.ndarray:
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"] if text else [], np.int32)


def _text_of(line: bytes, where: str, tokenizer: Any) -> str:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}).") from error
    if isinstance(fields, dict) and "text" in fields:
        if not isinstance(fields["text"], str):
            raise ValueError(f"{where} has a text that is a {type(fields['text']).__name__}; it must be a string.")
        return fields["text"]
    try:
        return tokenizer.apply_chat_template(parse_conversation(line, where), tokenize=False)
    except (TemplateError, ValueError) as error:
        if str(error).startswith(where):
            raise
        raise ValueError(f"{where} is refused by the chat template ({error}).") from error
