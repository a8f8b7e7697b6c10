"""Training an autoregression head on the target's features (EAGLE section 3.2).

State in, state out: `train_step` maps (state, batch) to (state, metrics). The target stays frozen and takes part only
through its features and its two ends, embedding and LM head.

B batch rows, T tokens, P pairs (= T - 1), E hidden size, W draft vocabulary.
"""

import dataclasses
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx
from jax import Array

from eagle_jax import losses
from eagle_jax.head import FrozenEnds
from eagle_jax.layers import causal_mask


class Batch(NamedTuple):
    """What one training step takes in; padding stands at the end of rows and is nobody's."""

    tokens: Array  # i32[B, T]
    assistant: Array  # bool[B, T]
    features: Array  # [B, T, E]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The recipe. Loss weights, noise, betas and learning rate default to the paper's (EAGLE section 4)."""

    steps: int = 1000
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-5
    muon_learning_rate: float = 0.02  # of matrices, under Muon
    warmup_steps: int = 50
    final_learning_rate: float = 0.0  # as a share of learning_rate, reached linearly at the last step
    weight_decay: float = 0.0
    gradient_clip: float = 0.5  # global norm
    regression_weight: float = 1.0
    cross_entropy_weight: float = 0.1
    noise: float = 0.1  # U(-noise, noise) on input features
    seed: int = 0

    def __post_init__(self):
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"TrainConfig.optimizer is {self.optimizer!r}; it must be 'adamw' or 'muon'.")
        for name in ("steps", "learning_rate", "muon_learning_rate", "gradient_clip"):
            if not getattr(self, name) > 0:  # NaN is refused too
                raise ValueError(f"TrainConfig.{name} is {getattr(self, name)}; it must be positive.")
        weights = ("regression_weight", "cross_entropy_weight", "weight_decay")
        for name in ("warmup_steps", "final_learning_rate", "noise", *weights):
            if not getattr(self, name) >= 0:
                raise ValueError(f"TrainConfig.{name} is {getattr(self, name)}; it must not be negative.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    step: Array  # i32[], optimizer steps taken
    head: nnx.State  # the head's parameters
    optimizer: optax.OptState
    key: Array  # the run's key; step i draws with fold_in(key, i)


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW, or Muon (Jordan 2024) for matrices and AdamW for the rest, behind clipping, warm-up and linear decay."""

    def schedule(peak: float) -> optax.Schedule:
        decay = max(1, config.steps - config.warmup_steps)
        return optax.join_schedules(
            [
                optax.linear_schedule(peak / (config.warmup_steps + 1), peak, config.warmup_steps),
                optax.linear_schedule(peak, peak * config.final_learning_rate, decay),
            ],
            [config.warmup_steps],
        )

    rate = schedule(config.learning_rate)
    if config.optimizer == "muon":
        step = optax.contrib.muon(
            schedule(config.muon_learning_rate),
            weight_decay=config.weight_decay,
            adam_b1=0.9,
            adam_b2=0.95,
            adam_learning_rate=rate,
        )
    else:
        step = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(config.gradient_clip), step)


def init_state(head: nnx.State, config: TrainConfig) -> TrainState:
    """A state that starts from `head`, which stays the caller's: steps donate the state's own copy."""
    head = jax.tree.map(jnp.copy, head)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        head=head,
        optimizer=optimizer(config).init(head),
        key=jax.random.key(config.seed),
    )


def head_sums(
    graphdef: nnx.GraphDef, head: nnx.State, ends: FrozenEnds, batch: Batch, noise: Array | float
) -> losses.LossSums:
    """Loss sums of a batch; `noise` [B, P, E] is added to the input features alone, never to the wanted ones."""
    model = nnx.merge(graphdef, head)
    dtype = ends.embedding.dtype
    features = batch.features.astype(dtype)
    pairs = features.shape[1] - 1
    predicted, _ = model(
        ends.embedding[batch.tokens[:, 1:]],
        features[:, :-1] + noise,
        jnp.arange(pairs)[None],
        causal_mask(pairs),
    )
    return losses.loss_sums(predicted, features[:, 1:], losses.pair_mask(batch.assistant), ends.lm_head)


def metrics_of(sums: losses.LossSums, config: TrainConfig) -> dict[str, Array]:
    """Means over unmasked pairs; a batch without any counts as 0."""
    count = jnp.maximum(sums.count, 1)
    regression, cross_entropy = sums.regression / count, sums.cross_entropy / count
    return {
        "loss": config.regression_weight * regression + config.cross_entropy_weight * cross_entropy,
        "regression": regression,
        "cross_entropy": cross_entropy,
        "top1": sums.top1 / count,
        "top3": sums.top3 / count,
        "pairs": sums.count,
    }


@partial(jax.jit, static_argnames=("graphdef", "config"), donate_argnames="state")
def train_step(
    state: TrainState, ends: FrozenEnds, batch: Batch, *, graphdef: nnx.GraphDef, config: TrainConfig
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step.

    Args:
      state: donated.
      ends: the target's embedding and LM-head rows, frozen.
      batch: padded rows with their features.

    Returns:
      The next state, and `metrics_of` the step's own batch with the noise it was trained with.
    """
    rows, tokens, hidden = batch.features.shape
    noise: Array | float = 0.0
    if config.noise > 0:
        # U(-0.1, 0.1), EAGLE section 4.1. The published code scales it by 512 / T, which shrinks it on long rows.
        noise = jax.random.uniform(
            jax.random.fold_in(state.key, state.step),
            (rows, tokens - 1, hidden),
            ends.embedding.dtype,
            -config.noise,
            config.noise,
        )

    def loss(head: nnx.State) -> tuple[Array, dict[str, Array]]:
        metrics = metrics_of(head_sums(graphdef, head, ends, batch, noise), config)
        return metrics["loss"], metrics

    gradients, metrics = jax.grad(loss, has_aux=True)(state.head)
    updates, optimizer_state = optimizer(config).update(gradients, state.optimizer, state.head)
    # A batch without a single unmasked pair moves nothing, the optimizer's momentum included.
    moved = TrainState(
        step=state.step, head=jax.tree.map(jnp.add, state.head, updates), optimizer=optimizer_state, key=state.key
    )
    kept = jax.tree.map(lambda new, old: jnp.where(metrics["pairs"] > 0, new, old), moved, state)
    return dataclasses.replace(kept, step=state.step + 1), metrics


@partial(jax.jit, static_argnames="graphdef")
def evaluate_step(head: nnx.State, ends: FrozenEnds, batch: Batch, *, graphdef: nnx.GraphDef) -> losses.LossSums:
    """Loss sums of a batch without noise."""
    return head_sums(graphdef, head, ends, batch, 0.0)
