"""Times the training step against the same step in PyTorch, eager, and compares their peak memory.

    python train/bench_step.py --widths 576 1024        # pip install ".[train,peers]"

One head of each width (a Llama layer behind `fc`), random weights, float32 on a CPU, the same batch and the same number
of threads; tests hold the two steps to equal losses and parameters. Steps are timed in turn in one process, after a
first one that compiles; memory is the peak of a whole process that takes only one side's steps, libraries included.
"""

import dataclasses
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
    head = ej.Head.random(ej.Target.random(config))
    random = np.random.default_rng(0)
    shape = options.rows, options.length
    tokens = random.integers(0, options.vocab_size, shape, np.int32)
    features = random.standard_normal((*shape, width), np.float32)
    return head, training.Batch(*map(jnp.asarray, (tokens, np.ones(shape, bool), features)))


def jax_step(head: ej.Head, batch: training.Batch) -> Step:
    graphdef, params = nnx.split(head.model)
    state = training.init_state(params, RECIPE)

    def step() -> float:
        nonlocal state
        state, metrics = training.train_step(state, head.ends, batch, graphdef=graphdef, config=RECIPE)
        return float(jax.block_until_ready(metrics)["loss"])

    return step


def torch_step(head: ej.Head, batch: training.Batch) -> Step:
    peer = TorchTraining(head, RECIPE)
    theirs = peer.batch(batch)
    return lambda: peer(theirs)


SIDES = {"eagle_jax": jax_step, "torch": torch_step}


def peak_memory(options: Options, width: int, side: str) -> float:
    """Megabytes, by a process of its own."""
    arguments = ["--widths", width, "--rows", options.rows, "--length", options.length, "--only", side]
    command = [sys.executable, __file__, *map(str, arguments), "--vocab-size", str(options.vocab_size)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def take_alone(options: Options, side: str) -> None:
    head, batch = problem(options, options.widths[0])
    step = SIDES[side](head, batch)
    for _ in range(3):
        step()
    print(measure.peak_memory() / 1e6)


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
        memory = {side: peak_memory(options, width, side) for side in steps}
        records.append(
            {
                "width": width,
                "first_loss": losses,
                "tokens_per_second": {side: tokens / time for side, time in seconds.items()},
                "throughput_ratio": seconds["torch"] / seconds["eagle_jax"],
                "peak_megabytes": memory,
                "memory_ratio": memory["eagle_jax"] / memory["torch"],
            }
        )
    table = Table("width", "eagle_jax, tokens/s", "torch, tokens/s", "ratio", "eagle_jax, MB", "torch, MB", "ratio")
    for record in records:
        rates, peaks = record["tokens_per_second"].values(), record["peak_megabytes"].values()
        cells = [*(f"{rate:.0f}" for rate in rates), f"{record['throughput_ratio']:.2f}"]
        cells += [*(f"{peak:.0f}" for peak in peaks), f"{record['memory_ratio']:.2f}"]
        table.add_row(str(record["width"]), *cells)
    shape = f"{options.rows} rows of {options.length} tokens, vocabulary {options.vocab_size}"
    console.print(f"{shape}, float32, {measure.machine()}", highlight=False)
    console.print(table)
    if options.output is not None:
        options.output.write_text(
            json.dumps({"machine": measure.machine(), "batch": shape, "records": records}, indent=2)
        )


if __name__ == "__main__":
    run(main, Options, __doc__)
