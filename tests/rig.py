"""Small models, and a small tokenizer, for tests."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax import ModelConfig, Target
from eagle_jax.convert import build
from eagle_jax.repository import TARGET_TABLE
from eagle_jax.target import TargetModel

WORDS = ["<system>", "<user>", "<assistant>", "</s>", *"abcdefgh", "<unk>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
GOLDENS = Path(__file__).parent / "goldens"


def tiny_config(**overrides) -> ModelConfig:
    fields = dict(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return ModelConfig(**(fields | overrides))


def tiny_target(seed: int = 0, eos: tuple[int, ...] = (), **overrides) -> Target:
    return Target.random(tiny_config(**overrides), seed=seed, eos_token_ids=eos)


def from_hugging_face(config: ModelConfig, weights: dict[str, np.ndarray]) -> TargetModel:
    """A target with weights under Hugging Face's names."""
    make = lambda: TargetModel(config, dtype=jnp.float32, rngs=nnx.Rngs(0))  # noqa: E731
    shapes = {name: weight.shape for name, weight in weights.items()}
    return build(make, TARGET_TABLE, shapes, weights.__getitem__, "the test's weights")


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights under Hugging Face's names, large enough that attention is far from uniform."""
    rng = np.random.default_rng(seed)
    queries, keys = config.num_attention_heads * config.key_dim, config.kv_heads * config.key_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    matrices = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden)}
    matrices |= {"self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries)}
    matrices |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    weights = {"model.embed_tokens.weight": rng.normal(size=(config.vocab_size, hidden))}
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = rng.normal(size=(config.vocab_size, hidden)) * hidden**-0.5
    for layer in range(config.num_hidden_layers):
        for name, shape in matrices.items():
            weights[f"model.layers.{layer}.{name}.weight"] = rng.normal(size=shape) * 1.5 * shape[1] ** -0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = rng.uniform(0.5, 1.5, hidden)
    weights["model.norm.weight"] = rng.uniform(0.5, 1.5, hidden)
    return {name: weight.astype(np.float32) for name, weight in weights.items()}


def word_tokenizer(template: str | None = TEMPLATE) -> Any:
    """A token a word, of WORDS."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, eos_token="</s>")
