"""Decodes prompts plainly and with EAGLE-2 and compares: the ids, tokens a round (tau), and time.

    python decode/compare.py --prompts mt_bench.jsonl --limit 40 --max-new-tokens 96
    python decode/compare.py --prompts mt_bench.jsonl --limit 20 --temperature 1 --top-p 0.9 --seeds 0 1 2
    python decode/compare.py --prompts mt_bench.jsonl --limit 8 --speed --tree.nodes 8 --tree.depth 3 --tree.top-k 3

Prompts: one `{"turns": ["...", ...]}` a line (MT-bench's form); the first turn goes through the chat template. Every
difference is listed with plain decoding's gap between its two best of `logits + temperature * noise` there: rounding
differs between one token a forward and many, and only a gap below 2e-4 excuses a difference. Exits with 1 on any other.

--speed decodes each prompt alone, both ways in turn, after a run that compiles; prefill is left out. `tau / cost`, with
`cost` a round in plain steps (timed over a few rounds of each prompt), should agree with the measured ratio.
"""

import dataclasses
import json
import os
import platform
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from rich.progress import track

import eagle_jax as ej
from eagle_jax import generation, sampling
from eagle_jax.features import features_of
from eagle_jax.script import require, run

EXCUSED_GAP = 2e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    prompts: list[Path]
    limit: int = 20  # prompts taken from each file
    target: str = "smollm2-135m"
    head: str = "smollm2-135m"
    max_new_tokens: int = 96
    batch: int = 1  # prompts decoded together
    seeds: tuple[int, ...] = (0,)
    speed: bool = False  # time both, one prompt at a time
    output: Path | None = None  # JSON lines with the figures
    sampling: Annotated[ej.SamplingConfig, tyro.conf.arg(name="")] = ej.SamplingConfig()
    tree: ej.TreeConfig = ej.TreeConfig()

    def __post_init__(self):
        for name in ("limit", "batch"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be at least 1.")
        require(len(self.prompts) > 0 and len(self.seeds) > 0, "Give at least one file of prompts and one seed.")
        require(self.max_new_tokens > 1, f"max_new_tokens is {self.max_new_tokens}; a comparison needs at least 2.")


def read_prompts(path: Path, limit: int) -> list[list[dict[str, str]]]:
    chats = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if len(chats) == limit:
                break
            try:
                chats.append([{"role": "user", "content": str(json.loads(line)["turns"][0])}])
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ValueError(
                    f'{path}, line {number} is not of the form {{"turns": ["..."]}} ({error!r}).'
                ) from error
    return chats


def top_two_gap(target: ej.Target, ids: list[int], key: jax.Array, config: ej.SamplingConfig) -> float:
    """The gap between the two best of processed `logits + temperature * noise` for the token after `ids`."""
    features = features_of(*nnx.split(target.model), jnp.asarray([ids]))
    logits = target.model.logits(features[:, -1])
    values = sampling.perturbed(
        logits,
        sampling.params_for([config], target.config.vocab_size),
        sampling.processors_for([config]),
        key[None],
        jnp.asarray([len(ids)]),
        jnp.zeros(logits.shape, bool).at[0, jnp.asarray(ids)].set(True),
    )
    best = jnp.sort(values[0])[-2:]
    return float(best[1] - best[0])


class Lossless(NamedTuple):
    """Both ways on the same prompts."""

    rows: int
    tokens: int
    accepted: list[int]  # over all rounds
    gaps: list[float]  # plain's top-2 gap at each row's first difference
    positions: list[float]  # share of rounds in which the draft token at level 1, 2, ... was accepted


def compare_ids(options: Options, target: ej.Target, head: ej.Head, prompts: list[list[int]]) -> Lossless:
    """Decodes every prompt under every seed, plainly and with drafts."""
    shared: Any = {"max_new_tokens": options.max_new_tokens, "sampling": options.sampling}
    tokens, accepted, gaps = 0, [], []
    jobs = [(seed, i) for seed in options.seeds for i in range(0, len(prompts), options.batch)]
    for seed, begin in track(jobs, description="comparing"):
        group = prompts[begin : begin + options.batch]
        # A list of seeds: each row draws as if it were alone, whatever the batch.
        seeds = [seed] * len(group)
        plain = ej.generate(target, None, group, seed=seeds, **shared)
        drafted = ej.generate(target, head, group, seed=seeds, tree=options.tree, **shared)
        for prompt, one, other in zip(group, plain, drafted, strict=True):
            tokens += len(other.token_ids)
            accepted += other.accepted
            if one.token_ids != other.token_ids:
                pairs = zip(one.token_ids, other.token_ids, strict=False)
                first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
                key = sampling.row_keys([seed], 1)[0]
                before = [] if first is None else one.token_ids[:first]
                gaps.append(np.inf if first is None else top_two_gap(target, prompt + before, key, options.sampling))
                print(f"difference: {target.tokenizer.decode(prompt)[-60:]!r}, token {first}, gap {gaps[-1]:.1e}")
    positions = [float(np.mean(np.asarray(accepted) > level)) for level in range(options.tree.depth)]
    return Lossless(len(prompts) * len(options.seeds), tokens, accepted, gaps, positions)


class Speed(NamedTuple):
    """Seconds, compilation and prefill left out."""

    plain_token: float  # generate's, a token
    drafted_token: float
    plain_round: float  # run_rounds', a round
    drafted_round: float


ROUNDS_TIMED = 8


def compare_speed(options: Options, target: ej.Target, head: ej.Head, prompts: list[list[int]]) -> Speed:
    """Decodes each prompt to its end, plainly and with drafts in turn, and by itself a few rounds of each.

    The few rounds start anew from the prompt and run only as far as the text goes; they tell what a round costs apart
    from how many there are.
    """
    shared: Any = {"max_new_tokens": options.max_new_tokens, "sampling": options.sampling}
    whole, rounds = np.zeros(2), np.zeros(2)
    tokens, rounds_timed = np.zeros(2), np.zeros(2)
    for prompt in track(prompts, description="timing"):
        jobs = [generation.prepare(target, drafter, [prompt], tree=options.tree, **shared) for drafter in (None, head)]
        for job in jobs:
            jax.block_until_ready(job.run_rounds(job.start(), generation.UNBOUNDED))  # compiles
        for way, job in enumerate(jobs):
            for limit, total, count in ((generation.UNBOUNDED, whole, tokens), (ROUNDS_TIMED, rounds, rounds_timed)):
                state = jax.block_until_ready(job.start())
                started = time.perf_counter()
                state = jax.block_until_ready(job.run_rounds(state, limit))
                total[way] += time.perf_counter() - started
                # The first token is the prefill's.
                count[way] += int(state.emitted[0]) - 1 if limit == generation.UNBOUNDED else int(state.rounds[0])
    return Speed(*(whole / tokens), *(rounds / rounds_timed))


def main(options: Options) -> None:
    chats = [chat for path in options.prompts for chat in read_prompts(path, options.limit)]
    target = ej.load_target(options.target)
    head = ej.load_head(options.head, target)
    prompts = [generation.encode_prompt(target, chat) for chat in chats]

    drafter, _ = generation.bind(target, head, options.tree)
    found = compare_ids(options, target, head, prompts)
    tau = float(np.mean(found.accepted)) + 1
    record: dict[str, Any] = {
        "prompts": [f"{path.name}:{options.limit}" for path in options.prompts],
        "settings": dataclasses.asdict(options.sampling) | {"seeds": options.seeds},
        "tree": f"{options.tree.kind}, {drafter.nodes} nodes, depth {drafter.depth}, top_k {options.tree.top_k}",
        "max_new_tokens": options.max_new_tokens,
        "machine": f"{os.cpu_count()} {platform.machine()} cores, jax {jax.__version__} on {jax.default_backend()}",
        "dtype": str(target.dtype),
        "rows": found.rows,
        "tokens": found.tokens,
        "identical": found.rows - len(found.gaps),
        "gaps": found.gaps,
        "tau": round(tau, 3),
        "accepted_at_level": [round(share, 3) for share in found.positions],
    }
    if options.speed:
        speed = compare_speed(options, target, head, prompts)
        cost = speed.drafted_round / speed.plain_round
        record |= {
            "plain_tokens_per_second": round(1 / speed.plain_token, 2),
            "drafted_tokens_per_second": round(1 / speed.drafted_token, 2),
            "measured_ratio": round(speed.plain_token / speed.drafted_token, 3),
            "round_in_plain_steps": round(cost, 2),
            "tau_over_cost": round(tau / cost, 3),
        }
    print(json.dumps(record, indent=2))
    if options.output is not None:
        with open(options.output, "a") as file:
            file.write(json.dumps(record) + "\n")
    unexcused = [gap for gap in found.gaps if gap >= EXCUSED_GAP]
    if unexcused:
        raise RuntimeError(f"{len(unexcused)} of {found.rows} texts differ from plain decoding without excuse.")


if __name__ == "__main__":
    run(main, Options, __doc__)
