"""Trained heads on disk: a directory with `model.safetensors`, under the published tensor names, and `config.json`."""

import dataclasses
import json
import os
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from eagle_jax import layers
from eagle_jax.config import HeadConfig
from eagle_jax.convert import Table, build, tensor_for, transposed, unchanged
from eagle_jax.head import Head, HeadModel, check_fit, frozen_ends
from eagle_jax.target import Target

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
VOCABULARY = "draft_vocabulary"  # i32[W], ascending token ids
BORROWED = ("embed_tokens.weight",)  # published heads carry a copy of what is the target's

# Transposing is its own inverse, so one table serves both ways.
HEAD_TABLE: Table = (
    (r"(.*)\.kernel", r"\1.weight", transposed),
    (r"(.*)\.scale", r"\1.weight", unchanged),
    (r"(.*)\.bias", r"\1.bias", unchanged),
)


def save_head(head: Head, directory: str | Path, *, dtype: layers.Dtype = jnp.bfloat16) -> None:
    """Writes a head's weights and configuration; a reader never sees half of one."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, leaf in nnx.to_flat_state(nnx.state(head.model)):
        name, transform = tensor_for(path, HEAD_TABLE)
        tensors[name] = np.ascontiguousarray(transform(np.asarray(leaf[...].astype(dtype)), head.config))
    if head.ends.vocabulary is not None:
        tensors[VOCABULARY] = np.asarray(head.ends.vocabulary, np.int32)
    fields = {"architectures": ["EagleHead"]} | dataclasses.asdict(head.config) | {"bias": head.config.fc_bias}
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        save_file(tensors, Path(scratch) / WEIGHTS)
        (Path(scratch) / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
        for name in (WEIGHTS, CONFIG):
            os.replace(Path(scratch) / name, directory / name)


def load_head(name: str | Path, target: Target, dtype: layers.Dtype | None = None) -> Head:
    """Loads a head and checks that it fits the target.

    Args:
      name: an embedded head ("smollm2-135m") or a directory that holds one.
      target: the target it drafts for.
      dtype: of the parameters; None is the target's.

    Raises:
      ValueError: no such head, its sizes differ from the target's, or its tensors do not fit its configuration.
    """
    directory = Path(str(resources.files("eagle_jax") / "heads" / str(name)))
    if not (directory / CONFIG).is_file():
        directory = Path(name)
    for file in (CONFIG, WEIGHTS):
        if not (directory / file).is_file():
            raise ValueError(f"There is no head {str(name)!r}: neither an embedded one nor a directory with {file}.")
    try:
        fields = json.loads((directory / CONFIG).read_text())
        tensors = load_file(directory / WEIGHTS)
    except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
        raise ValueError(f"The head in {directory} cannot be read ({error}); fetch or train it again.") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{directory / CONFIG} describes no head (it is no JSON object); fetch or train it again.")
    of_eagle3 = any(key.startswith("midlayer.") for key in tensors)
    if of_eagle3 or "fc.weight" not in tensors:
        kind = "an EAGLE-3 head" if of_eagle3 else "no EAGLE head"
        raise ValueError(f"{directory} holds {kind}; supported are EAGLE and EAGLE-2 heads (fc and one decoder layer).")
    for key in BORROWED:
        tensors.pop(key, None)
    source = f"head in {directory}"
    vocabulary = tensors.pop(VOCABULARY, None)
    config = _config_from(fields, directory, has_bias="fc.bias" in tensors, vocabulary=vocabulary)
    check_fit(config, target, source)
    if vocabulary is not None and not _ascending_ids(vocabulary, config.vocab_size):
        raise ValueError(
            f"The {VOCABULARY} of the {source} is not ascending ids below {config.vocab_size}; train it again."
        )
    dtype = target.dtype if dtype is None else dtype
    make = lambda: HeadModel(config, dtype=dtype, rngs=nnx.Rngs(0))  # noqa: E731
    model = build(make, HEAD_TABLE, tensors, tensors.__getitem__, f"the {source}")
    return Head(config=config, model=model, ends=frozen_ends(target, vocabulary))


def _config_from(
    fields: dict[str, Any], directory: Path, *, has_bias: bool, vocabulary: np.ndarray | None
) -> HeadConfig:
    # What the weights say goes before what the configuration says: published ones disagree about `bias`.
    known = {field.name for field in dataclasses.fields(HeadConfig)}
    chosen = {key: value for key, value in fields.items() if key in known}
    chosen |= {"fc_bias": has_bias, "draft_vocab_size": None if vocabulary is None else len(vocabulary)}
    try:
        return HeadConfig(**chosen)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{directory / CONFIG} describes no head ({error}); fetch or train it again.") from error


def _ascending_ids(vocabulary: np.ndarray, vocab_size: int) -> bool:
    inside = vocabulary.ndim == 1 and vocabulary[0] >= 0 and vocabulary[-1] < vocab_size
    return bool(inside and np.all(np.diff(vocabulary) > 0))
