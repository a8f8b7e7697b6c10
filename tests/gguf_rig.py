"""GGUF files for tests: small, whole, and written tensor by tensor under llama.cpp's names."""

import gguf
import numpy as np
import pytest

from eagle_jax import load_target
from eagle_jax.config import ModelConfig

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abc", "Ġ", "Ċ", "ab", "Ġa", "1", "2", "12", *"use"]
MERGES = ["a b", "Ġ a", "1 2"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
KINDS = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3)


def metadata_of(config: ModelConfig, architecture: str = "llama"):
    """Metadata of a GGUF file by key, with the writer's method for it."""
    model = {
        "context_length": ("add_uint32", config.max_position_embeddings),
        "embedding_length": ("add_uint32", config.hidden_size),
        "block_count": ("add_uint32", config.num_hidden_layers),
        "feed_forward_length": ("add_uint32", config.intermediate_size),
        "attention.head_count": ("add_uint32", config.num_attention_heads),
        "attention.head_count_kv": ("add_uint32", config.num_key_value_heads),
        "attention.key_length": ("add_uint32", config.head_dim),
        "attention.value_length": ("add_uint32", config.head_dim),
        "attention.layer_norm_rms_epsilon": ("add_float32", config.rms_norm_eps),
        "rope.freq_base": ("add_float32", config.rope_theta),
    }
    tokenizer = {
        "ggml.model": ("add_string", "gpt2"),
        "ggml.pre": ("add_string", "smollm"),
        "ggml.tokens": ("add_array", TOKENS),
        "ggml.token_type": ("add_array", [int(kind) for kind in KINDS]),
        "ggml.merges": ("add_array", MERGES),
        "ggml.bos_token_id": ("add_uint32", 1),
        "ggml.eos_token_id": ("add_uint32", 2),
        "chat_template": ("add_string", TEMPLATE),
    }
    return {f"{architecture}.{key}": value for key, value in model.items()} | {
        f"tokenizer.{key}": value for key, value in tokenizer.items()
    }


def tensors_of(config: ModelConfig, weights, architecture: str = "llama"):
    """Tensors under GGUF's names, for "llama" the rows of queries and keys in llama.cpp's order."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    tensors = {}
    for name, weight in weights.items():
        for kind, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.kv_heads)):
            if kind in name and architecture == "llama":
                halves = weight.reshape(heads, 2, config.key_dim // 2, -1)
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = weight
    return tensors


def write(path, metadata, tensors, architecture="llama"):
    """Writes a file; a tensor is an array or a pair of stored bytes and what they are."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, (method, value) in metadata.items():
        getattr(writer, method)(key, value)
    for name, tensor in tensors.items():
        stored, kind = tensor if isinstance(tensor, tuple) else (np.ascontiguousarray(tensor), None)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path):
    """The message a file is refused with: one line, one sentence."""
    with pytest.raises((ValueError, OSError)) as caught:
        load_target(path)
    message = str(caught.value)
    # A subclass, such as UnicodeDecodeError, was raised for something else and only passed through.
    assert type(caught.value) in (ValueError, OSError), repr(caught.value)
    assert "\n" not in message and message.endswith("."), message
    return message
