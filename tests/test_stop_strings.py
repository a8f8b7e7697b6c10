"""Stop strings: the text ends before the first one, the ids with the token that completes it."""

import dataclasses
import string

import pytest
from engine_rig import make_head, make_target, random_prompts

import eagle_jax as ej
from eagle_jax.text import Reader

PROMPTS = random_prompts(3, seed=5)


class Letters:
    """Sixteen letters, a token each."""

    bos_token = None

    def decode(self, ids, skip_special_tokens=False):
        return "".join(string.ascii_lowercase[token] for token in ids)


@pytest.fixture(scope="module")
def target():
    return dataclasses.replace(make_target(), tokenizer=Letters())


@pytest.fixture(scope="module")
def head(target):
    return make_head(target)


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_A3_a_stop_string_of_three_tokens_cuts_at_its_first_match(target, head, depth):
    sampling = ej.SamplingConfig(temperature=1.5)
    options = {"max_new_tokens": 48, "sampling": sampling, "seed": [1, 2, 3]}
    tree = ej.TreeConfig(nodes=12, depth=depth, top_k=4)
    plain = ej.generate(target, None, PROMPTS, **options)
    for begin in (0, 9, 30):
        stop = plain[0].text[begin : begin + 3]
        done = ej.generate(target, head, PROMPTS, tree=tree, stop=[stop, "zz"], **options)
        for one, cut in zip(plain, done, strict=True):
            place = one.text.find(stop)
            if place < 0:
                assert cut.token_ids == one.token_ids and cut.finish_reason == "length"
                continue
            assert cut.finish_reason == "stop"
            assert cut.text == one.text[:place]
            assert cut.token_ids == one.token_ids[: place + 3]
            assert len(cut.logprobs) == len(cut.token_ids)
            # The rounds told of are those that the cut text took.
            tokens = [1 + sum(cut.accepted[:rounds]) + rounds for rounds in range(cut.rounds + 1)]
            assert tokens[-1] >= len(cut.token_ids) and all(count < len(cut.token_ids) for count in tokens[:-1])


def test_a_stream_shows_nothing_of_a_stop_string(target, head):
    options = {"max_new_tokens": 40, "sampling": ej.SamplingConfig(temperature=1.5), "seed": 4}
    text = ej.generate(target, None, PROMPTS[0], **options).text
    stop = [text[20:23]]
    done = ej.generate(target, head, PROMPTS[0], stop=stop, **options)
    chunks = list(ej.stream(target, head, PROMPTS[0], stop=stop, **options))
    assert "".join(chunk.text for chunk in chunks) == done.text == text[: text.find(stop[0])]
    assert [token for chunk in chunks for token in chunk.token_ids] == done.token_ids
    assert chunks[-1].finish_reason == "stop"


@pytest.mark.parametrize("piece", [1, 2, 3, 8])
def test_the_earliest_of_several_stop_strings_counts(piece):
    assert read("abcdefgh", piece, ["fg", "cde", "d"]) == ("abc", 4)
    assert read("abcdefgh", piece, ["x"]) == ("abcdefgh", None)
    assert read("abcdefgh", piece, []) == ("abcdefgh", None)


def read(text, piece, stop):
    """A text read in pieces: what is shown, and the cut."""
    ids, reader = [string.ascii_lowercase.index(letter) for letter in text], Reader(Letters(), stop)
    for begin in range(0, len(ids), piece):
        if reader.cut is None:
            reader.read(ids[begin : begin + piece], last=begin + piece >= len(ids))
    return reader.text, reader.cut


def test_what_may_begin_a_stop_string_is_held_back():
    reader = Reader(Letters(), ["cde", "dx"])
    letters = string.ascii_lowercase.index
    shown = [reader.read(list(map(letters, piece)), last=False) for piece in ("abc", "d", "c", "cd", "d")]
    assert shown == ["ab", "", "cd", "c", "cd"]
    assert reader.read([], last=True) == "d"


@pytest.mark.parametrize("stop", [[""], ["a", ""]])
def test_an_empty_stop_string_is_refused(target, stop):
    with pytest.raises(ValueError, match="empty string"):
        ej.generate(target, None, [1], stop=stop)


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ValueError, match="needs a tokenizer"):
        ej.generate(make_target(), None, [1], stop=["a"])
