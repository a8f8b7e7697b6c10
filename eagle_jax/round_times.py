"""Where a round's time goes: drafting, verification, and the draft model's own forwards by themselves.

Decoding is one compiled loop. Here its round is cut into two programs, run in turn over the same prompts: the drafter
takes in what the last round committed and proposes a tree; the target verifies it. Before each round the forwards that
the drafter is about to make (its layers and its LM head) are run alone, on the same arrays: what drafting takes above
them goes into making a tree of what they say.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from eagle_jax import decoding
from eagle_jax.decoding import DecodeState, Params, Program
from eagle_jax.draft import Committed
from eagle_jax.measure import Decoding
from eagle_jax.tree import Tree

Calls = list[dict[str, tuple[Any, ...]]]  # method: what it was called with, but for the parameters


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Same:
    """In place of an array that was there before: its number among all of them, so that a cache is kept once."""

    number: int


class RoundTimes(NamedTuple):
    """Seconds of each round; the three of a round stand at one place of the lists."""

    drafting: list[float]
    verifying: list[float]
    forwards: list[float]  # the draft model's alone; empty for a drafter that has none


def time_parts(way: Decoding, prompts: Sequence[Sequence[int]], rounds: int) -> RoundTimes:
    """`rounds` rounds of prompts that are decoded together, or fewer at their end.

    The first two compile and are not counted.
    """
    job = way.job(prompts)
    params, program, times = job.params, job.program, RoundTimes([], [], [])

    def timed(function: Callable[..., Any], *args: Any, **static: Any) -> tuple[Any, float]:
        begun = way.clock()
        result = jax.block_until_ready(function(*args, **static))
        return result, way.clock() - begun

    state = jax.block_until_ready(job.start())
    draft, state = state.draft, dataclasses.replace(state, draft=None)
    committed = None  # the drafter has seen the whole prompt
    for number in range(rounds + 2):
        if not np.any(np.asarray(state.finish) == decoding.RUNNING):
            break
        given = params.drafter, _without_keys(state), draft, committed
        calls = jax.block_until_ready(_calls(*given, program=program))
        _, forwards = timed(_forwards, params.drafter, calls, program=program)
        (tree, draft), drafting = timed(_draft, *given, program=program)
        (state, committed), verifying = timed(_verify, params, state, tree, program=program)
        if number > 1:  # two rounds compile: the first has nothing to take in
            times.drafting.append(drafting)
            times.verifying.append(verifying)
            if calls:
                times.forwards.append(forwards)
    return times


def _without_keys(state: DecodeState) -> DecodeState:
    """What a drafter is shown of the state; a program would take time to hand the target's keys and values through."""
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, keys=(), values=()))


def _take_in_and_propose(
    params: Any, state: DecodeState, draft: Any, committed: Committed | None, *, program: Program
) -> tuple[Tree, Any]:
    if committed is not None:
        draft = program.drafter.observe(params, draft, committed)
    return decoding.propose(params, dataclasses.replace(state, draft=draft), program=program)


_draft = jax.jit(_take_in_and_propose, static_argnames="program", donate_argnames="draft")


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def _verify(params: Params, state: DecodeState, tree: Tree, *, program: Program) -> tuple[DecodeState, Committed]:
    state, committed, _ = decoding.verify_tree(params.target, state, tree, program=program)
    return state, committed


@partial(jax.jit, static_argnames="program")
def _calls(params: Any, state: DecodeState, draft: Any, committed: Committed | None, *, program: Program) -> Calls:
    """What the drafter is going to run its model with in this round, in order."""
    calls: Calls = []
    noting = dataclasses.replace(program, drafter=_noting(program.drafter, calls))
    _take_in_and_propose(params, state, draft, committed, program=noting)
    arrays: list[Any] = []

    def once(array: Any) -> Any:
        earlier = next((number for number, one in enumerate(arrays) if one is array), None)
        if earlier is None:
            arrays.append(array)
        return array if earlier is None else Same(earlier)

    return jax.tree.map(once, calls)


def _noting(drafter: Any, calls: Calls) -> Any:
    """The drafter, which writes down what its model is run with."""
    kind = type(drafter)

    def noting(name: str) -> Callable[..., Any]:
        def call(self: Any, params: Any, *args: Any) -> Any:
            calls.append({name: args})
            return getattr(kind, name)(self, params, *args)

        return call

    there = {name: noting(name) for name in getattr(kind, "forwards", ())}
    fields = {field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)}
    return type(kind.__name__, (kind,), there)(**fields)


@partial(jax.jit, static_argnames="program")
def _forwards(params: Any, calls: Calls, *, program: Program) -> list[Any]:
    """The same calls and nothing else; each waits for the one before, as it does where that one's word is its input."""
    is_same = lambda leaf: isinstance(leaf, Same)  # noqa: E731
    arrays, results, last = jax.tree.leaves(calls), [], jnp.zeros(())
    for call in jax.tree.map(lambda leaf: arrays[leaf.number] if is_same(leaf) else leaf, calls, is_leaf=is_same):
        [(name, (first, *rest))] = call.items()
        results.append(getattr(program.drafter, name)(params, _after(last, first), *rest))
        last = jax.tree.leaves(results[-1])[0].ravel()[0]
    return results


def _after(last: Array, first: Array) -> Array:
    """`first`, known only once `last` is: a number is added that is 0."""
    return first + jnp.isnan(last).astype(first.dtype)
