"""Targets by name: an embedded model or a file."""

from pathlib import Path

import jax
import jax.numpy as jnp

from eagle_jax import embedded, layers
from eagle_jax.gguf_file import target_from_gguf
from eagle_jax.target import Target


def load_target(name: str | Path, dtype: layers.Dtype | None = None, quantization: None = None) -> Target:
    """Loads a target by name: an embedded model or a .gguf file of the Llama family.

    Args:
      name: "smollm2-135m" (fetched once into the user's cache) or the path of a .gguf file.
      dtype: of the parameters; None is bfloat16 on accelerators and float32 on a CPU.
      quantization: only None so far; a quantised file is read into `dtype`.

    Raises:
      ValueError: unknown name, unsupported architecture, or tensors that do not fit the file's own description.
      OSError: the file cannot be read, fetched or stored.
    """
    if quantization is not None:
        raise ValueError(f"quantization is {quantization!r}; only None is supported.")
    if str(name) in embedded.EMBEDDED:
        path = embedded.model_path(str(name))
    else:
        path = Path(name)
        if path.suffix != ".gguf" or not path.is_file():
            known = ", ".join(sorted(embedded.EMBEDDED))
            raise ValueError(f"There is no target {str(name)!r}: give an embedded model ({known}) or a .gguf file.")
    return target_from_gguf(path, name=str(name), dtype=default_dtype() if dtype is None else dtype)


def default_dtype() -> layers.Dtype:
    """bfloat16 where the hardware multiplies it, float32 on a CPU."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
