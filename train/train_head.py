"""Trains an EAGLE head for a target on conversations.

    python train/train_head.py --data conversations.jsonl --output runs/head

Data: one `{"messages": [{"role", "content"}, ...]}` a line, best written by the target itself. The last 5 % of lines
stay unseen and are what the reported accuracy is measured on. The output directory loads with `eagle_jax.load_head`.
Expect about 1,500 tokens/s for smollm2-135m on two CPU cores, and a top-1 accuracy of half or more after a few passes.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax import checkpoint, data, features, loading, training
from eagle_jax.head import Head, HeadModel
from eagle_jax.losses import LossSums
from eagle_jax.script import require, run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    data: Path  # conversations in JSONL
    output: Path  # where the head is left, and the log; must hold neither yet
    target: str = "smollm2-135m"
    start: Path | None = None  # a head to start from, with its draft vocabulary; default: random
    features: Path | None = None  # where features are kept; default: OUTPUT/features
    max_length: int = 512  # tokens a conversation is cut at
    tokens_per_batch: int = 2048
    draft_vocabulary: int = 8192  # most frequent tokens that the head drafts over; 0 = all
    held_out: float = 0.05  # share of lines, from the end, that are not trained on
    evaluate_every: int = 500  # steps; the head is saved then too
    log_every: int = 50  # steps
    recipe: training.TrainConfig = training.TrainConfig()

    def __post_init__(self):
        for name in ("max_length", "tokens_per_batch", "evaluate_every", "log_every"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be at least 1.")
        require(self.draft_vocabulary >= 0, f"draft_vocabulary is {self.draft_vocabulary}; it must be 0 or more.")
        require(0 < self.held_out < 1, f"held_out is {self.held_out}; it must be between 0 and 1.")
        for name in ("log.jsonl", checkpoint.WEIGHTS):
            path = self.output / name
            require(not path.exists(), f"{path} is there already; give another output directory or remove it.")


def main(options: Options) -> None:
    conversations = data.read_conversations(options.data)
    unseen = max(1, round(options.held_out * len(conversations)))
    require(
        unseen < len(conversations),
        f"{options.data} has {len(conversations)} conversations, of which {unseen} would be held out; give more.",
    )
    options.output.mkdir(parents=True, exist_ok=True)
    target = loading.load_target(options.target)
    kept = data.encode_all(target.tokenizer, conversations[:-unseen], options.max_length)
    held = data.encode_all(target.tokenizer, conversations[-unseen:], options.max_length)
    print(f"train: {len(kept.rows)} rows ({kept.dropped} dropped, {kept.truncated} cut), held out: {len(held.rows)}")

    # Float32 whatever the target's dtype: an optimizer's small steps would round to nothing in bfloat16.
    if options.start is None:
        vocabulary = None
        if 0 < options.draft_vocabulary < target.config.vocab_size:
            vocabulary = data.frequent_tokens(kept.rows, options.draft_vocabulary, target.config.vocab_size)
        head = Head.random(target, seed=options.recipe.seed, vocabulary=vocabulary, dtype=jnp.float32)
    else:
        head = checkpoint.load_head(options.start, target, dtype=jnp.float32)
    graphdef, params = nnx.split(head.model)
    state = training.init_state(params, options.recipe)

    rows = kept.rows + held.rows
    store = features.load_or_make(
        options.features or options.output / "features",
        target,
        rows,
        progress=lambda done, total: print(f"features: {done} of {total} tokens", end="\r", file=sys.stderr),
    )
    plan = {"tokens_per_batch": options.tokens_per_batch, "bucket": 64, "seed": options.recipe.seed}
    lengths = [len(row.tokens) for row in rows]
    unseen_plans = data.epoch_plan(lengths[len(kept.rows) :], epoch=0, **plan)

    def evaluate(head_state: nnx.State) -> dict[str, float]:
        total = LossSums.zero()
        for plans in unseen_plans:
            shifted = [index + len(kept.rows) for index in plans.indices]
            batch = store.batch(shifted, plans.length, plans.size)
            sums = training.evaluate_step(head_state, head.ends, batch, graphdef=graphdef)
            total = jax.tree.map(jnp.add, total, sums)
        return {f"held_out_{key}": float(x) for key, x in training.metrics_of([total], options.recipe).items()}

    started, tokens = time.time(), 0
    with open(options.output / "log.jsonl", "x") as log:
        for step, plans in enumerate(data.plan_from(lengths[: len(kept.rows)], step=0, **plan), start=1):
            batch = store.batch(plans.indices, plans.length, plans.size)
            state, metrics = training.train_step(state, head.ends, batch, graphdef=graphdef, config=options.recipe)
            tokens += sum(lengths[index] for index in plans.indices)
            last = step == options.recipe.steps
            record: dict[str, float] = {}
            if last or step % options.evaluate_every == 0:
                record |= evaluate(state.head)
                trained: HeadModel = nnx.merge(graphdef, state.head)
                checkpoint.save_head(dataclasses.replace(head, model=trained), options.output)
            if record or step % options.log_every == 0:
                record |= {key: float(value) for key, value in metrics.items()}
                record |= {"step": step, "tokens": tokens, "tokens_per_second": tokens / (time.time() - started)}
                log.write(json.dumps(record) + "\n")
                log.flush()
                print({key: round(value, 4) for key, value in record.items()}, flush=True)
            if last:
                return


if __name__ == "__main__":
    run(main, Options, __doc__)
