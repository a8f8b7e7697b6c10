"""Where the library keeps what can be fetched or compiled again."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """$EAGLE_JAX_CACHE, else $XDG_CACHE_HOME/eagle_jax, else ~/.cache/eagle_jax."""
    if chosen := os.environ.get("EAGLE_JAX_CACHE"):
        path = Path(chosen)
    elif caches := os.environ.get("XDG_CACHE_HOME"):
        path = Path(caches, "eagle_jax")
    else:
        path = Path("~/.cache/eagle_jax")
    return path.expanduser().absolute()
