"""Evaluates a head: tau, acceptance by position, chain acceptance n-alpha, calibration, and accuracy on unseen rows.

    python train/evaluate.py --head runs/head --prompts mt_bench.jsonl humaneval.jsonl --limit 20
    python train/evaluate.py --head runs/head --prompts mt_bench.jsonl --data unseen.jsonl --output runs/head/eval.json

Any head that decodes: an embedded one, a hub id, or the output directory of a training run, while it runs too. Prompts:
one `{"turns": ["...", ...]}` a line (MT-bench's form), of which the first turn is asked. "0.58/0.27" under "accepted
2": 0.58 of all rounds accepted at least 2 draft tokens, and 0.27 of those that accepted at least 1. "n-alpha": of the
chain's draft tokens with n features of the head's own making before them, the share that was accepted. Calibration: a
drafted node's path probability against how often such nodes were accepted, and the mean distance of the two.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

import eagle_jax as ej
from eagle_jax import data, evaluation, measure, report
from eagle_jax.script import require, run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    head: str
    prompts: list[Path]
    data: Path | None = None  # conversations in JSONL, unseen in training: top-1 and top-3 accuracy
    target: str = "smollm2-135m"
    dtype: Literal["float32", "bfloat16"] | None = None  # default: bfloat16 on accelerators, float32 on a CPU
    limit: int = 20  # prompts taken from each file
    raw: bool = False  # decode prompts as plain text, without the chat template
    max_new_tokens: int = 96
    max_length: int = 512  # tokens a conversation is cut at
    batch: int = 8  # prompts decoded together
    temperatures: tuple[float, ...] = (0.0, 1.0)
    seed: int = 0
    tree: ej.TreeConfig = ej.TreeConfig()
    output: Path | None = None  # a file for the figures, in JSON

    def __post_init__(self):
        for name in ("limit", "max_new_tokens", "max_length", "batch"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be at least 1.")
        require(len(self.prompts) > 0 and len(self.temperatures) > 0, "Give at least one file and one temperature.")
        for path in self.prompts if self.data is None else [*self.prompts, self.data]:
            require(path.is_file(), f"There is no file {str(path)!r}.")
        require(self.tree.nodes > 1, "tree.nodes is 1, which drafts nothing; give at least 2.")
        require(not self.output or not self.output.exists(), f"{self.output} is there already; give another file.")
        self.samplings()  # refuses what makes no sense

    def samplings(self) -> list[ej.SamplingConfig]:
        return [ej.SamplingConfig(temperature=temperature) for temperature in self.temperatures]


def main(options: Options) -> None:
    questions = {path: data.read_questions(path, options.limit) for path in options.prompts}
    conversations = None if options.data is None else data.read_conversations(options.data)
    target = ej.load_target(options.target, dtype=options.dtype)
    head = ej.load_head(options.head, target)
    prompts = {path: measure.encode_questions(target, path, some, options.raw) for path, some in questions.items()}
    console = Console()
    settings = dataclasses.asdict(options) | {"dtype": str(target.dtype), "machine": measure.machine()}
    found: dict[str, Any] = {"settings": settings, "files": []}
    for path, ids in prompts.items():
        for sampling in options.samplings():
            figures = evaluation.evaluate(
                target,
                head,
                ids,
                tree=options.tree,
                sampling=sampling,
                seed=options.seed,
                max_new_tokens=options.max_new_tokens,
                batch=options.batch,
            )
            for table in report.evaluation_tables(f"{path.name}, temperature {sampling.temperature:g}", figures):
                console.print(table)
                console.print()
            labels = {"file": str(path), "temperature": sampling.temperature}
            found["files"].append(labels | report.evaluation_record(figures))
    if conversations is not None:
        rows = data.encode_all(target.tokenizer, conversations, options.max_length).rows
        found["accuracy"] = evaluation.accuracy(target, head, rows)
        console.print(report.accuracy_line(str(options.data), found["accuracy"]), markup=False, highlight=False)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        report.write_json(options.output, found)


if __name__ == "__main__":
    run(main, Options, __doc__)
