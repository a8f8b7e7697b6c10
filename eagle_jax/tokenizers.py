"""Tokenizers and chat templates: a model directory's, read by transformers, and those in a GGUF file's metadata.

The latter are of two kinds: byte-level BPE, whose file names the pre-tokenizer and lists merges, and SentencePiece,
whose file lists scores. transformers reads them too, but not all of a file: it knows no single digits, no whole words
before merges, no text without a space before it, and takes a pre-tokenizer it does not know for GPT-2's.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle_jax.gguf_reader import GGUFFile, shown

# Without PyTorch transformers says at its import that models won't be available; none of its models is used here. With
# PyTorch it imports that as well, so that it is imported only where a tokenizer is made.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # llama.cpp's token types; control tokens are never text
NO_TOKENIZER = (None, "none", "no_vocab")
SPACE = "▁"  # SentencePiece's


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def tokenizer_from_directory(directory: Path) -> Any:
    """The tokenizer beside a model's weights; None where there is none. Code that a repository brings is never run."""
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises no narrower class
        reason = " ".join(str(error).split())
        raise ValueError(f"The tokenizer in {directory} cannot be read ({reason[:200].rstrip('.')}).") from error


class Splitter(NamedTuple):
    """How byte-level BPE cuts a text into words, and what goes with that."""

    steps: tuple[Any, ...]
    words_first: bool = False  # a word that is a token is taken whole, whatever the merges make of it
    bos: bool = False  # whether BOS is added where the file does not say
    normalizer: Any = None


def _cut(*patterns: str) -> tuple[Any, ...]:
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return (*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)  # it has GPT-2's pattern built in
DIGITS = pre_tokenizers.Digits(individual_digits=True)
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
)

LLAMA3 = Splitter(_cut(WORDS % "{1,3}"), words_first=True, bos=True)
QWEN2 = Splitter(_cut(WORDS % ""), normalizer=normalizers.NFC())
SPLITTERS = {
    "default": Splitter((GPT2,)),
    "gpt-2": Splitter((GPT2,)),
    "smollm": Splitter((DIGITS, GPT2)),
    "starcoder": Splitter((DIGITS, GPT2)),
    "refact": Splitter((DIGITS, GPT2)),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "deepseek-coder": Splitter(_cut(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "tekken": Splitter(_cut(TEKKEN), words_first=True, bos=True),
}


def tokenizer_from_gguf(file: GGUFFile) -> Any:
    """The tokenizer a GGUF file describes, with its chat template; None where it describes none."""
    kind = file.text("tokenizer.ggml.model", None)
    if kind in NO_TOKENIZER:
        return None
    if kind not in READERS:
        raise ValueError(f"{file.path} has a tokenizer of type {shown(kind)}; supported are {_listed(READERS)}.")
    tokens = file.texts("tokenizer.ggml.tokens")
    types = _one_each(file, "token_type", tokens)
    tokenizer, adds_bos = READERS[kind](file, tokens, types)

    def found_whole(wanted: tuple[int, ...], special: bool) -> list[AddedToken]:
        chosen = [token for token, type_ in zip(tokens, types, strict=True) if type_ in wanted]
        return [AddedToken(token, special=special, normalized=False) for token in chosen]

    tokenizer.add_special_tokens(found_whole((CONTROL, UNKNOWN), special=True))
    tokenizer.add_tokens(found_whole((USER_DEFINED,), special=False))
    ids = {
        mark: file.whole(f"tokenizer.ggml.{mark}_token_id", None, least=0, most=len(tokens) - 1)
        for mark in ("bos", "eos", "unknown", "padding")
    }
    texts = {mark: None if index is None else tokens[index] for mark, index in ids.items()}
    around = _added_around(file, {"bos": adds_bos and ids["bos"] is not None, "eos": False})
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[part for part in ("bos", "$A", "eos") if part in (*around, "$A")],
            special_tokens=[{"id": mark, "ids": [ids[mark]], "tokens": [texts[mark]]} for mark in around],
        )
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=texts["bos"],
        eos_token=texts["eos"],
        unk_token=texts["unknown"],
        pad_token=texts["padding"],
        chat_template=file.text("tokenizer.chat_template", None),
        clean_up_tokenization_spaces=False,
    )


def _added_around(file: GGUFFile, unless_told: dict[str, bool]) -> list[str]:
    """Which of BOS and EOS the tokenizer writes around each text."""
    added = [mark for mark, default in unless_told.items() if file.flag(f"tokenizer.ggml.add_{mark}_token", default)]
    for mark in added:
        file.whole(f"tokenizer.ggml.{mark}_token_id", least=0)
    return added


def _byte_level(file: GGUFFile, tokens: list[str], types: np.ndarray) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether it adds BOS unless told."""
    name = file.text("tokenizer.ggml.pre")
    if name not in SPLITTERS:
        raise ValueError(f"{file.path} has a pre-tokenizer {shown(name)}; supported are {_listed(SPLITTERS)}.")
    splitter = SPLITTERS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in file.texts("tokenizer.ggml.merges")]
    tokenizer = _bpe(file, tokens, merges, ignore_merges=splitter.words_first)
    tokenizer.normalizer = splitter.normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(splitter.steps))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitter.bos


def _sentencepiece(file: GGUFFile, tokens: list[str], types: np.ndarray) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE: the best-scored neighbours are joined first, and bytes stand for what is in no token."""
    scores = _one_each(file, "scores", tokens)
    pieces = {
        token: score
        for token, score, type_ in zip(tokens, scores, types, strict=True)
        if type_ in (NORMAL, USER_DEFINED)
    }
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == UNKNOWN), None)
    tokenizer = _bpe(file, tokens, _merges(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    # A space before each stretch of text between markers, as llama.cpp and the models' own tokenizer.json have it.
    leading = file.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if leading else spaces)
    texts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*texts, decoders.Strip(" ", 1, 0)] if leading else texts)
    return tokenizer, True


def _merges(pieces: dict[str, float]) -> list[tuple[str, str]]:
    """Each way to join two pieces into a third, the best third first."""
    lengths = sorted({len(piece) for piece in pieces})
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces, key=pieces.__getitem__, reverse=True)
        for cut in lengths
        if cut < len(piece) and piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _bpe(file: GGUFFile, tokens: list[str], merges: list[Any], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, **options))
    except Exception as error:  # tokenizers raises no narrower class
        reason = " ".join(str(error).split())
        raise ValueError(f"{file.path} has merges that do not fit its tokens ({reason}); fetch it again.") from error


def _one_each(file: GGUFFile, key: str, tokens: list[str]) -> np.ndarray:
    values = file.numbers(f"tokenizer.ggml.{key}")
    if len(values) != len(tokens):
        raise ValueError(
            f"{file.path} has {len(tokens)} tokens, but tokenizer.ggml.{key} has {len(values)}; convert it again."
        )
    return values


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


READERS: dict[str, Callable[[GGUFFile, list[str], np.ndarray], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
