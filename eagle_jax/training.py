"""Training an autoregression head on the target's features (EAGLE section 3.2), and on its own guesses by option.

State in, state out: `train_step` maps (state, batch) to (state, metrics). The target stays frozen and takes part only
through its features and its two ends, embedding and LM head. All losses are sums over unmasked pairs; what a step
takes in, in one piece or several and on one device or many, is divided once by the pairs of all of it.

B batch rows, T tokens, P pairs (= T - 1), E hidden size, W draft vocabulary, A pieces of an accumulated batch.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx
from jax import Array

from eagle_jax import cache as kv
from eagle_jax import layers, losses
from eagle_jax.config import HeadConfig
from eagle_jax.head import FrozenEnds, HeadModel
from eagle_jax.target import features_of


class Batch(NamedTuple):
    """What one training step takes in; padding stands at the end of rows and is nobody's. Accumulated: [A, B, ...]."""

    tokens: Array  # i32[B, T]
    assistant: Array  # bool[B, T]
    features: Array | None  # [B, T, E]; None where the target computes them in the step


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
    weight_decay: float = 0.0
    gradient_clip: float = 0.5  # global norm
    regression_weight: float = 1.0
    cross_entropy_weight: float = 0.1
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
    """AdamW, or Muon (Jordan 2024) for matrices and AdamW for the rest, behind clipping, warm-up and decay."""

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
    graphdef: nnx.GraphDef,
    head: nnx.State,
    ends: FrozenEnds,
    batch: Batch,
    noise: Array | float = 0.0,
    *,
    unroll: int = 1,
    labels: Literal["soft", "hard"] = "soft",
) -> list[losses.LossSums]:
    """Loss sums of a batch, for each of `unroll` passes (HASS, arXiv 2408.15766, section 3.2).

    The first pass is the paper's: every pair has the target's feature. In pass k pair j has the feature that pass k - 1
    predicted from pair j - 1, and sees what it would see as the k-th level of a chain that left the target's features
    at pair j - k + 1: the first pass's pairs up to there, and of each pass since the one pair on the chain.

    Args:
      graphdef: of the head in the dtype it computes in, which is that of `ends`; see `compute_graphdef`.
      noise: [B, P, E], added to the first pass's features alone, never to the wanted ones.
    """
    assert batch.features is not None
    dtype = ends.embedding.dtype
    model = nnx.merge(graphdef, jax.tree.map(lambda weight: weight.astype(dtype), head))
    features, wanted = batch.features[:, :-1].astype(dtype), batch.features[:, 1:].astype(dtype)
    embeddings, mask = ends.embedding[batch.tokens[:, 1:]], losses.pair_mask(batch.assistant)
    wanted_rows = _label_rows(batch.tokens, ends) if labels == "hard" else None
    pairs = features.shape[1]
    return [
        losses.loss_sums(predicted, wanted, mask & (jnp.arange(pairs) >= step), ends.lm_head, wanted_rows)
        for step, predicted in enumerate(unrolled(model, embeddings, features + noise, unroll))
    ]


def unrolled(model: HeadModel, embeddings: Array, features: Array, passes: int) -> Iterator[Array]:
    """Predicted features [B, P, E], pass by pass, from the shifted tokens' embeddings and the pairs' true features."""
    pairs, inputs, earlier = features.shape[1], features, None
    for step in range(passes):
        seen = unrolled_mask(pairs, step)
        predicted, rows = model(embeddings, inputs, jnp.arange(pairs)[None], seen, earlier=earlier)
        yield predicted
        earlier = rows if earlier is None else kv.join(earlier, rows)
        inputs = jnp.pad(predicted[:, :-1], ((0, 0), (1, 0), (0, 0)))


def unrolled_mask(pairs: int, step: int) -> Array:
    """bool[1, P, (step + 1) * P]: what each pair of unrolled pass `step` (from 0) sees of the passes up to its own."""
    start = jnp.arange(pairs)[:, None] - step  # the last pair with the target's feature
    column = jnp.arange(pairs)
    chain = [column == start + level for level in range(1, step + 1)]
    return jnp.concatenate([column <= start, *chain], axis=1)[None]


def _label_rows(tokens: Array, ends: FrozenEnds) -> Array:
    """i32[B, P]: the LM head's row for the token that pair j is to predict, t_{j+2}; -1 where it has none."""
    wanted = jnp.pad(tokens[:, 2:], ((0, 0), (0, 1)))
    if ends.vocabulary is None:
        return wanted
    row = jnp.minimum(jnp.searchsorted(ends.vocabulary, wanted), ends.vocabulary.shape[0] - 1)
    return jnp.where(ends.vocabulary[row] == wanted, row, -1)


def compute_graphdef(config: HeadConfig, dtype: layers.Dtype) -> nnx.GraphDef:
    """The structure of a head that computes in `dtype`, whatever its parameters are kept in."""
    return nnx.split(nnx.eval_shape(lambda: HeadModel(config, dtype=dtype, rngs=nnx.Rngs(0))))[0]


def metrics_of(sums: Sequence[losses.LossSums], config: TrainConfig) -> dict[str, Array]:
    """Means over unmasked pairs; a batch without any counts as 0.

    "loss" is over all passes; the other figures are the first pass's, and "top1_2", ... the later passes' accuracy.
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
        (config.regression_weight * one.regression + config.cross_entropy_weight * one.cross_entropy for one in sums),
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
def evaluate_step(head: nnx.State, ends: FrozenEnds, batch: Batch, *, graphdef: nnx.GraphDef) -> losses.LossSums:
    """Loss sums of a batch with features, without noise and not unrolled."""
    return head_sums(graphdef, head, ends, batch)[0]
