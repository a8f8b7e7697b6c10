"""Decodes a prompt with EAGLE-2 and shows the text as it is committed.

    python decode/generate.py "The three laws of motion are"
    python decode/generate.py --chat "Explain tides to a child." --temperature 0.7 --top-p 0.9 --seed 1
    python decode/generate.py --head none "..."          # plain decoding: the same text, one token a forward
    python decode/generate.py --color "..."              # underlines what was drafted, coloured by level

The last line tells tokens, rounds, tau (tokens a round) and tokens/s; the first run in a shape also compiles.
"""

import dataclasses
import sys
import time
from typing import Annotated, Literal

import tyro
from rich.console import Console

import eagle_jax as ej
from eagle_jax import viz
from eagle_jax.generation import check_lengths
from eagle_jax.script import require, run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    prompt: tyro.conf.Positional[str] = ""  # text to continue
    chat: str | None = None  # a message for the model to answer, instead of a prompt
    target: str = "smollm2-135m"  # embedded model or .gguf file
    head: str = "smollm2-135m"  # embedded head, directory, or "none"
    dtype: Literal["float32", "bfloat16"] | None = None  # default: bfloat16 on accelerators, float32 on a CPU
    max_new_tokens: int = 128
    max_length: int | None = None  # of prompt and text together
    stop: tuple[str, ...] = ()  # strings that end the text
    seed: int = 0
    color: bool = False  # show which tokens were drafted, on a terminal
    sampling: Annotated[ej.SamplingConfig, tyro.conf.arg(name="")] = ej.SamplingConfig()
    tree: ej.TreeConfig = ej.TreeConfig()

    def __post_init__(self):
        require((self.chat is None) != (self.prompt == ""), "Give either a prompt or --chat with a message.")
        require("" not in self.stop, "stop holds an empty string; give strings of at least one character.")
        check_lengths(self.max_new_tokens, self.max_length)


def main(options: Options) -> None:
    target = ej.load_target(options.target, dtype=options.dtype)
    head = None if options.head == "none" else ej.load_head(options.head, target)
    prompt = options.prompt if options.chat is None else [{"role": "user", "content": options.chat}]

    console, paint = Console(), viz.Painter(target)
    color = options.color and console.is_terminal
    if color:
        console.print(viz.legend(), end="\n\n")
    started, tokens, accepted = time.perf_counter(), 0, []
    for chunk in ej.stream(
        target,
        head,
        prompt,
        max_new_tokens=options.max_new_tokens,
        max_length=options.max_length,
        sampling=options.sampling,
        tree=options.tree,
        seed=options.seed,
        stop=options.stop,
    ):
        if color:
            console.print(paint(chunk), end="", soft_wrap=True)
        else:
            print(chunk.text, end="", flush=True)
        tokens += len(chunk.token_ids)
        if chunk.accepted is not None:
            accepted.append(chunk.accepted)
    seconds = time.perf_counter() - started
    tau = sum(accepted) / len(accepted) + 1 if accepted else float("nan")
    print(
        f"\n\n{tokens} tokens in {len(accepted)} rounds, tau {tau:.2f}, {tokens / seconds:.1f} tokens/s "
        f"(compilation included), ended by {chunk.finish_reason}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    run(main, Options, __doc__)
