"""The target writes its own conversations: data to train a head on.

    python train/synthesize.py --prompts prompts.jsonl --exclude mt_bench.jsonl --output runs/chats.jsonl
    python train/synthesize.py --from-nothing 10000 --output runs/chats.jsonl      # user's turns are written, too
    python train/synthesize.py --prompts prompts.jsonl --from-nothing 5000 --rows 512 --output runs/chats.jsonl

Prompts: one `{"prompt": "..."}`, `{"turns": ["...", ...]}` or `{"messages": [...]}` a line. From nothing: the user's
turn is sampled from what the chat template puts before one. --rows conversations are written at once, and a row whose
text has ended begins the next one: 256 to 1024 on a GPU, 16 to 64 on a CPU. With --head the text is the same, in fewer
rounds.

A line of the output is `{"id", "messages", "temperature", "finished", "source", "seed"}`; `finished: false` is an
answer cut at --max-new-tokens or --max-length. Dropped: exact duplicates, loops, texts that share 13 words in a row
with a file to --exclude (a shorter text of it only if it is the same), and with --drop-unfinished those. The same
command goes on where it was interrupted or killed, also with a higher --limit or --from-nothing. Expect 90 (32 rows) to
150 (64) tokens/s of smollm2-135m on two CPU cores that others use too.
"""

import dataclasses
import functools
import hashlib
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import eagle_jax as ej
from eagle_jax import prompts, screening, synthesis
from eagle_jax.journal import Journal
from eagle_jax.pool import RowPool
from eagle_jax.script import interruptions, require, run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    output: Path  # a .jsonl file; beside it, its options and what was dropped
    prompts: Path | None = None  # what users ask
    limit: int | None = None  # prompts taken from the file; default: all
    from_nothing: int = 0  # conversations whose user's turns are written, too
    exclude: tuple[Path, ...] = ()  # JSONL files for evaluation, all texts of which are kept out
    target: str = "smollm2-135m"  # embedded model, directory, hub id or .gguf file
    head: str = "none"  # embedded head, directory or hub id; changes speed alone
    dtype: Literal["float32", "bfloat16"] | None = None  # default: bfloat16 on accelerators, float32 on a CPU
    rows: int = 32  # conversations written at once
    rounds: int = 8  # between two looks at what has ended
    recipe: Annotated[synthesis.Recipe, tyro.conf.arg(name="")] = synthesis.Recipe()
    tree: ej.TreeConfig = ej.TreeConfig()  # of the head

    def __post_init__(self):
        require(self.output.suffix == ".jsonl", f"The output is {str(self.output)!r}; give it the ending .jsonl.")
        require(self.prompts is not None or self.from_nothing > 0, "Give --prompts, --from-nothing or both.")
        for name in ("rows", "rounds"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be at least 1.")
        require(self.from_nothing >= 0, f"from_nothing is {self.from_nothing}; it must be 0 or more.")
        require(self.limit is None or self.limit > 0, f"limit is {self.limit}; it must be at least 1.")
        for path in (*([self.prompts] if self.prompts else []), *self.exclude):
            require(path.is_file(), f"There is no file {str(path)!r}.")

    def made_with(self) -> dict[str, Any]:
        """What the conversations depend on. More of them may be asked for later, and by other means."""
        recipe = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self.recipe).items()}
        files = {"prompts": self.prompts and digest(self.prompts), "exclude": sorted(map(digest, self.exclude))}
        return {"target": self.target, "dtype": self.dtype, **recipe, **files}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(options: Options) -> None:
    recipe = options.recipe
    openings = prompts.read_openings(options.prompts, options.limit) if options.prompts else []
    texts = [text for path in options.exclude for text in prompts.read_texts(path)]
    place = functools.cache(functools.partial(synthesis.place_of, recipe))
    journal = Journal(options.output, options.made_with(), place)
    plans = [plan for plan in synthesis.plans_for(recipe, openings, options.from_nothing) if plan.name not in journal]

    target = ej.load_target(options.target, dtype=options.dtype)
    head = None if options.head == "none" else ej.load_head(options.head, target)
    if options.from_nothing or recipe.turns > 1:
        synthesis.user_turn(target)  # refuses a template that has no place for one
    pool = RowPool(
        target,
        head,
        rows=options.rows,
        max_length=recipe.max_length,
        sampling=recipe.samplings(),
        tree=options.tree,
        rounds=options.rounds,
    )
    writer = synthesis.Writer(
        target=target,
        recipe=recipe,
        max_length=pool.max_length,
        excluded=screening.Overlap(texts, recipe.overlap_words),
        given=frozenset(message["content"] for opening in openings for message in opening.messages),
        is_duplicate=journal.is_duplicate,
    )
    console = Console(stderr=True)
    with journal, progress_bar(console) as bar, interruptions() as interrupted:
        done = journal.kept + len(journal.dropped)
        task = bar.add_task("", total=done + len(plans), completed=done, rate=0.0, kept=0, dropped=0)
        begun, seconds = None, 0.0
        for outcomes in synthesis.run(pool, writer, plans):
            begun = begun or time.perf_counter()  # the first programs have been compiled by now
            for outcome in outcomes:
                if outcome.record is None:
                    journal.drop(outcome.name, outcome.reason)
                else:
                    journal.keep(outcome.record)
            seconds = time.perf_counter() - begun
            kept, dropped = journal.kept, len(journal.dropped)
            figures: dict[str, Any] = {"kept": kept, "dropped": dropped, "rate": pool.emitted / max(seconds, 1e-9)}
            bar.update(task, completed=kept + dropped, **figures)
            if interrupted():
                break
    reasons = ", ".join(f"{count} {reason}" for reason, count in journal.reasons.items()) or "none"
    print(f"{options.output}: {journal.kept} conversations; dropped: {reasons}")
    print(f"{pool.emitted} tokens in {seconds:.0f} s, {pool.emitted / max(seconds, 1e-9):.0f} tokens/s")
    if interrupted():
        print("interrupted; the same command goes on from here")
        sys.exit(130)


def progress_bar(console: Console) -> Progress:
    figures = "{task.fields[rate]:,.0f} tokens/s, {task.fields[kept]} kept, {task.fields[dropped]} dropped"
    return Progress(BarColumn(), MofNCompleteColumn(), TextColumn(figures), TimeRemainingColumn(), console=console)


if __name__ == "__main__":
    run(main, Options, __doc__)
