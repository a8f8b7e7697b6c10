"""Times the training step against the same step in PyTorch, eager, and compares their peak memory.

    python train/bench_step.py --widths 576 1024        # pip install ".[train,peers]"

One head of each width (a Llama layer behind `fc`), random weights, float32 on a CPU, the same batch and the same number
of threads; tests hold the two steps to equal losses and parameters. Steps are timed in turn in one process, after a
first one that compiles. Memory is that of a process that takes only one side's steps: its peak with libraries, weights
and compilation, and how far that lies above what it held before its first step, which makes the optimizer's moments.
"""

import dataclasses
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

import eagle_jax as ej
from eagle_jax import measure, training
from eagle_jax.head import FrozenEnds, HeadModel, config_for
from eagle_jax.peer_training import TorchTraining
from eagle_jax.script import require, run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    widths: tuple[int, ...] = (576, 1024)
    vocab_size: int = 49152
    rows: int = 4
    length: int = 512  # tokens a row
    steps: int = 5  # timed, of each side
    only: Literal["eagle_jax", "torch"] | None = None  # takes that side's steps alone and prints its memory
    output: Path | None = None  # JSON

    def __post_init__(self):
        for name in ("vocab_size", "rows", "length", "steps"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be at least 1.")
        for width in self.widths:
            require(width > 0 and width % 64 == 0, f"A width is {width}; it must be a multiple of 64.")


RECIPE = training.TrainConfig(noise=0.0, final_learning_rate=1.0, learning_rate=1e-4)
Step = Callable[[], float]


def problem(options: Options, width: int) -> tuple[ej.Head, training.Batch]:
    """A head and a batch for it."""
    config = ej.ModelConfig(
        vocab_size=options.vocab_size,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=1,
        num_attention_heads=width // 64,
    )
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32))

    # The target's ends are all of it that a step needs.
    embedding, lm_head = (0.02 * normal(options.vocab_size, width) for _ in range(2))
    ends = FrozenEnds(embedding, lm_head, None)
    own = config_for(config)
    head = ej.Head(config=own, model=HeadModel(own, rngs=nnx.Rngs(0)), ends=ends)
    shape = options.rows, options.length
    tokens = jnp.asarray(random.integers(0, options.vocab_size, shape, np.int32))
    return head, training.Batch(tokens, jnp.ones(shape, bool), normal(*shape, width))


def jax_step(head: ej.Head, batch: training.Batch) -> Step:
    graphdef, params = nnx.split(head.model)
    state: training.TrainState | None = None

    def step() -> float:
        nonlocal state
        if state is None:
            state = training.init_state(params, RECIPE)
        state, metrics = training.train_step(state, head.ends, batch, graphdef=graphdef, config=RECIPE)
        return float(jax.block_until_ready(metrics)["loss"])

    return step


def torch_step(head: ej.Head, batch: training.Batch) -> Step:
    peer = TorchTraining(head, RECIPE)
    theirs = peer.batch(batch)
    return lambda: peer(theirs)


SIDES = {"eagle_jax": jax_step, "torch": torch_step}


def memory_of(options: Options, width: int, side: str) -> dict[str, float]:
    """Megabytes, by a process of its own."""
    arguments = ["--widths", width, "--rows", options.rows, "--length", options.length, "--only", side]
    command = [sys.executable, __file__, *map(str, arguments), "--vocab-size", str(options.vocab_size)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def take_alone(options: Options, side: str) -> None:
    step = SIDES[side](*problem(options, options.widths[0]))
    gc.collect()  # the head that PyTorch's side was made from
    before = measure.resident_memory()
    for _ in range(3):
        step()
    peak = measure.peak_memory()
    print(json.dumps({"before_first_step": before / 1e6, "peak": peak / 1e6, "above": (peak - before) / 1e6}))


def main(options: Options) -> None:
    if options.only is not None:
        return take_alone(options, options.only)
    records, console = [], Console()
    for width in options.widths:
        steps = {side: make(*problem(options, width)) for side, make in SIDES.items()}
        losses = {side: step() for side, step in steps.items()}  # compiles
        seconds = dict.fromkeys(steps, 0.0)
        for _ in range(options.steps):
            for side, step in steps.items():
                begun = time.perf_counter()
                step()
                seconds[side] += time.perf_counter() - begun
        tokens = options.rows * options.length * options.steps
        memory = {side: memory_of(options, width, side) for side in steps}
        records.append(
            {
                "width": width,
                "first_loss": losses,
                "tokens_per_second": {side: tokens / time for side, time in seconds.items()},
                "throughput_ratio": seconds["torch"] / seconds["eagle_jax"],
                "megabytes": memory,
                "peak_ratio": memory["eagle_jax"]["peak"] / memory["torch"]["peak"],
                "above_ratio": memory["eagle_jax"]["above"] / memory["torch"]["above"],
            }
        )
    table = Table("width", "", "eagle_jax", "torch", "ratio")
    for record in records:
        rows = {"tokens/s": (record["tokens_per_second"], record["throughput_ratio"])}
        for name, text in (("peak", "peak, MB"), ("above", "of it above what was held before, MB")):
            rows[text] = {side: of[name] for side, of in record["megabytes"].items()}, record[f"{name}_ratio"]
        for text, (figures, ratio) in rows.items():
            table.add_row(str(record["width"]), text, *(f"{figure:.0f}" for figure in figures.values()), f"{ratio:.2f}")
    shape = f"{options.rows} rows of {options.length} tokens, vocabulary {options.vocab_size}"
    console.print(f"{shape}, float32, {measure.machine()}", highlight=False)
    console.print(table)
    if options.output is not None:
        options.output.write_text(
            json.dumps({"machine": measure.machine(), "batch": shape, "records": records}, indent=2)
        )


if __name__ == "__main__":
    run(main, Options, __doc__)
