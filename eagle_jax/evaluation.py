"""What a head is worth: tau, acceptance along trees and chains, how far its confidence can be trusted, and accuracy.

n-alpha (EAGLE section 4.1) is the acceptance rate of a chain's draft token whose input holds n features that the head
predicted itself: of the places reached, the share accepted. A chain is drafted by the head's best token each and is
accepted by the target's choice, so that at temperature 0 it is the paper's; above 0 the paper draws the drafts, and
here the best token is that of the tree's ranking (`ranking.py`).

Confidence is a node's path probability by the head's own account. EAGLE-2 grows its trees by it because it is close to
the rate of acceptance (section 3.2); the bins show how close.

B batch rows, N nodes.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from eagle_jax import decoding, figures, generation, measure, training
from eagle_jax.config import SamplingConfig, TreeConfig
from eagle_jax.data import Row
from eagle_jax.head import Head
from eagle_jax.medusa import Medusa
from eagle_jax.pipeline import BatchConfig, Pipeline
from eagle_jax.target import Target, features_of
from eagle_jax.tree import NO_PARENT

CHAIN = TreeConfig(kind="chain", nodes=6, depth=5)  # five places: 0-alpha to 4-alpha
BINS = 10
Ids = Sequence[Sequence[int]]  # prompts


# --- While training ---------------------------------------------------------------------------------------------------


def live_tau(
    target: Target,
    head: Head | Medusa,
    head_state: nnx.State,
    prompts: Ids,
    tree: TreeConfig = TreeConfig(),
    *,
    max_new_tokens: int = 64,
) -> dict[str, float]:
    """Tau of parameters in training, by greedy decoding of held-out prompts, all in one batch.

    The parameters are an argument of the compiled loop: it is compiled for the first ones and serves the whole run. On
    a mesh of several processes all of them call this, with the same prompts, and all get the same figures.

    Args:
      target: the model the head drafts for.
      head: what the parameters are those of.
      head_state: the parameters; they are used in the target's dtype, as decoding would have them.
      prompts: token ids, always the same ones.
      tree: the shape of the draft tree.
      max_new_tokens: for each prompt.

    Returns:
      "tau", and "accepted_1", ...: the share of rounds that accepted so many draft tokens at least.
    """
    graphdef = training.compute_graphdef(head.config, target.dtype)
    model = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf.astype(target.dtype), head_state))
    trained = dataclasses.replace(head, model=model)
    accepted = measure.Decoding(target=target, drafter=trained, tree=tree, max_new_tokens=max_new_tokens)(
        prompts
    ).accepted
    depth = generation.bind(target, trained, tree)[0].depth
    shares = enumerate(figures.acceptance(accepted, depth), start=1)
    return {"tau": figures.tau(accepted)} | {f"accepted_{level}": share for level, share in shares}


# --- Rounds, watched --------------------------------------------------------------------------------------------------


class Rounds(NamedTuple):
    """What came of drafting; nodes are those of all trees, roots left out."""

    accepted: list[int]  # draft tokens, of each round
    confidence: np.ndarray  # f32[nodes], path probability
    taken: np.ndarray  # bool[nodes], whether the target went there


def watch_rounds(
    target: Target,
    drafter: Head | generation.BindsDrafter,
    prompts: Ids,
    *,
    tree: TreeConfig,
    sampling: SamplingConfig = SamplingConfig(),
    seed: int = 0,
    max_new_tokens: int = 128,
) -> Rounds:
    """Decodes prompts in one batch and keeps what became of every node. A row draws as if it were alone."""
    seeds = [seed] * len(prompts)
    job = generation.prepare(
        target, drafter, prompts, max_new_tokens=max_new_tokens, sampling=sampling, tree=tree, seed=seeds
    )
    state = job.start()
    accepted: list[int] = []
    confidence, taken = [np.zeros(0, np.float32)], [np.zeros(0, bool)]
    while (running := np.asarray(state.finish) == decoding.RUNNING).any():
        state, seen = decoding.watch_round(job.params, state, program=job.program)
        drafted, walked = jax.device_get(tuple(seen))
        for row in np.flatnonzero(running):
            count = int(walked.count[row])
            on_path = np.zeros(drafted.tokens.shape[1], bool)
            on_path[walked.path[row, 1:count]] = True
            nodes = drafted.parents[row] != NO_PARENT
            accepted.append(count - 1)
            confidence.append(np.exp(drafted.log_scores[row, nodes]))
            taken.append(on_path[nodes])
    return Rounds(accepted, np.concatenate(confidence), np.concatenate(taken))


def joined(parts: Sequence[Rounds]) -> Rounds:
    """The rounds of several batches as one."""
    return Rounds(
        [count for part in parts for count in part.accepted],
        np.concatenate([part.confidence for part in parts]),
        np.concatenate([part.taken for part in parts]),
    )


# --- Figures ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """n-alpha of a chain."""

    predicted: int  # n, features among the inputs that the head predicted
    reached: int  # rounds that got there
    accepted: int

    @property
    def alpha(self) -> float:
        return self.accepted / self.reached if self.reached else math.nan


def chain_acceptance(accepted: Sequence[int], places: int = CHAIN.depth) -> list[Place]:
    """0-alpha, 1-alpha, ... from the rounds of a chain that drafts so many tokens."""
    counts = np.asarray(accepted)
    return [
        Place(predicted=n, reached=int(np.sum(counts >= n)), accepted=int(np.sum(counts > n))) for n in range(places)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bin:
    """Nodes whose confidence lies in [low, high), or up to 1 in the last one."""

    low: float
    high: float
    nodes: int
    confidence: float  # mean; NaN where there are no nodes
    accepted: float  # share of nodes


def calibration(confidence: np.ndarray, taken: np.ndarray, bins: int = BINS) -> list[Bin]:
    """Confidence against acceptance, in bins of equal width."""
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    found = []
    for index in range(bins):
        inside = place == index
        nodes = int(inside.sum())
        found.append(
            Bin(
                low=index / bins,
                high=(index + 1) / bins,
                nodes=nodes,
                confidence=float(confidence[inside].mean()) if nodes else math.nan,
                accepted=float(taken[inside].mean()) if nodes else math.nan,
            )
        )
    return found


def calibration_error(bins: Sequence[Bin]) -> float:
    """ECE: how far confidence and acceptance lie apart, averaged over nodes (Guo et al. 2017, section 2)."""
    nodes = sum(one.nodes for one in bins)
    if not nodes:
        return math.nan
    return sum(one.nodes * abs(one.confidence - one.accepted) for one in bins if one.nodes) / nodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One head on one set of prompts at one temperature; NaN where there is nothing to divide by."""

    prompts: int
    rounds: int  # with trees
    tau: float
    accepted_at_level: list[float]  # share of rounds with at least 1, 2, ... accepted draft tokens
    accepted_given_previous: list[float]  # the same as a share of the level before
    chain_tau: float
    chain: list[Place]
    calibration: list[Bin]
    calibration_error: float


def evaluate(
    target: Target,
    drafter: Head | generation.BindsDrafter,
    prompts: Ids,
    *,
    tree: TreeConfig = TreeConfig(),
    sampling: SamplingConfig = SamplingConfig(),
    seed: int = 0,
    max_new_tokens: int = 128,
    batch: int = 8,
) -> Evaluation:
    """Decodes prompts, `batch` at a time, once with trees and once with chains; everything but accuracy on rows."""
    options: dict[str, Any] = {"sampling": sampling, "seed": seed, "max_new_tokens": max_new_tokens}
    groups = [prompts[begin : begin + batch] for begin in range(0, len(prompts), batch)]
    grown = joined([watch_rounds(target, drafter, group, tree=tree, **options) for group in groups])
    chain = dataclasses.replace(CHAIN, common_random_numbers=tree.common_random_numbers)
    chains = joined([watch_rounds(target, drafter, group, tree=chain, **options) for group in groups])
    shares = figures.acceptance(grown.accepted, max(grown.accepted, default=0))
    bins = calibration(grown.confidence, grown.taken)
    return Evaluation(
        prompts=len(prompts),
        rounds=len(grown.accepted),
        tau=figures.tau(grown.accepted),
        accepted_at_level=shares,
        accepted_given_previous=[share / before for before, share in zip([1.0, *shares], shares, strict=False)],
        chain_tau=figures.tau(chains.accepted),
        chain=chain_acceptance(chains.accepted, generation.bind(target, drafter, CHAIN)[0].depth),
        calibration=bins,
        calibration_error=calibration_error(bins),
    )


# --- Accuracy on rows -------------------------------------------------------------------------------------------------


def accuracy(
    target: Target, head: Head | Medusa, rows: Sequence[Row], *, tokens_per_batch: int = 2048
) -> dict[str, float]:
    """How often the head's best token, and one of its three best, is the target's: "top1", "top3" and "pairs".

    Of Medusa these are the first head's, and "top1_2", ... the later ones' accuracy.
    """
    graphdef, params = nnx.split(head.model)
    of_target = nnx.split(target.model)
    pipeline = Pipeline(rows, BatchConfig(tokens_per_batch=tokens_per_batch))
    parts = []
    # Without threads: reading ahead takes grain, which only training is worth.
    for batch in pipeline.batches(0, pipeline.order.steps_per_epoch, threads=0):
        batch = batch._replace(features=features_of(*of_target, batch.tokens))
        parts.append(training.evaluate_step(params, head.ends, batch, graphdef=graphdef))
    first, *later = jax.tree.map(lambda *sums: float(sum(sums)), *parts)
    share = lambda hits, count: hits / count if count else math.nan  # noqa: E731
    found = {"top1": share(first.top1, first.count), "top3": share(first.top3, first.count), "pairs": first.count}
    return found | {f"top1_{place}": share(one.top1, one.count) for place, one in enumerate(later, start=2)}
