"""Decodes one prompt plainly and with EAGLE-2, and shows that the text is the same.

    make demo        # or: python decode/demo.py

Fetches the embedded model once (93 MB). Expect the same text twice, fewer rounds with EAGLE-2, and both speeds. On a
CPU a forward pass over a tree costs several plain steps, so that EAGLE-2 may well be the slower of the two there; on an
accelerator, where a pass costs the same for one token or for sixty, rounds are what counts.
"""

import dataclasses
import sys
import time

import tyro
from rich.console import Console
from rich.table import Table

import eagle_jax as ej


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    message: str = "Explain in a few sentences why the sky is blue."
    max_new_tokens: int = 96
    tree: ej.TreeConfig = ej.TreeConfig(nodes=12, depth=4, top_k=4)


def main(options: Options) -> None:
    console = Console()
    target = ej.load_target("smollm2-135m")
    head = ej.load_head("smollm2-135m", target)
    chat = [{"role": "user", "content": options.message}]

    def decode(drafter: ej.Head | None) -> ej.Completion:
        return ej.generate(target, drafter, chat, max_new_tokens=options.max_new_tokens, tree=options.tree)

    table = Table("", "tokens", "rounds", "tau", "tokens/s")
    texts = []
    for name, drafter in (("plain", None), ("EAGLE-2", head)):
        with console.status(f"{name}: compiling, then decoding"):
            decode(drafter)  # compiles
            started = time.perf_counter()
            done = decode(drafter)
            seconds = time.perf_counter() - started
        texts.append(done.text)
        tokens = len(done.token_ids)
        table.add_row(name, str(tokens), str(done.rounds), f"{done.tau:.2f}", f"{tokens / seconds:.1f}")
    console.print(f"\n[bold]{options.message}[/bold]\n{texts[1]}\n")
    console.print(table)
    if texts[0] != texts[1]:
        raise RuntimeError(f"Plain decoding gives another text: {texts[0]!r}")
    console.print("Both give the same text.")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
