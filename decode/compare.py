"""Decodes prompts plainly and with EAGLE-2 and compares: the ids, tokens a round (tau), and time.

    python decode/compare.py --prompts mt_bench.jsonl --limit 40 --max-new-tokens 96
    python decode/compare.py --prompts mt_bench.jsonl --limit 20 --temperature 1 --top-p 0.9 --seeds 0 1 2
    python decode/compare.py --prompts mt_bench.jsonl --limit 8 --speed --tree.nodes 8 --tree.depth 3 --tree.top-k 3

Prompts: one `{"turns": ["...", ...]}` a line (MT-bench's form); the first turn goes through the chat template, or is
plain text with --raw, for targets without one. Every difference is listed with plain decoding's gap between its two
best of `logits + temperature * noise` there: rounding differs between one token a forward and many, and only a gap
below it (2e-4 in float32, 2 units in the last place in bfloat16) excuses a difference. Exits with 1 on any other.

--speed decodes each prompt alone, both ways in turn, after a run that compiles; prefill is left out. `tau / cost`, with
`cost` a round in plain steps (timed over a few rounds of each prompt), should agree with the measured ratio.
"""

import dataclasses
import json
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro
from rich.progress import track

import eagle_jax as ej
from eagle_jax import figures, measure
from eagle_jax.data import read_questions
from eagle_jax.script import require, run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    prompts: list[Path]
    limit: int = 20  # prompts taken from each file
    raw: bool = False  # decode prompts as plain text, without the chat template
    target: str = "smollm2-135m"
    head: str = "smollm2-135m"
    dtype: Literal["float32", "bfloat16"] | None = None  # default: bfloat16 on accelerators, float32 on a CPU
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
        require(
            self.tree.children == "best" or self.sampling.temperature == 0,
            f"temperature is {self.sampling.temperature} and tree.children 'sampled', which keeps a text's law but not "
            f"its tokens; compare at temperature 0, or with tree.children 'best'.",
        )


def ways_for(options: Options, target: ej.Target, head: ej.Head | ej.Medusa, seed: int) -> dict[str, measure.Decoding]:
    shared: dict[str, Any] = {"target": target, "sampling": options.sampling, "seed": seed}
    shared |= {"max_new_tokens": options.max_new_tokens, "tree": options.tree}
    return {"plain": measure.Decoding(drafter=None, **shared), "drafted": measure.Decoding(drafter=head, **shared)}


class Lossless(NamedTuple):
    """Both ways on the same prompts."""

    rows: int
    tokens: int
    accepted: list[int]  # over all rounds
    differences: list[measure.Difference]


def compare_ids(options: Options, target: ej.Target, head: ej.Head | ej.Medusa, prompts: list[list[int]]) -> Lossless:
    """Decodes every prompt under every seed, plainly and with drafts."""
    tokens, accepted, differences = 0, [], []
    jobs = [(seed, i) for seed in options.seeds for i in range(0, len(prompts), options.batch)]
    for seed, begin in track(jobs, description="comparing"):
        group = prompts[begin : begin + options.batch]
        plain, drafted = (way(group) for way in ways_for(options, target, head, seed).values())
        tokens += drafted.tokens
        accepted += drafted.accepted
        for one in measure.differences(target, group, plain, drafted, seed=seed, sampling=options.sampling):
            differences.append(one)
            end = target.tokenizer.decode(group[one.row])[-60:]
            print(f"difference: {end!r}, token {one.place}, gap {one.gap:.1e}")
    return Lossless(len(prompts) * len(options.seeds), tokens, accepted, differences)


ROUNDS_TIMED = 8


def compare_speed(
    options: Options, target: ej.Target, head: ej.Head | ej.Medusa, prompts: list[list[int]]
) -> dict[str, float]:
    """Decodes each prompt to its end, plainly and with drafts in turn, and by itself a few rounds of each.

    The few rounds start anew from the prompt and run only as far as the text goes; they tell what a round costs apart
    from how many there are.
    """
    ways = ways_for(options, target, head, options.seeds[0])
    samples: list[measure.Sample] = []
    warm: set[Hashable] = set()
    rounds = np.zeros((2, 2))  # seconds and count of each way's
    for group, prompt in enumerate(track(prompts, description="timing")):
        # The ids have been compared.
        samples += measure.take_turns(ways, [prompt], group=group, warm=warm, judge=lambda *_: [])
        rounds += [measure.time_rounds(way, prompt, ROUNDS_TIMED) for way in ways.values()]
    of_plain = [sample for sample in samples if sample.way == "plain"]
    plain = figures.figures(of_plain, of_plain)
    drafted = figures.figures([sample for sample in samples if sample.way == "drafted"], of_plain)
    per_round = rounds[:, 0] / rounds[:, 1]
    return {
        "plain_tokens_per_second": round(plain.tokens_per_second, 2),
        "drafted_tokens_per_second": round(drafted.tokens_per_second, 2),
        "measured_ratio": round(drafted.ratio, 3),
        "round_in_plain_steps": round(per_round[1] / per_round[0], 2),
        "tau_over_cost": round(drafted.tau / (per_round[1] / per_round[0]), 3),
    }


def main(options: Options) -> None:
    questions = [(path, read_questions(path, options.limit)) for path in options.prompts]
    target = ej.load_target(options.target, dtype=options.dtype)
    prompts = [ids for path, some in questions for ids in measure.encode_questions(target, path, some, options.raw)]
    head = ej.load_head(options.head, target)

    found = compare_ids(options, target, head, prompts)
    record: dict[str, Any] = {
        "prompts": [f"{path.name}:{options.limit}" for path in options.prompts],
        "settings": dataclasses.asdict(options.sampling) | {"seeds": options.seeds, "raw": options.raw},
        "tree": ways_for(options, target, head, 0)["drafted"].drafting,
        "max_new_tokens": options.max_new_tokens,
        "machine": measure.machine(),
        "dtype": str(target.dtype),
        "rows": found.rows,
        "tokens": found.tokens,
        "identical": found.rows - len(found.differences),
        "gaps": [one.gap for one in found.differences],
        "tau": round(figures.tau(found.accepted), 3),
        "accepted_at_level": [round(share, 3) for share in figures.acceptance(found.accepted, options.tree.depth)],
    }
    if options.speed:
        record |= compare_speed(options, target, head, prompts)
    print(json.dumps(record, indent=2))
    if options.output is not None:
        with open(options.output, "a") as file:
            file.write(json.dumps(record) + "\n")
    unexcused = [one for one in found.differences if not one.excused]
    if unexcused:
        raise RuntimeError(f"{len(unexcused)} of {found.rows} texts differ from plain decoding without excuse.")


if __name__ == "__main__":
    run(main, Options, __doc__)
