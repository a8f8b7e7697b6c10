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
import tyro
from flax import nnx

from eagle_jax import checkpoint, convert, data, features, training
from eagle_jax.head import Head, HeadModel
from eagle_jax.losses import LossSums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    data: Path  # conversations in JSONL
    output: Path  # where the head is left, and the log
    target: str = "smollm2-135m"
    start: Path | None = None  # a head to start from, with its draft vocabulary; default: random
    features: Path | None = None  # where features are kept; default: OUTPUT/features
    max_length: int = 512  # tokens a conversation is cut at
    tokens_per_batch: int = 2048
    draft_vocabulary: int = 8192  # most frequent tokens that the head drafts over; 0 = all
    held_out: float = 0.05  # share of lines, from the end, that are not trained on
    evaluate_every: int = 500  # steps; the head is saved then too
    recipe: training.TrainConfig = training.TrainConfig()


def main(options: Options) -> None:
    conversations = data.read_conversations(options.data)
    unseen = max(1, round(options.held_out * len(conversations)))
    if unseen >= len(conversations):
        raise ValueError(f"{options.data} has {len(conversations)} conversations, of which {unseen} would be held out.")
    target = convert.load_target(options.target)
    kept = data.encode_all(target.tokenizer, conversations[:-unseen], options.max_length)
    held = data.encode_all(target.tokenizer, conversations[-unseen:], options.max_length)
    print(f"train: {len(kept.rows)} rows ({kept.dropped} dropped, {kept.truncated} cut), held out: {len(held.rows)}")

    rows = kept.rows + held.rows
    store = features.load_or_make(
        options.features or options.output / "features",
        target,
        rows,
        progress=lambda done, total: print(f"features: {done} of {total} tokens", end="\r", file=sys.stderr),
    )
    vocabulary = None
    if 0 < options.draft_vocabulary < target.config.vocab_size:
        vocabulary = data.frequent_tokens(kept.rows, options.draft_vocabulary, target.config.vocab_size)
    if options.start is None:
        head = Head.random(target, seed=options.recipe.seed, vocabulary=vocabulary)
    else:
        head = checkpoint.load_head(options.start, target)
    ends = head.ends
    graphdef, params = nnx.split(head.model)
    state = training.init_state(params, options.recipe)
    del params

    plan = {"tokens_per_batch": options.tokens_per_batch, "bucket": 64, "seed": options.recipe.seed}
    lengths = [len(row.tokens) for row in rows]
    unseen_plans = data.epoch_plan(lengths[len(kept.rows) :], epoch=0, **plan)

    def evaluate(head_state: nnx.State) -> dict[str, float]:
        total = LossSums.zero()
        for plans in unseen_plans:
            shifted = [index + len(kept.rows) for index in plans.indices]
            batch = store.batch(shifted, plans.length, plans.size)
            sums = training.evaluate_step(head_state, ends, batch, graphdef=graphdef)
            total = jax.tree.map(jnp.add, total, sums)
        return {key: float(value) for key, value in training.metrics_of(total, options.recipe).items()}

    options.output.mkdir(parents=True, exist_ok=True)
    started, tokens = time.time(), 0
    with open(options.output / "log.jsonl", "a") as log:
        for step, plans in enumerate(data.plan_from(lengths[: len(kept.rows)], step=0, **plan), start=1):
            batch = store.batch(plans.indices, plans.length, plans.size)
            state, metrics = training.train_step(state, ends, batch, graphdef=graphdef, config=options.recipe)
            tokens += sum(lengths[index] for index in plans.indices)
            last = step == options.recipe.steps
            if step % 50 == 0 or last:
                record = {"step": step, "tokens": tokens, "tokens_per_second": tokens / (time.time() - started)}
                record |= {key: float(value) for key, value in metrics.items()}
                if step % options.evaluate_every == 0 or last:
                    record |= {f"held_out_{key}": value for key, value in evaluate(state.head).items()}
                    model: HeadModel = nnx.merge(graphdef, state.head)
                    checkpoint.save_head(dataclasses.replace(head, model=model), options.output)
                log.write(json.dumps(record) + "\n")
                log.flush()
                print({key: round(value, 4) for key, value in record.items()}, flush=True)
            if last:
                return


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
