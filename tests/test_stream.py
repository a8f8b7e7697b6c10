"""`stream` is `generate` in pieces, and a completion's numbers agree with each other."""

import dataclasses
import math

import pytest
from engine_rig import TREE, make_head, make_target, random_prompts

import eagle_jax as ej

PROMPTS = random_prompts(3, seed=8)
OPTIONS = {"sampling": ej.SamplingConfig(temperature=1.5), "tree": TREE, "seed": 3}


class ByteTokenizer:
    """Sixteen tokens of one or two bytes, some of them halves of a character."""

    bos_token = None
    all_special_ids = ()
    TABLE = (b"a", b"\xc3", b"\xa9", b"b ", b"\xc3\xa8", b" ", b"\xe2\x82", b"\xac", *(b"%d" % i for i in range(8)))

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [self.TABLE.index(bytes([byte])) for byte in text.encode()]}

    def decode(self, ids, skip_special_tokens=False, **options):
        return b"".join(self.TABLE[token] for token in ids).decode("utf-8", errors="replace")


@pytest.fixture(scope="module")
def target():
    return dataclasses.replace(make_target(), tokenizer=ByteTokenizer())


@pytest.fixture(scope="module")
def head(target):
    return make_head(target)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stream_is_generate_in_rounds(target, head, prompt):
    done = ej.generate(target, head, prompt, max_new_tokens=32, **OPTIONS)
    chunks = list(ej.stream(target, head, prompt, max_new_tokens=32, **OPTIONS))
    assert [token for chunk in chunks for token in chunk.token_ids] == done.token_ids
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert done.text == target.tokenizer.decode(done.token_ids)
    assert [chunk.accepted for chunk in chunks] == [None, *done.accepted]
    assert [chunk.finish_reason for chunk in chunks] == [None] * done.rounds + ["length"]
    assert all(len(chunk.token_ids) == chunk.accepted + 1 for chunk in chunks[1:-1])


def test_a_stream_never_shows_half_a_character(target):
    """Each character is the work of two rounds; the last one stays a half."""
    shown = list(ej.stream(echo(target, [6, 7] * 12), None, [0], max_new_tokens=23))
    assert [chunk.text for chunk in shown] == ["", "€"] * 11 + ["\N{REPLACEMENT CHARACTER}"]


def echo(target, tokens):
    """The target, but its tokenizer reads whatever it says as the given tokens."""

    class Echo(ByteTokenizer):
        def decode(self, ids, skip_special_tokens=False, **options):
            return super().decode(tokens[: len(ids)])

    return dataclasses.replace(target, tokenizer=Echo())


def test_an_end_token_is_in_the_ids_but_not_in_the_text(target, head):
    plain = ej.generate(target, head, PROMPTS[0], max_new_tokens=32, **OPTIONS)
    ended = dataclasses.replace(target, eos_token_ids=(plain.token_ids[7],))
    done = ej.generate(ended, head, PROMPTS[0], max_new_tokens=32, **OPTIONS)
    first = plain.token_ids.index(plain.token_ids[7])
    assert done.token_ids == plain.token_ids[: first + 1]
    assert done.text == target.tokenizer.decode(done.token_ids[:-1])
    chunks = list(ej.stream(ended, head, PROMPTS[0], max_new_tokens=32, **OPTIONS))
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert chunks[-1].finish_reason == "stop"


def test_a_stream_of_nothing_is_one_chunk(target):
    [chunk] = ej.stream(target, None, PROMPTS[0], max_new_tokens=0)
    assert chunk == ej.Chunk(text="", token_ids=[], accepted=None, finish_reason="length")


def completion(accepted, tokens):
    return ej.Completion(
        token_ids=[0] * tokens,
        text="",
        logprobs=[0.0] * tokens,
        finish_reason="length",
        rounds=len(accepted),
        accepted=accepted,
    )


def test_P1_tau_counts_the_bonus_token():
    assert completion([0, 2, 5], 11).tau == pytest.approx(10 / 3)
    assert math.isnan(completion([], 1).tau)


def test_P1_tokens_are_those_of_the_rounds(target, head):
    """An uncut last round leaves 1 + sum(accepted) + rounds tokens; a cut one fewer, but more than without it."""
    long = ej.generate(target, head, PROMPTS[0], max_new_tokens=32, **OPTIONS)
    assert max(long.accepted) > 0
    uncut, rounds = 1, 0
    for most in range(1, 32):
        if uncut < most:
            uncut += long.accepted[rounds] + 1
            rounds += 1
        done = ej.generate(target, head, PROMPTS[0], max_new_tokens=most, **OPTIONS)
        assert done.token_ids == long.token_ids[:most]
        assert (done.rounds, done.accepted) == (rounds, long.accepted[:rounds])
        assert len(done.token_ids) <= 1 + sum(done.accepted) + done.rounds == uncut
        if most == uncut and rounds:
            assert done.tau == pytest.approx((len(done.token_ids) - 1) / done.rounds)
