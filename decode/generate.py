"""Decodes a prompt with EAGLE-2 and shows the text as it is committed, or talks.

    python decode/generate.py "The three laws of motion are"
    python decode/generate.py --chat "Explain tides to a child." --temperature 0.7 --top-p 0.9 --seed 1
    python decode/generate.py --chat                     # turn by turn: /reset begins anew, /quit or Ctrl-D ends
    python decode/generate.py --head none "..."          # plain decoding: the same text, one token a forward
    python decode/generate.py --color "..."              # underlines what was drafted, coloured by level

The last line of each text tells tokens, rounds, tau (tokens a round), tokens/s and, of a chat, how many tokens of the
prompt were run; the first text in a shape also compiles. Ctrl-C stops an answer; what was shown stays in the chat.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

import eagle_jax as ej
from eagle_jax import generation, viz
from eagle_jax.script import require, run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    prompt: tyro.conf.Positional[str] = ""  # text to continue
    chat: tuple[str, ...] | None = None  # a message for the model to answer; without one, turns are read line by line
    system: str | None = None  # a chat's system message
    template: Path | None = None  # a chat template (Jinja), for a model that brings none
    target: str = "smollm2-135m"  # embedded model, directory, hub id or .gguf file
    head: str = "smollm2-135m"  # embedded head, directory, hub id, or "none"
    dtype: Literal["float32", "bfloat16"] | None = None  # default: bfloat16 on accelerators, float32 on a CPU
    max_new_tokens: int = 128
    max_length: int | None = None  # of prompt and text together
    stop: tuple[str, ...] = ()  # strings that end the text
    seed: int = 0
    color: bool = False  # show which tokens were drafted, on a terminal
    sampling: Annotated[ej.SamplingConfig, tyro.conf.arg(name="")] = ej.SamplingConfig()
    tree: ej.TreeConfig = ej.TreeConfig()

    def __post_init__(self):
        require((self.chat is None) != (self.prompt == ""), "Give either a prompt or --chat.")
        require(self.system is None or self.chat is not None, "--system is for a --chat.")
        require(self.template is None or self.template.is_file(), f"There is no template file {str(self.template)!r}.")
        require("" not in self.stop, "stop holds an empty string; give strings of at least one character.")
        generation.check_lengths(self.max_new_tokens, self.max_length)


def main(options: Options) -> None:
    target = ej.load_target(options.target, dtype=options.dtype)
    head = None if options.head == "none" else ej.load_head(options.head, target)
    if options.template is not None:
        target.tokenizer.chat_template = options.template.read_text(encoding="utf-8")
    shared = generation.Options(
        max_new_tokens=options.max_new_tokens,
        max_length=options.max_length,
        sampling=options.sampling,
        tree=options.tree,
        seed=options.seed,
        stop=options.stop,
    )
    console = Console()
    color = options.color and console.is_terminal
    if color:
        console.print(viz.legend(), end="\n\n")

    def show(chunks: Iterator[ej.Chunk], talk: ej.Conversation | None = None) -> None:
        print_chunks(chunks, (console, viz.Painter(target)) if color else None, talk)

    if options.chat is None:
        show(ej.stream(target, head, options.prompt, **shared))
    elif options.chat:
        talk = ej.Conversation(target, head, system=options.system, **shared)
        show(talk.say(" ".join(options.chat)), talk)
    else:
        converse(lambda: ej.Conversation(target, head, system=options.system, **shared), show)


def converse(begin: Callable[[], ej.Conversation], show: Callable[[Iterator[ej.Chunk], ej.Conversation], None]) -> None:
    """Answers lines until they end."""
    talk, prompt = begin(), "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
            if line == "/quit":
                return
            if line == "/reset":
                talk = begin()
            elif line:
                show(talk.say(line), talk)
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
        except ValueError as error:  # the chat has become too long; it may be reset
            print(f"error: {error}", file=sys.stderr)


def print_chunks(
    chunks: Iterator[ej.Chunk], colors: tuple[Console, viz.Painter] | None, talk: ej.Conversation | None
) -> None:
    """Prints a text as it comes, then its figures."""
    started, tokens, accepted, ended = time.perf_counter(), 0, [], None
    for chunk in chunks:
        if colors is None:
            print(chunk.text, end="", flush=True)
        else:
            console, paint = colors
            console.print(paint(chunk), end="", soft_wrap=True)
        tokens, ended = tokens + len(chunk.token_ids), chunk.finish_reason
        if chunk.accepted is not None:
            accepted.append(chunk.accepted)
    seconds = time.perf_counter() - started
    tau = sum(accepted) / len(accepted) + 1 if accepted else float("nan")
    prefilled = "" if talk is None else f", {talk.prefilled} tokens prefilled"
    print("\n", flush=True)
    print(
        f"{tokens} tokens in {len(accepted)} rounds, tau {tau:.2f}, {tokens / seconds:.1f} tokens/s "
        f"(compilation included), ended by {ended}{prefilled}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    run(main, Options, __doc__)
