"""Model repositories in Hugging Face's layout: a directory, or a hub id whose files are fetched into the hub's cache.

Nothing of a repository is executed. Weights are read from safetensors, one tensor at a time; heads were also published
as PyTorch's pickles, of which PyTorch's restricted loader takes tensors and nothing else.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import numpy as np
from flax import nnx
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open

from eagle_jax import layers
from eagle_jax.convert import Table, build, transposed, unchanged
from eagle_jax.families import config_from
from eagle_jax.target import Target, TargetModel
from eagle_jax.tokenizers import tokenizer_from_directory

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
DESCRIPTION = (CONFIG, GENERATION_CONFIG, INDEX, "tokenizer*", "special_tokens_map.json", "chat_template*")
VOCABULARIES = ("vocab.json", "merges.txt", "added_tokens.json")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")

# One for all families: they differ in which of these tensors there are.
TARGET_TABLE: Table = (
    (r"lm_head\.embedding", r"lm_head.weight", unchanged),
    (r"embed_tokens\.embedding", r"model.embed_tokens.weight", unchanged),
    (r"(.*)\.kernel", r"model.\1.weight", transposed),
    (r"(.*)\.scale", r"model.\1.weight", unchanged),
    (r"(.*)\.bias", r"model.\1.bias", unchanged),
)
DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")  # old checkpoints store what follows from the configuration
FLOATS = ("F64", "F32", "F16", "BF16")
ROWS_COMPARED = 8192


def is_hub_id(name: str) -> bool:
    """Whether a name that is no path here could be one on the hub, `organisation/model`."""
    return HUB_ID.fullmatch(name) is not None


def directory_of(name: str, patterns: tuple[str, ...]) -> Path:
    """Fetches a hub repository's files that match `patterns`, or finds them in the hub's cache.

    Raises:
      OSError: there is no such repository, no access to it, or no network.
    """
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())
        raise OSError(
            f"{name!r} is no directory here and could not be fetched from the hub ({reason[:200]})."
        ) from error


def target_from_repository(name: str, *, dtype: layers.Dtype) -> Target:
    """The target in a directory or hub repository.

    Raises:
      ValueError: an unsupported model, or files that do not fit each other.
      OSError: files that cannot be read or fetched.
    """
    directory = Path(name).expanduser()
    if not directory.is_dir():
        directory = directory_of(name, DESCRIPTION + VOCABULARIES)
        # By name, for repositories hold other copies of the weights beside these.
        shards = weight_map(directory).values() if (directory / INDEX).is_file() else (WEIGHTS,)
        directory_of(name, tuple(sorted(set(shards))))
    fields = read_json(directory / CONFIG)
    config = config_from(fields, str(directory / CONFIG))
    tensors = stored_tensors(directory)
    require_floats(tensors)
    if config.tie_word_embeddings:
        _drop_copy_of_embedding(tensors, directory)
    model = build(
        lambda: TargetModel(config, dtype=dtype, rngs=nnx.Rngs(0)),
        TARGET_TABLE,
        {name: tensor.shape for name, tensor in tensors.items()},
        lambda name: tensors[name].read(),
        str(directory),
    )
    tokenizer = tokenizer_from_directory(directory)
    return Target(
        config=config,
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(directory, fields, tokenizer, config.vocab_size),
        name=name,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}; give a directory in Hugging Face's layout.")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); fetch it again.") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds a {type(fields).__name__} where an object is needed; fetch it again.")
    return fields


class StoredTensor(NamedTuple):
    """Where a tensor lies."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name for it

    def read(self) -> np.ndarray:
        # Opened for each tensor: an open file keeps what was read of it in memory.
        with _open(self.file) as file:
            return file.get_tensor(self.name)


class PickledTensor(NamedTuple):
    """A tensor that PyTorch has opened."""

    tensor: Any
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        return self.tensor.float().numpy()  # NumPy has no bfloat16 of PyTorch's


def require_floats(tensors: Mapping[str, StoredTensor | PickledTensor]) -> None:
    """Raises ValueError where a tensor holds no floating-point numbers of a common kind."""
    for tensor in tensors.values():
        if isinstance(tensor, StoredTensor) and tensor.dtype not in FLOATS:
            raise ValueError(
                f"{tensor.file} stores {tensor.name} as {tensor.dtype}; supported are {', '.join(FLOATS)}."
            )


def head_tensors(directory: Path) -> Mapping[str, StoredTensor | PickledTensor]:
    """All tensors of a directory's head, from safetensors or else from PyTorch's pickle."""
    path = directory / PICKLED
    if (directory / WEIGHTS).is_file() or not path.is_file():
        return stored_tensors(directory)
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"{path} is a pickle, which only PyTorch reads; install torch.") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # it raises whatever the file leads it to
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not a whole file of tensors ({reason[:200]}); fetch it again.") from error
    if not isinstance(content, Mapping) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ValueError(f"{path} holds something else than tensors by name; fetch it again.")
    return {name: PickledTensor(value, tuple(value.shape)) for name, value in content.items()}


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of a directory's model: those of `model.safetensors`, or those that an index lists."""
    if (directory / WEIGHTS).is_file():
        listed = None
        files = [WEIGHTS]
    elif (directory / INDEX).is_file():
        listed = weight_map(directory)
        files = sorted(set(listed.values()))
    else:
        others = sorted(path.name for path in directory.glob("*.bin"))
        remedy = f"it has {others[0]}, which must be converted first" if others else "fetch the model again"
        raise ValueError(f"{directory} has neither {WEIGHTS} nor {INDEX}; {remedy}.")
    tensors = {}
    for name in files:
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{directory / INDEX} lists the file {name}, which is not there; fetch it again.")
        with _open(path) as file:
            for key in file.keys():  # noqa: SIM118, the file is no mapping
                if (listed is not None and listed.get(key) != name) or DERIVED.fullmatch(key):
                    continue
                described = file.get_slice(key)
                tensors[key] = StoredTensor(key, path, tuple(described.get_shape()), described.get_dtype())
    absent = sorted(key for key in listed or () if key not in tensors and not DERIVED.fullmatch(key))
    if absent:
        assert listed is not None
        raise ValueError(
            f"{directory / INDEX} lists {absent[0]} in {listed[absent[0]]}, which does not hold it "
            f"({len(absent)} such tensors); fetch the model again."
        )
    return tensors


def weight_map(directory: Path) -> dict[str, str]:
    """Which file each tensor lies in, by the directory's index."""
    path = directory / INDEX
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(f"{path} has no weight_map from tensors to files; fetch it again.")
    for name in listed.values():
        # A plain name: an index must not reach outside its directory.
        if Path(name).name != name:
            raise ValueError(f"{path} lists the file {name!r}, which is no name of a file beside it; fetch it again.")
    return listed


def _open(path: Path) -> Any:
    """A safetensors file, for use in a `with` statement."""
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); fetch it again.") from error


def _drop_copy_of_embedding(tensors: dict[str, StoredTensor], directory: Path) -> None:
    """Leaves out an LM head that repeats the embedding it is tied to."""
    head, embedding = tensors.pop("lm_head.weight", None), tensors.get("model.embed_tokens.weight")
    if head is None or embedding is None:
        return
    with _open(head.file) as first, _open(embedding.file) as second:
        pair = first.get_slice(head.name), second.get_slice(embedding.name)
        # Piece by piece: an embedding can be the largest tensor by far.
        rows = embedding.shape[0]
        same = head.shape == embedding.shape and all(
            np.array_equal(*(matrix[begin : min(begin + ROWS_COMPARED, rows)] for matrix in pair))
            for begin in range(0, rows, ROWS_COMPARED)
        )
    if not same:
        raise ValueError(
            f"{directory / CONFIG} has tie_word_embeddings true, but lm_head.weight {head.shape} is no copy of "
            f"model.embed_tokens.weight {embedding.shape}; correct one of them."
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
