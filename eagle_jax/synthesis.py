"""Conversations that the target writes itself: training data for a head, out of prompts or out of nothing.

A conversation is a coroutine: it asks for one text after the other, an answer or (sampled from the beginning of a
user's turn, as MAGPIE does it, arXiv 2406.08464) a question, checks what it gets, and comes to an `Outcome`. A pool of
rows writes the texts of many at once. All that a conversation depends on is drawn from (seed, source, index): neither
the others nor the order in which they end matter to it.
"""

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError

from eagle_jax import screening
from eagle_jax.completion import Completion
from eagle_jax.config import SamplingConfig
from eagle_jax.data import Message
from eagle_jax.generation import encode_prompt
from eagle_jax.journal import DUPLICATE
from eagle_jax.pool import Request, RowPool
from eagle_jax.prompts import Opening
from eagle_jax.script import require
from eagle_jax.target import Target

SOURCES = ("prompt", "nothing")
MARKERS = ("MarkerOne", "MarkerTwo")  # stand for a user's message in a template
EMPTY, UNFINISHED, LOOPS, OVERLAP, TOO_LONG = "empty", "unfinished", "repetition", "overlap", "too long"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What conversations are to be like.

    seed: of everything that is drawn.
    temperatures: of answers; each conversation draws one.
    weights: how often each is drawn, relative to the others; none = all alike.
    user_temperature: of user's turns that the target writes.
    top_k, top_p, min_p: for both, off unless given.
    turns: answers in a conversation; user's turns that are not given are written.
    max_new_tokens: most tokens of one text.
    max_length: most tokens of a conversation.
    drop_unfinished: drop conversations whose answer was cut at one of these; else they say so.
    loop_repeats: drop texts in which something stands this often in a row (and fills 32 tokens); 0 = none.
    overlap_words: drop texts with so many words in a row of those to be excluded.
    """

    seed: int = 0
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    weights: tuple[float, ...] = ()
    user_temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    turns: int = 1
    max_new_tokens: int = 448
    max_length: int = 512
    drop_unfinished: bool = False
    loop_repeats: int = 4
    overlap_words: int = 13

    def __post_init__(self):
        for name in ("turns", "max_new_tokens", "overlap_words"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be at least 1.")
        require(self.max_length > 1, f"max_length is {self.max_length}; it must be at least 2.")
        require(self.seed >= 0, f"seed is {self.seed}; it must be 0 or more.")
        require(
            self.loop_repeats == 0 or self.loop_repeats > 1,
            f"loop_repeats is {self.loop_repeats}; it must be at least 2, or 0 for none.",
        )
        require(len(self.temperatures) > 0, "Give at least one temperature.")
        require(
            len(self.weights) in (0, len(self.temperatures)),
            f"There are {len(self.weights)} weights for {len(self.temperatures)} temperatures; give one for each.",
        )
        require(
            not self.weights or (min(self.weights) >= 0 and 0 < sum(self.weights) < float("inf")),
            f"weights are {self.weights}; they must not be negative, nor all 0.",
        )
        require(
            self.user_temperature > 0,
            f"user_temperature is {self.user_temperature}; at 0 all users would say the same.",
        )
        self.samplings()  # refuses what makes no sense

    def samplings(self) -> list[SamplingConfig]:
        """All settings that occur."""
        return [self.sampling(temperature) for temperature in {*self.temperatures, self.user_temperature}]

    def sampling(self, temperature: float) -> SamplingConfig:
        return SamplingConfig(temperature=temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


class Plan(NamedTuple):
    """One conversation that is to be written."""

    name: str  # its id
    source: str
    opening: Opening
    place: tuple[float, str]  # among all others
    temperature: float  # of its answers
    seed: int  # of its first written text; each later message's is one more


class Outcome(NamedTuple):
    """What a conversation came to."""

    name: str
    record: dict[str, Any] | None  # a line of the file
    reason: str  # why there is none, else empty


def plans_for(recipe: Recipe, openings: Sequence[Opening], from_nothing: int) -> list[Plan]:
    """What is to be written, in an order drawn from the seed; more prompts, or more from nothing, change no other."""
    plans = [_plan(recipe, "prompt", index, opening) for index, opening in enumerate(openings)]
    plans += [_plan(recipe, "nothing", index, Opening((), ())) for index in range(from_nothing)]
    return sorted(plans, key=lambda plan: plan.place)


def place_of(recipe: Recipe, name: str) -> tuple[float, str]:
    """Where a conversation stands among all others, by its id."""
    source, _, index = name.partition("-")
    return _place(_draws(recipe, source, int(index)), name)


def _draws(recipe: Recipe, source: str, index: int) -> np.random.Generator:
    return np.random.default_rng((recipe.seed, SOURCES.index(source), index))


def _place(draws: np.random.Generator, name: str) -> tuple[float, str]:
    return draws.random(), name  # the id decides should two draw the same


def _plan(recipe: Recipe, source: str, index: int, opening: Opening) -> Plan:
    draws, name = _draws(recipe, source, index), f"{source}-{index}"
    weights = np.asarray(recipe.weights or [1.0] * len(recipe.temperatures))
    return Plan(
        name=name,
        source=source,
        opening=opening,
        place=_place(draws, name),
        temperature=float(draws.choice(recipe.temperatures, p=weights / weights.sum())),
        seed=int(draws.integers(2**31 - 2 * recipe.turns)),
    )


class Beginning(NamedTuple):
    """What a text goes on from, and what ends it besides the target's own end tokens."""

    tokens: list[int]
    end: int | None
    stop: tuple[str, ...]


def user_turn(target: Target, messages: Sequence[Message] = ()) -> Beginning:
    """The beginning of a user's turn after `messages`, by the chat template, found with markers in its place.

    Raises:
      ValueError: the template shows no such place.
    """
    tokenizer, around = target.tokenizer, []
    require(tokenizer is not None, f"The target {target.name} has no tokenizer, which writing conversations needs.")
    for marker in MARKERS:
        chat = [*messages, {"role": "user", "content": marker}]
        try:
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except (ValueError, TemplateError) as error:
            reason = " ".join(str(error).split())[:120].rstrip(".")
            raise ValueError(
                f"The target {target.name} has no chat template for a user's message ({reason})."
            ) from error
        around.append(text.partition(marker) if text.count(marker) == 1 else None)
    first, second = around
    # A space before the text is the text's own: a word's token begins with it.
    before = "" if first is None else first[0].rstrip(" ")
    require(
        first is not None and second is not None and first[::2] == second[::2] and before != "",
        f"The chat template of {target.name} shows no place of its own for a user's message, so that none can be "
        f"written from nothing; give prompts.",
    )
    after = "" if first is None else first[2].strip()
    ids = tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
    # Text holds no special tokens, so that one would never be found there.
    if ids and ids[0] in tokenizer.all_special_ids:
        return Beginning(encode_prompt(target, before), ids[0], ())
    return Beginning(encode_prompt(target, before), None, (after,) if after else ())


class Unfit(Exception):
    """A text that a conversation is not to hold, with the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writer:
    """Writes conversations with a target."""

    target: Target
    recipe: Recipe
    max_length: int  # the recipe's, or the target's limit
    excluded: screening.Overlap
    given: frozenset[str] = frozenset()  # user's turns that a written one must not repeat
    is_duplicate: Callable[[str, str, Sequence[Message]], bool]  # (id, source, messages), the journal's

    def write(self, plan: Plan) -> Generator[Request, Completion, Outcome]:
        """A conversation, text by text. One that fails a check in a later turn ends before that turn."""
        messages, later = list(plan.opening.messages), iter(plan.opening.later)
        whole, finished = 0, False  # whole: messages up to the last good answer
        try:
            for message in messages:
                self._check(message["content"])
            for turn in range(self.recipe.turns):
                if turn > 0 or not messages:
                    text = next(later, None) or (yield from self._ask(plan, messages))
                    self._check(text)
                    messages.append({"role": "user", "content": text})
                if turn == 0 and plan.source == "nothing":
                    self._check_new(plan, messages)
                text, finished = yield from self._answer(plan, messages)
                messages.append({"role": "assistant", "content": text})
                whole = len(messages)
                if not finished:
                    break
        except Unfit as unfit:
            if whole == 0:
                return Outcome(plan.name, None, str(unfit))
        record = {
            "id": plan.name,
            "messages": messages[:whole],
            "temperature": plan.temperature,
            "finished": finished,
            "source": plan.source,
            "seed": plan.seed,
        }
        return Outcome(plan.name, record, "")

    def _ask(self, plan: Plan, messages: Sequence[Message]) -> Generator[Request, Completion, str]:
        """A user's turn."""
        turn = user_turn(self.target, messages) if messages else self._first_turn
        text, finished = yield from self._text(plan, messages, turn, self.recipe.user_temperature)
        if not finished:
            raise Unfit(UNFINISHED)
        return text

    def _answer(self, plan: Plan, messages: Sequence[Message]) -> Generator[Request, Completion, tuple[str, bool]]:
        """An answer, and whether it came to its end."""
        beginning = Beginning(encode_prompt(self.target, messages), None, ())
        text, finished = yield from self._text(plan, messages, beginning, plan.temperature)
        if self.recipe.drop_unfinished and not finished:
            raise Unfit(UNFINISHED)
        self._check(text)
        return text, finished

    def _text(
        self, plan: Plan, messages: Sequence[Message], beginning: Beginning, temperature: float
    ) -> Generator[Request, Completion, tuple[str, bool]]:
        if len(beginning.tokens) >= self.max_length:
            raise Unfit(TOO_LONG)
        done = yield Request(
            tokens=beginning.tokens,
            seed=plan.seed + len(messages) - len(plan.opening.messages),
            sampling=self.recipe.sampling(temperature),
            max_new_tokens=self.recipe.max_new_tokens,
            end=beginning.end,
            stop=beginning.stop,
        )
        text = done.text.strip()  # templates put the space around a message themselves
        if not text:
            raise Unfit(EMPTY)
        if self.recipe.loop_repeats and screening.loops(done.token_ids, self.recipe.loop_repeats):
            raise Unfit(LOOPS)
        return text, done.finish_reason == "stop"

    def _check(self, text: str) -> None:
        if self.excluded.found_in(text):
            raise Unfit(OVERLAP)

    def _check_new(self, plan: Plan, messages: Sequence[Message]) -> None:
        if messages[0]["content"] in self.given or self.is_duplicate(plan.name, plan.source, messages):
            raise Unfit(DUPLICATE)

    @cached_property
    def _first_turn(self) -> Beginning:
        return user_turn(self.target)


def run(pool: RowPool, writer: Writer, plans: Iterable[Plan]) -> Iterator[list[Outcome]]:
    """Writes conversations; yields those that came to something, or to nothing, at each of the pool's looks."""
    left = iter(plans)
    ended: list[Outcome] = []

    def go_on(writing: Generator[Request, Completion, Outcome], completion: Completion | None) -> None:
        try:
            # The first text of a coroutine is asked for with None.
            pool.add(writing.send(completion), tag=writing)  # pyright: ignore[reportArgumentType]
        except StopIteration as end:
            ended.append(end.value)

    while True:
        while pool.wanted > 0 and (plan := next(left, None)) is not None:
            go_on(writer.write(plan), None)
        if not pool.busy:
            yield ended
            return
        for writing, _, completion in pool.step():
            go_on(writing, completion)
        yield ended
        ended = []
