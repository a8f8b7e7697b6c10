"""What a `config.json` says: Hugging Face's description of a model of the Llama family, as a `ModelConfig`.

A key that is absent (or null) has the family's documented default, or there is none and an error names the key. What
this library does not compute is refused by name.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from eagle_jax.config import FULL, SLIDING, ModelConfig, RopeScaling

Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one architecture differs: in defaults, and in what its code has whatever `config.json` says."""

    architecture: str
    required: tuple[str, ...] = ()  # beyond REQUIRED
    defaults: Fields
    fixed: Fields = dataclasses.field(default_factory=dict)


REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
DEFAULTS: Fields = {
    "num_key_value_heads": None,  # as many as attention heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
# All but the first: transformers takes 8 or 32 key-value heads for granted, which is right for one size of model only.
FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", defaults={"max_position_embeddings": 2048}),
    "mistral": Family(
        architecture="MistralForCausalLM",
        required=("num_key_value_heads",),
        defaults={"max_position_embeddings": 131072, "sliding_window": 4096},
        fixed={"attention_bias": False, "mlp_bias": False},
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        required=("num_key_value_heads",),
        defaults={
            "max_position_embeddings": 131072,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        fixed={"attention_bias": False, "mlp_bias": False},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        required=("num_key_value_heads",),
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
        fixed={"attention_bias": True, "attention_output_bias": False, "mlp_bias": False, "head_dim": None},
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        required=("num_key_value_heads",),
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
        fixed={"qk_norm": True, "mlp_bias": False},
    ),
}
SUPPORTED = ", ".join(family.architecture for family in FAMILIES.values())

LARGEST = 2**31 - 1  # sizes are int32 where they are used
MOST = {"num_hidden_layers": 1024, "num_local_experts": 256}
WHOLE, NUMBER, FLAG = f"a whole number up to {LARGEST}", "a finite number", "true or false"
KINDS: dict[str, str] = {
    **dict.fromkeys((*REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings"), WHOLE),
    **dict.fromkeys(("sliding_window", "max_window_layers", "original_max_position_embeddings"), WHOLE),
    **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), WHOLE),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"), NUMBER),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"), NUMBER),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "truncate"), FLAG),
}
ROPE_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),  # without a factor: max_position_embeddings / original_max_position_embeddings
}
ROPE_OPTIONAL = {
    "llama3": ("original_max_position_embeddings",),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def config_from(fields: Fields, source: str) -> ModelConfig:
    """The configuration a `config.json` describes.

    Args:
      fields: its content.
      source: the file's name, for errors.

    Raises:
      ValueError: an architecture, an option or a value that is not supported, or a key that has no default.
    """
    try:
        return ModelConfig(**model_fields(fields, family_of(fields, source), source))
    except ValueError as error:
        if str(error).startswith(source):
            raise
        raise ValueError(f"{source} describes a model that cannot be: {error}") from error


def family_of(fields: Fields, source: str) -> Family:
    """The family a `config.json` names, by its `model_type` or else its `architectures`."""
    kind, architectures = fields.get("model_type"), fields.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if kind is None and named is None:
        raise ValueError(
            f"{source} has neither model_type nor architectures; add one of them (supported: {SUPPORTED})."
        )
    for name, family in FAMILIES.items():
        if kind in (None, name) and named in (None, family.architecture):
            return family
    raise ValueError(f"{source} describes a {named or kind!s} of type {kind!r}; supported are {SUPPORTED}.")


def model_fields(fields: Fields, family: Family, source: str) -> dict[str, Any]:
    """`ModelConfig`'s arguments out of a `config.json`."""
    _refuse_unsupported(fields, source)
    chosen: dict[str, Any] = {}
    for name in (*REQUIRED, *family.required):
        chosen[name] = _value(fields, name, source)
        if chosen[name] is None:
            raise ValueError(f"{source} has no {name!r}, which has no default; add it.")
    for name, default in {**DEFAULTS, **family.defaults}.items():
        value = _value(fields, name, source)
        if name not in chosen:
            chosen[name] = default if value is None else value
    for name, most in MOST.items():
        if chosen.get(name, 0) > most:
            raise ValueError(f"{source} has {name} {chosen[name]}; supported are {most}.")
    chosen |= family.fixed
    chosen |= _windows(fields, chosen, source)
    theta = family.defaults.get("rope_theta", 10000.0)
    theta, scaling = rope_from(fields, chosen["max_position_embeddings"], source, theta)
    return chosen | {"rope_theta": theta, "rope_scaling": scaling}


def _refuse_unsupported(fields: Fields, source: str) -> None:
    activation = fields.get("hidden_act") or "silu"
    if activation != "silu":
        raise ValueError(f"{source} has hidden_act {activation!r}; supported is 'silu'.")
    quantized = fields.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise ValueError(
            f"{source} describes weights quantised by {method!r}; give the unquantised model or a GGUF file."
        )
    tensors = fields.get("pretraining_tp")
    if tensors not in (None, 1):
        raise ValueError(f"{source} has pretraining_tp {tensors!r}; supported is 1.")


def _value(fields: Fields, name: str, source: str) -> Any:
    """A key's value of the kind it has to be; None where it is absent or null."""
    value, kind = fields.get(name), KINDS[name]
    fits = {
        WHOLE: isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST,
        NUMBER: isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max,
        FLAG: isinstance(value, bool),
    }[kind]
    if value is not None and not fits:
        raise ValueError(f"{source} has {name} {value!r}; it must be {kind}.")
    return float(value) if kind == NUMBER and value is not None else value


def _windows(fields: Fields, chosen: dict[str, Any], source: str) -> Fields:
    """Which layers see how far back. An explicit null in `sliding_window` is no window, not the default."""
    window = chosen.pop("sliding_window", None)
    first = chosen.pop("max_window_layers", None)
    none = {"sliding_window": None, "layer_types": None}
    if window is None or ("sliding_window" in fields and fields["sliding_window"] is None):
        return none
    if first is None:  # Mistral: all layers alike
        return {"sliding_window": window, "layer_types": None}
    if not _value(fields, "use_sliding_window", source):
        return none
    kinds = fields.get("layer_types")
    if kinds is None:
        layers = max(chosen["num_hidden_layers"], 0)
        kinds = [SLIDING if layer >= first else FULL for layer in range(layers)]
    elif not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"{source} has layer_types {kinds!r}; it must be a list of names.")
    return {"sliding_window": window, "layer_types": tuple(kinds)}


def rope_from(
    fields: Fields, max_positions: int, source: str, default_theta: float = 10000.0
) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from either layout: `rope_theta` and `rope_scaling`, or both inside `rope_parameters`."""
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{source} has rope parameters {rope!r}; they must be an object.")
    nested = [name for name in (FULL, SLIDING) if name in rope]
    if nested:
        raise ValueError(
            f"{source} has rope parameters of their own for {nested[0]!r}; supported is one set for all layers."
        )
    turned = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1
    if turned != 1:
        raise ValueError(f"{source} has partial_rotary_factor {turned!r}; supported is 1.")
    stated = (_value(rope, "rope_theta", source), _value(fields, "rope_theta", source), default_theta)
    theta = next(value for value in stated if value is not None)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in ROPE_REQUIRED:
        known = ", ".join(("default", *ROPE_REQUIRED))
        raise ValueError(f"{source} has rope type {kind!r}; supported are {known}.")
    names = ROPE_REQUIRED[kind] + ROPE_OPTIONAL.get(kind, ())
    values = {name: value for name in names if (value := _value(rope, name, source)) is not None}
    for name in ROPE_REQUIRED[kind]:
        if name not in values:
            raise ValueError(f"{source} has rope type {kind!r} without {name!r}, which has no default; add it.")
    if kind == "yarn" and "factor" not in values:
        original = values.get("original_max_position_embeddings")
        if not original or original < 0:
            raise ValueError(f"{source} has rope type 'yarn' without 'factor', which has no default; add it.")
        values["factor"] = max_positions / original
    return theta, RopeScaling(rope_type=kind, **values)
