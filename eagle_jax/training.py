"""Training a head on the target's features (EAGLE section 3.2), and on its own guesses by option.

State in, state out: `train_step` maps (state, batch) to (state, metrics). The target stays frozen and takes part only
through its features and its two ends, embedding and LM head. What a batch's losses are is the head's business: the
step is one for autoregression heads and for Medusa's. All losses are sums over unmasked pairs; what a step takes in, in
one piece or several and on one device or many, is divided once by the pairs of all of it.

B batch rows, T tokens, P pairs (= T - 1), E hidden size, W draft vocabulary, A pieces of an accumulated batch.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx
from jax import Array

from eagle_jax import layers, losses
from eagle_jax.config import HeadConfig, MedusaConfig
from eagle_jax.head import FrozenEnds
from eagle_jax.losses import Batch
from eagle_jax.medusa import model_for
from eagle_jax.target import features_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The recipe. Loss weights, noise, betas and learning rate default to the paper's (EAGLE section 4)."""

    steps: int = 1000
    unroll: int = 1  # passes over the head's own guesses: 1 is EAGLE, more is HASS (arXiv 2408.15766)
    accumulate: int = 1  # pieces a step's batch comes in
    labels: Literal["soft", "hard"] = "soft"  # the target's distribution, or the text's own token
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-5
    muon_learning_rate: float = 0.02  # of matrices, under Muon
    warmup_steps: int = 50
    decay: Literal["linear", "cosine"] = "linear"
    final_learning_rate: float = 0.0  # as a share of learning_rate, reached at the last step
    weight_decay: float = 0.0  # of matrices (under Muon, of those that it steps), never of norms and biases
    gradient_clip: float = 0.5  # global norm
    regression_weight: float = 1.0
    cross_entropy_weight: float = 0.1
    later_weight: float = 1.0  # of each further pass, or Medusa head, as a share of the one before
    noise: float = 0.1  # U(-noise, noise) on input features
    seed: int = 0

    def __post_init__(self):
        for name, known in (
            ("optimizer", ("adamw", "muon")),
            ("decay", ("linear", "cosine")),
            ("labels", ("soft", "hard")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"TrainConfig.{name} is {getattr(self, name)!r}; it must be {' or '.join(map(repr, known))}."
                )
        for name in ("steps", "unroll", "accumulate", "learning_rate", "muon_learning_rate", "gradient_clip"):
            if not getattr(self, name) > 0:  # NaN is refused too
                raise ValueError(f"TrainConfig.{name} is {getattr(self, name)}; it must be positive.")
        weights = ("regression_weight", "cross_entropy_weight", "later_weight", "weight_decay")
        for name in ("warmup_steps", "final_learning_rate", "noise", *weights):
            if not getattr(self, name) >= 0:
                raise ValueError(f"TrainConfig.{name} is {getattr(self, name)}; it must not be negative.")


def medusa_recipe(config: TrainConfig, later_weight: float = 0.8) -> TrainConfig:
    """A recipe with Medusa's loss (section 2.2.1): cross-entropy alone, head k's at 0.8^k, and no noise.

    Of the weights only the ratios are the paper's: the first head has 1, and the sum is over the pairs of all heads.
    """
    return dataclasses.replace(
        config, regression_weight=0.0, cross_entropy_weight=1.0, later_weight=later_weight, noise=0.0
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    step: Array  # i32[], optimizer steps taken
    head: nnx.State  # the head's parameters
    optimizer: optax.OptState
    key: Array  # the run's key; step i draws with fold_in(key, i)


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW, or Muon (Jordan 2024) for matrices and AdamW for the rest, behind clipping, warm-up and decay.

    LM heads are of the rest: Muon is for matrices between hidden states.
    """

    def schedule(peak: float) -> optax.Schedule:
        steps = max(1, config.steps - config.warmup_steps)
        if config.decay == "cosine":
            decay = optax.cosine_decay_schedule(peak, steps, config.final_learning_rate)
        else:
            decay = optax.linear_schedule(peak, peak * config.final_learning_rate, steps)
        warmup = optax.linear_schedule(peak / (config.warmup_steps + 1), peak, config.warmup_steps)
        return optax.join_schedules([warmup, decay], [config.warmup_steps])

    rate = schedule(config.learning_rate)
    if config.optimizer == "muon":
        step = optax.contrib.muon(
            schedule(config.muon_learning_rate),
            weight_decay=config.weight_decay,
            adam_b1=0.9,
            adam_b2=0.95,
            adam_learning_rate=rate,
            muon_weight_dimension_numbers=_hidden_matrices,
        )
    else:
        step = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=_matrices)
    return optax.chain(optax.clip_by_global_norm(config.gradient_clip), step)


def _matrices(params: Any) -> Any:
    """For each parameter, whether it is one."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _hidden_matrices(params: Any) -> Any:
    """For each parameter: how Muon is to read it, or None."""

    def read(path: Any, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        of_lm_head = any(getattr(key, "key", None) == "lm_head" for key in path)
        return optax.contrib.MuonDimensionNumbers() if leaf.ndim == 2 and not of_lm_head else None

    return jax.tree_util.tree_map_with_path(read, params)


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
    graphdef: nnx.GraphDef,
    head: nnx.State,
    ends: FrozenEnds,
    batch: Batch,
    noise: Array | float = 0.0,
    *,
    unroll: int = 1,
    labels: Literal["soft", "hard"] = "soft",
) -> list[losses.LossSums]:
    """Loss sums of a batch, as many as the head says: of each unrolled pass, or of each of Medusa's heads.

    The arguments are those of `HeadModel.loss_sums` and `MedusaModel.loss_sums`.

    Args:
      graphdef: of the head in the dtype it computes in, which is that of `ends`; see `compute_graphdef`.
    """
    dtype = ends.embedding.dtype
    model = nnx.merge(graphdef, jax.tree.map(lambda weight: weight.astype(dtype), head))
    return model.loss_sums(ends, batch, noise, unroll=unroll, labels=labels)


def compute_graphdef(config: HeadConfig | MedusaConfig, dtype: layers.Dtype) -> nnx.GraphDef:
    """The structure of a head that computes in `dtype`, whatever its parameters are kept in."""
    return nnx.split(nnx.eval_shape(lambda: model_for(config, dtype=dtype, rngs=nnx.Rngs(0))))[0]


def metrics_of(sums: Sequence[losses.LossSums], config: TrainConfig) -> dict[str, Array]:
    """Means over unmasked pairs; a batch without any counts as 0.

    "loss" is over all passes, or Medusa's heads; the other figures are the first one's, and "top1_2", ... the later
    ones' accuracy.
    """
    first, count = sums[0], jnp.maximum(sums[0].count, 1)
    metrics = {
        "loss": _weighted(sums, config) / _pairs(sums),
        "regression": first.regression / count,
        "cross_entropy": first.cross_entropy / count,
        "top1": first.top1 / count,
        "top3": first.top3 / count,
        "pairs": first.count,
    }
    later = {f"top1_{step}": one.top1 / jnp.maximum(one.count, 1) for step, one in enumerate(sums[1:], start=2)}
    return metrics | later


def _weighted(sums: Sequence[losses.LossSums], config: TrainConfig) -> Array:
    return sum(
        (
            config.later_weight**place
            * (config.regression_weight * one.regression + config.cross_entropy_weight * one.cross_entropy)
            for place, one in enumerate(sums)
        ),
        start=jnp.zeros(()),
    )


def _pairs(sums: Sequence[losses.LossSums]) -> Array:
    return jnp.maximum(sum((one.count for one in sums), start=jnp.zeros(())), 1)


@partial(jax.jit, static_argnames=("graphdef", "config", "target_graphdef"), donate_argnames="state")
def train_step(
    state: TrainState,
    ends: FrozenEnds,
    batch: Batch,
    target: nnx.State | None = None,
    *,
    graphdef: nnx.GraphDef,
    config: TrainConfig,
    target_graphdef: nnx.GraphDef | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step.

    Args:
      state: donated; its parameters are the masters, float32 whatever the head computes in.
      ends: the target's embedding and LM-head rows, frozen. The cross-entropy is over those rows, which may be fewer
        than the head drafts over.
      batch: padded rows, with the target's features or (None) without. With `config.accumulate` pieces every leaf has
        a leading axis [A, ...].
      target: the target's parameters, where the batch comes without features: then they are computed here.

    Returns:
      The next state, and `metrics_of` the step's own batch with the noise it was trained with.
    """
    key = jax.random.fold_in(state.key, state.step)

    def gradient_of(piece: Batch, key: Array) -> tuple[nnx.State, list[losses.LossSums]]:
        if piece.features is None:
            assert target is not None and target_graphdef is not None
            piece = piece._replace(features=features_of(target_graphdef, target, piece.tokens))
        noise = _noise(piece, key, config.noise, ends.embedding.dtype)

        def loss(head: nnx.State) -> tuple[Array, list[losses.LossSums]]:
            sums = head_sums(graphdef, head, ends, piece, noise, unroll=config.unroll, labels=config.labels)
            return _weighted(sums, config), sums

        return jax.grad(loss, has_aux=True)(state.head)

    if config.accumulate == 1:
        gradients, sums = gradient_of(batch, key)
    else:

        def add(total: Any, piece: tuple[Batch, Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient_of(*piece)), None

        pieces = batch, jax.random.split(key, config.accumulate)
        shapes = jax.eval_shape(gradient_of, *jax.tree.map(lambda leaf: leaf[0], pieces))
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        (gradients, sums), _ = jax.lax.scan(add, nothing, pieces)
    # Divided once, by the pairs of the whole batch.
    gradients = jax.tree.map(lambda gradient: gradient / _pairs(sums), gradients)
    metrics = metrics_of(sums, config)
    updates, optimizer_state = optimizer(config).update(gradients, state.optimizer, state.head)
    # A batch without a single unmasked pair moves nothing, the optimizer's momentum included.
    moved = TrainState(
        step=state.step, head=jax.tree.map(jnp.add, state.head, updates), optimizer=optimizer_state, key=state.key
    )
    kept = jax.tree.map(lambda new, old: jnp.where(metrics["pairs"] > 0, new, old), moved, state)
    return dataclasses.replace(kept, step=state.step + 1), metrics


def _noise(batch: Batch, key: Array, size: float, dtype: layers.Dtype) -> Array | float:
    """U(-size, size) for a batch's input features, EAGLE section 4.1.

    The published code scales it by 512 / T, which shrinks it on long rows.
    """
    assert batch.features is not None
    rows, tokens, hidden = batch.features.shape
    return jax.random.uniform(key, (rows, tokens - 1, hidden), dtype, -size, size) if size > 0 else 0.0


@partial(jax.jit, static_argnames="graphdef")
def evaluate_step(head: nnx.State, ends: FrozenEnds, batch: Batch, *, graphdef: nnx.GraphDef) -> list[losses.LossSums]:
    """Loss sums of a batch with features, without noise and not unrolled; one of an EAGLE head, K of Medusa's."""
    return head_sums(graphdef, head, ends, batch)
