"""Model repositories in Hugging Face's layout: a directory, or a hub id whose files are fetched into the hub's cache.

Code that a repository brings is never run.
"""

import re
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
from flax import nnx
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from jax.sharding import Mesh

from eagle_jax import layers
from eagle_jax.config import ModelConfig
from eagle_jax.convert import Table, build, transposed, unchanged
from eagle_jax.families import config_from
from eagle_jax.target import Target, TargetModel
from eagle_jax.tokenizers import tokenizer_from_directory
from eagle_jax.weights import (
    INDICES,
    PICKLED,
    WEIGHTS,
    PickledTensor,
    StoredTensor,
    Tensors,
    index_of,
    open_safetensors,
    read_json,
    require_floats,
    stored_tensors,
    weight_map,
)

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.json", "merges.txt", "added_tokens.json")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
ROWS_COMPARED = 8192

# One for all families: they differ in which of these tensors there are.
TARGET_TABLE: Table = (
    (r"lm_head\.embedding", r"lm_head.weight", unchanged),
    (r"embed_tokens\.embedding", r"model.embed_tokens.weight", unchanged),
    (r"(.*)\.mlp\.router\.kernel", r"model.\1.block_sparse_moe.gate.weight", transposed),
    (r"(.*)\.mlp\.experts\.(\d+)\.gate_proj\.kernel", r"model.\1.block_sparse_moe.experts.\2.w1.weight", transposed),
    (r"(.*)\.mlp\.experts\.(\d+)\.down_proj\.kernel", r"model.\1.block_sparse_moe.experts.\2.w2.weight", transposed),
    (r"(.*)\.mlp\.experts\.(\d+)\.up_proj\.kernel", r"model.\1.block_sparse_moe.experts.\2.w3.weight", transposed),
    (r"(.*)\.kernel", r"model.\1.weight", transposed),
    (r"(.*)\.scale", r"model.\1.weight", unchanged),
    (r"(.*)\.bias", r"model.\1.bias", unchanged),
)


def find_repository(name: str | Path, description: tuple[str, ...] = (), *, weights: bool = True) -> Path | None:
    """The directory of a model: a path, or where the hub's files were fetched to; None where a name is neither.

    Args:
      name: a directory or a hub id, `organisation/model`.
      description: patterns of files to fetch besides `config.json` and the weights.
      weights: whether to fetch those.

    Raises:
      ValueError: the repository publishes no weights that can be read.
      OSError: there is no such repository, no access to it, or no network.
    """
    path = Path(name).expanduser()
    if path.exists() or not HUB_ID.fullmatch(str(name)) or path.suffix == ".gguf":
        return path if str(name) and path.is_dir() else None
    directory = _fetched(str(name), CONFIG, *INDICES, *description)
    if not weights:
        return directory
    # By name, for repositories hold other copies of the weights beside these.
    index = index_of(directory)
    files = (WEIGHTS,) if index is None else tuple(sorted(set(weight_map(index).values())))
    _fetched(str(name), *files)
    if index is None and not (directory / WEIGHTS).is_file():
        _fetched(str(name), PICKLED)
        if not (directory / PICKLED).is_file():
            raise ValueError(
                f"The hub's {str(name)!r} publishes neither {WEIGHTS} nor {PICKLED}, nor an index of shards."
            )
    return directory


def _fetched(name: str, *patterns: str) -> Path:
    """Where a hub repository's files that match the patterns are, after fetching those that are not there."""
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())
        raise OSError(
            f"{name!r} is no directory here and could not be fetched from the hub ({reason[:200]})."
        ) from error


def description_from_repository(directory: Path) -> tuple[ModelConfig, Any]:
    """The configuration of a directory's target, and its tokenizer or None; errors as `target_from_repository`'s."""
    return config_from(read_json(directory / CONFIG), str(directory / CONFIG)), tokenizer_from_directory(directory)


def target_from_repository(directory: Path, *, name: str, dtype: layers.Dtype, mesh: Mesh | None = None) -> Target:
    """The target in a directory; with a mesh, laid out over its devices.

    Raises:
      ValueError: an unsupported model, or files that do not fit each other.
      OSError: files that cannot be read.
    """
    fields = read_json(directory / CONFIG)
    config = config_from(fields, str(directory / CONFIG))
    tokenizer = tokenizer_from_directory(directory)
    ends = _eos_token_ids(directory, fields, tokenizer, config.vocab_size)
    tensors = stored_tensors(directory)
    require_floats(tensors)
    if config.tie_word_embeddings:
        _drop_copy_of_embedding(tensors, directory)
    model = build(
        lambda: TargetModel(config, dtype=dtype, rngs=nnx.Rngs(0)),
        TARGET_TABLE,
        {name: tensor.shape for name, tensor in tensors.items()},
        lambda name, index=None: tensors[name].read(index),
        str(directory),
        mesh,
    )
    return Target(config=config, model=model, tokenizer=tokenizer, eos_token_ids=ends, name=name)


def _drop_copy_of_embedding(tensors: Tensors, directory: Path) -> None:
    """Leaves out an LM head that repeats the embedding it is tied to."""
    head, embedding = tensors.pop("lm_head.weight", None), tensors.get("model.embed_tokens.weight")
    if head is not None and embedding is not None and not _same(head, embedding):
        raise ValueError(
            f"{directory / CONFIG} has tie_word_embeddings true, but lm_head.weight {head.shape} is no copy of "
            f"model.embed_tokens.weight {embedding.shape}; correct one of them."
        )


def _same(first: StoredTensor | PickledTensor, second: StoredTensor | PickledTensor) -> bool:
    if first.shape != second.shape:
        return False
    if isinstance(first, PickledTensor) or isinstance(second, PickledTensor):
        return np.array_equal(first.read(), second.read())
    with open_safetensors(first.file) as one, open_safetensors(second.file) as other:
        pair, rows = (one.get_slice(first.name), other.get_slice(second.name)), first.shape[0]
        # Piece by piece: an embedding can be the largest tensor by far.
        return all(
            np.array_equal(*(matrix[begin : min(begin + ROWS_COMPARED, rows)] for matrix in pair))
            for begin in range(0, rows, ROWS_COMPARED)
        )


def _eos_token_ids(directory: Path, fields: dict[str, Any], tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """The tokens that end a text: those of both configurations, or else the tokenizer's."""
    found: list[int] = []
    sources = [(directory / CONFIG, fields)]
    if (directory / GENERATION_CONFIG).is_file():
        sources.append((directory / GENERATION_CONFIG, read_json(directory / GENERATION_CONFIG)))
    for path, content in sources:
        given = content.get("eos_token_id")
        for token in given if isinstance(given, list) else [] if given is None else [given]:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise ValueError(f"{path} has eos_token_id {token!r}; it must be an id below {vocab_size}.")
            found.append(token)
    if not found and tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(found))
