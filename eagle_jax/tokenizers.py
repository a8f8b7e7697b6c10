"""Tokenizers and chat templates: a model directory's, read by transformers, and those in a GGUF file's metadata.

transformers reads the latter too, but only with PyTorch installed; the pieces themselves need none.
"""

import os
from pathlib import Path
from typing import Any

import gguf

# Without PyTorch transformers says at its import that models won't be available; none of its models is used here.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

CONTROL_TOKEN = 3  # llama.cpp's token type for tokens that mark structure, never text


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def tokenizer_from_directory(directory: Path) -> Any:
    """The tokenizer beside a model's weights; None where there is none. Code that a repository brings is never run."""
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises no narrower class
        reason = " ".join(str(error).split())
        raise ValueError(f"The tokenizer in {directory} cannot be read ({reason[:200]}); fetch it again.") from error


def tokenizer_from_gguf(reader: gguf.GGUFReader, path: Path) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer a GGUF file describes, with its chat template."""

    def value(key: str, default: Any = None) -> Any:
        field = reader.get_field(f"tokenizer.{key}")
        return default if field is None else field.contents()

    model, splitter = value("ggml.model"), value("ggml.pre")
    if (model, splitter) != ("gpt2", "smollm"):
        raise ValueError(f"{path} has a tokenizer of type {model!r} / {splitter!r}; supported: 'gpt2' / 'smollm'.")
    tokens, kinds = value("ggml.tokens"), value("ggml.token_type", ())
    if len(kinds) != len(tokens):
        raise ValueError(
            f"{path} has {len(tokens)} tokens, but tokenizer.ggml.token_type has {len(kinds)}; convert it again."
        )
    try:
        merges = [tuple(merge.split(" ", 1)) for merge in value("ggml.merges", ())]
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # tokenizers raises no narrower class
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} has merges that do not fit its tokens ({reason}); fetch it again.") from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    def token(key: str) -> str | None:
        index = value(f"ggml.{key}_token_id")
        if index is not None and not 0 <= index < len(tokens):
            raise ValueError(f"{path} has {key} token id {index}, but only {len(tokens)} tokens; fetch it again.")
        return None if index is None else tokens[index]

    if value("ggml.add_bos_token", False):
        bos = token("bos")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, value("ggml.bos_token_id"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=token("bos"),
        eos_token=token("eos"),
        unk_token=token("unknown"),
        pad_token=token("padding"),
        chat_template=value("chat_template"),
        clean_up_tokenization_spaces=False,
    )
