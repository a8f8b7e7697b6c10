"""Decodes one prompt plainly and with EAGLE-2, and shows that the text is the same.

    make demo        # or: python decode/demo.py

Fetches the embedded model once (98 MB). Expect the same text twice, fewer rounds with EAGLE-2, and both speeds. On a
CPU a forward pass over a tree costs several plain steps, so that EAGLE-2 may well be the slower of the two there; where
a pass costs the same for one token or for sixty, rounds are what counts.
"""

import dataclasses
import time

from rich.console import Console
from rich.table import Table

import eagle_jax as ej
from eagle_jax.generation import check_lengths
from eagle_jax.script import run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    message: str = "Explain in a few sentences why the sky is blue."
    max_new_tokens: int = 96
    tree: ej.TreeConfig = ej.TreeConfig(nodes=8, depth=3, top_k=3)

    def __post_init__(self):
        check_lengths(self.max_new_tokens, None)


def main(options: Options) -> None:
    console = Console()
    target = ej.load_target("smollm2-135m")
    head = ej.load_head("smollm2-135m", target)
    chat = [{"role": "user", "content": options.message}]

    def decode(drafter: ej.Head | ej.Medusa | None) -> ej.Completion:
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
    # What a model writes is no markup of the console's.
    console.print(options.message, style="bold", markup=False, highlight=False)
    console.print(texts[1], markup=False, highlight=False)
    console.print(table)
    if texts[0] != texts[1]:
        raise RuntimeError(f"Plain decoding gives another text: {texts[0]!r}")
    console.print("Both give the same text.")


if __name__ == "__main__":
    run(main, Options, __doc__)
