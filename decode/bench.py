"""Measures decoding methods on files of prompts: tau, acceptance by position, tokens/s and their ratio to plain.

    python decode/bench.py --prompts mt_bench.jsonl humaneval.jsonl --limit 20 --methods dynamic static chain
    python decode/bench.py --prompts mt_bench.jsonl --temperatures 0 1 --tree.nodes 8 --tree.depth 3 --tree.top-k 3
    python decode/bench.py --prompts mt_bench.jsonl --methods dynamic "dynamic plain ranking" --temperatures 0 1
    python decode/bench.py --prompts mt_bench.jsonl --peer transformers --output runs/bench    # JSON, CSV, PNG

Prompts: one `{"turns": ["...", ...]}` a line (MT-bench's form); the first turn goes through the chat template, or is
plain text with --raw, for targets without one. Each prompt is decoded plainly and by every method in turn, all in one
process and from the same ids. Tokens/s counts what comes after the prefill's token; prefill and compilation have
columns of their own. The 95 % interval of a ratio comes from resampling the prompts. "19/20 (1)" under "same text": 19
texts are plain decoding's, each in all repeats, and 1 differs only where its two best values lie closer than rounding
(2e-4 in float32, 2 units in the last place in bfloat16). "0.58/0.27" under "accepted 2": 0.58 of all rounds accepted at
least 2 draft tokens, and 0.27 of those that accepted at least 1.

What a round takes is timed apart, over --rounds-timed rounds of each group of prompts after its first two, in
milliseconds (medians): to draft and to verify, which the decoding loop does in one program, and the draft model's own
forwards alone. "1.11" under "draft / forwards": choosing tokens and making a tree of them adds 11 % to what the draft
model takes. Texts of one or two rounds have none to time.

Methods: dynamic (EAGLE-2), static (EAGLE-1) and chain draft with the head, "dynamic plain ranking" without common
random numbers; eagle-1-sampled draws the static tree's tokens at random, as EAGLE-1 was published; speculative is
standard speculative sampling, a chain drawn from --draft-model; first-layers draws one from the target's own
--first-layers. At temperature 0 what is drawn is the best; above it, texts with drawn children have plain decoding's
law, not its tokens, so that "same text" stays empty. medusa drafts with the heads in --medusa, over Medusa's default
tree or --tree.choices. lookup (in the text itself), rest (in a --datastore) and lookahead have no head; what
--lookahead says decides lookahead's tree, not --tree.

--peer transformers runs `generate` of transformers in PyTorch as well, plain and with prompt look-up, with the same
weights, ids and number of threads. Its waiting threads sleep (OMP_WAIT_POLICY=PASSIVE) unless the environment says
otherwise: spinning ones are slow on cores that others use.

--output keeps `bench.json` up to date after every group of prompts, so that Ctrl-C loses no more than one.
"""

import dataclasses
import sys
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from rich.console import Console
from rich.progress import track

import eagle_jax as ej
from eagle_jax import generation, measure, peers, report, round_times
from eagle_jax.data import read_questions
from eagle_jax.script import Paths, require, run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What a method leaves open of its trees; see `TreeConfig`."""

    nodes: int = ej.TreeConfig.nodes
    depth: int = ej.TreeConfig.depth
    top_k: int = ej.TreeConfig.top_k
    choices: Paths | None = ej.TreeConfig.choices  # of static trees
    common_random_numbers: bool = ej.TreeConfig.common_random_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    prompts: list[Path]
    limit: int = 20  # prompts taken from each file
    raw: bool = False  # decode prompts as plain text, without the chat template
    methods: tuple[str, ...] = ("dynamic",)  # besides plain; a name that is not known lists all that are
    peer: Literal["transformers"] | None = None
    target: str = "smollm2-135m"
    head: str = "smollm2-135m"
    draft_model: str | None = None  # a smaller model with the target's vocabulary, for speculative
    first_layers: int = 4  # of the target's, for first-layers
    medusa: str | None = None  # a directory of trained Medusa heads, for the method medusa
    dtype: Literal["float32", "bfloat16"] | None = None  # default: bfloat16 on accelerators, float32 on a CPU
    max_new_tokens: int = 96
    batch: int = 1  # prompts decoded together
    repeats: int = 1  # timed decodings of each prompt
    rounds_timed: int = 8  # of each group of prompts, drafting and verification apart; 0 = none
    seed: int = 0
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int = 0  # this and the next three: processors of the target's logits, off unless given
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    tree: Shape = Shape()
    lookup: ej.PromptLookup = ej.PromptLookup()
    lookahead: ej.Lookahead = ej.Lookahead()
    datastore: Path | None = None  # for rest; train/build_datastore.py makes one
    output: Path | None = None  # directory for bench.json, bench.csv and bench.png

    def __post_init__(self):
        for name in ("limit", "batch", "repeats"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be at least 1.")
        require(self.rounds_timed >= 0, f"rounds_timed is {self.rounds_timed}; it must be 0 or more.")
        require(len(self.prompts) > 0 and len(self.temperatures) > 0, "Give at least one file and one temperature.")
        for path in self.prompts:
            require(path.is_file(), f"There is no file of prompts {str(path)!r}.")
        names = [path.name for path in self.prompts]
        require(len(set(names)) == len(names), f"Two files of prompts have one name, among {', '.join(names)}.")
        for name in self.methods:
            require(name in METHODS, f"There is no method {name!r}; known methods: {', '.join(METHODS)}.")
        require(
            self.draft_model is not None or "speculative" not in self.methods,
            "The method speculative needs a smaller model with the target's vocabulary; name it with --draft-model.",
        )
        require(
            "rest" not in self.methods or self.datastore is not None,
            "The method rest needs a datastore; give its directory with --datastore.",
        )
        require(
            "medusa" not in self.methods or self.medusa is not None,
            "The method medusa needs trained heads; give their directory with --medusa.",
        )
        require(self.max_new_tokens > 1, f"max_new_tokens is {self.max_new_tokens}; a speed needs at least 2.")
        require(self.peer is None or self.batch == 1, f"batch is {self.batch}; a peer decodes 1 prompt at a time.")
        kept = self.output and self.output / "bench.json"
        require(not kept or not kept.exists(), f"{kept} is there already; give another directory.")
        if self.peer is not None:
            peers.require_torch()
        self.samplings()  # refuses what makes no sense
        trees = [tree_for(self.tree, METHODS[name]) for name in self.methods]
        require(
            self.tree.choices is None or any(tree.kind == "static" for tree in trees),
            f"tree.choices shape static trees, but none of {', '.join(self.methods)} drafts one; leave them out.",
        )

    def samplings(self) -> list[ej.SamplingConfig]:
        shared = {name: getattr(self, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")}
        return [ej.SamplingConfig(temperature=temperature, **shared) for temperature in self.temperatures]


class Method(NamedTuple):
    """A way to draft: what loads the drafter, and what of its tree is the method's."""

    load: Callable[[ej.Target, Options], ej.Head | generation.BindsDrafter]
    kind: str
    children: str = "best"
    common_random_numbers: bool = True


def load_head(target: ej.Target, options: Options) -> ej.Head | ej.Medusa:
    return ej.load_head(options.head, target)


def load_draft_model(target: ej.Target, options: Options) -> ej.DraftModel:
    assert options.draft_model is not None
    return ej.DraftModel(ej.load_target(options.draft_model, dtype=target.dtype))


def load_first_layers(target: ej.Target, options: Options) -> ej.DraftModel:
    return ej.DraftModel.first_layers(target, options.first_layers)


def load_rest(target: ej.Target, options: Options) -> ej.Rest:
    assert options.datastore is not None
    return ej.Rest(store=ej.load_datastore(options.datastore, target))


def load_medusa(target: ej.Target, options: Options) -> ej.Medusa:
    assert options.medusa is not None
    return ej.load_medusa(options.medusa, target)


METHODS = {
    "dynamic": Method(load_head, "dynamic"),
    "dynamic plain ranking": Method(load_head, "dynamic", common_random_numbers=False),
    "static": Method(load_head, "static"),
    "chain": Method(load_head, "chain"),
    "eagle-1-sampled": Method(load_head, "static", "sampled"),
    "speculative": Method(load_draft_model, "chain", "sampled"),
    "first-layers": Method(load_first_layers, "chain", "sampled"),
    "lookup": Method(lambda _, options: options.lookup, "dynamic"),
    "lookahead": Method(lambda _, options: options.lookahead, "dynamic"),
    "rest": Method(load_rest, "dynamic"),
    "medusa": Method(load_medusa, "static"),
}


def ways_for(options: Options, target: ej.Target) -> list[tuple[ej.SamplingConfig, dict[str, measure.Way]]]:
    """For each temperature, plain decoding, the methods and the peers by name."""
    trees = {name: tree_for(options.tree, METHODS[name]) for name in options.methods}
    drafters = {load: load(target, options) for load in {METHODS[name].load for name in options.methods}}
    model = peers.torch_model(target) if options.peer else None
    settings: dict[str, Any] = {"target": target, "seed": options.seed, "max_new_tokens": options.max_new_tokens}
    found = []
    for sampling in options.samplings():
        shared: dict[str, Any] = settings | {"sampling": sampling}
        ways: dict[str, measure.Way] = {"plain": measure.Decoding(drafter=None, **shared)}
        for name in options.methods:
            same_text = trees[name].children == "best" or sampling.temperature == 0
            drafter = drafters[METHODS[name].load]
            ways[name] = measure.Decoding(drafter=drafter, tree=trees[name], same_text=same_text, **shared)
        if model is not None:
            ways["transformers"] = peers.TransformersDecoding(model=model, **shared)
            ways["prompt lookup"] = peers.TransformersDecoding(model=model, lookup=True, **shared)
        found.append((sampling, ways))
    return found


def tree_for(shape: Shape, method: Method) -> ej.TreeConfig:
    own = {
        "kind": method.kind,
        "children": method.children,
        "choices": shape.choices if method.kind == "static" else None,
        "common_random_numbers": shape.common_random_numbers and method.common_random_numbers,
    }
    return ej.TreeConfig(**vars(shape) | own)


def about(options: Options, target: ej.Target) -> dict[str, Any]:
    """What every figure was measured with."""
    names = ("target", "head", "limit", "raw", "seed", "top_k", "top_p", "min_p", "repetition_penalty")
    fields = {name: getattr(options, name) for name in (*names, "max_new_tokens", "batch", "repeats", "rounds_timed")}
    own = {"speculative": "draft_model", "first-layers": "first_layers"}
    fields |= {name: getattr(options, name) for method, name in own.items() if method in options.methods}
    used = {
        "medusa": options.medusa,
        "lookup": options.lookup,
        "lookahead": options.lookahead,
        "rest": options.datastore,
    }
    fields |= {name: str(value) for name, value in used.items() if name in options.methods}
    fields |= {"tree": str(options.tree), "dtype": str(target.dtype), "machine": measure.machine()}
    return fields | ({"peer": peers.about()} if options.peer else {})


def main(options: Options) -> None:
    questions = {path: read_questions(path, options.limit) for path in options.prompts}
    target = ej.load_target(options.target, dtype=options.dtype)
    prompts = {path.name: measure.encode_questions(target, path, some, options.raw) for path, some in questions.items()}
    found = ways_for(options, target)
    jobs = [
        (file, sampling, ways, begin)
        for file in prompts
        for sampling, ways in found
        for begin in range(0, len(prompts[file]), options.batch)
    ]
    drafting = {name: way.drafting for name, way in found[0][1].items()}
    settings, console = about(options, target), Console()
    console.print(", ".join(f"{name} {value}" for name, value in settings.items()), highlight=False, markup=False)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)

    samples: report.Samples = {}
    rounds: report.Rounds = {}
    warm: set[Hashable] = set()
    complete = False

    def everything() -> dict[str, Any]:
        return report.record(settings, samples, drafting, rounds, complete)

    try:
        for file, sampling, ways, begin in track(jobs, "measuring", console=console):
            if measure.crowded():
                jax.clear_caches()
                warm.clear()
            group = prompts[file][begin : begin + options.batch]
            samples.setdefault((file, sampling.temperature), []).extend(
                measure.take_turns(
                    ways,
                    group,
                    group=begin // options.batch,
                    warm=warm,
                    judge=partial(measure.differences, target, seed=options.seed, sampling=sampling),
                    repeats=options.repeats,
                )
            )
            for name, way in ways.items():
                if options.rounds_timed and isinstance(way, measure.Decoding):
                    times = round_times.time_parts(way, group, options.rounds_timed)
                    rounds.setdefault((file, sampling.temperature, name), []).append(times)
            if options.output is not None:
                report.write_json(options.output / "bench.json", everything())
        complete = True
    except KeyboardInterrupt:
        console.print("Interrupted; what follows is of the prompts so far.")
    rows = report.rows(samples, drafting, rounds)
    for table in report.tables(rows):
        console.print(table)
        console.print()
    if options.output is not None and rows:
        report.write_json(options.output / "bench.json", everything())
        report.write_csv(options.output / "bench.csv", rows, settings)
        try:
            report.plot(options.output / "bench.png", rows)
        except RuntimeError as error:  # no matplotlib; the figures are there all the same
            console.print(str(error), markup=False)
    if not complete:
        sys.exit(130)


if __name__ == "__main__":
    run(main, Options, __doc__)
