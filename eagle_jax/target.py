"""The target: the language model whose text is wanted, as token ids -> features and features -> logits.

A *feature* is the vector the LM head is applied to: the last hidden state after the final norm. (EAGLE section 3.1
says "second-to-top layer"; the published heads were trained on this one.)

B batch rows, T block tokens, E hidden size, V vocabulary.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from eagle_jax import cache as kv
from eagle_jax import layers
from eagle_jax.config import ModelConfig
from eagle_jax.numerics import lm_logits


class TargetModel(nnx.Module):
    """A decoder of the Llama family."""

    def __init__(self, config: ModelConfig, *, dtype: layers.Dtype = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = token_matrix(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([layers.Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)])
        self.norm = layers.rms_norm(config.hidden_size, config, dtype=dtype, rngs=rngs)
        self.lm_head = None if config.tie_word_embeddings else token_matrix(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        tokens: Array,  # i32[B, T]
        positions: Array,  # i32[B or 1, T]
        block_mask: Array,  # bool[B or 1, T, U]
        prefix: kv.KVCache | None = None,
        text_length: Array | None = None,  # i32[B or 1, T or 1]; see `rope.angles`
        earlier: kv.Rows | None = None,  # block tokens of earlier calls, the mask's first columns
    ) -> tuple[Array, kv.Rows]:
        """Features [B, T, E] of a block of tokens, and the block's keys and values."""
        x = self.embed_tokens(tokens)
        x, rows = layers.run_blocks(
            self.layers, self.config, x, positions, block_mask, prefix, earlier, text_length=text_length
        )
        return self.norm(x), rows

    def logits(self, features: Array) -> Array:
        """f32[..., V] from features [..., E]."""
        return lm_logits(features, self.lm_matrix())

    def lm_matrix(self) -> Array:
        """The LM head as [V, E]; the embedding itself where the two are tied."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head).embedding[...]


def token_matrix(config: ModelConfig, *, dtype: layers.Dtype, rngs: nnx.Rngs) -> nnx.Embed:
    """A [V, E] matrix with a row for each token: the embedding, or an LM head of its own."""
    return nnx.Embed(
        config.vocab_size,
        config.hidden_size,
        dtype=dtype,
        param_dtype=dtype,
        embedding_init=nnx.initializers.normal(0.02),
        rngs=rngs,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A target with what is needed to decode text: its tokenizer (or None) and the tokens that end a text."""

    config: ModelConfig
    model: TargetModel
    tokenizer: Any = None  # transformers' PreTrainedTokenizerFast
    eos_token_ids: tuple[int, ...] = ()
    name: str = "random"

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        seed: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        dtype: layers.Dtype = jnp.float32,
    ) -> "Target":
        """A target with random weights, for experiments and tests."""
        model = TargetModel(config, dtype=dtype, rngs=nnx.Rngs(seed))
        return cls(config=config, model=model, eos_token_ids=tuple(eos_token_ids))

    @property
    def dtype(self) -> jnp.dtype:
        return self.model.embed_tokens.embedding[...].dtype


@partial(jax.jit, static_argnums=0)
def features_of(graphdef: nnx.GraphDef, params: nnx.State, tokens: Array, text_length: Array | None = None) -> Array:
    """Features [B, T, E] of whole rows i32[B, T]; padding at their ends changes nothing before it.

    Args:
      text_length: i32[B or 1, T], the length of the text each token came in with, for targets with "dynamic" rope (see
        `rope.angles`). None: every token by itself, as decoded text comes in. Training is on that: a row has several
        answers, each after a prompt of another length, so that no one length is right for all of it.
    """
    length = tokens.shape[1]
    positions = jnp.arange(length)[None]
    features, _ = nnx.merge(graphdef, params)(tokens, positions, layers.causal_mask(length), text_length=text_length)
    return features
