"""EAGLE's autoregression head: the next feature from the current feature and the next token (EAGLE section 3.1).

Pair i is (feature f_i, token t_{i+1}); the head maps it to a guess of f_{i+1}, which the target's frozen LM head turns
into a distribution over t_{i+2}. The shifted token tells the head which of the possible continuations was taken; that
is what makes the regression target unique. Heads for the ablation read less of it: see `HeadConfig.inputs`.

The head owns `fc` and one decoder layer. Embedding and LM head are the target's and are handed in, never stored.

B batch rows, T block tokens, P pairs, E hidden size, V vocabulary, W draft vocabulary.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from eagle_jax import cache as kv
from eagle_jax import layers, losses
from eagle_jax.config import HeadConfig, Inputs, MedusaConfig, ModelConfig
from eagle_jax.target import Target


class FrozenEnds(NamedTuple):
    """What the head borrows of the target."""

    embedding: Array  # [V, E]
    lm_head: Array  # [W, E]: the rows of the draft vocabulary, or all V
    vocabulary: Array | None  # i32[W], the draft vocabulary's token ids; None where W = V

    def token_ids(self, indices: Array) -> Array:
        """Draft-vocabulary indices to token ids."""
        return indices if self.vocabulary is None else self.vocabulary[indices]

    def rows_of(self, tokens: Array) -> Array:
        """Token ids to draft-vocabulary indices; -1 for those that are not in it."""
        if self.vocabulary is None:
            return tokens
        row = jnp.minimum(jnp.searchsorted(self.vocabulary, tokens), self.vocabulary.shape[0] - 1)
        return jnp.where(self.vocabulary[row] == tokens, row, -1)


class HeadModel(nnx.Module):
    """`fc` and a decoder layer without its input norm; parameters bear the published names."""

    def __init__(self, config: HeadConfig, *, dtype: layers.Dtype = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        hidden = config.hidden_size
        read = (config.reads_token + config.reads_feature) * hidden
        # For a single input too, which the paper hands to the layer as it is: `fc` stands where the layer's norm would,
        # and an embedding is not in the features' space, which the residual stream has to end in.
        self.fc = layers.linear(read, hidden, bias=config.fc_bias, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([layers.Block(config, input_norm=False, dtype=dtype, rngs=rngs)])

    def __call__(
        self,
        embeddings: Array,  # [B, T, E] of the shifted tokens, or of the features' own; see `HeadConfig.shifted`
        features: Array,  # [B, T, E]
        positions: Array,  # i32[B or 1, T]
        block_mask: Array,  # bool[B or 1, T, U]
        prefix: kv.KVCache | None = None,
        earlier: kv.Rows | None = None,
    ) -> tuple[Array, kv.Rows]:
        """Predicted next features [B, T, E], and the block's keys and values."""
        # The published weights' order.
        read = [embeddings] * self.config.reads_token + [features] * self.config.reads_feature
        x = self.fc(layers.by_rows(jnp.concatenate(read, axis=-1)))
        return layers.run_blocks(self.layers, self.config, x, positions, block_mask, prefix, earlier)

    def loss_sums(
        self,
        ends: FrozenEnds,
        batch: losses.Batch,
        noise: Array | float = 0.0,  # [B, P, E], added to the first pass's features alone, never to the wanted ones
        *,
        unroll: int = 1,
        labels: Literal["soft", "hard"] = "soft",
    ) -> list[losses.LossSums]:
        """Loss sums of a batch, for each of `unroll` passes (HASS, arXiv 2408.15766, section 3.2).

        The first pass is the paper's: every pair has the target's feature. In pass k pair j has the feature that pass
        k - 1 predicted from pair j - 1, and sees what it would see as the k-th level of a chain that left the target's
        features at pair j - k + 1: the first pass's pairs up to there, and of each pass since the one pair on the
        chain.
        """
        assert batch.features is not None
        dtype = ends.embedding.dtype
        features, wanted = batch.features[:, :-1].astype(dtype), batch.features[:, 1:].astype(dtype)
        embeddings = ends.embedding[batch.tokens[:, 1:] if self.config.shifted else batch.tokens[:, :-1]]
        wanted_rows = ends.rows_of(losses.ahead(batch.tokens, 2)) if labels == "hard" else None
        mask, pairs = losses.pair_mask(batch.assistant), features.shape[1]
        return [
            losses.loss_sums(predicted, wanted, mask & (jnp.arange(pairs) >= step), ends.lm_head, wanted_rows)
            for step, predicted in enumerate(self.unrolled(embeddings, features + noise, unroll))
        ]

    def unrolled(self, embeddings: Array, features: Array, passes: int) -> Iterator[Array]:
        """Predicted features [B, P, E] pass by pass, as `loss_sums` has them, from the first pass's [B, P, E]."""
        pairs, inputs, earlier = features.shape[1], features, None
        for step in range(passes):
            seen = unrolled_mask(pairs, step)
            predicted, rows = self(embeddings, inputs, jnp.arange(pairs)[None], seen, earlier=earlier)
            yield predicted
            earlier = rows if earlier is None else kv.join(earlier, rows)
            inputs = jnp.pad(predicted[:, :-1], ((0, 0), (1, 0), (0, 0)))


def unrolled_mask(pairs: int, step: int) -> Array:
    """bool[1, P, (step + 1) * P]: what each pair of unrolled pass `step` (from 0) sees of the passes up to its own."""
    start = jnp.arange(pairs)[:, None] - step  # the last pair with the target's feature
    column = jnp.arange(pairs)
    chain = [column == start + level for level in range(1, step + 1)]
    return jnp.concatenate([column <= start, *chain], axis=1)[None]


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
        inputs: Inputs = "feature+shifted_token",
    ) -> "Head":
        """A head with random weights, shaped after its target.

        Args:
          vocabulary: i32[W], ascending token ids that the head drafts; None for all.
          dtype: of the parameters; None is the target's.
          key_value_heads: of the head's attention; None is the target's. Some published heads have others.
          inputs: what the head reads; see `HeadConfig`.

        Raises:
          ValueError: the attention heads are no multiple of `key_value_heads`.
        """
        config = dataclasses.replace(config_for(target.config, vocabulary, key_value_heads), inputs=inputs)
        model = HeadModel(config, dtype=target.dtype if dtype is None else dtype, rngs=nnx.Rngs(seed))
        return cls(config=config, model=model, ends=frozen_ends(target, vocabulary))

    @classmethod
    def from_last_layer(
        cls,
        target: Target,
        seed: int = 0,
        vocabulary: np.ndarray | None = None,
        dtype: layers.Dtype | None = None,
        inputs: Inputs = "feature+shifted_token",
    ) -> "Head":
        """A head that begins as its target's last layer over the features themselves.

        `fc` passes the feature on and adds the embedding through small random weights. The arguments are `random`'s.

        Raises:
          ValueError: the target's layers are mixtures of experts, which a head's is not, or the head reads no features.
        """
        if target.config.num_local_experts is not None:
            raise ValueError(
                f"{target.name} has layers of {target.config.num_local_experts} experts, of which a head has 1; "
                f"begin with random weights or another head."
            )
        head = cls.random(target, seed, vocabulary, dtype, inputs=inputs)
        if not head.config.reads_feature:
            raise ValueError(
                f"A head whose inputs are {inputs!r} has no feature to pass to the last layer; begin with random ones."
            )
        dtype = head.model.fc.kernel[...].dtype
        last = dict(nnx.to_flat_state(nnx.state(target.model.layers[-1])))
        hidden = target.config.hidden_size

        def begin(path: tuple, leaf: Any) -> Any:
            if path == ("fc", "kernel"):
                return leaf.replace(leaf[...].at[-hidden:].set(jnp.eye(hidden, dtype=dtype)))
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


def check_fit(config: HeadConfig | MedusaConfig, target: Target, source: str) -> None:
    """Raises ValueError where a head is not of its target's sizes."""
    for field in ("hidden_size", "vocab_size"):
        own, wanted = getattr(config, field), getattr(target.config, field)
        if own != wanted:
            raise ValueError(
                f"The {source} has {field} {own}, but the target {target.name} has {wanted}; "
                f"give the head that was trained for this target."
            )
