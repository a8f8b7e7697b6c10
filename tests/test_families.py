"""What a config.json says: layouts, defaults and refusals, against transformers' own reading of it."""

import pytest
import transformers

from eagle_jax import ModelConfig, RopeScaling
from eagle_jax.families import FAMILIES, REQUIRED, config_from

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
SIZES = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope_theta=50000.0,
    tie_word_embeddings=True,
    hidden_act="silu",
)
WHOLE = {
    "llama": SIZES | {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "mistral": SIZES | {"head_dim": 16, "sliding_window": 40},
    "mixtral": SIZES | {"head_dim": 16, "sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 1},
    "qwen2": SIZES | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "qwen3": SIZES
    | {
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
}
WITHOUT_DEFAULT = {name: (*REQUIRED, *family.required) for name, family in FAMILIES.items()}


def described(name, fields):
    return fields | {"model_type": name, "architectures": [FAMILIES[name].architecture]}


def read(name, fields):
    return config_from(described(name, fields), "config.json")


def as_transformers_reads(name, fields):
    """Transformers' configuration, in the terms of ours."""
    theirs = transformers.AutoConfig.for_model(name, **fields)
    kinds = getattr(theirs, "layer_types", None)
    heads = theirs.hidden_size // theirs.num_attention_heads
    return ModelConfig(
        **{field: getattr(theirs, field) for field in SIZES if field not in ("rope_theta", "hidden_act")},
        head_dim=getattr(theirs, "head_dim", None) or heads,
        rope_theta=theirs.rope_parameters["rope_theta"],
        sliding_window=getattr(theirs, "sliding_window", None),
        layer_types=None if getattr(theirs, "sliding_window", None) is None else kinds,
        attention_bias=name == "qwen2" or getattr(theirs, "attention_bias", False),
        attention_output_bias=getattr(theirs, "attention_bias", False),
        qk_norm=name == "qwen3",
        mlp_bias=getattr(theirs, "mlp_bias", False),
        num_local_experts=getattr(theirs, "num_local_experts", None),
        num_experts_per_tok=getattr(theirs, "num_experts_per_tok", None),
    )


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, fields in WHOLE.items() for key in (None, *fields)], ids=str
)
def test_E8_a_deleted_key_has_transformers_default_or_is_named(name, key):
    fields = {field: value for field, value in WHOLE[name].items() if field != key}
    if key in WITHOUT_DEFAULT[name]:
        for given in (fields, fields | {key: None}):
            with pytest.raises(ValueError, match=rf"^config.json has no '{key}', which has no default; add it\.$"):
                read(name, given)
    else:
        assert read(name, fields) == as_transformers_reads(name, fields)


@pytest.mark.parametrize("key", ["model_type", "architectures"])
def test_E8_either_name_of_the_family_is_enough(key):
    fields = described("qwen3", WHOLE["qwen3"])
    assert config_from({name: value for name, value in fields.items() if name != key}, "c") == config_from(fields, "c")


def test_E8_no_name_of_the_family():
    with pytest.raises(
        ValueError, match=r"^config.json has neither model_type nor architectures; .*Qwen3ForCausalLM.*\.$"
    ):
        config_from(SIZES, "config.json")


def test_a_null_window_is_no_window():
    assert read("mistral", SIZES | {"sliding_window": None}).windows == (None,) * 3
    assert read("mistral", SIZES).windows == (4096,) * 3


@pytest.mark.parametrize(
    ("scaling", "wanted"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 2}, RopeScaling(rope_type="linear", factor=2.0)),
        ({"type": "dynamic", "factor": 2.0}, RopeScaling(rope_type="dynamic", factor=2.0)),
        ({"rope_type": "llama3", **LLAMA3}, RopeScaling(rope_type="llama3", **LLAMA3)),
        ({"type": "yarn", "factor": 4.0}, RopeScaling(rope_type="yarn", factor=4.0)),
        (
            {"type": "yarn", "original_max_position_embeddings": 128, "truncate": False},
            RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, truncate=False),
        ),
    ],
    ids=str,
)
def test_E6_both_layouts_of_rope_parameters(scaling, wanted):
    sizes = {key: value for key, value in SIZES.items() if key != "rope_theta"}
    old = read("llama", sizes | {"rope_theta": 1e6, "rope_scaling": scaling})
    new = read("llama", sizes | {"rope_parameters": scaling | {"rope_theta": 1e6}})
    assert old == new
    assert (old.rope_theta, old.rope_scaling) == (1e6, wanted)


@pytest.mark.parametrize(
    ("scaling", "wanted"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope'.*default, linear, dynamic, llama3, yarn"),
        ({"rope_type": "linear"}, "'linear' without 'factor'"),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "'llama3' without 'high_freq_factor'"),
        ({"type": "yarn"}, "'yarn' without 'factor'"),
        ({"rope_type": "linear", "factor": "2"}, "factor '2'; it must be a finite number"),
        ({"rope_type": "linear", "factor": -2.0}, "factor is -2.0"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": float("nan")}, "attention_factor nan"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": -1.0}, "mscale is -1.0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"sliding_attention": {"rope_type": "default"}}, "of their own for 'sliding_attention'"),
        ("linear", "must be an object"),
    ],
    ids=str,
)
def test_E6_rope_parameters_that_are_not_supported(scaling, wanted):
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ValueError, match=rf"^config.json .*{wanted}.*\.$"):
            read("llama", SIZES | {key: scaling})


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM.*LlamaForCausalLM"),
        ({"model_type": "phimoe", "architectures": None}, "'phimoe'.*supported are LlamaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'"),
        ({"hidden_size": "32"}, "hidden_size '32'; it must be a whole number up to 2147483647"),
        ({"hidden_size": True}, "hidden_size True"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3.*num_key_value_heads, which is 2"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan; it must be a finite number"),
        ({"rope_theta": 10**400}, "rope_theta 1000.*finite number"),
        ({"num_hidden_layers": 2**30}, "num_hidden_layers 1073741824; supported are 1024"),
        ({"vocab_size": 2**40}, "vocab_size 1099511627776"),
        ({"rope_theta": 0.5}, "rope_theta is 0.5"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings 'no'; it must be true or false"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(fields, wanted):
    with pytest.raises(ValueError, match=rf"^config.json .*{wanted}.*\.$"):
        config_from(described("llama", SIZES) | fields, "config.json")


def test_layer_types_are_read():
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = read("qwen3", WHOLE["qwen3"] | {"layer_types": kinds})
    assert config.windows == (None, 40, None)
    with pytest.raises(ValueError, match=r"layer_types lists 1 layers, but num_hidden_layers is 3"):
        read("qwen3", WHOLE["qwen3"] | {"layer_types": kinds[:1]})


def test_longest_text_includes_the_scaling():
    def longest(**scaling):
        return read("llama", SIZES | {"rope_scaling": scaling}).context_length

    assert longest(rope_type="linear", factor=4.0) == 2048
    assert longest(rope_type="dynamic", factor=4.0) == 2048
    assert longest(rope_type="yarn", factor=4.0, original_max_position_embeddings=128) == 512
    assert longest(rope_type="llama3", **LLAMA3) == 512
