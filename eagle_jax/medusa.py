"""Medusa (arXiv 2401.10774): several heads on one feature, each of which guesses a token further ahead.

Head k, k = 1 ... K, maps the feature h at token j, whose own LM head gives t_{j+1}, to a distribution over t_{j+1+k}:
softmax(W2_k (SiLU(W1_k h) + h)), section 2.1.1. W2_k begins as the target's LM head and W1_k as zero, so that each head
begins by guessing t_{j+1}. The heads know nothing of each other's guesses: what stands at a level of the tree is the
same below every node of the level above.

Its drafts are verified as any other's, so that the text is the target's own. The original's typical acceptance
(section 2.3.1), which takes what is merely likely, changes the text and is left out.

B batch rows, P pairs, E hidden size, W draft vocabulary, K heads (the frontier's width is M here), N nodes.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from eagle_jax import layers, losses
from eagle_jax.config import HeadConfig, MedusaConfig, Path, TreeConfig
from eagle_jax.draft import (
    Committed,
    Frontier,
    Start,
    TreeDrafter,
    draft_tree,
    tree_ranks,
)
from eagle_jax.head import FrozenEnds, HeadModel, check_fit, frozen_ends
from eagle_jax.numerics import lm_logits, precision_for, top_k
from eagle_jax.ranking import rank_for
from eagle_jax.sampling import Sampler
from eagle_jax.target import Target
from eagle_jax.tree import ROOT, Tree

# How many children each node of the published default tree (63 nodes below the root, 4 levels) has: its best tokens.
_CHILDREN: dict[Path, int] = {
    **{(): 10, (0,): 10, (1,): 7, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1, (8,): 1, (9,): 1},
    **{(0, 0): 10, (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1, (1, 0): 2, (2, 0): 1},
    (0, 0, 0): 2,
}
MEDUSA_CHOICES: tuple[Path, ...] = tuple(
    (*parent, rank) for parent, children in _CHILDREN.items() for rank in range(children)
)


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

    def __call__(self, features: Array) -> Array:
        """Logits of every head, f32[B, K, W], from features [B, E]."""
        return jnp.stack([lm_logits(head(features), head.lm_head[...]) for head in self.heads], axis=1)

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


class MedusaParams(NamedTuple):
    """What Medusa drafts with."""

    heads: nnx.State
    ends: FrozenEnds


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

    def bind(self, target: Target, tree: TreeConfig) -> tuple["MedusaDrafter", MedusaParams]:
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
            vocab_size=self.config.vocab_size,
            tree=_up_to(tree, self.config.medusa_num_heads),
            draft_vocab_size=self.ends.lm_head.shape[0],
        )
        return drafter, MedusaParams(params, self.ends)


def _up_to(tree: TreeConfig, levels: int) -> TreeConfig:
    """The tree without what lies deeper; a static one without choices is the published default."""
    if tree.kind != "static":
        return dataclasses.replace(tree, depth=min(tree.depth, levels))
    choices = MEDUSA_CHOICES if tree.choices is None else tree.choices
    return dataclasses.replace(tree, choices=tuple(path for path in choices if len(path) <= levels))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaDrafter(TreeDrafter):
    """A tree over the heads' best tokens: level l holds guesses of head l.

    Static trees and chains have their shape given. A dynamic one keeps the nodes with the highest products of
    probabilities, which is EAGLE-2's growing and reranking over heads that know no path.

    Its memory is one feature, that of the last token the target has run. It needs no rewinding: no tree is drafted
    before the prompt's last token, whose feature takes the place of what was there, has been observed.
    """

    graphdef: nnx.GraphDef
    hidden_size: int
    vocab_size: int

    def init(self, params: MedusaParams, batch: int, capacity: int) -> Array:
        return jnp.zeros((batch, self.hidden_size), params.ends.embedding.dtype)

    def observe(self, params: MedusaParams, state: Array, committed: Committed) -> Array:
        last = jnp.maximum(committed.count - 1, 0)
        feature = jnp.take_along_axis(committed.features, last[:, None, None], axis=1)[:, 0]
        return jnp.where((committed.count > 0)[:, None], feature, state)

    def logits(self, params: MedusaParams, features: Array) -> Array:
        """Every head's, f32[B, K, W], from features [B, E]."""
        dtype = jax.tree.leaves(params.heads)[0].dtype  # may be another than the target's
        return nnx.merge(self.graphdef, params.heads)(features.astype(dtype))

    def propose(self, params: MedusaParams, state: Array, root: Array, sampler: Sampler) -> tuple[Tree, Array]:
        logits = self.logits(params, state)
        rank = rank_for(sampler, self.tree, self.vocab_size, params.ends.vocabulary)
        ranked = jnp.stack([rank(logits[:, level], level) for level in range(self.depth)], axis=1)
        # The tree is grown over ranks, a few to a head, and gets its tokens at the end: no level looks at W again.
        ranks = tree_ranks(self.tree, self.draft_vocab_size)
        scores, best = top_k(ranked, ranks)  # [B, D, ranks]
        tokens = params.ends.token_ids(best).reshape(root.shape[0], -1)
        nothing = jnp.zeros((root.shape[0], 1, 0), jnp.float32)  # the heads predict no features

        def step(carry: tuple[()], frontier: Frontier) -> tuple[tuple[()], Array, Array]:
            batch, width = frontier.tokens.shape
            of_next = jnp.broadcast_to(scores[:, frontier.depth, None], (batch, width, ranks))
            return carry, of_next, jnp.broadcast_to(nothing, (batch, width, 0))

        start = Start(scores[:, 0], nothing[:, 0])
        tree = draft_tree(step, (), start, root, lambda index: index, self.tree, rank=lambda given, level: given)
        place = jnp.maximum(tree.depths - 1, ROOT) * ranks + tree.tokens
        below = jnp.take_along_axis(tokens, jnp.where(tree.depths > 0, place, 0), axis=1)
        return dataclasses.replace(tree, tokens=jnp.where(tree.depths > 0, below, tree.tokens)), state
