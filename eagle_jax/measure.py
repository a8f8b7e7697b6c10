"""What decoding takes: the same prompts by several methods in turn, ids counted alike, compilation kept apart.

A method is a `Way` to decode a group of prompts. It tells two times: from the prompts' ids in hand to the first ids
out (prefill), and from there to the last ids (decoding). A speed counts the ids of the second time over that time. The
first call for a shape compiles; it is made beforehand, and what it took more than the next one is told by itself.

Every text of the same seed should be plain decoding's; where one is not, the gap between plain's two best of processed
`logits + temperature * noise` at the first difference says whether rounding excuses it: float32's, or bfloat16's.
"""

import dataclasses
import math
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax import generation
from eagle_jax import sampling as sampling_rows
from eagle_jax.config import SamplingConfig, TreeConfig
from eagle_jax.draft import TreeDrafter
from eagle_jax.head import Head
from eagle_jax.target import Target, features_of

# Rounding differs between a forward over one token and over many, in float32 by less than this ...
EXCUSED_GAP = 2e-4
# ... and in bfloat16, where now and then a feature rounds the other way, by less than so many units in the last place.
EXCUSED_ULPS = 2

Clock = Callable[[], float]


class Timed(NamedTuple):
    """One decoding of a group of prompts."""

    ids: list[list[int]]  # each prompt's, the token that ended it included
    accepted: list[int]  # draft tokens of each round, over all rows
    early: int  # ids that the prefill gave
    prefill: float  # seconds
    decoding: float  # seconds

    @property
    def seconds(self) -> float:
        return self.prefill + self.decoding

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


class Way(Protocol):
    """A method of decoding."""

    @property
    def same_text(self) -> bool:
        """Whether its text should be plain decoding's, id for id."""
        ...

    @property
    def drafting(self) -> str:
        """What it drafts, in words; empty where it does not."""
        ...

    def shape(self, prompts: Sequence[Sequence[int]]) -> Hashable:
        """What a first call compiles for."""
        ...

    def __call__(self, prompts: Sequence[Sequence[int]]) -> Timed: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """This library's decoding, plain where the drafter is None. Each row draws as if it were alone under the seed."""

    target: Target
    drafter: Head | generation.BindsDrafter | None
    tree: TreeConfig = TreeConfig()
    sampling: SamplingConfig = SamplingConfig()
    seed: int = 0
    max_new_tokens: int = 128
    clock: Clock = time.perf_counter
    same_text: bool = True

    @property
    def drafting(self) -> str:
        drafter, _ = generation.bind(self.target, self.drafter, self.tree)
        if drafter.nodes == 1:
            return ""
        drawn = ", sampled" if self.tree.children == "sampled" else ""
        kind = ""
        if isinstance(drafter, TreeDrafter):  # others have trees of their own
            kind = f"{self.tree.kind}, "
            drawn = (f", top_k {self.tree.top_k}" if self.tree.kind == "dynamic" else "") + drawn
        return f"{kind}{drafter.nodes} nodes, depth {drafter.depth}{drawn}"

    def job(self, prompts: Sequence[Sequence[int]]) -> generation.Job:
        return generation.prepare(
            self.target,
            self.drafter,
            prompts,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            tree=self.tree,
            seed=[self.seed] * len(prompts),
        )

    def shape(self, prompts: Sequence[Sequence[int]]) -> Hashable:
        job, longest = self.job(prompts), max(map(len, prompts))
        return job.program, len(prompts), min(generation.length_bucket(longest), generation.CHUNK), job.capacity

    def __call__(self, prompts: Sequence[Sequence[int]]) -> Timed:
        begun = self.clock()
        job = self.job(prompts)
        state = jax.block_until_ready(job.start())
        first = self.clock()
        state = jax.block_until_ready(job.run_rounds(state, generation.UNBOUNDED))
        ended = self.clock()
        read = job.rows()
        job.look(state, read)
        rows = [row.completion() for row in read]
        return Timed(
            ids=[row.token_ids for row in rows],
            accepted=[count for row in rows for count in row.accepted],
            early=len(rows),
            prefill=first - begun,
            decoding=ended - first,
        )


# --- Prompts ----------------------------------------------------------------------------------------------------------


def encode_questions(target: Target, path: Path, questions: Sequence[generation.Chat], raw: bool) -> list[list[int]]:
    """Ids of a file's questions, all of them checked, so that no measurement ends at a prompt that cannot be decoded.

    Args:
      path: the file, for errors.
      raw: plain text, a question's messages a paragraph each; else through the chat template.

    Raises:
      ValueError: a prompt is empty or too long for the target, with its number in the file; or the target has no
        tokenizer, or no chat template where one is wanted.
    """
    if target.tokenizer is None:
        raise ValueError(f"The target {target.name} has no tokenizer, which prompts in text need; give another target.")
    if not raw and target.tokenizer.chat_template is None:
        raise ValueError(f"The target {target.name} has no chat template; add --raw to decode prompts as plain text.")
    encoded = []
    for number, question in enumerate(questions, start=1):
        prompt = "\n\n".join(message["content"] for message in question) if raw else question
        try:
            encoded += generation.prepare(target, None, [prompt]).prompts
        except ValueError as error:
            raise ValueError(f"{path}, prompt {number}: {error}") from error
    return encoded


# --- Taking turns -----------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Where a row's text is not plain decoding's."""

    row: int
    place: int | None  # of the first id that differs; None where one text only ends earlier
    gap: float  # plain's between its two best values there; inf where one text only ends earlier
    allowed: float  # gaps below this are rounding's

    @property
    def excused(self) -> bool:
        return self.gap < self.allowed


class Sample(NamedTuple):
    """One way's decoding of one group of prompts."""

    way: str
    group: int
    timed: Timed
    compiling: float  # seconds by which the first call for this shape was longer; 0 where it had been made before
    differences: list[Difference] | None  # from plain's texts; None: not to be compared


Judge = Callable[[Sequence[Sequence[int]], Timed, Timed], list[Difference]]


def take_turns(
    ways: Mapping[str, Way],
    prompts: Sequence[Sequence[int]],
    *,
    group: int,
    warm: set[Hashable],
    judge: Judge,
    repeats: int = 1,
) -> list[Sample]:
    """Decodes one group of prompts every way; "plain" must be one of them.

    Args:
      ways: by name.
      prompts: the same ids for every way.
      group: the group's number. It turns the order of the ways, so that a machine's drift meets all of them.
      warm: shapes whose first call has been made; added to.
      judge: `differences` with its target; gets the prompts, plain's result and another's.
      repeats: how many times each way decodes the group.
    """
    first_calls = {}
    for name, way in ways.items():
        shape = name, way.shape(prompts)
        if shape not in warm:
            first_calls[name] = way(prompts).seconds
            warm.add(shape)
    names, samples = list(ways), []
    for repeat in range(repeats):
        turn = (group + repeat) % len(names)
        timed = {name: ways[name](prompts) for name in names[turn:] + names[:turn]}
        for name in names:
            found = judge(prompts, timed["plain"], timed[name]) if ways[name].same_text else None
            compiling = max(0.0, first_calls.pop(name, 0.0) - timed[name].seconds)
            samples.append(Sample(name, group, timed[name], compiling, found))
    return samples


def differences(
    target: Target,
    prompts: Sequence[Sequence[int]],
    plain: Timed,
    other: Timed,
    *,
    seed: int,
    sampling: SamplingConfig,
) -> list[Difference]:
    """The rows whose texts differ, each at its first difference."""
    found = []
    for row, (prompt, one, two) in enumerate(zip(prompts, plain.ids, other.ids, strict=True)):
        if one == two:
            continue
        # The shorter may be the other's beginning.
        place = next((place for place, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            found.append(Difference(row, None, math.inf, allowed=0.0))
            continue
        second, best = jnp.sort(values_after(target, prompt, one[:place], seed, sampling))[-2:].tolist()
        found.append(Difference(row, place, best - second, allowed_gap(target.dtype, best)))
    return found


def allowed_gap(dtype: jnp.dtype, value: float) -> float:
    """The gap below which rounding may exchange two values of about this size."""
    if dtype == jnp.float32:
        return EXCUSED_GAP
    return EXCUSED_ULPS * 2.0 ** (math.frexp(value)[1] + math.frexp(float(jnp.finfo(dtype).eps))[1] - 2)


def values_after(
    target: Target, prompt: Sequence[int], text: Sequence[int], seed: int, sampling: SamplingConfig
) -> jax.Array:
    """Processed `logits + temperature * noise` f32[V] for the token after a prompt and a text, as decoding has them."""
    ids = [*prompt, *text]
    # The prompt came in whole, every later token by itself.
    came_with = jnp.maximum(jnp.arange(len(ids)) + 1, len(prompt))[None]
    features = features_of(*nnx.split(target.model), jnp.asarray([ids]), came_with)
    logits = target.model.logits(features[:, -1])
    return sampling_rows.perturbed(
        logits,
        sampling_rows.params_for([sampling], target.config.vocab_size),
        sampling_rows.processors_for([sampling]),
        sampling_rows.row_keys([seed], 1),
        jnp.asarray([len(ids)]),
        jnp.zeros(logits.shape, bool).at[0, jnp.asarray(ids)].set(True),
    )[0]


def time_rounds(way: Decoding, prompt: Sequence[int], rounds: int) -> tuple[float, int]:
    """Seconds of a prompt's first rounds, prefill left out, and how many they were; the shape must be warm."""
    job = way.job([prompt])
    state = jax.block_until_ready(job.start())
    begun = way.clock()
    state = jax.block_until_ready(job.run_rounds(state, rounds))
    return way.clock() - begun, int(state.rounds[0])


def peak_memory() -> int:
    """The most bytes this process has held at once."""
    # Not getrusage's figure where there is another: a new process inherits it from the one that started it.
    found = _memory_status("VmHWM")
    if found is not None:
        return found
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_memory() -> int:
    """The bytes this process holds now; the most it has held where the system does not tell."""
    found = _memory_status("VmRSS")
    return peak_memory() if found is None else found


def _memory_status(name: str, status: Path = Path("/proc/self/status")) -> int | None:
    if not status.is_file():
        return None
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name)) * 1024


# Each compiled program holds dozens of mappings of memory on a CPU, and Linux gives a process 65,530.
MANY_MAPPINGS = 30_000


def crowded(maps: Path = Path("/proc/self/maps")) -> bool:
    """Whether compiled programs hold so many mappings of memory that they are to be forgotten (`jax.clear_caches`)."""
    return maps.is_file() and maps.read_text().count("\n") > MANY_MAPPINGS


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor(info: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's model where the system names it, else its architecture."""
    if info.is_file():
        named = re.search(r"^model name\s*:\s*(\S.*)$", info.read_text(errors="replace"), re.MULTILINE)
        if named:
            return named[1].strip()
    return platform.processor() or platform.machine()


def machine() -> str:
    kinds = sorted({device.device_kind for device in jax.devices()})
    return f"{cores()} cores of {processor()}, jax {jax.__version__} on {len(jax.devices())} {', '.join(kinds)}"
