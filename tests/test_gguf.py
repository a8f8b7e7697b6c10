"""Targets from GGUF files: whole ones agree with PyTorch, broken ones are refused in one sentence."""

import json
import math
import random

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_rig import TOKENS, metadata_of, refusal, tensors_of, write
from rig import GOLDENS, from_hugging_face, random_weights, tiny_config

from eagle_jax import ModelConfig, generate, load_target
from eagle_jax.config import RopeScaling
from eagle_jax.layers import causal_mask

CONFIG = tiny_config(num_hidden_layers=1, intermediate_size=64, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def parts():
    """Metadata and tensors of a small whole file, for tests that break it."""
    return metadata_of(CONFIG), tensors_of(CONFIG, random_weights(CONFIG))


@pytest.fixture(scope="module")
def whole(parts, tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "whole.gguf", *parts)


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


def model_of_pytorch(architecture, **options):
    """A random model of transformers, its weights large enough that attention is far from uniform."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    name = architecture.capitalize()
    base = dict(
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    hf_config = getattr(transformers, f"{name}Config")(**(base | options))
    model = getattr(transformers, f"{name}ForCausalLM")(hf_config).eval().requires_grad_(False)
    for path, weight in model.named_parameters():
        if path.endswith("norm.weight"):
            weight.uniform_(0.5, 1.5)
        else:
            weight.normal_(std=0.5 if path.endswith("bias") else 1.5 * weight.shape[-1] ** -0.5)
    return model


def file_of_pytorch(path, model, architecture, extra_metadata=None, extra_tensors=None):
    """The GGUF file of such a model; its layers' kinds, beyond sizes, are for `extra_metadata` to say."""
    hf = model.config
    config = ModelConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_hidden_layers=hf.num_hidden_layers,
        num_attention_heads=hf.num_attention_heads,
        num_key_value_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        max_position_embeddings=hf.max_position_embeddings,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=hf.rope_parameters["rope_theta"],
    )
    weights = {name: weight.numpy() for name, weight in model.named_parameters()}
    metadata = {key: value for key, value in metadata_of(config, architecture).items() if "key_length" not in key}
    if config.head_dim != config.hidden_size // config.num_attention_heads:
        metadata[f"{architecture}.attention.key_length"] = ("add_uint32", config.head_dim)
    tensors = tensors_of(config, weights, architecture) | (extra_tensors or {})
    return write(path, metadata | (extra_metadata or {}), tensors, architecture)


def rope(kind, **options):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


def llama3_factors(dim, theta, factor, low, high, original):
    """What Llama 3.1's scaling divides each frequency by; converters store it as a tensor."""
    factors = []
    for frequency in theta ** -(np.arange(0, dim, 2) / dim):
        turns = original * frequency / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - share) / factor + share))
    return np.asarray(factors, np.float32)


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = {
    "rope.scaling.type": ("add_string", "yarn"),
    "rope.scaling.factor": ("add_float32", 4.0),
    "rope.scaling.original_context_length": ("add_uint32", 128),
}
# Architecture, transformers' options, metadata and tensors that say the same, fields of the configuration.
FAMILIES = {
    "llama": ("llama", {}, {}, {}, {}),
    "llama with biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        {},
        {},
        {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    ),
    "llama 3.1": (
        "llama",
        rope("llama3", **LLAMA3),
        {},
        {"rope_freqs.weight": llama3_factors(8, 10000.0, 8.0, 1.0, 4.0, 64)},
        {},
    ),
    "linear": (
        "llama",
        rope("linear", factor=4.0),
        {"rope.scaling.type": ("add_string", "linear"), "rope.scaling.factor": ("add_float32", 4.0)},
        {},
        {"rope_scaling": RopeScaling(rope_type="linear", factor=4.0)},
    ),
    "linear, an older file": ("llama", rope("linear", factor=4.0), {"rope.scale_linear": ("add_float32", 4.0)}, {}, {}),
    "yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=128), YARN, {}, {}),
    "yarn with its own magnitude": (
        "qwen2",
        rope("yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=0.7, beta_fast=8.0),
        YARN
        | {"rope.scaling.yarn_attn_factor": ("add_float32", 0.7), "rope.scaling.yarn_beta_fast": ("add_float32", 8.0)},
        {},
        {},
    ),
    "yarn with a multiple of the usual magnitude": (
        "llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=2 * (0.1 * math.log(4) + 1)),
        YARN | {"rope.scaling.attn_factor": ("add_float32", 2.0)},
        {},
        {},
    ),
    "mistral": (
        "mistral",
        {"sliding_window": 5},
        {"attention.sliding_window": ("add_uint32", 5)},
        {},
        {"sliding_window": 5},
    ),
    "qwen2": ("qwen2", {}, {}, {}, {"attention_bias": True, "attention_output_bias": False}),
    "qwen3": ("qwen3", {"head_dim": 12, "tie_word_embeddings": True}, {}, {}, {"qk_norm": True, "head_dim": 12}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_agree_with_pytorch(family, tmp_path):
    torch = pytest.importorskip("torch")
    kind, options, metadata, tensors, fields = FAMILIES[family]
    model = model_of_pytorch(kind, **options)
    architecture = "llama" if kind == "mistral" else kind  # llama.cpp's name for it
    metadata = {f"{architecture}.{key}": value for key, value in metadata.items()}
    target = load_target(file_of_pytorch(tmp_path / "model.gguf", model, architecture, metadata, tensors))
    for field, value in fields.items():
        assert getattr(target.config, field) == value, field
    tokens = np.random.default_rng(0).integers(0, len(TOKENS), (2, 40))
    wanted = model(torch.from_numpy(tokens)).logits.numpy()
    logits = logits_of(target.model, tokens, np.arange(40)[None])
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)


def test_mistral_by_its_own_name(parts, tmp_path):
    """Files of converters that say "mistral" hold what "llama" files hold."""
    metadata = metadata_of(CONFIG, "mistral")
    target = load_target(write(tmp_path / "mistral.gguf", metadata, parts[1], architecture="mistral"))
    tokens = np.arange(6)[None]
    wanted = logits_of(load_target(write(tmp_path / "llama.gguf", *parts)).model, tokens, tokens)
    np.testing.assert_array_equal(logits_of(target.model, tokens, tokens), wanted)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_quantized_file(kind, tmp_path):
    """Quantised matrices give what their rounded weights give."""
    config = tiny_config(num_hidden_layers=1)
    weights = random_weights(config)
    rounded = {
        name: gguf.dequantize(gguf.quantize(weight, kind), kind) if weight.ndim == 2 else weight
        for name, weight in weights.items()
    }
    tensors = {
        name: (gguf.quantize(tensor, kind), kind) if tensor.ndim == 2 else tensor
        for name, tensor in tensors_of(config, weights).items()
    }
    target = load_target(str(write(tmp_path / "quantized.gguf", metadata_of(config), tensors)))
    tokens, positions = np.arange(10)[None] % 7, np.arange(10)[None]
    logits = logits_of(target.model, tokens, positions)
    wanted = logits_of(from_hugging_face(config, rounded), tokens, positions)
    exact = logits_of(from_hugging_face(config, weights), tokens, positions)
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5)
    assert np.abs(logits - exact).max() > 1e-4


# Where a block keeps its float16 scales.
K_QUANTS = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants(kind, tmp_path):
    """gguf writes none of these, so the blocks are random bytes under scales that are numbers."""
    config = tiny_config(num_hidden_layers=1, hidden_size=256, intermediate_size=512)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng, stored, tensors = np.random.default_rng(0), {}, tensors_of(config, random_weights(config))
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            rows, columns = tensor.shape
            blocks = rng.integers(0, 256, (rows, columns // per_block, block_bytes), np.uint8)
            for at in K_QUANTS[kind]:
                scales = rng.uniform(1e-3, 1e-2, blocks.shape[:2]).astype("<f2")
                blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
            stored[name] = (blocks.reshape(rows, -1), kind)
    model = load_target(write(tmp_path / "k.gguf", metadata_of(config), tensors | stored)).model
    block = model.layers[0]
    for name, parameter in (
        ("token_embd", model.embed_tokens.embedding[...]),
        ("blk.0.attn_v", block.self_attn.v_proj.kernel[...].T),
        ("blk.0.ffn_up", block.mlp.up_proj.kernel[...].T),
        ("blk.0.ffn_down", block.mlp.down_proj.kernel[...].T),
    ):
        weight = gguf.dequantize(*stored[f"{name}.weight"])
        assert np.std(weight) > 0
        np.testing.assert_array_equal(parameter, weight)


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


def test_file_without_a_tokenizer(parts, tmp_path):
    """The vocabulary's size is the file's or the embedding's."""
    metadata, tensors = parts
    metadata = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
    for extra in ({}, {"tokenizer.ggml.model": ("add_string", "none"), "llama.vocab_size": ("add_uint32", 16)}):
        target = load_target(write(tmp_path / "bare.gguf", metadata | extra, tensors))
        assert (target.config, target.tokenizer, target.eos_token_ids) == (CONFIG, None, ())
        assert len(generate(target, None, [3, 4], max_new_tokens=2).token_ids) == 2


@pytest.mark.parametrize(
    ("ids", "wanted"), [({"eot": 5}, (2, 5)), ({"eom": 4, "eot": 5}, (2, 5, 4)), ({"eot": 2, "eom": 2}, (2,))]
)
def test_all_that_ends_a_text(parts, tmp_path, ids, wanted):
    metadata, tensors = parts
    extra = {f"tokenizer.ggml.{key}_token_id": ("add_uint32", value) for key, value in ids.items()}
    assert load_target(write(tmp_path / "ends.gguf", metadata | extra, tensors)).eos_token_ids == wanted


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
    message = refusal(path)
    assert "'mamba'" in message and "llama, mistral, qwen2, qwen3" in message


def test_rope_factors_under_linear_scaling(parts, tmp_path):
    """Both slow the frequencies."""
    metadata, tensors = parts
    factors = np.arange(1, 9, dtype=np.float32)
    metadata = metadata | {"llama.rope.scaling.factor": ("add_float32", 2.0)}
    path = write(tmp_path / "both.gguf", metadata, tensors | {"rope_freqs.weight": factors})
    assert load_target(path).config.rope_scaling == RopeScaling(rope_type="factors", factors=tuple(2 * factors))


@pytest.mark.parametrize("factors", [np.ones(7, np.float32), np.zeros(8, np.float32), np.full(8, np.nan, np.float32)])
def test_senseless_rope_factors(parts, tmp_path, factors):
    metadata, tensors = parts
    assert "8 frequencies" in refusal(write(tmp_path / "f.gguf", metadata, tensors | {"rope_freqs.weight": factors}))


def test_tensor_of_a_kind_that_cannot_be_read(parts, tmp_path):
    metadata, tensors = parts
    tensors = tensors | {"output_norm.weight": np.ones(64, np.int32)}
    assert "output_norm.weight as I32" in refusal(write(tmp_path / "kind.gguf", metadata, tensors))


def test_damaged_headers(parts, tmp_path):
    """Bytes changed, cut out and put in, before the numbers: a file loads or is refused, whatever it says."""
    metadata, tensors = parts
    extra = {"llama.rope.scaling.type": ("add_string", "yarn"), "llama.attention.sliding_window": ("add_uint32", 8)}
    path = write(tmp_path / "damaged.gguf", metadata | extra, tensors)
    content, dice = path.read_bytes(), random.Random(0)
    numbers = content.index(gguf.GGUFReader(path).tensors[0].data.tobytes())
    refused = 0
    for _ in range(150):
        at, count = dice.randrange(numbers), dice.choice([0, 1, 8])
        put_in = dice.choice(
            [dice.randbytes(dice.choice([1, 8])), b"\xff" * 8, b"\0" * 4, (2**40).to_bytes(8, "little")]
        )
        path.write_bytes(content[:at] + put_in + content[at + count :])
        try:
            load_target(path)
        except (ValueError, OSError):
            assert str(path) in refusal(path)
            refused += 1
    assert refused > 100


def test_numbers_without_end_take_no_memory(parts, tmp_path):
    """Of an array that claims more elements than the file has bytes, none is made."""
    metadata, tensors = parts
    path = write(tmp_path / "endless.gguf", metadata, tensors)
    key = b"tokenizer.ggml.token_type"
    content = path.read_bytes()
    at = content.index(key) + len(key) + 8  # behind the types of the value and of its elements
    path.write_bytes(content[:at] + (2**60).to_bytes(8, "little") + content[at + 8 :])
    assert f"an array of {2**60} numbers" in refusal(path)


REQUIRED = (
    "llama.context_length",
    "llama.embedding_length",
    "llama.block_count",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.eos_token_id",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_metadata(parts, tmp_path, key):
    metadata, tensors = parts
    metadata = {other: value for other, value in metadata.items() if other != key}
    assert key in refusal(write(tmp_path / "missing.gguf", metadata, tensors))


@pytest.mark.parametrize(
    ("key", "method", "value"),
    [
        ("llama.block_count", "add_string", "one"),
        ("llama.block_count", "add_uint64", 2**64 - 1),
        ("llama.context_length", "add_float32", 512.0),
        ("llama.attention.head_count_kv", "add_int32", -2),
        ("llama.attention.head_count_kv", "add_uint32", 3),
        ("llama.attention.key_length", "add_uint32", 15),
        ("llama.attention.layer_norm_rms_epsilon", "add_float32", float("nan")),
        ("llama.rope.freq_base", "add_float32", 0.0),
        ("llama.rope.scaling.factor", "add_float32", -1.0),
        ("llama.rope.scaling.type", "add_uint32", 1),
        ("general.alignment", "add_uint32", 0),
        ("tokenizer.ggml.tokens", "add_array", [1, 2]),
        ("tokenizer.ggml.model", "add_string", "bert"),
        ("tokenizer.ggml.pre", "add_string", "other"),
        ("tokenizer.ggml.add_bos_token", "add_uint32", 1),
        ("tokenizer.ggml.eot_token_id", "add_uint32", 16),
        ("tokenizer.chat_template", "add_array", ["a"]),
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
    path = tmp_path / "senseless.gguf"
    if key == "general.alignment":  # the writer obeys it too
        content = write(path, metadata | {key: (method, 64)}, tensors).read_bytes()
        at = content.index(key.encode()) + len(key) + 4
        path.write_bytes(content[:at] + value.to_bytes(4, "little") + content[at + 4 :])
    else:
        write(path, metadata | {key: (method, value)}, tensors)
    assert str(path) in refusal(path)


def test_faulty_tensors_are_listed_in_one_error(parts, tmp_path):
    metadata, tensors = parts
    tensors = dict(tensors)
    del tensors["blk.0.ffn_up.weight"], tensors["output_norm.weight"]
    tensors["blk.0.ffn_gate.weight"] = np.zeros((63, 64), np.float32)
    tensors["blk.0.attn_rot.weight"] = np.zeros(8, np.float32)
    message = refusal(write(tmp_path / "faulty.gguf", metadata, tensors))
    assert "missing blk.0.ffn_up.weight" in message and "missing output_norm.weight" in message
    assert "unexpected blk.0.attn_rot.weight" in message
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
        ("llama.rope.scaling.type", ("add_string", "longrope"), "rope scaling 'longrope'"),
        ("llama.rope.scaling.attn_factor", ("add_float32", 1.5), "attn_factor 1.5"),
        ("llama.rope.scaling.yarn_ext_factor", ("add_float32", 0.5), "yarn_ext_factor is 0.5"),
        ("llama.expert_count", ("add_uint32", 8), "a mixture of experts (llama.expert_count is 8)"),
        ("llama.attention.causal", ("add_bool", False), "an encoder"),
        ("split.count", ("add_uint16", 3), "one part of a split model (split.count is 3)"),
    ],
)
def test_what_is_not_supported_is_named(parts, tmp_path, key, value, reason):
    metadata, tensors = parts
    assert reason in refusal(write(tmp_path / "other.gguf", metadata | {key: value}, tensors))


@pytest.mark.parametrize("name", ["smollm9", "", "model.safetensors", "missing.gguf"])
def test_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"smollm2-135m.*\.gguf file\.$"):
        load_target(name)
