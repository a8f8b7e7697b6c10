"""Fitting beta, the sharpness of scores that are made with the target's noise (see `ranking.py`), to what it chose.

A node that the target comes to has K children, the best ones of the draft's ranking, and a score for each. The target
chooses one of them, or none; the scores say how likely each of these K + 1 outcomes is. Beta is the one under which
what happened is likeliest: so a score is the share of cases in which the target goes there, which is what EAGLE-2 grows
its trees by (section 3.2), and what temperature scaling does for a classifier (Guo et al. 2017, section 4.2).

The nodes are those of a target's own sampled texts, each token the start of one chain of D levels: the level-l features
are the head's own guesses, as in drafting, and a level counts where all those above it were among the K children.

R places of a text, P pairs, L levels, K children, G values of beta, E hidden size, V vocabulary, W draft vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from eagle_jax import generation, sampling
from eagle_jax.config import SamplingConfig, TreeConfig
from eagle_jax.head import FrozenEnds, Head
from eagle_jax.numerics import lm_logits, top_k
from eagle_jax.ranking import outcomes
from eagle_jax.target import Target, features_of

BETAS = tuple(np.geomspace(0.1, 10.0, 81).tolist())  # 6 % apart
LEAST = 1e-6  # probability granted to the target's choosing none of the children
PLACES = 32  # whose logits exist at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class BetaFit:
    """How likely each beta makes what the target chose."""

    betas: tuple[float, ...]
    log_likelihoods: tuple[float, ...]  # of each, the mean over nodes
    nodes: int
    hits: float  # share of nodes at which the choice was among the children

    @property
    def beta(self) -> float:
        return self.betas[int(np.argmax(self.log_likelihoods))]

    def at(self, beta: float) -> float:
        """The log-likelihood of the nearest beta."""
        return self.log_likelihoods[int(np.argmin(np.abs(np.log(self.betas) - np.log(beta))))]

    @property
    def at_end(self) -> bool:
        """Whether the best one is the first or the last, so that a better one may lie beyond."""
        return self.beta in (self.betas[0], self.betas[-1])


def fit_beta(
    target: Target,
    head: Head,
    prompts: Sequence[Sequence[int]],
    *,
    tree: TreeConfig = TreeConfig(),
    temperature: float = 1.0,
    betas: Sequence[float] = BETAS,
    seed: int = 0,
    max_new_tokens: int = 128,
    batch: int = 8,
) -> BetaFit:
    """Has the target write on from prompts, and fits beta to the nodes of its texts.

    Args:
      prompts: token ids.
      tree: how many children a node has (top_k) and how many levels there are (depth); its children are not drawn.
      temperature: of the texts, without filters; above 0.
      betas: those to choose from, ascending.
      seed: prompt i is drawn from as if alone under seed + i.
      max_new_tokens: for each prompt.
      batch: prompts at a time.

    Raises:
      ValueError: an option out of range, a prompt that cannot be decoded, or texts too short to hold a node.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; a ranking that knows the noise needs some, so it must be > 0.")
    if tree.children == "sampled":
        raise ValueError(
            "TreeConfig.children is 'sampled', whose texts owe nothing to the noise that beta is for; set it to 'best'."
        )
    config = SamplingConfig(temperature=temperature)
    total, nodes, hits = np.zeros(len(betas)), 0, 0
    for begin in range(0, len(prompts), batch):
        group = prompts[begin : begin + batch]
        seeds = [seed + begin + row for row in range(len(group))]
        done = generation.generate(
            target, head, group, max_new_tokens=max_new_tokens, sampling=config, tree=tree, seed=seeds
        )
        texts = [[*prompt, *row.token_ids] for prompt, row in zip(group, done, strict=True)]
        likely, hit, reached = nodes_of(
            target, head, texts, [len(prompt) for prompt in group], seeds, tree=tree, config=config, betas=betas
        )
        total += likely[reached].sum(axis=0)
        nodes += int(reached.sum())
        hits += int(hit[reached].sum())
    if not nodes:
        raise ValueError(f"The texts of {len(prompts)} prompts hold no node; give more prompts, or more new tokens.")
    return BetaFit(betas=tuple(betas), log_likelihoods=tuple((total / nodes).tolist()), nodes=nodes, hits=hits / nodes)


def nodes_of(
    target: Target,
    head: Head,
    texts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    seeds: Sequence[int],
    *,
    tree: TreeConfig,
    config: SamplingConfig,
    betas: Sequence[float],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For level l of the chain whose last pair is j: log-likelihoods, hits, and whether the target came there.

    Args:
      texts: prompts with what was drawn after them.
      prompt_lengths: of the texts.
      seeds: that each was drawn under, alone.

    Returns:
      f32[B, L, P, G], bool[B, L, P] and bool[B, L, P].
    """
    lengths, starts = np.asarray([len(text) for text in texts]), np.asarray(prompt_lengths)
    width = generation.length_bucket(int(lengths.max()))
    tokens = np.zeros((len(texts), width), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    came_with = np.maximum(np.arange(width) + 1, starts[:, None])  # a prompt came in whole, every later token by itself
    features = features_of(*nnx.split(target.model), jnp.asarray(tokens), jnp.asarray(came_with))
    graphdef, params = nnx.split(head.model)
    levels = _levels(params, head.ends, jnp.asarray(tokens), features, graphdef=graphdef, levels=tree.depth)

    # Pair j leads to token j + 2. A first root is the token after the prompt, whose pair is the prompt's last one.
    pair = np.arange(width - 1)
    there = (pair >= starts[:, None] - 1) & (pair + 2 < lengths[:, None])
    rows, pairs = np.nonzero(there)
    children = min(tree.top_k, head.ends.lm_head.shape[0])
    likely = np.zeros((len(texts), tree.depth, width - 1, len(betas)), np.float32)
    hit = np.zeros(likely.shape[:-1], bool)
    keys = sampling.row_keys(list(seeds), len(texts))
    drafted = head.ends.token_ids(jnp.arange(head.ends.lm_head.shape[0]))
    for begin in range(0, len(rows), PLACES):
        row, place = rows[begin : begin + PLACES], pairs[begin : begin + PLACES]
        pad = (0, PLACES - len(row))
        at, where = jnp.asarray(np.pad(row, pad)), jnp.asarray(np.pad(place, pad))
        found = likelihoods(
            lm_logits(levels[at, :, where], head.ends.lm_head),
            sampling.gumbel_noise(keys[at], where + 2, drafted),
            jnp.asarray(tokens)[at, where + 2],
            jnp.asarray(betas, jnp.float32),
            head.ends.vocabulary,
            config=config,
            children=children,
        )
        likely[row, :, place], hit[row, :, place] = (np.asarray(one)[: len(row)] for one in found)

    reached = np.zeros_like(hit)
    reached[:, 0] = there
    for level in range(1, tree.depth):
        # The node above ends at the pair before.
        reached[:, level, 1:] = (reached & hit)[:, level - 1, :-1] & there[:, 1:]
    return likely, hit, reached


@partial(jax.jit, static_argnames=("graphdef", "levels"))
def _levels(
    params: nnx.State, ends: FrozenEnds, tokens: Array, features: Array, *, graphdef: nnx.GraphDef, levels: int
) -> Array:
    """The head's features [B, L, P, E] of pairs that are the l-th of a chain."""
    model = nnx.merge(graphdef, params)
    read = tokens[:, 1:] if model.config.shifted else tokens[:, :-1]
    return jnp.stack([*model.unrolled(ends.embedding[read], features[:, :-1], levels)], axis=1)


@partial(jax.jit, static_argnames=("config", "children"))
def likelihoods(
    logits: Array,  # f32[R, L, W]
    noise: Array,  # f32[R, W]
    choice: Array,  # i32[R], the target's
    betas: Array,  # f32[G]
    vocabulary: Array | None,
    *,
    config: SamplingConfig,
    children: int,
) -> tuple[Array, Array]:
    """Log-likelihoods f32[R, L, G] of the choices, and whether they were among the children, bool[R, L]."""
    params = sampling.params_for([config] * logits.shape[0], logits.shape[-1])
    values = outcomes(logits, noise, params, sampling.processors_for([config]))
    best, index = top_k(values, children)  # [R, L, K]
    matches = (index if vocabulary is None else vocabulary[index]) == choice[:, None, None]
    hit = jnp.any(matches, axis=-1)
    # Summed by themselves: 1 - the children's share would be nothing but rounding where they have almost all.
    others = jnp.put_along_axis(values, index, -jnp.inf, axis=-1, inplace=False)

    def of(beta: Array) -> Array:
        whole = jax.nn.logsumexp(beta * values, axis=-1)
        chosen = jnp.sum(jnp.where(matches, beta * best, 0.0), axis=-1) - whole
        none = jax.nn.logsumexp(beta * others, axis=-1) - whole
        return jnp.where(hit, chosen, jnp.maximum(none, jnp.log(LEAST)))

    return jnp.moveaxis(jax.lax.map(of, betas), 0, -1), hit
