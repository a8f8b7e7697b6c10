"""Targets by name: an embedded model, a directory, a hub id or a GGUF file."""

from pathlib import Path

import jax
import jax.numpy as jnp

from eagle_jax import embedded, layers
from eagle_jax.gguf_file import target_from_gguf
from eagle_jax.repository import GENERATION_CONFIG, TOKENIZER, find_repository, target_from_repository
from eagle_jax.target import Target


def load_target(name: str | Path, dtype: layers.Dtype | None = None, quantization: None = None) -> Target:
    """Loads a target of the Llama family by name.

    Args:
      name: an embedded model ("smollm2-135m", fetched once into the user's cache), a directory in Hugging Face's
        layout, a hub id ("organisation/model", fetched once into the hub's cache), or the path of a .gguf file.
      dtype: of the parameters; None is bfloat16 on accelerators and float32 on a CPU.
      quantization: only None so far; a quantised file is read into `dtype`.

    Raises:
      ValueError: unknown name, unsupported architecture, or tensors that do not fit the model's own description.
      OSError: a file cannot be read, fetched or stored.
    """
    if quantization is not None:
        raise ValueError(f"quantization is {quantization!r}; only None is supported.")
    dtype = default_dtype() if dtype is None else dtype
    path = Path(name).expanduser()
    if str(name) in embedded.EMBEDDED:
        return target_from_gguf(embedded.model_path(str(name)), name=str(name), dtype=dtype)
    if path.suffix == ".gguf" and path.is_file():
        return target_from_gguf(path, name=str(name), dtype=dtype)
    directory = find_repository(name, (GENERATION_CONFIG, *TOKENIZER))
    if directory is not None:
        return target_from_repository(directory, name=str(name), dtype=dtype)
    known = ", ".join(sorted(embedded.EMBEDDED))
    raise ValueError(
        f"There is no target {str(name)!r}: give an embedded model ({known}), a directory, a hub id or a .gguf file."
    )


def default_dtype() -> layers.Dtype:
    """bfloat16 where the hardware multiplies it, float32 on a CPU."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
