"""Files that are there whole or as they were: written beside their place, which they take at once."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, suffix: str = ".partial") -> Iterator[Path]:
    """Where to write what is to stand at `path` once the block ends without an error; else nothing is left of it.

    Args:
      suffix: of the scratch file's name. What a kill leaves is overwritten by the next writer with the same one, so
        writers that may meet need their own.
    """
    scratch = path.with_name(path.name + suffix)
    try:
        yield scratch
        with open(scratch, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:  # an interruption, too
        scratch.unlink(missing_ok=True)
        raise
