"""What holds for every test: a CPU, no network, a compile cache of the run's own, repeatable examples."""

import atexit
import os
import shutil
import tempfile

# Before anything imports JAX or transformers, which read these once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="eagle_jax-compiled-")
atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax  # noqa: E402
import pytest  # noqa: E402
from engine_rig import make_head, make_target  # noqa: E402
from hypothesis import settings  # noqa: E402

from eagle_jax import load_target  # noqa: E402
from eagle_jax.paths import cache_directory  # noqa: E402

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


def pytest_configure(config):
    """Tiny models take longer to be optimized than they save. The slow tests compile as users do."""
    if config.option.markexpr == "not slow":
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for the processes that tests start


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """A compiled program holds mappings of memory, of which a process may have 65,530: all tests together need more."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def smollm2():
    """The embedded model, loaded once for all tests; `make model` fetches it."""
    if not (cache_directory() / "smollm2-135m.gguf").is_file():
        pytest.skip("the embedded model has not been fetched; run `make model`")
    return load_target("smollm2-135m")


@pytest.fixture(scope="module")
def target():
    """The engine tests' small random target; a file that needs another defines its own."""
    return make_target()


@pytest.fixture(scope="module")
def head(target):
    return make_head(target)
