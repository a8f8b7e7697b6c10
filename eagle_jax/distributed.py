"""Several processes as one program: each runs the same script, and `jax.devices()` is then the devices of all.

Which processes belong together is asked for, never guessed: a script that waits for others that nobody started would
hang. What one of them may fail at goes through `in_all`, so that none waits for one that has ended.
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

LONGEST_ERROR = 1024  # bytes of an error's text that other processes are told

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The processes that run together; by default this one is alone."""

    detect: bool = False  # as Cloud TPU, GKE, SLURM or Open MPI describe them to JAX
    coordinator: str | None = None  # host:port of process 0, which the others can reach; where nothing is detected
    count: int | None = None  # processes, with `coordinator`
    index: int | None = None  # which of them this is, from 0

    def __post_init__(self):
        stated = (self.coordinator, self.count, self.index)
        if self.detect and stated != (None, None, None):
            raise ValueError("ProcessConfig has detect as well as a coordinator; give one of the two.")
        if stated != (None, None, None) and None in stated:
            raise ValueError(
                f"ProcessConfig has coordinator {self.coordinator}, count {self.count} and index {self.index}; "
                f"give all three or none."
            )
        if self.count is not None and not 0 <= (self.index or 0) < self.count:
            raise ValueError(f"ProcessConfig.index is {self.index}; it must be from 0 to below count, {self.count}.")


def start(config: ProcessConfig) -> None:
    """Joins the other processes, if there are any to be; before anything else asks JAX for a device.

    Raises:
      ValueError: nothing was detected.
      RuntimeError: JAX has started already, or the others did not come within five minutes.
    """
    if config.detect:
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise ValueError(
                f"JAX detects no other processes ({error}); state coordinator, count and index."
            ) from error
    elif config.coordinator is not None:
        jax.distributed.initialize(config.coordinator, config.count, config.index)


def is_main() -> bool:
    """Whether this process is the one that writes files and prints."""
    return jax.process_index() == 0


def in_all(work: Callable[[], Result]) -> Result:
    """What `work` gives in this process, once every process has done it; all processes have to call this.

    Args:
      work: must not itself need another process.

    Raises:
      RuntimeError: another process failed, in that one's words. Its own error is raised in itself.
    """
    if jax.process_count() == 1:
        return work()
    outcome: Future[Result] = Future()
    try:
        outcome.set_result(work())
    except Exception as error:
        outcome.set_exception(error)
    failure = outcome.exception()
    said = np.zeros(LONGEST_ERROR, np.uint8)
    text = b"" if failure is None else (str(failure) or repr(failure)).encode()[:LONGEST_ERROR]
    said[: len(text)] = np.frombuffer(text, np.uint8)
    for index, other in enumerate(multihost_utils.process_allgather(said)):
        if failure is None and other.any():
            told = other.tobytes().rstrip(b"\0").decode(errors="replace")
            raise RuntimeError(f"Process {index} of {jax.process_count()}: {told}")
    return outcome.result()


def main_first(work: Callable[[], Result]) -> Result:
    """`in_all`, in which the others begin when process 0 is through: what it has written is there for them."""
    done = in_all(lambda: [work()] if is_main() else [])
    return in_all(lambda: done[0] if done else work())


def from_main(values: np.ndarray) -> np.ndarray:
    """What process 0 gives, in every process; all have to call this, with arrays of the same shape and dtype."""
    return values if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(values))
