"""GGUF files as targets: metadata becomes the configuration, tensors the parameters, token ids what ends a text.

Metadata keys and tensor names are llama.cpp's, which fixes what they mean.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from eagle_jax import layers
from eagle_jax.config import ModelConfig, RopeScaling
from eagle_jax.convert import Table, Transform, build, transposed, unchanged
from eagle_jax.gguf_reader import REQUIRED, GGUFFile, shown
from eagle_jax.target import Target, TargetModel
from eagle_jax.tokenizers import tokenizer_from_gguf


def unpermuted(weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Undoes llama.cpp's order of query and key rows, of matrices and of biases.

    llama.cpp rotates neighbouring rows and stores a head as (pair, half); here a pair's two coordinates stand in the
    two halves of the head, (half, pair).
    """
    pairs = weight.reshape(-1, config.key_dim // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape).T


def _table(queries_and_keys: Transform) -> Table:
    return (
        (r"embed_tokens\.embedding", r"token_embd.weight", unchanged),
        (r"lm_head\.embedding", r"output.weight", unchanged),
        (r"norm\.scale", r"output_norm.weight", unchanged),
        (r"layers\.(\d+)\.input_layernorm\.scale", r"blk.\1.attn_norm.weight", unchanged),
        (r"layers\.(\d+)\.post_attention_layernorm\.scale", r"blk.\1.ffn_norm.weight", unchanged),
        (r"layers\.(\d+)\.self_attn\.(q|k)_norm\.scale", r"blk.\1.attn_\2_norm.weight", unchanged),
        (r"layers\.(\d+)\.self_attn\.(q|k)_proj\.kernel", r"blk.\1.attn_\2.weight", queries_and_keys),
        (r"layers\.(\d+)\.self_attn\.(q|k)_proj\.bias", r"blk.\1.attn_\2.bias", queries_and_keys),
        (r"layers\.(\d+)\.self_attn\.v_proj\.kernel", r"blk.\1.attn_v.weight", transposed),
        (r"layers\.(\d+)\.self_attn\.v_proj\.bias", r"blk.\1.attn_v.bias", unchanged),
        (r"layers\.(\d+)\.self_attn\.o_proj\.kernel", r"blk.\1.attn_output.weight", transposed),
        (r"layers\.(\d+)\.self_attn\.o_proj\.bias", r"blk.\1.attn_output.bias", unchanged),
        (r"layers\.(\d+)\.mlp\.(gate|up|down)_proj\.kernel", r"blk.\1.ffn_\2.weight", transposed),
        (r"layers\.(\d+)\.mlp\.(gate|up|down)_proj\.bias", r"blk.\1.ffn_\2.bias", unchanged),
    )


# llama.cpp's "llama" is all of Llama, Vicuna and Mistral; only its query and key rows are stored in another order.
TABLES = {
    "llama": _table(unpermuted),
    "mistral": _table(unpermuted),
    "qwen2": _table(transposed),
    "qwen3": _table(transposed),
}

# What a file may ask for that is not done here: its key, the value that does not ask for it, and what it is.
UNSUPPORTED = (
    ("{arch}.expert_count", 0, "a mixture of experts"),
    ("{arch}.attention.causal", True, "an encoder"),
    ("{arch}.attention.sliding_window_pattern", None, "layers with and without a sliding window"),
    ("{arch}.attention.temperature_scale", None, "attention whose temperature goes by the position"),
    ("{arch}.rope.scaling.yarn_ext_factor", 1, "yarn of another strength"),
    ("{arch}.rope.scaling.yarn_log_multiplier", 0, "yarn with DeepSeek's magnitudes"),
    ("split.count", 1, "one part of a split model"),
)

EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"  # no parameter: it becomes part of the configuration


def description_from_gguf(path: Path) -> tuple[ModelConfig, Any]:
    """The configuration of a GGUF file's model, and its tokenizer or None; errors as `target_from_gguf`'s."""
    file = GGUFFile(path)
    return config_from_gguf(file, _architecture(file)), tokenizer_from_gguf(file)


def target_from_gguf(path: Path, *, name: str, dtype: layers.Dtype, mesh: Mesh | None = None) -> Target:
    """Loads a GGUF file of the Llama family; with a mesh, laid out over its devices.

    Raises:
      ValueError: the file is damaged, of an unsupported kind, or its tensors do not fit its own description.
      OSError: the file cannot be read.
    """
    file = GGUFFile(path)
    architecture = _architecture(file)
    tokenizer = tokenizer_from_gguf(file)
    config = config_from_gguf(file, architecture)
    ends = _eos_token_ids(file, config.vocab_size, required=tokenizer is not None)
    model = build(
        lambda: TargetModel(config, dtype=dtype, rngs=nnx.Rngs(0)),
        TABLES[architecture],
        {name: tensor.shape for name, tensor in file.tensors.items() if name != ROPE_FACTORS},
        file.read if mesh is None else _parts_of(file),
        str(path),
        mesh,
    )
    return Target(config=config, model=model, tokenizer=tokenizer, eos_token_ids=ends, name=name)


def _parts_of(file: GGUFFile) -> Callable[..., np.ndarray]:
    """Reads tensors, or parts of them, which are cut from the whole: blocks of numbers end where no index does."""
    last = lru_cache(maxsize=1)(file.read)  # for the several parts of one tensor
    return lambda name, index=...: last(name)[index]


def _architecture(file: GGUFFile) -> str:
    architecture = file.text("general.architecture")
    if architecture not in TABLES:
        raise ValueError(
            f"{file.path} holds a model of architecture {shown(architecture)}; supported are {', '.join(TABLES)}."
        )
    for template, harmless, what in UNSUPPORTED:
        key = template.format(arch=architecture)
        value = file.metadata.get(key)
        if value is not None and not (isinstance(value, (int, float)) and value == harmless):
            raise ValueError(f"{file.path} holds {what} ({key} is {shown(value)}), which is not supported.")
    return architecture


def config_from_gguf(file: GGUFFile, architecture: str) -> ModelConfig:
    heads, blocks = (file.whole(f"{architecture}.{key}") for key in ("attention.head_count", "block_count"))
    hidden = file.whole(f"{architecture}.embedding_length")
    found = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if blocks != len(found):
        raise ValueError(
            f"{file.path} describes {blocks} layers, but has tensors of {len(found)}; fetch or convert it again."
        )
    key_dim = file.whole(f"{architecture}.attention.key_length", max(hidden // heads, 1))
    turned = file.whole(f"{architecture}.rope.dimension_count", key_dim)
    if turned != key_dim:
        raise ValueError(f"{file.path} turns {turned} of {key_dim} dimensions of a head; supported: all of them.")
    fields: dict[str, Any] = dict(
        vocab_size=_vocabulary_size(file, architecture),
        hidden_size=hidden,
        intermediate_size=file.whole(f"{architecture}.feed_forward_length"),
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=file.whole(f"{architecture}.attention.head_count_kv", heads),
        head_dim=key_dim,
        max_position_embeddings=file.whole(f"{architecture}.context_length"),
        rms_norm_eps=file.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope_theta=file.number(f"{architecture}.rope.freq_base", 10000.0),
        tie_word_embeddings="output.weight" not in file.tensors,
        rope_scaling=_rope_scaling(file, architecture, key_dim),
        # 0 is none, as in llama.cpp.
        sliding_window=file.whole(f"{architecture}.attention.sliding_window", 0, least=0) or None,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )
    try:
        return ModelConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{file.path} describes no model of the Llama family: {error}") from error


def _vocabulary_size(file: GGUFFile, architecture: str) -> int:
    tokens = file.texts("tokenizer.ggml.tokens", None)
    if tokens is not None:
        return len(tokens)
    if EMBEDDING not in file.tensors:
        raise ValueError(f"{file.path} has neither tokens nor a tensor {EMBEDDING}; fetch or convert it again.")
    return file.whole(f"{architecture}.vocab_size", file.tensors[EMBEDDING].shape[0])


def _eos_token_ids(file: GGUFFile, vocab_size: int, *, required: bool) -> tuple[int, ...]:
    """What ends a text: the end of all, of a turn and of a message, each once."""
    defaults = {"eos": REQUIRED if required else None, "eot": None, "eom": None}
    ids = [
        file.whole(f"tokenizer.ggml.{end}_token_id", default, least=0, most=vocab_size - 1)
        for end, default in defaults.items()
    ]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _rope_scaling(file: GGUFFile, architecture: str, key_dim: int) -> RopeScaling | None:
    prefix = f"{architecture}.rope.scaling"
    # Older files state a factor and no type.
    factor = file.number(f"{prefix}.factor", file.number(f"{architecture}.rope.scale_linear", 1.0))
    kind = file.text(f"{prefix}.type", "linear")
    times = file.number(f"{prefix}.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"{file.path} has rope scaling {shown(kind)}; supported are 'none', 'linear' and 'yarn'.")
    if kind != "yarn" and times != 1:
        raise ValueError(f"{file.path} has {prefix}.attn_factor {times} with rope scaling {kind!r}; only yarn has one.")
    if ROPE_FACTORS in file.tensors:
        factors = file.read(ROPE_FACTORS)
        if kind == "yarn" or factors.shape != (key_dim // 2,) or not np.all((factors > 0) & (factors < np.inf)):
            raise ValueError(
                f"{file.path} has {ROPE_FACTORS} of shape {factors.shape} with rope scaling {kind!r}; supported is a "
                f"positive number for each of a head's {key_dim // 2} frequencies, without yarn."
            )
        factors = factors * (factor if kind == "linear" else 1)
        return RopeScaling(rope_type="factors", factors=tuple(map(float, factors)))
    if kind == "yarn":
        attention_factor = file.number(f"{prefix}.yarn_attn_factor", None)
        if times != 1:  # of what it would be, which is YaRN's own (arXiv 2309.00071, section 3.4) unless stated
            attention_factor = times * (attention_factor or 0.1 * math.log(max(factor, 1.0)) + 1)
        return RopeScaling(
            rope_type="yarn",
            factor=factor,
            original_max_position_embeddings=file.whole(f"{prefix}.original_context_length", None),
            beta_fast=file.number(f"{prefix}.yarn_beta_fast", 32.0),
            beta_slow=file.number(f"{prefix}.yarn_beta_slow", 1.0),
            attention_factor=attention_factor,
        )
    return RopeScaling(rope_type="linear", factor=factor) if kind == "linear" and factor != 1 else None
