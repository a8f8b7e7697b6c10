"""The tensors of a model directory, by name: safetensors in one file or in shards with an index, or PyTorch's pickles.

Nothing is read before it is asked for, and of a pickle PyTorch's restricted loader takes tensors and nothing else.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
# An index says which files are the model's; whatever else lies beside it is not. Safetensors go before pickles.
INDICES = (f"{WEIGHTS}.index.json", f"{PICKLED}.index.json")
DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")  # old checkpoints store what follows from the configuration
FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")  # as the two formats call them


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """All of it, or the part that an index selects."""
        # Opened for each tensor: an open file keeps what was read of it in memory.
        with open_safetensors(self.file) as file:
            return file.get_tensor(self.name) if index is None else file.get_slice(self.name)[index]


class PickledTensor(NamedTuple):
    """A tensor that PyTorch has opened."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    tensor: Any

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """All of it, or the part that an index selects."""
        part = self.tensor if index is None else self.tensor[index]
        return part.float().numpy()  # NumPy knows no bfloat16 of PyTorch's


Tensors = dict[str, StoredTensor | PickledTensor]


def stored_tensors(directory: Path) -> Tensors:
    """All tensors of a directory's model.

    Raises:
      ValueError: there is no model, a file is damaged or missing, or an index lies.
    """
    index = index_of(directory)
    listed = None if index is None else weight_map(index)
    if listed is None:
        files = [name for name in (WEIGHTS, PICKLED) if (directory / name).is_file()][:1]
        if not files:
            raise ValueError(f"{directory} has neither {WEIGHTS} nor {INDICES[0]}; fetch the model again.")
    else:
        files = sorted(set(listed.values()))
    tensors: Tensors = {}
    for name in files:
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{index} lists the file {name}, which is not there; fetch it again.")
        for tensor in tensors_in(path):
            if (listed is None or listed.get(tensor.name) == name) and not DERIVED.fullmatch(tensor.name):
                tensors[tensor.name] = tensor
    absent = sorted(key for key in listed or () if key not in tensors and not DERIVED.fullmatch(key))
    if absent:
        assert listed is not None
        raise ValueError(
            f"{index} lists {absent[0]} in {listed[absent[0]]}, which does not hold it "
            f"({len(absent)} such tensors); fetch the model again."
        )
    return tensors


def require_floats(tensors: Tensors) -> None:
    """Raises ValueError where a tensor holds no floating-point numbers of a common kind."""
    for tensor in tensors.values():
        if tensor.dtype not in FLOATS:
            raise ValueError(
                f"{tensor.file} stores {tensor.name} as {tensor.dtype}; supported are floats of 16 to 64 bits."
            )


def index_of(directory: Path) -> Path | None:
    """The directory's index, if it has one."""
    return next((directory / name for name in INDICES if (directory / name).is_file()), None)


def weight_map(index: Path) -> dict[str, str]:
    """Which file beside an index each tensor lies in."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(f"{index} has no weight_map from tensors to files; fetch it again.")
    for name in listed.values():
        # A plain name: an index must not reach outside its directory.
        if Path(name).name != name:
            raise ValueError(f"{index} lists the file {name!r}, which is no name of a file beside it; fetch it again.")
    return listed


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


def tensors_in(path: Path) -> list[StoredTensor] | list[PickledTensor]:
    """The tensors of one file."""
    if path.suffix == ".bin":
        return [
            PickledTensor(name, path, tuple(value.shape), str(value.dtype).removeprefix("torch."), value)
            for name, value in _unpickled(path).items()
        ]
    with open_safetensors(path) as file:
        described = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, the file is no mapping
        return [
            StoredTensor(name, path, tuple(one.get_shape()), str(one.get_dtype())) for name, one in described.items()
        ]


def open_safetensors(path: Path) -> Any:
    """A safetensors file, for use in a `with` statement."""
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); fetch it again.") from error


def _unpickled(path: Path) -> Mapping[str, Any]:
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"{path} is a pickle, which only PyTorch reads; install torch.") from error
    try:
        # Mapped, so that what is not read takes no memory.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # it raises whatever the file leads it to
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not a whole file of tensors ({reason[:200]}); fetch it again.") from error
    if not isinstance(content, Mapping) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ValueError(f"{path} holds something else than tensors by name; fetch it again.")
    return content
