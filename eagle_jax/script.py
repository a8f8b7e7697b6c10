"""How every script starts and ends: options from the command line, a refusal as one sentence and a non-zero exit."""

import sys
from collections.abc import Callable
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
