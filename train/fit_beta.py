"""Fits how far a head's scores may be trusted above temperature 0, and keeps it with the head.

    python train/fit_beta.py --head runs/head --prompts mt_bench.jsonl --limit 20
    python train/fit_beta.py --head smollm2-135m --prompts mt_bench.jsonl --dry-run

Above temperature 0 a draft's children are ranked with the noise that the target's tokens are drawn with; beta weighs
paths against each other (eagle_jax/ranking.py). The target writes on from the prompts, and beta is the value under
which its choices are likeliest. It goes into the head's config.json as `ranking_beta`; the weights stay as they are. A
head that is close to its target has a large beta, one that is not a small one. Takes about as long as decoding the
prompts does, and half as long again. Fit it when training is over: what a run saves later is a head without it.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from rich.console import Console

import eagle_jax as ej
from eagle_jax import checkpoint, data, measure, ranking_fit
from eagle_jax.script import require, run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    head: str  # a directory; with --dry-run also an embedded head or a hub id
    prompts: list[Path]  # one {"turns": ["...", ...]} a line; the first turn is asked
    target: str = "smollm2-135m"
    dtype: Literal["float32", "bfloat16"] | None = None  # default: bfloat16 on accelerators, float32 on a CPU
    limit: int = 20  # prompts taken from each file
    raw: bool = False  # decode prompts as plain text, without the chat template
    max_new_tokens: int = 96
    batch: int = 8  # prompts decoded together
    temperature: float = 1.0
    seed: int = 0
    tree: ej.TreeConfig = ej.TreeConfig()  # children of a node (top_k) and levels (depth)
    dry_run: bool = False  # only show what fits

    def __post_init__(self):
        for name in ("limit", "max_new_tokens", "batch"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be at least 1.")
        require(len(self.prompts) > 0, "Give at least one file of prompts.")
        for path in self.prompts:
            require(path.is_file(), f"There is no file {str(path)!r}.")
        require(0 < self.temperature < float("inf"), f"temperature is {self.temperature}; it must be positive.")
        require(
            self.dry_run or Path(self.head).is_dir(),
            f"There is no directory {self.head!r} to keep beta in; give a head's directory, or add --dry-run.",
        )


def main(options: Options) -> None:
    questions = {path: data.read_questions(path, options.limit) for path in options.prompts}
    target = ej.load_target(options.target, dtype=options.dtype)
    # As a path, so that no embedded head of the same name comes in its place.
    head = ej.load_head(options.head if options.dry_run else Path(options.head).absolute(), target)
    if not isinstance(head, ej.Head):
        raise ValueError(
            f"{options.head} holds Medusa's heads, which have no beta; give the directory of an EAGLE head."
        )
    prompts = [
        ids for path, some in questions.items() for ids in measure.encode_questions(target, path, some, options.raw)
    ]
    names = ("tree", "temperature", "seed", "max_new_tokens", "batch")
    found = ranking_fit.fit_beta(target, head, prompts, **{name: getattr(options, name) for name in names})
    console = Console(highlight=False)
    best, before = max(found.log_likelihoods), head.config.ranking_beta
    console.print(
        f"beta {found.beta:.3g} (it was {before:.3g}): log-likelihood {best:.3f} a node, "
        f"{found.at(1.0):.3f} at 1; {found.nodes} nodes, "
        f"{found.hits:.1%} of them with the target's choice among {options.tree.top_k} children"
    )
    if found.at_end:
        console.print("It is the end of the range; the head is far better or worse than usual, or the texts are few.")
    if not options.dry_run:
        checkpoint.save_beta(options.head, found.beta)
        console.print(f"written to {Path(options.head) / 'config.json'}", markup=False)


if __name__ == "__main__":
    run(main, Options, __doc__)
