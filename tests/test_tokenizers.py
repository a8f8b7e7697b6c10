"""Tokenizers out of GGUF files, and exactly one BOS in whatever they encode."""

import dataclasses
import itertools

import pytest
from gguf_rig import KINDS, MERGES, TOKENS, metadata_of, refusal, tensors_of, write
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import random_weights, tiny_config, tiny_target
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from eagle_jax import load_target
from eagle_jax.generation import encode_prompt
from eagle_jax.gguf_reader import GGUFFile
from eagle_jax.tokenizers import SPLITTERS, tokenizer_from_gguf

CONFIG = tiny_config(num_hidden_layers=1, intermediate_size=64, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def parts():
    return metadata_of(CONFIG), tensors_of(CONFIG, random_weights(CONFIG))


@pytest.fixture(scope="module")
def whole(parts, tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "whole.gguf", *parts)


def tokenizer_with(path, **options):
    """The tokenizer of a file that has nothing else; options are metadata under tokenizer.ggml."""
    kinds = {bool: "add_bool", str: "add_string", int: "add_uint32", list: "add_array"}
    metadata = {f"tokenizer.ggml.{key}": (kinds[type(value)], value) for key, value in options.items()}
    return tokenizer_from_gguf(GGUFFile(write(path, metadata, {})))


# --- Byte-level BPE ---------------------------------------------------------------------------------------------------


def test_tokenizer_and_template(whole):
    """Digits stand alone, merges apply, control tokens are found in text and left out of it."""
    target = load_target(whole)
    tokenizer = target.tokenizer

    def ids(*names):
        return [TOKENS.index(name) for name in names]

    assert tokenizer("ab ac12")["input_ids"] == ids("ab", "Ġa", "c", "1", "2")
    assert tokenizer("a<|im_end|>\n")["input_ids"] == ids("a", "<|im_end|>", "Ċ")
    assert tokenizer.decode(ids("<|im_start|>", "ab", "Ġa", "Ċ", "<|im_end|>"), skip_special_tokens=True) == "ab a\n"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    chat = [{"role": "user", "content": "use"}, {"role": "assistant", "content": "ab"}]
    wanted = ids("<|im_start|>", *"use", "<|im_end|>", "Ċ", "<|im_start|>", "ab", "<|im_end|>", "Ċ", "<|im_start|>")
    assert encode_prompt(target, chat) == wanted


TEXT = "I'LL pay 1234 euros, Été!\n\n  x/\n"
# By hand from the models' own tokenizer.json.
CUTS = {
    "smollm": ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", " euros", ",", " Été", "!", "\n\n ", " x", "/", "\n"],
    "gpt-2": ["I", "'", "LL", " pay", " 1234", " euros", ",", " Été", "!", "\n\n ", " x", "/", "\n"],
    "llama-bpe": ["I", "'LL", " pay", " ", "123", "4", " euros", ",", " Été", "!\n\n", " ", " x", "/\n"],
    "qwen2": ["I", "'LL", " pay", " ", "1", "2", "3", "4", " euros", ",", " Été", "!\n\n", " ", " x", "/\n"],
    "tekken": ["I", "'LL", " pay", " ", "1", "2", "3", "4", " euros", ",", " Été", "!\n\n", " ", " x", "/\n"],
    "deepseek-coder": [
        *("I", "'", "LL", " pay", " ", "1", "2", "3", "4", " euros", ",", " Été", "!", "\n", "\n", " ", " x", "/", "\n")
    ],
}
BYTE_LEVEL = dict(model="gpt2", tokens=TOKENS, token_type=list(map(int, KINDS)), merges=MERGES)
ENDS = dict(bos_token_id=1, eos_token_id=2)


@pytest.mark.parametrize("pre", CUTS)
def test_words_of_each_pre_tokenizer(pre, tmp_path):
    tokenizer = tokenizer_with(tmp_path / "t.gguf", pre=pre, **BYTE_LEVEL)
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in pieces] == CUTS[pre]


def test_case_parts_words_for_tekken_only(tmp_path):
    words = {}
    for pre in ("tekken", "qwen2"):
        splitter = tokenizer_with(tmp_path / "t.gguf", pre=pre, **BYTE_LEVEL).backend_tokenizer.pre_tokenizer
        words[pre] = [word for word, _ in splitter.pre_tokenize_str("camelCase/\n")]
    assert words == {"tekken": ["camel", "Case", "/Ċ"], "qwen2": ["camelCase", "/Ċ"]}


def test_every_pre_tokenizer_gives_back_the_text(tmp_path):
    """With a token for each byte, whatever the splits, nothing is lost."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    text = TEXT + " ab\t東京 🙂 e\u0301"
    for pre in SPLITTERS:
        options = dict(pre=pre, model="gpt2", tokens=alphabet, token_type=[1] * 256, merges=["a b"])
        with pytest.raises(ValueError, match="merges that do not fit"):  # no token "ab"
            tokenizer_with(tmp_path / "t.gguf", **options)
        options |= dict(tokens=[*alphabet, "ab"], token_type=[1] * 257)
        tokenizer = tokenizer_with(tmp_path / "t.gguf", **options)
        back = text.replace("e\u0301", "é") if "qwen" in pre else text  # Qwen composes characters
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == back, pre


@pytest.mark.parametrize(("pre", "names"), [("llama-bpe", ["use"]), ("tekken", ["use"]), ("qwen2", ["u", "s", "e"])])
def test_words_that_are_tokens(pre, names, tmp_path):
    """Llama 3 and Mistral Nemo take them whole, though no merge makes them."""
    tokens = [*TOKENS[:-3], *"use", "use"]
    options = BYTE_LEVEL | dict(tokens=tokens, token_type=[*map(int, KINDS), 1])
    tokenizer = tokenizer_with(tmp_path / "t.gguf", pre=pre, add_bos_token=False, **options)
    assert tokenizer("use")["input_ids"] == [tokens.index(name) for name in names]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (dict(pre="smollm"), [3]),
        (dict(pre="qwen2"), [3]),
        (dict(pre="llama-bpe"), [1, 3]),
        (dict(pre="tekken"), [1, 3]),
        (dict(pre="llama-bpe", add_bos_token=False), [3]),
        (dict(pre="qwen2", add_bos_token=True), [1, 3]),
        (dict(pre="llama-bpe", add_eos_token=True), [1, 3, 2]),
        (dict(pre="qwen2", add_eos_token=True), [3, 2]),
    ],
)
def test_S1_bos_and_eos_as_the_file_says(options, wanted, tmp_path):
    """Where it says nothing, as llama.cpp does for its pre-tokenizer."""
    tokenizer = tokenizer_with(tmp_path / "t.gguf", **BYTE_LEVEL, **ENDS, **options)
    assert tokenizer("a")["input_ids"] == wanted
    assert tokenizer("a", add_special_tokens=False)["input_ids"] == [3]


def test_bos_asked_for_but_not_named(tmp_path):
    with pytest.raises(ValueError, match="bos_token_id"):
        tokenizer_with(tmp_path / "t.gguf", **BYTE_LEVEL, pre="qwen2", add_bos_token=True)


MARK = "<\uff5cend▁of\uff5c>"  # DeepSeek's kind: no characters of the byte alphabet


def test_tokens_found_whole(tmp_path):
    """Control tokens are left out of text, user-defined ones are text, whatever characters they have."""
    tokens = [*TOKENS, MARK, "<think>"]
    options = BYTE_LEVEL | dict(tokens=tokens, token_type=[*map(int, KINDS), 3, 4])
    tokenizer = tokenizer_with(tmp_path / "t.gguf", pre="qwen2", **options)
    ids = tokenizer("a<think>b" + MARK)["input_ids"]
    assert ids == [tokens.index(name) for name in ("a", "<think>", "b", MARK)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"


# --- SentencePiece ----------------------------------------------------------------------------------------------------

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁t", "he", "▁the", "▁a", "in", "▁▁", "aa", "aaaa", "ne", "▁thehe", *"▁thenai", "é"]
VOCABULARY = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
PIECE_KINDS = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
SCORES = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES))]
SENTENCEPIECE = dict(
    model="llama", pre="default", tokens=VOCABULARY, token_type=PIECE_KINDS, scores=SCORES, **ENDS, unknown_token_id=0
)


def joined(text):
    """SentencePiece's algorithm as it is told: join the best-scored neighbours, the leftmost of equals, until none."""
    score = dict(zip(PIECES, SCORES[259:], strict=True))
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(score[a + b], -at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in score]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        ids += [VOCABULARY.index(part)] if part in score else [3 + byte for byte in part.encode()]
    return ids


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    return tokenizer_with(tmp_path_factory.mktemp("spm") / "t.gguf", **SENTENCEPIECE)


@given(st.text(alphabet=" thenaié🙂\n<", max_size=30))
@settings(max_examples=300)
def test_sentencepiece_joins_the_best_scored_first(sentencepiece, text):
    ids = sentencepiece(text)["input_ids"]
    assert ids == [1, *(joined(" " + text) if text else [])]
    assert sentencepiece.decode(ids, skip_special_tokens=True) == text


def test_sentencepiece_by_hand(sentencepiece):
    def names(text):
        return [VOCABULARY[index] for index in sentencepiece(text, add_special_tokens=False)["input_ids"]]

    assert names("the") == ["▁the"]
    assert names(" the") == ["▁", "▁the"]  # the space before a text is added, whatever stands there
    assert names("a\nü") == ["▁a", "<0x0A>", "<0xC3>", "<0xBC>"]
    # After a marker a text begins anew, as llama.cpp and the models' tokenizer.json have it.
    assert names("the</s>the") == ["▁the", "</s>", "▁the"]
    assert names("<s>") == ["<s>"]


def test_sentencepiece_decodes_bytes_and_spaces(sentencepiece):
    def text(*names):
        return sentencepiece.decode([VOCABULARY.index(name) for name in names], skip_special_tokens=True)

    assert text("<s>", "▁the", "▁the", "</s>") == "the the"
    assert text("he", "▁the") == "he the"
    assert text("▁a", "<0xC3>", "<0xBC>") == "aü"
    assert text("▁a", "<0xC3>") == "a\N{REPLACEMENT CHARACTER}"
    assert text("▁▁", "he") == " he"


def test_sentencepiece_without_a_space_first(tmp_path):
    tokenizer = tokenizer_with(tmp_path / "t.gguf", **SENTENCEPIECE, add_space_prefix=False, add_bos_token=False)
    for text in ("the", " the", "a  the"):
        ids = tokenizer(text)["input_ids"]
        assert ids == joined(text)
        assert tokenizer.decode(ids) == text


def test_sentencepiece_user_defined_tokens(tmp_path):
    """They are found in the text as it is written, spaces and all, and nothing is joined across them."""
    options = SENTENCEPIECE | dict(
        tokens=[*VOCABULARY, "he na"], token_type=[*PIECE_KINDS, 4], scores=[*SCORES, -1000.0]
    )
    tokenizer = tokenizer_with(tmp_path / "t.gguf", **options)
    assert tokenizer("the naa")["input_ids"] == [1, *joined(" t"), len(VOCABULARY), *joined(" a")]


def test_sentencepiece_scores_for_each_token(parts, tmp_path):
    metadata, tensors = parts
    metadata = metadata | {"tokenizer.ggml.model": ("add_string", "llama")}
    message = refusal(write(tmp_path / "none.gguf", metadata, tensors))
    assert "tokenizer.ggml.scores" in message
    metadata |= {"tokenizer.ggml.scores": ("add_array", [0.0, 1.0])}
    message = refusal(write(tmp_path / "few.gguf", metadata, tensors))
    assert "16 tokens" in message and "tokenizer.ggml.scores has 2" in message


@pytest.mark.parametrize("prompt", ["the", "<s>the", [{"role": "user", "content": "the"}]])
def test_S1_one_bos_for_sentencepiece(prompt, tmp_path):
    """Llama 2's and Vicuna's way: the template may write BOS too."""
    tokenizer = tokenizer_with(tmp_path / "t.gguf", **SENTENCEPIECE)
    for template in ("{{ bos_token }}{{ messages[0]['content'] }}", "{{ messages[0]['content'] }}"):
        tokenizer.chat_template = template
        target = dataclasses.replace(tiny_target(vocab_size=len(VOCABULARY)), tokenizer=tokenizer)
        assert encode_prompt(target, prompt) == [1, VOCABULARY.index("▁the")]


# --- BOS --------------------------------------------------------------------------------------------------------------

WORDS = ["<s>", "</s>", "<unk>", "a", "b"]
WITH_BOS = "{{ bos_token }}{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
WITHOUT_BOS = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


def target_with_bos(template):
    """A target whose tokenizer writes BOS before whatever it encodes, as Llama's does."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )
    assert fast("a b")["input_ids"] == [0, 3, 4]
    return dataclasses.replace(tiny_target(), tokenizer=fast)


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
@pytest.mark.parametrize(
    "prompt", ["a b", "<s>a b", "<s> a b", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
)
def test_S1_exactly_one_bos(template, prompt):
    """Whether the tokenizer, the template or the prompt itself writes it."""
    assert encode_prompt(target_with_bos(template), prompt) == [0, 3, 4]


def test_S1_one_bos_where_the_file_asks_for_it(parts, tmp_path):
    metadata, tensors = parts
    metadata = metadata | {"tokenizer.ggml.add_bos_token": ("add_bool", True)}
    target = load_target(write(tmp_path / "bos.gguf", metadata, tensors))
    for prompt in ("abc", "<|im_start|>abc", [{"role": "user", "content": "abc"}]):
        ids = encode_prompt(target, prompt)
        assert ids[0] == 1 and ids[1] != 1


def test_S1_no_bos_where_the_model_uses_none(whole):
    """The embedded model's family has a BOS token, but its tokenizer writes none."""
    assert encode_prompt(load_target(whole), "ab") == [TOKENS.index("ab")]


def test_ids_are_taken_as_they_stand():
    assert encode_prompt(target_with_bos(WITH_BOS), [3, 4]) == [3, 4]
