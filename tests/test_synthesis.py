"""Conversations that the target writes: each text is `generate`'s, whatever else is being written; what is dropped."""

import dataclasses

import pytest
from engine_rig import make_head, make_target
from rig import TEMPLATE, word_tokenizer

import eagle_jax as ej
from eagle_jax import synthesis
from eagle_jax.pool import RowPool
from eagle_jax.prompts import Opening
from eagle_jax.screening import Overlap
from eagle_jax.synthesis import Recipe, plans_for, user_turn

VICUNA = (
    "A chat. {% for m in messages %}{{ 'USER: ' if m['role'] == 'user' else 'ASSISTANT: ' }}{{ m['content'] }}"
    "{{ ' ' if m['role'] == 'user' else '</s>' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
TREE = ej.TreeConfig(nodes=6, depth=2, top_k=2)
RECIPE = Recipe(temperatures=(0.0, 1.5), max_new_tokens=12, max_length=64, loop_repeats=0)


@pytest.fixture(scope="module")
def target():
    return dataclasses.replace(make_target(vocab_size=13, eos=(3,)), tokenizer=word_tokenizer())


def users(*texts):
    return [Opening(({"role": "user", "content": first},), tuple(later)) for first, *later in map(str.split, texts)]


def write(target, recipe, plans, *, rows=4, head=None):
    """The outcomes, by id."""
    pool = RowPool(target, head, rows=rows, max_length=recipe.max_length, sampling=recipe.samplings(), tree=TREE)
    writer = synthesis.Writer(
        target=target,
        recipe=recipe,
        max_length=pool.max_length,
        excluded=Overlap([]),
        is_duplicate=lambda *_: False,
    )
    return {outcome.name: outcome for outcomes in synthesis.run(pool, writer, plans) for outcome in outcomes}


def records(outcomes):
    return [outcome.record for outcome in outcomes.values() if outcome.record is not None]


def texts(record):
    return [message["content"] for message in record["messages"]]


@pytest.mark.parametrize("turns", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_text_is_what_generate_gives_alone(target, turns):
    """User's turns from the bare beginning of one, answers from the chat so far, each under a seed of its own."""
    recipe = dataclasses.replace(RECIPE, turns=turns)
    outcomes = write(target, recipe, plans_for(recipe, users(*"abcd"), 8))
    found = records(outcomes)
    assert {record["source"] for record in found} == {"prompt", "nothing"}
    assert {record["temperature"] for record in found} == {0.0, 1.5}
    assert max(len(record["messages"]) for record in found) == 2 * turns
    for record in found:
        messages, given = record["messages"], record["source"] == "prompt"
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        for place in range(given, len(messages)):
            ours = messages[place]["role"] == "assistant"
            done = ej.generate(
                target,
                None,
                [messages[:place] if ours else user_turn(target, messages[:place]).tokens],
                seed=[record["seed"] + place - given],
                sampling=recipe.sampling(record["temperature"] if ours else 1.0),
                max_new_tokens=recipe.max_new_tokens,
            )[0]
            assert messages[place]["content"] == done.text.strip()
            if place == len(messages) - 1:
                assert record["finished"] == (done.finish_reason == "stop")


def test_neither_rows_nor_a_head_nor_order_nor_more_of_them_change_a_conversation(target):
    plans = plans_for(RECIPE, users(*"abcd"), 8)
    wanted = write(target, RECIPE, plans)
    assert len(records(wanted)) > 4
    assert write(target, RECIPE, plans[::-1], rows=2, head=make_head(target)) == wanted
    more = write(target, RECIPE, plans_for(RECIPE, users(*"abcdefg"), 11))
    assert len(more) == 18 and wanted.items() <= more.items()
    other = dataclasses.replace(RECIPE, seed=1)
    assert records(write(target, other, plans_for(other, users(*"abcd"), 8))) != records(wanted)


# --- Conversations fed by hand ----------------------------------------------------------------------------------------


def converse(target, plan, *said, recipe=RECIPE, excluded=(), **options):
    """What a conversation comes to when the target says this: texts, "..." at the end of those that were cut."""
    options = {"is_duplicate": lambda *_: False} | options
    writer = synthesis.Writer(
        target=target,
        recipe=recipe,
        max_length=recipe.max_length,
        excluded=Overlap(excluded, recipe.overlap_words),
        **options,
    )
    writing = writer.write(plan)
    try:
        next(writing)
        for text in said:
            writing.send(completed(text))
    except StopIteration as end:
        return end.value
    raise AssertionError("it wants to go on")


def completed(text):
    ids, reason = word_ids(text.removesuffix("...")), "length" if text.endswith("...") else "stop"
    text = text.removesuffix("...")
    return ej.Completion(token_ids=ids, text=text, logprobs=[], finish_reason=reason, rounds=0, accepted=[])


def word_ids(text):
    return [sum(map(ord, word)) for word in text.split()]


def plan_of(*given, **recipe):
    openings = users(" ".join(given)) if given else []
    return plans_for(dataclasses.replace(RECIPE, **recipe), openings, 0 if given else 1)[0]


def test_given_turns_are_asked_in_their_order_and_then_written_ones(target):
    recipe = dataclasses.replace(RECIPE, turns=3)
    outcome = converse(target, plan_of("a", "b"), "1", "2", " c ", "3\n", recipe=recipe)
    assert texts(outcome.record) == ["a", "1", "b", "2", "c", "3"] and outcome.record["finished"]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (["", ""], "empty"),
        (["a", " "], "empty"),
        (["a..."], "unfinished"),
        (["a " * 40], "repetition"),
        (["a", "b c " * 20], "repetition"),
        (["a b e v w"], "overlap"),
        (["a", "x B, E V w"], "overlap"),
        (["given"], "duplicate"),
        (["a " * 70], "too long"),
    ],
)
def test_what_is_unfit_is_dropped_with_its_reason(target, said, reason):
    recipe = dataclasses.replace(RECIPE, loop_repeats=0 if reason == "too long" else 4, overlap_words=4)
    options = {"recipe": recipe, "excluded": ["b e v w", "given it is"], "given": frozenset(["given"])}
    assert converse(target, plan_of(), *said, **options) == ("nothing-0", None, reason)


def test_a_given_text_may_be_unfit_too(target):
    assert converse(target, plan_of("a"), excluded=["a"]).reason == "overlap"
    long = Opening(({"role": "user", "content": "a " * 70},), ())
    assert converse(target, plans_for(RECIPE, [long], 0)[0]).reason == "too long"


def test_a_duplicate_is_answered_no_more(target):
    asked = []

    def is_duplicate(*arguments):
        asked.append(arguments)
        return True

    assert converse(target, plan_of(), "a", is_duplicate=is_duplicate).reason == "duplicate"
    assert asked == [("nothing-0", "nothing", [{"role": "user", "content": "a"}])]


def test_an_answer_that_was_cut_is_told_or_dropped(target):
    assert converse(target, plan_of("a"), "b...").record["finished"] is False
    recipe = dataclasses.replace(RECIPE, drop_unfinished=True)
    assert converse(target, plan_of("a"), "b...", recipe=recipe).reason == "unfinished"


def test_a_later_turn_that_is_unfit_ends_the_conversation_before_it(target):
    recipe = dataclasses.replace(RECIPE, turns=3, loop_repeats=4)
    for later in (["c..."], ["c", ""], ["c", "d " * 40]):
        record = converse(target, plan_of("a"), "b", *later, recipe=recipe).record
        assert texts(record) == ["a", "b"] and record["finished"]


# --- Plans ------------------------------------------------------------------------------------------------------------


def test_temperatures_are_drawn_by_weight():
    recipe = dataclasses.replace(RECIPE, temperatures=(0.0, 0.7, 1.0), weights=(1, 0, 3))
    drawn = [plan.temperature for plan in plans_for(recipe, [], 400)]
    assert set(drawn) == {0.0, 1.0} and 60 < drawn.count(0.0) < 140


def test_prompts_and_nothing_are_written_in_turn():
    """So that the end of a file, which is held out in training, is like the rest of it."""
    plans = plans_for(RECIPE, users(*["a"] * 200), 200)
    assert 60 < sum(plan.source == "prompt" for plan in plans[:200]) < 140
    assert [plan.place for plan in plans] == [synthesis.place_of(RECIPE, plan.name) for plan in plans]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperatures": ()}, "at least one temperature"),
        ({"temperatures": (-1.0,)}, "temperature is -1.0"),
        ({"weights": (1.0,)}, "1 weights for 2 temperatures"),
        ({"weights": (-1.0, 2.0)}, "must not be negative, nor all 0"),
        ({"weights": (0.0, 0.0)}, "must not be negative, nor all 0"),
        ({"user_temperature": 0.0}, "at 0 all users would say the same"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"turns": 0}, "turns is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_length": 1}, "max_length is 1"),
        ({"loop_repeats": 1}, "loop_repeats is 1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_senseless_recipes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(RECIPE, **change)


# --- The beginning of a user's turn -----------------------------------------------------------------------------------


def with_template(target, template):
    return dataclasses.replace(target, tokenizer=word_tokenizer(template))


def test_a_special_token_ends_a_users_turn(target):
    ids = target.tokenizer("<user>")["input_ids"]
    assert user_turn(target) == (ids, 3, ())
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    before = target.tokenizer("<user> a </s> <assistant> b </s> <user>")["input_ids"]
    assert user_turn(target, chat) == (before, 3, ())


def test_words_end_a_users_turn_where_the_template_has_no_token_for_it(target):
    turn = user_turn(with_template(target, VICUNA))
    assert (turn.end, turn.stop) == (None, ("ASSISTANT:",))
    assert len(turn.tokens) == 3  # "A chat. USER:", and no space by itself


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE.replace("m['content']", "m['content'] | upper"),
        TEMPLATE.replace("m['content'] }}", "m['content'] }} {{ m['content'] }}"),
        "{{ messages[0]['content'][-3:] }} " + TEMPLATE,
        "{{ messages[0]['content'] }}",
    ],
)
def test_a_template_without_a_place_for_a_user_is_refused(target, template):
    with pytest.raises(ValueError, match="shows no place of its own for a user's message"):
        user_turn(with_template(target, template))


def test_without_a_template_or_a_tokenizer_nothing_can_be_written(target):
    with pytest.raises(ValueError, match="has no chat template for a user's message"):
        user_turn(with_template(target, None))
    with pytest.raises(ValueError, match="has no tokenizer"):
        user_turn(make_target())
