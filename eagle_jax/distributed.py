"""Several processes as one program: each runs the same script, and `jax.devices()` is then the devices of all.

Which processes belong together is asked for, never guessed: a script that waits for others that nobody started would
hang.
"""

import dataclasses

import jax


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
