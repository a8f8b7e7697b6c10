"""Medusa (arXiv 2401.10774): several heads on one feature, each of which guesses a token further ahead.

Head k, k = 1 ... K, maps the feature h at token j, whose own LM head gives t_{j+1}, to a distribution over t_{j+1+k}:
softmax(W2_k (SiLU(W1_k h) + h)), section 2.1.1. W2_k begins as the target's LM head and W1_k as zero, so that each head
begins by guessing t_{j+1}. How trees are made of their guesses is `medusa_drafter.py`'s.

B batch rows, P pairs, E hidden size, W draft vocabulary, K heads.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from eagle_jax import layers, losses
from eagle_jax.config import HeadConfig, MedusaConfig, TreeConfig
from eagle_jax.head import FrozenEnds, HeadModel, check_fit, frozen_ends
from eagle_jax.medusa_drafter import MedusaDrafter, MedusaParams, up_to
from eagle_jax.numerics import lm_logits, precision_for
from eagle_jax.target import Target


class MedusaHead(nnx.Module):
    """A residual layer and an LM head of its own."""

    def __init__(self, config: MedusaConfig, *, dtype: layers.Dtype, rngs: nnx.Rngs):
        hidden, rows = config.hidden_size, config.draft_vocab_size or config.vocab_size
        self.linear = nnx.Linear(
            hidden,
            hidden,
            use_bias=False,
            dtype=dtype,
            param_dtype=dtype,
            precision=precision_for(dtype),
            kernel_init=nnx.initializers.zeros_init(),
            rngs=rngs,
        )
        self.lm_head = nnx.Param(jnp.zeros((rows, hidden), dtype))  # [W, E]

    def __call__(self, features: Array) -> Array:
        """What the LM head multiplies: [..., E] from features [..., E]."""
        return features + jax.nn.silu(self.linear(features))


class MedusaModel(nnx.Module):
    """K heads."""

    def __init__(self, config: MedusaConfig, *, dtype: layers.Dtype = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.heads = nnx.List([MedusaHead(config, dtype=dtype, rngs=rngs) for _ in range(config.medusa_num_heads)])

    def __call__(self, features: Array, count: int | None = None) -> Array:
        """Logits of the first `count` heads (None: of all K), f32[B, count, W], from features [B, E]."""
        return jnp.stack([lm_logits(head(features), head.lm_head[...]) for head in self.heads[:count]], axis=1)

    def loss_sums(
        self,
        ends: FrozenEnds,
        batch: losses.Batch,
        noise: Array | float = 0.0,  # [B, P, E], added to the features that the heads read, never to the target's word
        *,
        unroll: int = 1,
        labels: Literal["soft", "hard"] = "soft",
    ) -> list[losses.LossSums]:
        """Loss sums of a batch, for each head.

        Soft labels are the target's own distribution over t_{j+1+k}, hard ones, the paper's, that token. Head k's loss
        at token j counts where the assistant wrote t_{j+1} to t_{j+1+k}: drafts reach no further than an answer.
        """
        if unroll != 1:
            raise ValueError(f"unroll is {unroll}, but Medusa's heads read no guesses of their own; leave it at 1.")
        assert batch.features is not None
        dtype = ends.embedding.dtype
        features, sums = losses.ahead(batch.features, 0).astype(dtype) + noise, []
        for step, head in enumerate(self.heads, start=1):
            rows = ends.rows_of(losses.ahead(batch.tokens, 1 + step)) if labels == "hard" else None
            wanted, mask = losses.ahead(batch.features, step).astype(dtype), losses.pair_mask(batch.assistant, step)
            matrix = head.lm_head[...]
            sums.append(losses.token_sums(head(features), matrix, wanted, mask, ends.lm_head, rows))
        return sums


def model_for(config: HeadConfig | MedusaConfig, *, dtype: layers.Dtype, rngs: nnx.Rngs) -> "HeadModel | MedusaModel":
    """The module that a configuration describes."""
    make = MedusaModel if isinstance(config, MedusaConfig) else HeadModel
    return make(config, dtype=dtype, rngs=rngs)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Medusa:
    """Medusa's heads bound to the target that they draft for."""

    config: MedusaConfig
    model: MedusaModel
    ends: FrozenEnds

    @classmethod
    def from_target(
        cls,
        target: Target,
        heads: int = 4,
        vocabulary: np.ndarray | None = None,
        dtype: layers.Dtype | None = None,
    ) -> "Medusa":
        """Heads that have learned nothing: each says what the target's own LM head does.

        Args:
          heads: K.
          vocabulary: i32[W], ascending token ids that they draft; None for all.
          dtype: of the parameters; None is the target's.
        """
        config = MedusaConfig(
            vocab_size=target.config.vocab_size,
            hidden_size=target.config.hidden_size,
            draft_vocab_size=None if vocabulary is None else len(vocabulary),
            medusa_num_heads=heads,
        )
        dtype, ends = target.dtype if dtype is None else dtype, frozen_ends(target, vocabulary)
        graphdef, state = nnx.split(MedusaModel(config, dtype=dtype, rngs=nnx.Rngs(0)))
        flat = [
            # Copies: a training step may donate them, and the target keeps its own.
            (path, leaf.replace(jnp.array(ends.lm_head, dtype)) if path[-1] == "lm_head" else leaf)
            for path, leaf in nnx.to_flat_state(state)
        ]
        return cls(config=config, model=nnx.merge(graphdef, nnx.from_flat_state(flat)), ends=ends)

    def bind(self, target: Target, tree: TreeConfig) -> tuple[MedusaDrafter, MedusaParams]:
        """The drafter for a tree, which has no more levels than there are heads; see `MedusaDrafter`."""
        check_fit(self.config, target, "Medusa heads")
        if tree.children == "sampled":
            raise ValueError(
                "TreeConfig.children is 'sampled', but Medusa's heads draft their best tokens alone; set it to 'best'."
            )
        graphdef, params = nnx.split(self.model)
        drafter = MedusaDrafter(
            graphdef=graphdef,
            hidden_size=self.config.hidden_size,
            tree=up_to(tree, self.config.medusa_num_heads),
            draft_vocab_size=self.ends.lm_head.shape[0],
        )
        return drafter, MedusaParams(params, self.ends)
