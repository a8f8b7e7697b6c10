"""Trains a head for a target on conversations; run again with the same options, it goes on where it was ended.

    python train/train_head.py --data conversations.jsonl --output runs/head
    python train/train_head.py --data conversations.jsonl --output runs/feature --inputs feature     # EAGLE's ablation
    python train/train_head.py --data conversations.jsonl --output runs/medusa --kind medusa --medusa-heads 4
    python train/train_head.py --data "chats/*.jsonl" --output runs/head --recipe.unroll 3 --recipe.optimizer muon
    python train/train_head.py --data chats.jsonl --output runs/head --target lmsys/vicuna-7b-v1.3 --online

Data: conversations in JSONL, best written by the target itself (train/synthesize.py). The last 5 % of them stay unseen:
held-out accuracy and live tau are of those. The target's features are kept in files, or with --online computed in each
step, as larger targets need. The output directory decodes at any time after the first save: the best head by tau, else
the latest. docs/scaling.md has several devices and machines. Expect about 2,000 tokens/s for smollm2-135m on two CPU
cores that nothing else uses, and less with --recipe.unroll.
"""

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import eagle_jax as ej
from eagle_jax import checkpoint, data, distributed, evaluation, features, generation, loading, sharding, training
from eagle_jax.config import Inputs
from eagle_jax.conversations import before_answer
from eagle_jax.data import Row, Turns
from eagle_jax.head import Head, frozen_ends
from eagle_jax.medusa import Medusa
from eagle_jax.pipeline import BatchConfig, Pipeline, require_grain
from eagle_jax.runs import Run
from eagle_jax.script import require, run
from eagle_jax.target import features_of
from eagle_jax.watching import Watcher

EAGLE_INPUTS: Inputs = "feature+shifted_token"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    data: tuple[str, ...]  # conversations in JSONL: files or globs
    output: Path  # the run's directory; one that holds its steps is gone on with
    target: str = "smollm2-135m"
    dtype: Literal["float32", "bfloat16"] | None = (
        None  # what is computed in; masters are float32. Default: the target's
    )
    kind: Literal["eagle", "medusa"] = "eagle"  # an autoregression head, or heads that each guess one token further on
    inputs: Inputs = EAGLE_INPUTS  # what an eagle head reads; the others are for its ablation
    medusa_heads: int = 4
    medusa_weight: float = 0.8  # of each further Medusa head's loss, as a share of the one before
    start: str = (
        "random"  # or "last-layer" (of the target, eagle only), or a head to start from, with its draft vocabulary
    )
    head_key_value_heads: int | None = None  # of a random start, where a published head has not its target's
    features: Path | None = None  # where features are kept; default: OUTPUT/features
    online: bool = False  # compute features in the step and keep none
    max_length: int = 512  # tokens a conversation is cut at
    turns: Turns = "all"  # the assistant's turns that carry loss
    tokens_per_batch: int = 2048  # of all devices and pieces together
    draft_vocabulary: int = 8192  # most frequent tokens that the head drafts over; 0 = all
    loss_vocabulary: int = 0  # most frequent tokens that the cross-entropy is over; 0 = those that are drafted
    held_out: float = 0.05  # share of conversations, from the end, that are not trained on
    tau_prompts: int = 8  # of them, decoded for live tau; 0 = none
    tau_tokens: int = 64  # new ones for each prompt
    evaluate_every: int = 500  # optimizer steps
    save_every: int = 250  # optimizer steps; an evaluation saves too
    log_every: int = 50  # optimizer steps
    keep_last: int = 2
    keep_best: int = 1
    tensorboard: bool = False
    tree: ej.TreeConfig = ej.TreeConfig(nodes=24, depth=5, top_k=6)  # for live tau
    recipe: training.TrainConfig = training.TrainConfig()
    mesh: sharding.MeshConfig = sharding.MeshConfig()
    processes: distributed.ProcessConfig = distributed.ProcessConfig()

    def __post_init__(self):
        intervals = ("evaluate_every", "save_every", "log_every")
        for name in ("medusa_heads", "medusa_weight", "max_length", "tokens_per_batch", "tau_tokens", *intervals):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be positive.")
        for name in ("draft_vocabulary", "loss_vocabulary", "tau_prompts"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must be 0 or more.")
        require(0 < self.held_out < 1, f"held_out is {self.held_out}; it must be between 0 and 1.")
        require(
            self.head_key_value_heads is None or self.start == "random",
            f"head_key_value_heads is {self.head_key_value_heads}, but the head begins as {self.start}, which has its "
            f"own; leave it out or start at random.",
        )
        require(len(self.data) > 0, "Give at least one file of conversations.")
        require(
            not (self.online and self.features),
            "features are kept in files, but --online keeps none; give one of them.",
        )
        of_eagle = {
            "inputs": self.inputs != EAGLE_INPUTS,
            "start": self.start == "last-layer",
            "loss_vocabulary": self.loss_vocabulary > 0,
            "head_key_value_heads": self.head_key_value_heads is not None,
        }
        # Medusa's loss has these as `medusa_recipe` says.
        usual, of_loss = training.TrainConfig(), ("noise", "regression_weight", "cross_entropy_weight", "later_weight")
        of_recipe = {name: getattr(self.recipe, name) != getattr(usual, name) for name in ("unroll", *of_loss)}
        for name, given in (of_eagle | of_recipe).items():
            value = getattr(self.recipe if name in of_recipe else self, name)
            require(self.kind == "eagle" or not given, f"{name} is {value!r}, which is for --kind eagle; leave it out.")
        # Else it would be refused at the first live tau.
        require(
            self.kind == "eagle" or self.tree.children == "best",
            f"tree.children is {self.tree.children!r}, which is for --kind eagle; leave it out.",
        )
        require_grain()
        if not (self.output / "steps").is_dir():
            path = self.output / checkpoint.WEIGHTS
            require(not path.exists(), f"{path} is there already, but no steps to go on from; give another directory.")

    @property
    def settings(self) -> training.TrainConfig:
        """The recipe, with Medusa's loss where that is what is trained."""
        return self.recipe if self.kind == "eagle" else training.medusa_recipe(self.recipe, self.medusa_weight)

    def binding(self) -> dict[str, Any]:
        """What a run can only be gone on with."""
        left_out = ("output", "features", "tau_prompts", "tau_tokens", "tensorboard", "tree", "mesh", "processes")
        intervals = ("evaluate_every", "save_every", "log_every", "keep_last", "keep_best")
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if name not in left_out + intervals}

    def defaults(self) -> dict[str, Any]:
        """What `binding` is without options: what a run had of those that were added after it was begun."""
        return Options(data=self.data, output=self.output).binding()


def main(options: Options) -> None:
    distributed.start(options.processes)
    mesh = sharding.make_mesh(options.mesh)
    conversations = data.read_conversations(options.data)
    unseen = max(1, round(options.held_out * len(conversations)))
    require(
        unseen < len(conversations),
        f"There are {len(conversations)} conversations, of which {unseen} would be held out; give more.",
    )
    target = loading.load_target(options.target, dtype=options.dtype, mesh=None if mesh.size == 1 else mesh)
    encode = partial(data.encode_all, target.tokenizer, max_length=options.max_length, turns=options.turns)
    kept, held = encode(conversations[:-unseen]), encode(conversations[-unseen:])
    if distributed.is_main():
        print(f"train: {kept.summary()}\nheld out: {held.summary()}", flush=True)
    with jax.set_mesh(mesh):
        train(options, mesh, target, kept.rows, held.rows, tau_prompts(options, target, conversations[-unseen:]))


def begin(options: Options, target: ej.Target, rows: list[Row]) -> Head | Medusa:
    """The head that training begins with, in float32: an optimizer's small steps would round to nothing in bfloat16."""
    if options.start not in ("random", "last-layer"):
        return begin_from(options, target)
    vocabulary = None
    if 0 < options.draft_vocabulary < target.config.vocab_size:
        vocabulary = data.frequent_tokens(rows, options.draft_vocabulary, target.config.vocab_size)
    settings: dict[str, Any] = {"vocabulary": vocabulary, "dtype": jnp.float32}
    if options.kind == "medusa":
        return Medusa.from_target(target, options.medusa_heads, **settings)
    settings |= {"seed": options.recipe.seed, "inputs": options.inputs}
    if options.start == "last-layer":
        return Head.from_last_layer(target, **settings)
    return Head.random(target, key_value_heads=options.head_key_value_heads, **settings)


def begin_from(options: Options, target: ej.Target) -> Head | Medusa:
    """A head from disk, which has to be of the kind that was asked for."""
    head = checkpoint.load_head(options.start, target, dtype=jnp.float32)
    if isinstance(head, Medusa):
        found = {"kind": "medusa", "medusa_heads": head.config.medusa_num_heads}
    else:
        found = {"kind": "eagle", "inputs": head.config.inputs}
    for name, value in found.items():
        asked = getattr(options, name)
        require(
            value == asked, f"{name} is {asked!r}, but the head in {options.start} has {value!r}; give one of them."
        )
    return head


def tau_prompts(options: Options, target: ej.Target, conversations: list[list[dict[str, str]]]) -> list[list[int]]:
    """What users ask first in unseen conversations."""
    # What has no answer, or nothing before it, is left out of training and is no prompt either.
    asked = [asked for messages in conversations if (asked := before_answer(messages)) and len(asked) < len(messages)]
    prompts = [generation.encode_prompt(target, messages) for messages in asked[: options.tau_prompts]]
    return [prompt for prompt in prompts if len(prompt) < options.max_length]


def kept_features(options: Options, target: ej.Target, rows: list[Row]) -> features.KeptFeatures | None:
    """Features of all rows, made as far as they are not there; None where the step computes them."""
    if options.online:
        return None

    def said(done: int, total: int) -> None:
        if distributed.is_main():
            print(f"features: {done} of {total} tokens", end="\r", file=sys.stderr)

    return features.load_or_make(options.features or options.output / "features", target, rows, progress=said)


def batches_of(
    options: Options,
    mesh: Mesh,
    rows: list[Row],
    kept: list[np.ndarray] | None,
    *,
    accumulate: int = 1,
    begun_with: int | None = None,
) -> Pipeline:
    """This process's batches of some rows, in the order of a mesh of which batches' rows were multiples of a number."""
    multiple = sharding.row_multiple(mesh)
    config = BatchConfig(
        tokens_per_batch=options.tokens_per_batch,
        accumulate=accumulate,
        rows_multiple=multiple if begun_with is None else begun_with,
        seed=options.recipe.seed,
    )
    return Pipeline(rows, config, features=kept, rows_multiple=multiple, **sharding.process_share(mesh))


def train(
    options: Options, mesh: Mesh, target: ej.Target, seen: list[Row], held: list[Row], prompts: list[list[int]]
) -> None:
    recipe, rules = options.settings, sharding.ShardingRules(key_dim=target.config.key_dim)
    store = kept_features(options, target, seen + held)
    every = None if store is None else [store[row] for row in range(len(store))]
    of_seen, of_held = (None, None) if every is None else (every[: len(seen)], every[len(seen) :])
    unseen = batches_of(options, mesh, held, of_held)
    head = begin(options, target, seen)
    graphdef = training.compute_graphdef(head.config, target.dtype)
    target_graphdef, target_params = nnx.split(target.model)
    ends = loss_ends = head.ends
    if options.loss_vocabulary:
        loss_ends = frozen_ends(target, data.frequent_tokens(seen, options.loss_vocabulary, target.config.vocab_size))
    params = nnx.split(head.model)[1]
    if mesh.size > 1:
        params, ends, loss_ends = (sharding.shard(tree, mesh, rules) for tree in (params, ends, loss_ends))
    state = sharding.create(partial(training.init_state, config=recipe), params, mesh=mesh, rules=rules)
    options_of_step = {"graphdef": graphdef, "config": recipe, "target_graphdef": target_graphdef}
    step_once = sharding.in_place(partial(training.train_step, **options_of_step), state)

    def placed(pipeline: Pipeline, batch: training.Batch, axis: int) -> training.Batch:
        rows = batch.tokens.shape[axis] * pipeline.process_count
        return sharding.shard_batch(batch, mesh, rows, axis=axis)

    def evaluate(state: training.TrainState) -> dict[str, float]:
        parts = []
        for batch in unseen.batches(0, unseen.order.steps_per_epoch):
            batch = placed(unseen, batch, axis=0)
            if batch.features is None:
                batch = batch._replace(features=features_of(target_graphdef, target_params, batch.tokens))
            parts.append(training.evaluate_step(state.head, ends, batch, graphdef=graphdef))
        total = jax.tree.map(lambda *sums: sum(sums), *parts)
        found = {f"held_out_{name}": float(x) for name, x in training.metrics_of(total, recipe).items()}
        if prompts:
            tau = evaluation.live_tau(
                target, head, state.head, prompts, options.tree, max_new_tokens=options.tau_tokens
            )
            found |= tau
        return found

    told = f"{len(seen)}, and {len(held)} held out, of SHA-256 {data.digest(seen + held)}"
    of_run, of_older = ({"conversations": told} | named for named in (options.binding(), options.defaults()))
    kept: dict[str, Any] = {"keep_last": options.keep_last, "keep_best": options.keep_best}
    with Run(options.output, head, of_run, defaults=of_older, **kept) as saved:
        restored = saved.restore(state)
        begun, progress = 0, {"tokens": 0, "rows_multiple": sharding.row_multiple(mesh)}
        if restored is not None:
            state, begun = restored.state, restored.step
            progress |= restored.progress
        tokens, begun_with = progress["tokens"], progress["rows_multiple"]
        order = {"accumulate": recipe.accumulate, "begun_with": begun_with}
        trained_on = batches_of(options, mesh, seen, of_seen, **order)
        watch = {"every": options.log_every, "tensorboard": options.tensorboard}
        with Watcher(options.output, steps=recipe.steps, begun=begun, tokens=tokens, **watch) as watcher:
            for step, batch in enumerate(trained_on.batches(begun, recipe.steps), start=begun + 1):
                batch = placed(trained_on, batch, axis=int(recipe.accumulate > 1))
                state, metrics = step_once(state, loss_ends, batch, target_params if options.online else None)
                tokens += trained_on.order.tokens_at(step - 1)
                watcher.step(step, metrics, tokens)
                last, score = step == recipe.steps, None
                if last or step % options.evaluate_every == 0:
                    found = evaluate(state)
                    watcher.note(found)
                    score = found.get("tau", found["held_out_top1"])
                if score is not None or step % options.save_every == 0:
                    watcher.flush()
                    saved.save(state, score=score, progress={"tokens": tokens, "rows_multiple": begun_with})


if __name__ == "__main__":
    run(main, Options, __doc__)
