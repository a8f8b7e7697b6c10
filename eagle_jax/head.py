"""EAGLE's autoregression head: the next feature from the current feature and the next token (EAGLE section 3.1).

Pair i is (feature f_i, token t_{i+1}); the head maps it to a guess of f_{i+1}, which the target's frozen LM head turns
into a distribution over t_{i+2}. The shifted token tells the head which of the possible continuations was taken; that
is what makes the regression target unique.

The head owns `fc` and one decoder layer. Embedding and LM head are the target's and are handed in, never stored.

B batch rows, T block tokens, E hidden size, V vocabulary, W draft vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from eagle_jax import cache as kv
from eagle_jax import layers
from eagle_jax.config import HeadConfig, ModelConfig
from eagle_jax.target import Target


class HeadModel(nnx.Module):
    """`fc` and a decoder layer without its input norm; parameters bear the published names."""

    def __init__(self, config: HeadConfig, *, dtype: layers.Dtype = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        hidden = config.hidden_size
        self.fc = layers.linear(2 * hidden, hidden, bias=config.fc_bias, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([layers.Block(config, input_norm=False, dtype=dtype, rngs=rngs)])

    def __call__(
        self,
        embeddings: Array,  # [B, T, E] of the shifted tokens
        features: Array,  # [B, T, E]
        positions: Array,  # i32[B or 1, T]
        block_mask: Array,  # bool[B or 1, T, U]
        prefix: kv.KVCache | None = None,
        earlier: kv.Rows | None = None,
    ) -> tuple[Array, kv.Rows]:
        """Predicted next features [B, T, E], and the block's keys and values."""
        x = self.fc(layers.by_rows(jnp.concatenate([embeddings, features], axis=-1)))  # the published weights' order
        return layers.run_blocks(self.layers, self.config, x, positions, block_mask, prefix, earlier)


class FrozenEnds(NamedTuple):
    """What the head borrows of the target."""

    embedding: Array  # [V, E]
    lm_head: Array  # [W, E]: the rows of the draft vocabulary, or all V
    vocabulary: Array | None  # i32[W], the draft vocabulary's token ids; None where W = V

    def token_ids(self, indices: Array) -> Array:
        """Draft-vocabulary indices to token ids."""
        return indices if self.vocabulary is None else self.vocabulary[indices]


def frozen_ends(target: Target, vocabulary: np.ndarray | None = None) -> FrozenEnds:
    """The target's embedding and the LM head's rows for a draft vocabulary (None: all, without a copy)."""
    embedding, matrix = target.model.embed_tokens.embedding[...], target.model.lm_matrix()
    if vocabulary is None:
        return FrozenEnds(embedding, matrix, None)
    ids = jnp.asarray(vocabulary, jnp.int32)
    return FrozenEnds(embedding, matrix[ids], ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """A head bound to the target it drafts for."""

    config: HeadConfig
    model: HeadModel
    ends: FrozenEnds

    @classmethod
    def random(
        cls,
        target: Target,
        seed: int = 0,
        vocabulary: np.ndarray | None = None,
        dtype: layers.Dtype | None = None,
        key_value_heads: int | None = None,
    ) -> "Head":
        """A head with random weights, shaped after its target.

        Args:
          vocabulary: i32[W], ascending token ids that the head drafts; None for all.
          dtype: of the parameters; None is the target's.
          key_value_heads: of the head's attention; None is the target's. Some published heads have others.

        Raises:
          ValueError: the attention heads are no multiple of `key_value_heads`.
        """
        config = config_for(target.config, vocabulary, key_value_heads)
        model = HeadModel(config, dtype=target.dtype if dtype is None else dtype, rngs=nnx.Rngs(seed))
        return cls(config=config, model=model, ends=frozen_ends(target, vocabulary))

    @classmethod
    def from_last_layer(
        cls, target: Target, seed: int = 0, vocabulary: np.ndarray | None = None, dtype: layers.Dtype | None = None
    ) -> "Head":
        """A head that begins as its target's last layer over the features themselves.

        `fc` passes the feature on and adds the embedding through small random weights. The arguments are `random`'s.

        Raises:
          ValueError: the target's layers are mixtures of experts, which a head's is not.
        """
        if target.config.num_local_experts is not None:
            raise ValueError(
                f"{target.name} has layers of {target.config.num_local_experts} experts, of which a head has 1; "
                f"begin with random weights or another head."
            )
        head = cls.random(target, seed, vocabulary, dtype)
        dtype = head.model.fc.kernel[...].dtype
        last = dict(nnx.to_flat_state(nnx.state(target.model.layers[-1])))
        hidden = target.config.hidden_size

        def begin(path: tuple, leaf: Any) -> Any:
            if path == ("fc", "kernel"):
                return leaf.replace(leaf[...].at[hidden:].set(jnp.eye(hidden, dtype=dtype)))
            return leaf if path[0] == "fc" else leaf.replace(last[path[2:]][...].astype(dtype))

        graphdef, state = nnx.split(head.model)
        flat = [(path, begin(path, leaf)) for path, leaf in nnx.to_flat_state(state)]
        return dataclasses.replace(head, model=nnx.merge(graphdef, nnx.from_flat_state(flat)))


def config_for(
    target: ModelConfig, vocabulary: np.ndarray | None = None, key_value_heads: int | None = None
) -> HeadConfig:
    """A head's configuration after its target's: one layer, shaped like the last; for a mixture, like one expert."""
    fields = {field.name: getattr(target, field.name) for field in dataclasses.fields(ModelConfig)}
    fields |= {"num_hidden_layers": 1, "layer_types": None, "sliding_window": target.windows[-1]}
    fields |= {"num_local_experts": None, "num_experts_per_tok": None}
    fields["draft_vocab_size"] = None if vocabulary is None else len(vocabulary)
    if key_value_heads is not None:
        if key_value_heads < 1 or target.num_attention_heads % key_value_heads:
            raise ValueError(
                f"The head would have {key_value_heads} key-value heads for its {target.num_attention_heads} attention "
                f"heads; give a number that divides them, or none for the target's {target.kv_heads}."
            )
        fields["num_key_value_heads"] = key_value_heads
    return HeadConfig(**fields)


def check_fit(config: HeadConfig, target: Target, source: str) -> None:
    """Raises ValueError where a head is not of its target's sizes."""
    for field in ("hidden_size", "vocab_size"):
        own, wanted = getattr(config, field), getattr(target.config, field)
        if own != wanted:
            raise ValueError(
                f"The {source} has {field} {own}, but the target {target.name} has {wanted}; "
                f"give the head that was trained for this target."
            )
