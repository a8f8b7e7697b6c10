"""Trained heads on disk: a directory with `model.safetensors`, under the published tensor names, and `config.json`.

EAGLE's heads, those of its ablation and Medusa's; `config.json` says which. Heads published by EAGLE's authors, whose
weights are PyTorch's pickles, load where PyTorch is installed.
"""

import dataclasses
import json
from collections.abc import Collection
from importlib import resources
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import save_file

from eagle_jax import layers
from eagle_jax.config import HeadConfig, MedusaConfig, RopeScaling
from eagle_jax.convert import Table, build, tensor_for, transposed, unchanged
from eagle_jax.families import FAMILIES, model_fields
from eagle_jax.files import replacing
from eagle_jax.head import Head, check_fit, frozen_ends
from eagle_jax.medusa import Medusa, model_for
from eagle_jax.repository import CONFIG, find_repository
from eagle_jax.sharding import shard
from eagle_jax.target import Target
from eagle_jax.weights import WEIGHTS, read_json, require_floats, stored_tensors

ARCHITECTURE, MEDUSA = "EagleHead", "MedusaHeads"  # in the configuration of heads that were written here
VOCABULARY = "draft_vocabulary"  # i32[W], ascending token ids
BORROWED = ("embed_tokens.weight", "lm_head.weight")  # published heads carry copies of what is the target's
SUPPORTED = "supported are EAGLE and EAGLE-2 heads (fc and one decoder layer), and Medusa heads that were trained here"

# Transposing is its own inverse, so one table serves both ways.
HEAD_TABLE: Table = (
    (r"(.*)\.kernel", r"\1.weight", transposed),
    (r"(.*)\.scale", r"\1.weight", unchanged),
    (r"(.*)\.bias", r"\1.bias", unchanged),
)
MEDUSA_TABLE: Table = (
    (r"heads\.(\d+)\.linear\.kernel", r"\1.0.linear.weight", transposed),
    (r"heads\.(\d+)\.lm_head", r"\1.1.weight", unchanged),
)


def save_head(head: Head | Medusa, directory: str | Path, *, dtype: layers.Dtype = jnp.bfloat16) -> None:
    """Writes a head's weights and configuration; a reader never sees half of one."""
    table = HEAD_TABLE if isinstance(head, Head) else MEDUSA_TABLE
    config: Any = head.config  # a table's transforms are typed for models'
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, leaf in nnx.to_flat_state(nnx.state(head.model)):
        name, transform = tensor_for(path, table)
        tensors[name] = np.ascontiguousarray(transform(np.asarray(leaf[...].astype(dtype)), config))
    if head.ends.vocabulary is not None:
        tensors[VOCABULARY] = np.asarray(head.ends.vocabulary, np.int32)
    fields = {"architectures": [ARCHITECTURE if isinstance(head, Head) else MEDUSA]} | dataclasses.asdict(head.config)
    if isinstance(head, Head):
        fields["bias"] = head.config.fc_bias
    # Two names cannot change at once; a run that was killed in between writes both again when it is gone on with.
    with replacing(directory / CONFIG) as described, replacing(directory / WEIGHTS) as weights:
        save_file(tensors, weights)
        described.write_text(json.dumps(fields, indent=2) + "\n")


def save_beta(directory: str | Path, beta: float) -> None:
    """Writes a fitted `ranking_beta` into the configuration of a head's directory; the weights stay as they are."""
    path = Path(directory) / CONFIG
    fields = read_json(path) | {"ranking_beta": beta}
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(fields, indent=2) + "\n")


def load_head(
    name: str | Path, target: Target, dtype: layers.Dtype | None = None, mesh: Mesh | None = None
) -> Head | Medusa:
    """Loads whatever `train/train_head.py` leaves, or a published head, and checks that it fits the target.

    Args:
      name: an embedded head ("smollm2-135m"), a directory that holds one, or a hub id ("organisation/head").
      target: the target it drafts for.
      dtype: of the parameters; None is the target's.
      mesh: lays the parameters out over these devices, as `load_target` does.

    Returns:
      An autoregression head, or Medusa's heads where the directory holds those; `load_medusa` takes no other.

    Raises:
      ValueError: no such head, its sizes differ from the target's, or its tensors do not fit its configuration.
      OSError: a hub repository that cannot be fetched.
    """
    embedded_head = Path(str(resources.files("eagle_jax") / "heads" / str(name)))
    directory = embedded_head if (embedded_head / CONFIG).is_file() else find_repository(name)
    if directory is None or not (directory / CONFIG).is_file():
        raise ValueError(f"There is no head {str(name)!r}: neither an embedded one nor a directory with {CONFIG}.")
    source = f"head in {directory}"
    fields = read_json(directory / CONFIG)
    if "eagle3" in str(fields.get("architectures")).lower():
        raise ValueError(f"{directory} holds an EAGLE-3 head; {SUPPORTED}.")
    tensors = stored_tensors(directory)
    of_medusa = fields.get("architectures") == [MEDUSA]
    of_eagle3 = "d2t" in tensors or any(key.startswith("midlayer.") for key in tensors)
    if of_eagle3 or ("fc.weight" not in tensors and not of_medusa):
        raise ValueError(f"{directory} holds {'an EAGLE-3 head' if of_eagle3 else 'no EAGLE head'}; {SUPPORTED}.")
    for key in BORROWED:
        tensors.pop(key, None)
    stored_vocabulary = tensors.pop(VOCABULARY, None)
    vocabulary = None if stored_vocabulary is None else stored_vocabulary.read()
    require_floats(tensors)
    make_config = _medusa_config_from if of_medusa else _config_from
    config = make_config(fields, directory, tensors, vocabulary)
    check_fit(config, target, source)
    if vocabulary is not None and not _ascending_ids(vocabulary, config.vocab_size):
        raise ValueError(
            f"The {VOCABULARY} of the {source} is not ascending ids below {config.vocab_size}; train it again."
        )
    dtype = target.dtype if dtype is None else dtype
    model = build(
        lambda: model_for(config, dtype=dtype, rngs=nnx.Rngs(0)),
        MEDUSA_TABLE if of_medusa else HEAD_TABLE,
        {key: tensor.shape for key, tensor in tensors.items()},
        lambda key, index=None: tensors[key].read(index),
        f"the {source}",
        mesh,
    )
    ends = frozen_ends(target, vocabulary)
    bound: Any = Medusa if of_medusa else Head
    return bound(config=config, model=model, ends=ends if mesh is None else shard(ends, mesh))


def load_medusa(
    name: str | Path, target: Target, dtype: layers.Dtype | None = None, mesh: Mesh | None = None
) -> Medusa:
    """As `load_head`, for Medusa's heads alone.

    Raises:
      ValueError: as `load_head`, and where there is another head.
    """
    head = load_head(name, target, dtype, mesh)
    if isinstance(head, Head):
        raise ValueError(f"{str(name)!r} is an autoregression head, not Medusa's heads; load it with load_head.")
    return head


def _medusa_config_from(
    fields: dict[str, Any], directory: Path, tensors: Collection[str], vocabulary: np.ndarray | None
) -> MedusaConfig:
    known = {field.name for field in dataclasses.fields(MedusaConfig)}
    chosen = {key: value for key, value in fields.items() if key in known}
    chosen["draft_vocab_size"] = None if vocabulary is None else len(vocabulary)
    try:
        return MedusaConfig(**chosen)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{directory / CONFIG} describes no Medusa heads ({error}); fetch or train them again."
        ) from error


def _config_from(
    fields: dict[str, Any], directory: Path, tensors: Collection[str], vocabulary: np.ndarray | None
) -> HeadConfig:
    source = str(directory / CONFIG)
    architectures = fields.get("architectures")
    try:
        if architectures == [ARCHITECTURE]:
            known = {field.name for field in dataclasses.fields(HeadConfig)}
            chosen = {key: value for key, value in fields.items() if key in known}
            chosen["rope_scaling"] = None if (scaling := fields.get("rope_scaling")) is None else RopeScaling(**scaling)
        else:
            # Published heads describe themselves as the model that they were trained for, or as a Llama.
            kind = fields.get("model_type")
            chosen = model_fields(fields, FAMILIES.get(str(kind), FAMILIES["llama"]), source)
            # Some state the target's layers and experts; a head has one of each, as the weights must say.
            chosen |= {"num_hidden_layers": 1, "layer_types": None}
            chosen |= {"num_local_experts": None, "num_experts_per_tok": None}
            chosen |= {"ranking_beta": fields["ranking_beta"]} if "ranking_beta" in fields else {}
        # What the weights say goes before what the configuration says: published ones disagree about `bias`.
        attention = "layers.0.self_attn."
        chosen |= {
            "fc_bias": "fc.bias" in tensors,
            "attention_bias": f"{attention}q_proj.bias" in tensors,
            "attention_output_bias": f"{attention}o_proj.bias" in tensors,
            "qk_norm": f"{attention}q_norm.weight" in tensors,
            "mlp_bias": "layers.0.mlp.gate_proj.bias" in tensors,
            "draft_vocab_size": None if vocabulary is None else len(vocabulary),
        }
        return HeadConfig(**chosen)
    except (TypeError, ValueError) as error:
        if str(error).startswith(source):
            raise
        raise ValueError(f"{source} describes no head ({error}); fetch or train it again.") from error


def _ascending_ids(vocabulary: np.ndarray, vocab_size: int) -> bool:
    inside = (
        vocabulary.ndim == 1
        and vocabulary.dtype.kind == "i"
        and vocabulary.size
        and vocabulary[0] >= 0
        and vocabulary[-1] < vocab_size
    )
    return bool(inside and np.all(np.diff(vocabulary) > 0))
