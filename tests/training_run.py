"""A small training run, for tests that stop it: in this process, or as a program of its own that is killed.

    python tests/training_run.py OUTPUT '{"steps": 20, "save_every": 5}'

As a program it prints a line before and after each save and after each step.
"""

import dataclasses
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rig import tiny_target

import eagle_jax as ej
from eagle_jax import evaluation, runs, training, watching
from eagle_jax.features import features_of

TREE = ej.TreeConfig(kind="chain", nodes=4, depth=3)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    steps: int = 20
    save_every: int = 5
    evaluate_every: int = 1000
    log_every: int = 1
    keep_last: int = 2
    size: int = 64  # hidden
    learning_rate: float = 1e-3
    stop: int | None = None  # after this step

    @property
    def recipe(self) -> training.TrainConfig:
        return training.TrainConfig(steps=self.steps, learning_rate=self.learning_rate, warmup_steps=2)


class Stopped(Exception):
    """As a run ends in the middle."""


def parts(size: int) -> tuple[ej.Target, ej.Head]:
    target = tiny_target(hidden_size=size, intermediate_size=2 * size)
    return target, ej.Head.random(target)


def batch_of(target: ej.Target, step: int) -> training.Batch:
    tokens = np.random.default_rng(step).integers(0, target.config.vocab_size, (4, 12))
    assistant = np.broadcast_to(np.arange(12) >= 3, tokens.shape)
    features = features_of(*nnx.split(target.model), jnp.asarray(tokens))
    return training.Batch(jnp.asarray(tokens), jnp.asarray(assistant), features)


def open_run(output: Path | str, plan: Plan, head: ej.Head, **options) -> runs.Run:
    config = {"recipe": dataclasses.asdict(plan.recipe), "size": plan.size}
    return runs.Run(output, head, config, keep_last=plan.keep_last, **options)


def train(output: Path | str, plan: Plan, say: Callable[[str], None] = lambda said: None) -> training.TrainState:
    """Trains from the latest step on, as `train_head.py` does."""
    target, head = parts(plan.size)
    graphdef, params = nnx.split(head.model)
    state, begun, tokens = training.init_state(params, plan.recipe), 0, 0
    with open_run(output, plan, head) as run:
        if (found := run.restore(state)) is not None:
            state, begun, tokens = found.state, found.step, found.progress["tokens"]
        console = Console(file=io.StringIO())
        watcher = watching.Watcher(
            output, steps=plan.steps, begun=begun, tokens=tokens, every=plan.log_every, console=console
        )
        with watcher as watch:
            say(f"begun {begun}")
            for step in range(begun + 1, plan.steps + 1):
                batch = batch_of(target, step)
                state, metrics = training.train_step(state, head.ends, batch, graphdef=graphdef, config=plan.recipe)
                tokens += batch.tokens.size
                watch.step(step, metrics, tokens)
                score = None
                if step % plan.evaluate_every == 0:
                    found_tau = evaluation.live_tau(target, head, state.head, PROMPTS, TREE, max_new_tokens=16)
                    watch.note(found_tau)
                    score = found_tau["tau"]
                if step % plan.save_every == 0 or step == plan.steps:
                    watch.flush()
                    say("saving")
                    run.save(state, score=score, progress={"tokens": tokens})
                    say("saved")
                say(f"step {step}")
                if step == plan.stop:
                    raise Stopped
    return state


def last_state(output: Path | str, plan: Plan) -> training.TrainState:
    _, head = parts(plan.size)
    like = training.init_state(nnx.state(head.model), plan.recipe)
    with open_run(output, plan, head) as run:
        found = run.restore(like)
    assert found is not None
    return found.state


def same(one: training.TrainState, two: training.TrainState) -> bool:
    """Bit for bit, the key included."""
    keys = [jax.random.key_data(state.key) for state in (one, two)]
    leaves = [jax.tree.leaves(dataclasses.replace(state, key=key)) for state, key in zip((one, two), keys, strict=True)]
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(*leaves, strict=True))


if __name__ == "__main__":
    train(sys.argv[1], Plan(**json.loads(sys.argv[2])), say=lambda said: print(said, flush=True))
