"""Targets by name: an embedded model, a directory, a hub id or a GGUF file."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from eagle_jax import embedded, layers
from eagle_jax.config import ModelConfig
from eagle_jax.gguf_file import description_from_gguf, target_from_gguf
from eagle_jax.repository import (
    GENERATION_CONFIG,
    TOKENIZER,
    description_from_repository,
    find_repository,
    target_from_repository,
)
from eagle_jax.target import Target


def load_target(
    name: str | Path, dtype: layers.Dtype | None = None, quantization: None = None, mesh: Mesh | None = None
) -> Target:
    """Loads a target of the Llama family by name.

    Args:
      name: an embedded model ("smollm2-135m", fetched once into the user's cache), a directory in Hugging Face's
        layout, a hub id ("organisation/model", fetched once into the hub's cache), or the path of a .gguf file.
      dtype: of the parameters; None is bfloat16 on accelerators and float32 on a CPU.
      quantization: only None so far; a quantised file is read into `dtype`.
      mesh: lays the parameters out over these devices (see `sharding.make_mesh`). Each process reads of safetensors
        what its own devices hold, and none ever holds the whole.

    Raises:
      ValueError: unknown name, unsupported architecture, or tensors that do not fit the model's own description.
      OSError: a file cannot be read, fetched or stored.
    """
    if quantization is not None:
        raise ValueError(f"quantization is {quantization!r}; only None is supported.")
    dtype = default_dtype() if dtype is None else dtype
    path = _find(name)
    if path.is_dir():
        return target_from_repository(path, name=str(name), dtype=dtype, mesh=mesh)
    return target_from_gguf(path, name=str(name), dtype=dtype, mesh=mesh)


class Description(NamedTuple):
    config: ModelConfig
    tokenizer: Any  # or None


def describe_target(name: str | Path) -> Description:
    """A target's configuration and tokenizer, without its weights; names and errors are `load_target`'s."""
    path = _find(name, weights=False)
    return Description(*(description_from_repository if path.is_dir() else description_from_gguf)(path))


def _find(name: str | Path, weights: bool = True) -> Path:
    """The directory or GGUF file of a target, fetched if need be."""
    path = Path(name).expanduser()
    if str(name) in embedded.EMBEDDED:
        return embedded.model_path(str(name))
    if path.suffix == ".gguf" and path.is_file():
        return path
    directory = find_repository(name, (GENERATION_CONFIG, *TOKENIZER), weights=weights)
    if directory is None:
        known = ", ".join(sorted(embedded.EMBEDDED))
        raise ValueError(
            f"There is no target {str(name)!r}: give an embedded model ({known}), a directory, a hub id or a .gguf "
            "file."
        )
    return directory


def default_dtype() -> layers.Dtype:
    """bfloat16 where the hardware multiplies it, float32 on a CPU."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
