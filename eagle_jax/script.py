"""How every script starts and ends: options from the command line, a refusal as one sentence and a non-zero exit."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

Paths = tuple[tuple[int, ...], ...]
Options = TypeVar("Options")


def run(main: Callable[[Options], None], options: type[Options], description: str | None) -> None:
    """Parses `options`, a dataclass that refuses senseless values when it is made, and hands them to `main`."""
    try:
        main(tyro.cli(options, description=description, registry=_registry()))
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")


def _registry() -> ConstructorRegistry:
    """How a tree's paths are given: `0 1 0.0 0.1`, each a path, its ranks between dots."""

    def read(words: list[str]) -> Paths:
        return tuple(tuple(int(rank) for rank in word.split(".")) for word in words)

    def write(paths: Paths) -> list[str]:
        return [".".join(map(str, path)) for path in paths]

    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Paths] | None:
        if info.type != Paths:
            return None
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="RANK[.RANK...] ...",
            instance_from_str=read,
            is_instance=lambda found: isinstance(found, tuple) and all(isinstance(path, tuple) for path in found),
            str_from_instance=write,
        )

    registry = ConstructorRegistry()
    registry.primitive_rule(rule)
    return registry


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
