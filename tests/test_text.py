"""Text that is read in pieces is the whole decode, whatever the pieces, and costs no more than the text is long."""

import dataclasses

import pytest
from engine_rig import TREE, Letters, make_head, make_target
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import eagle_jax as ej
from eagle_jax import generation
from eagle_jax.text import Reader, decode

HALF = "\N{REPLACEMENT CHARACTER}"
LETTERS = ["▁", "▁a", "b", "c", "▁▁b", "."]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="session")
def bytelevel(smollm2):
    return smollm2.tokenizer


@pytest.fixture(scope="session")
def sentencepiece():
    """Llama's way: spaces written into the tokens, the first one of a text left out, rare characters as raw bytes."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *LETTERS, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def raw(text):
    """A text as SentencePiece's raw bytes."""
    return [3 + len(LETTERS) + byte for byte in text.encode()]


def read(tokenizer, ids, sizes, stop=()):
    """A text read in pieces of the given sizes, in turn: what each shows, and the reader."""
    reader, shown, begin = Reader(tokenizer, stop), [], 0
    sizes = list(sizes) or [1]
    while reader.cut is None:
        end = begin + sizes[len(shown) % len(sizes)]
        shown.append(reader.read(ids[begin:end], last=end >= len(ids)))
        begin = end
        if begin >= len(ids):
            break
    return shown, reader


def check_pieces(tokenizer, ids, sizes):
    """The pieces join to the whole decode, and none of them was shown too early."""
    shown, reader = read(tokenizer, ids, sizes)
    assert "".join(shown) == reader.text == decode(tokenizer, ids)
    assert not any(piece.endswith(HALF) for piece in shown[:-1])


def check_stop(tokenizer, ids, sizes, stop):
    """The cut is where the shortest prefix that holds a stop string ends, however it is read."""
    shown, reader = read(tokenizer, ids, sizes, stop)
    texts = [decode(tokenizer, ids[:count]) for count in range(len(ids) + 1)]
    cut = next((count for count, text in enumerate(texts) if any(string in text for string in stop)), None)
    if cut is None:
        assert (reader.cut, "".join(shown)) == (None, texts[-1])
    else:
        text = texts[cut]
        assert reader.cut == cut
        assert "".join(shown) == text[: min(text.index(string) for string in stop if string in text)]


SIZES = st.lists(st.integers(1, 9), max_size=5)


@settings(max_examples=400)
@given(data=st.data(), sizes=SIZES)
def test_S2_pieces_join_to_the_whole_decode(bytelevel, data, sizes):
    """Byte-level tokens: any ids of the vocabulary, markers and lone bytes among them."""
    ids = data.draw(st.lists(st.one_of(st.integers(0, len(bytelevel) - 1), st.integers(0, 300)), max_size=40))
    check_pieces(bytelevel, ids, sizes)


@given(text=st.text(max_size=20), sizes=SIZES)
@example(text="日本語 👩‍👩‍👧 naïve 🏴󠁧󠁢󠁥󠁮󠁧󠁿", sizes=[1])
def test_S2_characters_over_several_tokens_are_shown_whole(bytelevel, text, sizes):
    ids = bytelevel(text)["input_ids"]
    check_pieces(bytelevel, ids, sizes)
    shown, _ = read(bytelevel, ids, sizes)
    assert HALF in decode(bytelevel, ids) or not any(HALF in piece for piece in shown)


@given(
    ids=st.lists(
        st.one_of(st.integers(3, 2 + len(LETTERS)).map(lambda token: [token]), st.sampled_from("é€👍").map(raw)),
        max_size=20,
    ),
    broken=st.lists(st.integers(0, 2**16), max_size=4),
    sizes=SIZES,
)
@example(ids=[raw("€")], broken=[3 * 256 + 255], sizes=[1])
def test_S2_raw_bytes_and_leading_spaces_join_to_the_whole_decode(sentencepiece, ids, broken, sizes):
    """Bytes that spoil their run included: then none of it is a character, however much of it was one before."""
    ids = [token for piece in ids for token in piece]
    for each in broken:
        ids.insert(each // 256 % (len(ids) + 1), 3 + len(LETTERS) + each % 256)
    check_pieces(sentencepiece, ids, sizes)


def test_S2_a_spoiled_run_of_bytes_is_shown_as_the_whole_decode_has_it(sentencepiece):
    ids = [4, *raw("€"), 3 + len(LETTERS) + 0xFF, 5, *raw("é"), 4]
    assert decode(sentencepiece, ids) == "a" + 4 * HALF + "bé a"
    shown, _ = read(sentencepiece, ids, [1])
    assert [piece for piece in shown if piece] == ["a", 4 * HALF + "b", "é a"]


def test_S2_a_space_after_markers_is_kept(sentencepiece):
    """A decode that began with the second `a` would lose its space."""
    shown, _ = read(sentencepiece, [1, 4, 2, 2, 4, 1, 4], [1])
    assert shown == ["", "a", "", "", " a", "", " a"]


@given(data=st.data(), sizes=SIZES)
def test_A3_stop_strings_cut_the_same_in_any_pieces(sentencepiece, data, sizes):
    """Against every prefix's whole decode; bytes that spoil a character come too late where it was a stop string."""
    lone = st.one_of(st.integers(3, 2 + len(LETTERS)), st.sampled_from(raw("é")))
    words = st.one_of(lone.map(lambda token: [token]), st.just(raw("é")))
    ids = [token for piece in data.draw(st.lists(words, max_size=24)) for token in piece]
    stop = data.draw(st.lists(st.text("ab. é", min_size=1, max_size=3), min_size=1, max_size=3))
    check_stop(sentencepiece, ids, sizes, stop)


@given(text=st.text("ab é€👍\n", max_size=24), stop=st.lists(st.text("ab é👍\n", min_size=1, max_size=3)), sizes=SIZES)
def test_A3_stop_strings_cut_between_byte_level_tokens(bytelevel, text, stop, sizes):
    check_stop(bytelevel, bytelevel(text)["input_ids"], sizes, stop)


class Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids, skip_special_tokens):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("stop", [(), ("xyzzy", "\n\n\n")])
def test_the_work_grows_with_the_text_and_not_with_its_square(bytelevel, stop):
    """Each id is decoded a handful of times, however long the text is."""
    ids = bytelevel("Tides rise — and fall, 日本語 👍 — twice a day.\n" * 200)["input_ids"]
    assert len(ids) > 4000
    for piece in (1, 4):
        tokenizer = Counting(bytelevel)
        _, reader = read(tokenizer, ids, [piece], stop)
        assert reader.text == decode(bytelevel, ids)
        assert tokenizer.decoded < 12 * len(ids)


def test_a_stream_fetches_and_decodes_only_what_is_new(monkeypatch):
    """Over a hundred rounds: the tokenizer's work and what comes from the device grow with the text alone."""
    tokenizer = Counting(Letters())
    target = dataclasses.replace(make_target(), tokenizer=tokenizer)
    fetched = []
    device_get = generation.jax.device_get

    def counted(values):
        fetched.append(max(value.size for value in values))
        return device_get(values)

    monkeypatch.setattr(generation.jax, "device_get", counted)
    chunks = list(ej.stream(target, make_head(target), [1, 2, 3], max_new_tokens=200, tree=TREE))
    assert sum(len(chunk.token_ids) for chunk in chunks) == 200
    assert tokenizer.decoded < 8 * 200
    assert len(fetched) == len(chunks) > 50
    assert max(fetched) <= TREE.depth + 2
