"""A conversation is `generate` turn by turn, whatever it keeps of the turns before."""

import collections
import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from engine_rig import Copy, CopyDrafter, Letters, compilations, make_head, make_medusa, make_target

import eagle_jax as ej
from eagle_jax import decoding
from eagle_jax.config import RopeScaling

TREE = ej.TreeConfig(nodes=12, depth=3, top_k=4)
WARM = ej.SamplingConfig(temperature=1.2, top_p=0.95, repetition_penalty=1.2)
MESSAGES = ("abc", "l", "hgfed")


class Merging(Letters):
    """Spells an answer otherwise than the target did: an `l` is an `a` before most letters, markers are no text."""

    def __call__(self, text, add_special_tokens=True):
        return super().__call__(text.replace("la", "a").replace("lb", "b"))

    def decode(self, ids, skip_special_tokens=False):
        return "".join(letter for letter in super().decode(ids) if letter.islower())


@pytest.fixture(scope="module")
def target():
    return dataclasses.replace(make_target(max_position_embeddings=128), tokenizer=Letters())


@pytest.fixture(scope="module")
def head(target):
    return make_head(target)


def begin(target, head, system=None, **options):
    """A conversation, and `generate` under its options for a chat."""
    options = {"max_new_tokens": 12, "max_length": 64, "tree": TREE, "seed": 5} | options
    return ej.Conversation(target, head, system=system, **options), lambda chat: ej.generate(
        target, head, chat, **options
    )


def user(message):
    return {"role": "user", "content": message}


def check_turn(talk, alone, message):
    """One turn, against a whole decode of the messages so far."""
    chat = [*talk.messages, user(message)]
    done, expected = talk.ask(message), alone(chat)
    check_same(done, expected)
    assert talk.messages == [*chat, {"role": "assistant", "content": done.text}]
    return done


def check_same(done, expected):
    np.testing.assert_allclose(done.logprobs, expected.logprobs, atol=1e-4)
    assert dataclasses.replace(done, logprobs=expected.logprobs) == expected


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [("none", WARM), ("head", WARM), ("head", ej.SamplingConfig()), ("copy", WARM), ("medusa", WARM)],
    ids=["plain", "head", "head, greedy", "copy", "medusa"],
)
def test_a_turn_is_generate_for_the_messages_so_far(target, head, drafter, sampling):
    """Rounds and what they accepted agree too: the drafter goes on from where it would have been."""
    drafters = {"none": None, "head": head, "copy": Copy(), "medusa": make_medusa(target)}
    talk, alone = begin(target, drafters[drafter], sampling=sampling)
    held, accepted = 0, []
    for message in MESSAGES:
        done = check_turn(talk, alone, message)
        prompt = len(target.tokenizer.apply_chat_template(talk.messages[:-1], False, True))
        # The last of the tokens that were there is run again.
        assert talk.prefilled == (prompt - held + 1 if held else prompt)
        held = prompt + len(done.token_ids)
        assert done.finish_reason == "length"
        accepted += done.accepted
    assert sum(accepted) > 0 or drafter == "none"


def test_a_turn_may_end_at_a_stop_string(target, head):
    """Tokens behind the stop string are forgotten, though the device has run them."""
    text = ej.Conversation(target, head, max_new_tokens=24, tree=TREE, seed=5, sampling=WARM).ask(MESSAGES[0]).text
    for place in (4, 9):
        talk, alone = begin(
            target, head, stop=[text[place : place + 2]], sampling=WARM, max_new_tokens=24, max_length=128
        )
        first, *_ = (check_turn(talk, alone, message) for message in MESSAGES)
        assert first.finish_reason == "stop"


def test_a_turn_may_end_inside_an_accepted_path(target):
    """Whatever token ends a text; the end token that the template writes is the emitted one where that is `E`."""
    inside = 0
    for end in (3, 5, 9, 12):
        ended = dataclasses.replace(target, eos_token_ids=(end,))
        talk, alone = begin(ended, Copy(), max_new_tokens=24, max_length=128)
        for message in MESSAGES:
            done = check_turn(talk, alone, message)
            inside += done.finish_reason == "stop" and len(done.token_ids) < 1 + sum(done.accepted) + done.rounds
    assert inside > 2


@pytest.mark.parametrize("most", [0, 1])
def test_a_turn_may_be_short(target, head, most):
    talk, alone = begin(target, head, max_new_tokens=most, sampling=WARM)
    for message in MESSAGES:
        assert len(check_turn(talk, alone, message).token_ids) == most


def test_a_stream_is_the_turn_in_rounds(target, head):
    talk, alone = begin(target, head, sampling=WARM)
    for message in MESSAGES:
        chat = [*talk.messages, user(message)]
        chunks = list(talk.say(message))
        assert talk.completion is not None
        check_same(talk.completion, alone(chat))
        assert "".join(chunk.text for chunk in chunks) == talk.completion.text == talk.messages[-1]["content"]
        assert [token for chunk in chunks for token in chunk.token_ids] == talk.completion.token_ids


@pytest.mark.parametrize("seen", [0, 1, 3])
def test_an_abandoned_turn_counts_as_far_as_it_was_shown(target, head, seen):
    talk, alone = begin(target, head, sampling=WARM)
    check_turn(talk, alone, "abc")
    before = list(talk.messages)
    chunks = talk.say("de")
    shown = "".join(chunk.text for chunk in itertools.islice(chunks, seen))
    if seen:
        assert talk.completion is None
        assert talk.messages == [*before, user("de"), {"role": "assistant", "content": shown}]
    else:
        assert talk.messages == before
    check_turn(talk, alone, "k")
    assert talk.prefilled < 20
    assert list(chunks) == []  # the next turn ended it
    check_turn(talk, alone, "l")


def test_an_interrupted_round_leaves_the_conversation_usable(target, head, monkeypatch):
    """As by Ctrl-C in the middle of a round, when the state's buffers have been given away."""
    run_rounds, calls = decoding.run_rounds, []

    def interrupted(*args, **options):
        calls.append(run_rounds(*args, **options))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return calls[-1]

    talk, alone = begin(target, head)
    shown = ""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(decoding, "run_rounds", interrupted)
        for chunk in talk.say("abc"):
            shown += chunk.text
    assert talk.messages[-1] == {"role": "assistant", "content": shown}
    for message in MESSAGES:
        check_turn(talk, alone, message)


def test_messages_may_be_edited(target, head):
    talk, alone = begin(target, head, system="kk")
    for message in MESSAGES:
        check_turn(talk, alone, message)
    del talk.messages[-4:]
    check_turn(talk, alone, "abc")
    talk.messages[0]["content"] = "k"
    check_turn(talk, alone, "abc")
    del talk.messages[:]
    check_turn(talk, alone, "abc")


def test_an_answer_that_is_spelt_otherwise_is_run_again(target, head):
    merging = dataclasses.replace(target, tokenizer=Merging())
    talk, alone = begin(merging, head, sampling=WARM, max_new_tokens=24, max_length=128)
    again = 0
    for message in MESSAGES:
        done = check_turn(talk, alone, message)
        again += talk.prefilled > len(message) + 6 + len(done.token_ids) // 2
    assert again


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForgetfulDrafter(CopyDrafter):
    """Goes back no further than to the beginning."""

    def rewind(self, params, state, length):
        return super().rewind(params, state, jnp.minimum(length, 2))


class Forgetful(Copy):
    def bind(self, target, tree):
        drafter, params = super().bind(target, tree)
        return ForgetfulDrafter(**{f.name: getattr(drafter, f.name) for f in dataclasses.fields(drafter)}), params


def test_the_prefill_begins_where_the_drafter_can_go_on(target):
    talk, alone = begin(target, Forgetful())
    for message in MESSAGES:
        check_turn(talk, alone, message)
        kept = len(target.tokenizer.apply_chat_template(talk.messages[:-1], False, True)) - talk.prefilled
        assert kept == (0 if message == MESSAGES[0] else 2)


def test_caches_grow_and_compile_once_a_bucket():
    """Four turns from 64 slots to 256; the next conversation compiles nothing."""
    target = dataclasses.replace(make_target(), tokenizer=Letters())
    head = make_head(target)

    def run():
        talk, alone = begin(
            target, head, max_new_tokens=20, max_length=None, tree=ej.TreeConfig(nodes=7, depth=2, top_k=3)
        )
        with compilations() as compiled:
            *_, last = (talk.ask("abcdefgh" * (turn % 3)) for turn in range(4))
        check_same(last, alone(talk.messages[:-1]))
        return compiled, talk

    compiled, talk = run()
    length = len(target.tokenizer.apply_chat_template(talk.messages, False, True))
    assert 64 < length < 256
    counts = collections.Counter(compiled)
    capacities = 3
    for function in ("run_rounds", "first_token", "_read_chunk", "_write_chunk"):
        assert sum(n for name, n in counts.items() if function in name) == capacities, counts
    assert max(counts.values()) == capacities
    assert run()[0] == []


def test_F5_a_turn_over_the_limit_is_refused_and_changes_nothing(target, head):
    talk, alone = begin(target, head, max_length=60)
    for message in MESSAGES:
        check_turn(talk, alone, message)
    before = list(talk.messages)
    for call in (talk.say, talk.ask):
        with pytest.raises(ValueError, match=r"has \d+ tokens, but the limit is 60"):
            call("abc" * 20)
    assert talk.messages == before
    del talk.messages[:4]
    check_turn(talk, alone, "abc")


def test_a_growing_dynamic_base_is_honoured(head):
    """Beyond the window every prompt has a base of its own, so nothing is kept there."""
    scaling = RopeScaling(rope_type="dynamic", factor=4.0)
    target = dataclasses.replace(
        make_target(max_position_embeddings=32, rope_scaling=scaling), tokenizer=Letters(), eos_token_ids=()
    )
    talk, alone = begin(target, None, max_length=None)
    kept = []
    for message in MESSAGES:
        check_turn(talk, alone, message)
        kept.append(len(target.tokenizer.apply_chat_template(talk.messages[:-1], False, True)) - talk.prefilled)
    assert kept[1] > 0 and kept[-1] == 0
