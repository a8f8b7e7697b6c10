"""GGUF files as targets: metadata becomes the configuration, tensors the parameters, token ids what ends a text."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from flax import nnx

from eagle_jax import layers
from eagle_jax.config import ModelConfig
from eagle_jax.convert import Table, build, transposed, unchanged
from eagle_jax.target import Target, TargetModel
from eagle_jax.tokenizers import tokenizer_from_gguf


def unpermuted(weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Undoes llama.cpp's order of query and key rows.

    llama.cpp rotates neighbouring rows and stores a head as (pair, half); here a pair's two coordinates stand in the
    two halves of the head, (half, pair).
    """
    pairs = weight.reshape(-1, config.key_dim // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape).T


GGUF_TABLE: Table = (
    (r"embed_tokens\.embedding", r"token_embd.weight", unchanged),
    (r"lm_head\.embedding", r"output.weight", unchanged),
    (r"norm\.scale", r"output_norm.weight", unchanged),
    (r"layers\.(\d+)\.input_layernorm\.scale", r"blk.\1.attn_norm.weight", unchanged),
    (r"layers\.(\d+)\.post_attention_layernorm\.scale", r"blk.\1.ffn_norm.weight", unchanged),
    (r"layers\.(\d+)\.self_attn\.(q|k)_proj\.kernel", r"blk.\1.attn_\2.weight", unpermuted),
    (r"layers\.(\d+)\.self_attn\.v_proj\.kernel", r"blk.\1.attn_v.weight", transposed),
    (r"layers\.(\d+)\.self_attn\.o_proj\.kernel", r"blk.\1.attn_output.weight", transposed),
    (r"layers\.(\d+)\.mlp\.(gate|up|down)_proj\.kernel", r"blk.\1.ffn_\2.weight", transposed),
)


def read_gguf(path: Path) -> gguf.GGUFReader:
    """Opens a GGUF file of the Llama family, or says in one sentence why not."""
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path} is not a whole GGUF file ({error}); fetch it again.") from error
    architecture = metadata(reader, path, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"{path} holds a model of architecture {architecture!r}; supported: llama.")
    return reader


_REQUIRED = object()


def metadata(reader: gguf.GGUFReader, path: Path, key: str, default: Any = _REQUIRED) -> Any:
    """The value of a metadata key; without a default a missing key is an error that names it."""
    field = reader.get_field(key)
    if field is not None:
        try:
            return field.contents()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} has a metadata key {key!r} that is no text ({error}); fetch it again.") from error
    if default is _REQUIRED:
        raise ValueError(f"{path} has no metadata key {key!r}, which a Llama model needs; fetch or convert it again.")
    return default


def config_from_gguf(reader: gguf.GGUFReader, path: Path) -> ModelConfig:
    def value(key: str, default: Any = _REQUIRED) -> Any:
        return metadata(reader, path, f"llama.{key}", default)

    hidden, heads, blocks = value("embedding_length"), value("attention.head_count"), value("block_count")
    found = {tensor.name.split(".")[1] for tensor in reader.tensors if tensor.name.startswith("blk.")}
    if blocks != len(found):
        raise ValueError(
            f"{path} describes {blocks} layers, but has tensors of {len(found)}; fetch or convert it again."
        )
    key_dim = value("attention.key_length", hidden // heads)
    turned, scaling = value("rope.dimension_count", key_dim), value("rope.scaling.type", "none")
    if turned != key_dim:
        raise ValueError(f"{path} turns {turned} of {key_dim} dimensions of a head; supported: all of them.")
    if scaling != "none":
        raise ValueError(f"{path} has rope scaling {scaling!r}; supported: none.")
    return ModelConfig(
        vocab_size=len(metadata(reader, path, "tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=value("attention.head_count_kv", heads),
        head_dim=key_dim,
        max_position_embeddings=value("context_length"),
        # The file holds a float32; its shortest decimal is the number that was meant.
        rms_norm_eps=float(str(np.float32(value("attention.layer_norm_rms_epsilon")))),
        rope_theta=float(value("rope.freq_base", 10000.0)),
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
    )


def target_from_gguf(path: Path, *, name: str, dtype: layers.Dtype) -> Target:
    reader = read_gguf(path)
    try:
        config, tokenizer = config_from_gguf(reader, path), tokenizer_from_gguf(reader, path)
    except (UnicodeDecodeError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{path} describes no Llama model ({error}); fetch or convert it again.") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def read(tensor_name: str) -> np.ndarray:
        tensor = tensors[tensor_name]
        try:
            return gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ValueError(
                f"{path} stores {tensor_name} as {kind}, which cannot be read; convert it again."
            ) from error

    # GGUF states the innermost dimension first.
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    model = build(lambda: TargetModel(config, dtype=dtype, rngs=nnx.Rngs(0)), GGUF_TABLE, shapes, read, str(path))
    return Target(
        config=config,
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=(int(metadata(reader, path, "tokenizer.ggml.eos_token_id")),),
        name=name,
    )
