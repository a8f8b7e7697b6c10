"""A language model of its own as the drafter: speculative sampling (arXiv 2211.17192, 2302.01318).

It drafts for a larger model with its vocabulary, or is the target's own first layers, which takes no second model. With
a chain of sampled children that is the papers' method; any tree shape will do.

It takes in tokens, not features. The root is run at the head of each round and, as the first of what was committed,
once more at the next: only then is it known to stay.

B batch rows, R places, E hidden size, V vocabulary.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax import Array

from eagle_jax import cache as kv
from eagle_jax.cached_drafter import Block, CachedDrafter, Kept
from eagle_jax.config import TreeConfig
from eagle_jax.draft import Committed
from eagle_jax.target import Target, TargetModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDrafter(CachedDrafter):
    """A decoder with its own embedding and LM head behind one of the three tree shapes."""

    dtype: jnp.dtype

    def kept(self, params: nnx.State) -> Kept:
        return Kept(0, self.dtype, self.dtype)

    def committed_block(self, committed: Committed) -> Block:
        return Block(committed.tokens, committed.features[:, :, :0], committed.count)

    def root_block(self, committed: Committed) -> Block:
        tokens = jnp.concatenate([committed.tokens[:, :1], committed.next_tokens], axis=1)
        return Block(tokens, jnp.zeros((*tokens.shape, 0), self.dtype), committed.count + 1)

    def run(
        self,
        params: nnx.State,
        tokens: Array,
        features: Array,
        positions: Array,
        mask: Array,
        cache: kv.KVCache,
        earlier: kv.Rows | None = None,
    ) -> tuple[Array, kv.Rows]:
        return nnx.merge(self.graphdef, params)(tokens, positions, mask, cache, earlier=earlier)

    def logits(self, params: nnx.State, features: Array) -> Array:
        return nnx.merge(self.graphdef, params).logits(features)


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A model that drafts for a target; given to `generate` in place of a head.

    `model` has the target's vocabulary and dtype; its tokenizer and end tokens are not used.
    """

    model: Target

    @classmethod
    def first_layers(cls, target: Target, n: int) -> "DraftModel":
        """The target's first `n` layers under its own final norm and LM head. The weights are shared, not copied.

        Raises:
          ValueError: `n` is not a number of layers that the target has.
        """
        config, every = target.config, target.config.num_hidden_layers
        if not 1 <= n <= every:
            raise ValueError(
                f"first_layers is asked for {n} layers of {target.name}; it has from 1 to {every} to give."
            )
        kinds = None if config.layer_types is None else config.layer_types[:n]
        config = dataclasses.replace(config, num_hidden_layers=n, layer_types=kinds)
        shapes = nnx.eval_shape(lambda: TargetModel(config, dtype=target.dtype, rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(shapes)
        weights = dict(nnx.to_flat_state(nnx.state(target.model)))
        kept = [(path, weights[path]) for path, _ in nnx.to_flat_state(state)]
        model = nnx.merge(graphdef, nnx.from_flat_state(kept))
        return cls(dataclasses.replace(target, config=config, model=model, name=f"{target.name}, {n} layers"))

    def bind(self, target: Target, tree: TreeConfig) -> tuple[ModelDrafter, nnx.State]:
        """The drafter for a target and a tree, and its parameters.

        Raises:
          ValueError: the model has not the target's vocabulary size or dtype.
        """
        model, config = self.model, self.model.config
        own, wanted = config.vocab_size, target.config.vocab_size
        if own != wanted:
            raise ValueError(
                f"The draft model {model.name} has a vocabulary of {own} tokens, but the target {target.name} one of "
                f"{wanted}; give a model with the target's vocabulary."
            )
        if model.dtype != target.dtype:
            raise ValueError(
                f"The draft model {model.name} is in {model.dtype}, but the target {target.name} in {target.dtype}; "
                f"load both with one dtype."
            )
        graphdef, params = nnx.split(model.model)
        drafter = ModelDrafter(graphdef=graphdef, config=config, tree=tree, draft_vocab_size=own, dtype=model.dtype)
        return drafter, params
