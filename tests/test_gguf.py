"""Targets from GGUF files, whole and broken, and what their tokenizers make of prompts."""

import dataclasses
import json

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from rig import GOLDENS, from_hugging_face, random_weights, tiny_config, tiny_target
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from eagle_jax import ModelConfig, generate, load_target
from eagle_jax.generation import encode_prompt
from eagle_jax.layers import causal_mask

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abc", "Ġ", "Ċ", "ab", "Ġa", "1", "2", "12", *"use"]
MERGES = ["a b", "Ġ a", "1 2"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def metadata_of(config):
    """Metadata of a GGUF file by key, with the writer's method for it."""
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3)
    return {
        "llama.context_length": ("add_uint32", config.max_position_embeddings),
        "llama.embedding_length": ("add_uint32", config.hidden_size),
        "llama.block_count": ("add_uint32", config.num_hidden_layers),
        "llama.feed_forward_length": ("add_uint32", config.intermediate_size),
        "llama.attention.head_count": ("add_uint32", config.num_attention_heads),
        "llama.attention.head_count_kv": ("add_uint32", config.num_key_value_heads),
        "llama.attention.key_length": ("add_uint32", config.head_dim),
        "llama.attention.value_length": ("add_uint32", config.head_dim),
        "llama.attention.layer_norm_rms_epsilon": ("add_float32", config.rms_norm_eps),
        "llama.rope.freq_base": ("add_float32", config.rope_theta),
        "tokenizer.ggml.model": ("add_string", "gpt2"),
        "tokenizer.ggml.pre": ("add_string", "smollm"),
        "tokenizer.ggml.tokens": ("add_array", TOKENS),
        "tokenizer.ggml.token_type": ("add_array", [int(kind) for kind in kinds]),
        "tokenizer.ggml.merges": ("add_array", MERGES),
        "tokenizer.ggml.bos_token_id": ("add_uint32", 1),
        "tokenizer.ggml.eos_token_id": ("add_uint32", 2),
        "tokenizer.chat_template": ("add_string", TEMPLATE),
    }


def tensors_of(config, weights):
    """Tensors under GGUF's names, the rows of query and key matrices in llama.cpp's order."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = {}
    for name, weight in weights.items():
        for kind, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.kv_heads)):
            if kind in name:
                halves = weight.reshape(heads, 2, config.key_dim // 2, -1)
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
        tensors[names.get_name(name, try_suffixes=(".weight",))] = weight
    return tensors


def write(path, metadata, tensors, architecture="llama", quantized=()):
    writer = gguf.GGUFWriter(path, architecture)
    for key, (method, value) in metadata.items():
        getattr(writer, method)(key, value)
    for name, tensor in tensors.items():
        if name in quantized:
            writer.add_tensor(name, gguf.quantize(tensor, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


CONFIG = tiny_config(num_hidden_layers=1, intermediate_size=64, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def parts():
    """Metadata and tensors of a small whole file, for tests that break it."""
    return metadata_of(CONFIG), tensors_of(CONFIG, random_weights(CONFIG))


@pytest.fixture(scope="module")
def whole(parts, tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "whole.gguf", *parts)


def refusal(path):
    """The message a file is refused with: one line, one sentence."""
    with pytest.raises((ValueError, OSError)) as caught:
        load_target(path)
    message = str(caught.value)
    # A subclass, such as UnicodeDecodeError, was raised for something else and only passed through.
    assert type(caught.value) in (ValueError, OSError), repr(caught.value)
    assert "\n" not in message and message.endswith("."), message
    return message


# --- Whole files ------------------------------------------------------------------------------------------------------


def logits_of(model, tokens, positions):
    features, _ = model(jnp.asarray(tokens), jnp.asarray(positions), causal_mask(tokens.shape[1]))
    return model.logits(features)


@pytest.mark.parametrize("name", ["grouped", "head_dim", "tied"])
def test_float32_file_agrees_with_pytorch(name, tmp_path):
    """The weights of the stored PyTorch models, by way of a GGUF file."""
    arrays = dict(np.load(GOLDENS / f"{name}.npz"))
    config = ModelConfig(**json.loads(str(arrays["config"])))
    weights = {key: value.astype(np.float32) for key, value in arrays.items() if key.endswith(".weight")}
    path = write(tmp_path / "a model.gguf", metadata_of(config), tensors_of(config, weights))
    target = load_target(path)
    assert target.config == config
    assert target.eos_token_ids == (2,)
    logits = logits_of(target.model, arrays["tokens"], arrays["positions"])
    np.testing.assert_allclose(logits, arrays["logits"], rtol=0, atol=1e-4)


def test_quantized_file(tmp_path):
    """Q8_0 matrices give what their rounded weights give."""
    config = tiny_config(num_hidden_layers=1)
    weights = random_weights(config)
    rounded = {
        name: gguf.dequantize(gguf.quantize(weight, Q8_0), Q8_0) if weight.ndim == 2 else weight
        for name, weight in weights.items()
    }
    tensors = tensors_of(config, weights)
    matrices = [name for name, tensor in tensors.items() if tensor.ndim == 2]
    path = write(tmp_path / "quantized.gguf", metadata_of(config), tensors, quantized=matrices)
    target = load_target(str(path))
    tokens, positions = np.arange(10)[None] % 7, np.arange(10)[None]
    logits = logits_of(target.model, tokens, positions)
    wanted = logits_of(from_hugging_face(config, rounded), tokens, positions)
    exact = logits_of(from_hugging_face(config, weights), tokens, positions)
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5)
    assert np.abs(logits - exact).max() > 1e-3


def test_absent_optional_metadata_has_llamas_defaults(parts, tmp_path):
    metadata, tensors = parts
    optional = ("llama.attention.key_length", "llama.attention.value_length", "llama.rope.freq_base")
    metadata = {key: value for key, value in metadata.items() if key not in optional}
    assert load_target(write(tmp_path / "defaults.gguf", metadata, tensors)).config == CONFIG


def test_dtype_is_as_asked(whole):
    assert load_target(whole).dtype == jnp.float32
    target = load_target(whole, dtype=jnp.bfloat16)
    assert target.dtype == jnp.bfloat16
    tokens = np.arange(6)[None]
    logits = logits_of(target.model, tokens, tokens)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, logits_of(load_target(whole).model, tokens, tokens), rtol=0, atol=0.3)


def test_tokenizer_and_template(whole):
    """Digits stand alone, merges apply, control tokens are found in text and left out of it."""
    target = load_target(whole)
    tokenizer = target.tokenizer

    def ids(*names):
        return [TOKENS.index(name) for name in names]

    assert tokenizer("ab ac12")["input_ids"] == ids("ab", "Ġa", "c", "1", "2")
    assert tokenizer("a<|im_end|>\n")["input_ids"] == ids("a", "<|im_end|>", "Ċ")
    assert tokenizer.decode(ids("<|im_start|>", "ab", "Ġa", "Ċ", "<|im_end|>"), skip_special_tokens=True) == "ab a\n"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    chat = [{"role": "user", "content": "use"}, {"role": "assistant", "content": "ab"}]
    wanted = ids("<|im_start|>", *"use", "<|im_end|>", "Ċ", "<|im_start|>", "ab", "<|im_end|>", "Ċ", "<|im_start|>")
    assert encode_prompt(target, chat) == wanted


def test_loaded_target_generates(whole):
    done = generate(load_target(whole), None, "ab", max_new_tokens=3)
    assert len(done.token_ids) == len(done.logprobs) == 3 or done.finish_reason == "stop"
    assert all(0 <= token < len(TOKENS) for token in done.token_ids)


# --- Broken files -----------------------------------------------------------------------------------------------------


def test_truncated_file(whole, tmp_path):
    """Cut anywhere: in the header, the metadata, the tensor table or the numbers."""
    content = whole.read_bytes()
    path = tmp_path / "cut.gguf"
    numbers = content.index(gguf.GGUFReader(whole).tensors[0].data.tobytes())
    cuts = {0, 1, 3, 4, 5, 8, 12, 16, 23, 24, 25, numbers - 1, numbers, numbers + 1, len(content) - 1}
    cuts |= set(range(30, numbers, 97)) | set(range(numbers, len(content), len(content) // 5))
    for cut in sorted(cuts):
        path.write_bytes(content[:cut])
        assert str(path) in refusal(path), cut


@pytest.mark.parametrize("place", [0, 3, 4, 5])
def test_altered_magic_or_version(whole, tmp_path, place):
    content = bytearray(whole.read_bytes())
    content[place] ^= 0x55
    path = tmp_path / "altered.gguf"
    path.write_bytes(content)
    assert str(path) in refusal(path)


@pytest.mark.parametrize("text", [b"general.architecture", b"llama", b"smollm", b"<|im_end|>"])
def test_altered_text(whole, tmp_path, text):
    """A key, a value or a token that is no longer UTF-8."""
    content = whole.read_bytes()
    path = tmp_path / "altered.gguf"
    path.write_bytes(content.replace(text, b"\xff" + text[1:], 1))
    assert str(path) in refusal(path)


def test_text_file_is_no_model(tmp_path):
    path = tmp_path / "notes.gguf"
    path.write_text("These are notes, not numbers.\n" * 10)
    assert str(path) in refusal(path)


def test_directory_is_no_model(tmp_path):
    path = tmp_path / "directory.gguf"
    path.mkdir()
    assert str(path) in refusal(path)


def test_other_architecture(parts, tmp_path):
    path = write(tmp_path / "other.gguf", *parts, architecture="mamba")
    assert "'mamba'" in refusal(path)


REQUIRED = (
    "llama.context_length",
    "llama.embedding_length",
    "llama.block_count",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.eos_token_id",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_metadata(parts, tmp_path, key):
    metadata, tensors = parts
    metadata = {other: value for other, value in metadata.items() if other != key}
    message = refusal(write(tmp_path / "missing.gguf", metadata, tensors))
    # A tokenizer is refused by its kind, which two keys name together.
    assert ("has a tokenizer of type" if key in ("tokenizer.ggml.model", "tokenizer.ggml.pre") else key) in message


@pytest.mark.parametrize(
    ("key", "method", "value"),
    [
        ("llama.block_count", "add_string", "one"),
        ("llama.embedding_length", "add_uint32", 0),
        ("llama.attention.head_count", "add_uint32", 0),
        ("llama.attention.head_count", "add_array", [4, 4]),
        ("tokenizer.ggml.eos_token_id", "add_uint32", 16),
        ("tokenizer.ggml.bos_token_id", "add_uint32", 1000),
        ("tokenizer.ggml.token_type", "add_array", [1, 1]),
        ("tokenizer.ggml.merges", "add_array", ["a"]),
        ("tokenizer.ggml.merges", "add_array", ["a e"]),
    ],
)
def test_senseless_metadata(parts, tmp_path, key, method, value):
    metadata, tensors = parts
    refusal(write(tmp_path / "senseless.gguf", metadata | {key: (method, value)}, tensors))


def test_faulty_tensors_are_listed_in_one_error(parts, tmp_path):
    metadata, tensors = parts
    tensors = dict(tensors)
    del tensors["blk.0.ffn_up.weight"], tensors["output_norm.weight"]
    tensors["blk.0.ffn_gate.weight"] = np.zeros((63, 64), np.float32)
    tensors["rope_freqs.weight"] = np.zeros(8, np.float32)
    message = refusal(write(tmp_path / "faulty.gguf", metadata, tensors))
    assert "missing blk.0.ffn_up.weight" in message and "missing output_norm.weight" in message
    assert "unexpected rope_freqs.weight" in message
    assert "blk.0.ffn_gate.weight" in message and "(64, 63)" in message and "(64, 64)" in message


@pytest.mark.parametrize("shape", [(63, 64), (64, 63), (128, 64), (64,)])
@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.0.attn_v.weight", "token_embd.weight"])
def test_tensor_of_another_shape(parts, tmp_path, name, shape):
    """Listed with the other faults, whatever its conversion would have done with it."""
    metadata, tensors = parts
    tensors = {**tensors, name: np.zeros(shape, np.float32)}
    del tensors["blk.0.ffn_up.weight"]
    message = refusal(write(tmp_path / "faulty.gguf", metadata, tensors))
    assert name in message and "missing blk.0.ffn_up.weight" in message


@pytest.mark.parametrize("blocks", [2, 10**9])
def test_more_layers_than_tensors(parts, tmp_path, blocks):
    """Refused by the counts, before a model of so many layers is described."""
    metadata, tensors = parts
    message = refusal(write(tmp_path / "short.gguf", metadata | {"llama.block_count": ("add_uint32", blocks)}, tensors))
    assert f"describes {blocks} layers, but has tensors of 1" in message


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("llama.rope.dimension_count", ("add_uint32", 8), "turns 8 of 16 dimensions"),
        ("llama.rope.scaling.type", ("add_string", "yarn"), "rope scaling 'yarn'"),
    ],
)
def test_rotary_embeddings_of_another_kind(parts, tmp_path, key, value, reason):
    metadata, tensors = parts
    assert reason in refusal(write(tmp_path / "other.gguf", metadata | {key: value}, tensors))


@pytest.mark.parametrize("name", ["smollm9", "", "model.safetensors", "missing.gguf"])
def test_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"smollm2-135m.*\.gguf file\.$"):
        load_target(name)


# --- BOS --------------------------------------------------------------------------------------------------------------

WORDS = ["<s>", "</s>", "<unk>", "a", "b"]
WITH_BOS = "{{ bos_token }}{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
WITHOUT_BOS = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


def target_with_bos(template):
    """A target whose tokenizer writes BOS before whatever it encodes, as Llama's does."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )
    assert fast("a b")["input_ids"] == [0, 3, 4]
    return dataclasses.replace(tiny_target(), tokenizer=fast)


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
@pytest.mark.parametrize(
    "prompt", ["a b", "<s>a b", "<s> a b", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
)
def test_S1_exactly_one_bos(template, prompt):
    """Whether the tokenizer, the template or the prompt itself writes it."""
    assert encode_prompt(target_with_bos(template), prompt) == [0, 3, 4]


def test_S1_one_bos_where_the_file_asks_for_it(parts, tmp_path):
    metadata, tensors = parts
    metadata = metadata | {"tokenizer.ggml.add_bos_token": ("add_bool", True)}
    target = load_target(write(tmp_path / "bos.gguf", metadata, tensors))
    for prompt in ("abc", "<|im_start|>abc", [{"role": "user", "content": "abc"}]):
        ids = encode_prompt(target, prompt)
        assert ids[0] == 1 and ids[1] != 1


def test_S1_no_bos_where_the_model_uses_none(whole):
    """The embedded model's family has a BOS token, but its tokenizer writes none."""
    assert encode_prompt(load_target(whole), "ab") == [TOKENS.index("ab")]


def test_ids_are_taken_as_they_stand():
    assert encode_prompt(target_with_bos(WITH_BOS), [3, 4]) == [3, 4]
