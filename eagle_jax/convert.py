"""Targets from files: tensors of other formats, renamed and turned into this library's parameters.

One table per format says which parameter a tensor becomes; the loader walks it and lists whatever is missing,
unexpected or of another shape in one error.
"""

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax import embedded, layers
from eagle_jax.config import ModelConfig
from eagle_jax.target import Target, TargetModel
from eagle_jax.tokenizers import tokenizer_from_gguf

Transform = Callable[[np.ndarray, ModelConfig], np.ndarray]
Table = tuple[tuple[str, str, Transform], ...]  # (parameter path, tensor name, transform); the path is a regex


def unchanged(weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return weight


def transposed(weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return weight.T


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
    return _target_from_gguf(path, name=str(name), dtype=default_dtype() if dtype is None else dtype)


def default_dtype() -> layers.Dtype:
    """bfloat16 where the hardware multiplies it, float32 on a CPU."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


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


def _target_from_gguf(path: Path, *, name: str, dtype: layers.Dtype) -> Target:
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

    model = build(lambda: TargetModel(config, dtype=dtype, rngs=nnx.Rngs(0)), GGUF_TABLE, tensors, read, str(path))
    return Target(
        config=config,
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=(int(metadata(reader, path, "tokenizer.ggml.eos_token_id")),),
        name=name,
    )


def build(
    make: Callable[[], Any], table: Table, names: Collection[str], read: Callable[[str], np.ndarray], source: str
) -> Any:
    """Makes a module whose parameters come from named tensors.

    Args:
      make: builds the module; it is traced for its shapes only, random weights are never made.
      table: which tensor each parameter comes from.
      names: the tensors there are.
      read: a tensor by its name; called once for each, so that one at a time is in memory.
      source: what the tensors come from, for errors.

    Raises:
      ValueError: lists every tensor that is missing, unexpected or wrongly shaped.
    """
    abstract = nnx.eval_shape(make)
    graphdef, state = nnx.split(abstract)
    flat, faults, used = [], [], set()
    for path, leaf in nnx.to_flat_state(state):
        name, transform = tensor_for(path, table)
        used.add(name)
        if name not in names:
            faults.append(f"missing {name}")
            continue
        stored = read(name)
        try:
            weight = transform(stored, abstract.config)
        except (ValueError, IndexError):  # a wrong shape may not even be transformed
            faults.append(f"{name} of shape {stored.shape} does not become {leaf.shape}")
            continue
        if weight.shape == leaf.shape:
            flat.append((path, leaf.replace(jnp.asarray(weight, leaf.dtype))))
        else:
            faults.append(f"{name} gives {weight.shape} where {leaf.shape} is needed")
    faults += [f"unexpected {name}" for name in names if name not in used]
    if faults:
        raise ValueError(f"The tensors of {source} do not fit its configuration: {'; '.join(sorted(faults))}.")
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def tensor_for(path: tuple[Any, ...], table: Table) -> tuple[str, Transform]:
    """The tensor name and the transform for a parameter's path."""
    dotted = ".".join(map(str, path))
    for pattern, name, transform in table:
        match = re.fullmatch(pattern, dotted)
        if match:
            return match.expand(name), transform
    raise ValueError(f"No tensor is known for the parameter {dotted}; add it to the conversion table.")
