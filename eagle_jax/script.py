"""How every script starts and ends: options from the command line, a refusal as one sentence and a non-zero exit."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import tyro

Options = TypeVar("Options")


def run(main: Callable[[Options], None], options: type[Options], description: str | None) -> None:
    """Parses `options`, a dataclass that refuses senseless values when it is made, and hands them to `main`."""
    try:
        main(tyro.cli(options, description=description))
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")


def require(condition: bool, message: str) -> None:
    """Raises ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


@contextlib.contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """Inside, a first Ctrl-C or SIGTERM is only noted, for a program that ends where it loses nothing.

    Gives what tells whether one has come. A second one does what it always does.
    """
    noted: list[int] = []

    def note(number: int, _: object) -> None:
        noted.append(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: len(noted) > 0
    finally:
        restore()
