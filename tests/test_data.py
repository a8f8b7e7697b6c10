"""Conversations to token rows: what carries loss, what is left out, and what cannot be told."""

from types import SimpleNamespace

import numpy as np
import pytest
from rig import TEMPLATE, WORDS, word_tokenizer

from eagle_jax import data
from eagle_jax.losses import pair_mask


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


LONG = chat(("system", "a b"), ("user", "c"), ("assistant", "d e"), ("user", "f"), ("assistant", "g"))


def marked(row):
    return [WORDS[token] for token, ours in zip(row.tokens, row.assistant, strict=True) if ours]


def test_T1_pairs_of_a_conversation_carry_loss_where_their_last_two_tokens_are_the_assistants():
    row = data.encode(word_tokenizer(), chat(("user", "a"), ("assistant", "b")))
    assert [WORDS[token] for token in row.tokens] == ["<user>", "a", "</s>", "<assistant>", "b", "</s>"]
    assert row.assistant.tolist() == [False] * 4 + [True] * 2
    # Pair 3 = (feature of <assistant>, token b) predicts </s>.
    assert np.asarray(pair_mask(row.assistant[None]))[0].tolist() == [False] * 3 + [True] + [False]


def test_T2_loss_falls_on_the_assistants_words_and_end_tokens_only():
    assert marked(data.encode(word_tokenizer(), LONG)) == ["d", "e", "</s>", "g", "</s>"]


def test_T2_loss_on_the_last_turn_only():
    assert marked(data.encode(word_tokenizer(), LONG, "last")) == ["g", "</s>"]


def test_T2_a_template_whose_prompt_ends_with_the_users_turn():
    """Llama 2's way: nothing asks for an answer, which stands right after the question."""
    bare = "{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    assert marked(data.encode(word_tokenizer(bare), chat(("user", "c"), ("assistant", "d")))) == ["d", "</s>"]


REWRITES = "{% for m in messages %}{% if loop.last %}<{{ m['role'] }}> {% endif %}{{ m['content'] }} </s>{% endfor %}"
UNASKED = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s>{% endfor %}"
FORGETS = UNASKED.replace("m['content']", "'a' if m['role'] == 'assistant' else m['content']")


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (REWRITES, "rewrites earlier turns"),
        (UNASKED, "ignores add_generation_prompt"),
        (FORGETS, "leaves it out or changes it"),
        ("all the same", "leaves it out or changes it"),
    ],
)
def test_T2_a_template_from_which_the_span_cannot_be_told_is_refused(template, fault):
    conversation = chat(("user", "c"), ("assistant", "d"), ("user", "e"), ("assistant", "f"))
    with pytest.raises(ValueError, match=f"The chat template {fault}, so what the assistant wrote in turn 2 of 4"):
        data.encode(word_tokenizer(template), conversation)
    with pytest.raises(ValueError, match=fault):
        data.encode_all(word_tokenizer(template), [conversation], max_length=99)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, "has no tokenizer"),
        (SimpleNamespace(is_fast=False, chat_template=TEMPLATE), "does not tell where its tokens stand"),
        (word_tokenizer(None), "has no chat template"),
    ],
)
def test_T2_a_tokenizer_that_cannot_tell_the_span_is_refused(tokenizer, message):
    with pytest.raises(ValueError, match=message):
        data.encode(tokenizer, LONG)


def test_rows_are_cut_and_counted():
    tokenizer = word_tokenizer()
    long, short = chat(("user", "a"), ("assistant", "b c d e f")), chat(("user", "a b c d e f g"), ("assistant", "b"))
    encoded = data.encode_all(tokenizer, [long, short], max_length=6)
    assert (len(encoded.rows), encoded.dropped, encoded.truncated) == (1, 1, 2)
    assert encoded.rows[0].assistant.sum() == 2
    with pytest.raises(
        ValueError, match="None of 1 conversations is left to train on: 1 without an answer's beginning"
    ):
        data.encode_all(tokenizer, [short], max_length=6)
    # One token of the answer is not enough: it is given, and nothing after it is there to be drafted.
    with pytest.raises(ValueError, match="within 5 tokens"):
        data.encode_all(tokenizer, [long], max_length=5)


def test_what_is_left_out_is_counted_by_reason():
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + TEMPLATE
    good, unanswered = chat(("user", "a"), ("assistant", "b")), chat(("user", "a"))
    conversations = [good, [], unanswered, unanswered, chat(("assistant", "b"), *(("user", "a"), ("assistant", "b")))]
    conversations += [LONG, chat(("user", "a"), ("assistant", " ")), chat(("user", "a b c d e"), ("assistant", "b"))]
    encoded = data.encode_all(word_tokenizer(refusing), conversations, max_length=8)
    assert encoded.reasons == {
        "without a message": 1,
        "without a turn of the assistant's": 2,
        "beginning with the assistant's turn": 1,
        "refused by the chat template (no system turn)": 1,
        "with an empty answer": 1,
        "without an answer's beginning within 8 tokens": 1,
    }
    assert len(encoded.rows) == 1 and encoded.dropped == 7
    assert "1 conversations kept, 7 dropped; 1 without a message; 2 without a turn" in encoded.summary()


def test_a_last_answer_that_is_empty_counts_where_only_the_last_one_does():
    conversation = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", ""))
    assert len(data.encode_all(word_tokenizer(), [conversation], 99).rows) == 1
    with pytest.raises(ValueError, match="1 with an empty answer"):
        data.encode_all(word_tokenizer(), [conversation], 99, "last")


def test_no_conversation_at_all_is_an_error():
    with pytest.raises(ValueError, match="None of 0 conversations"):
        data.encode_all(word_tokenizer(), [], 99)


def test_frequent_tokens_are_the_assistants_most_frequent():
    rows = [data.Row(np.asarray([7, 7, 7, 2, 5, 5, 1], np.int32), np.asarray([0, 0, 0, 1, 1, 1, 1], bool))]
    assert data.frequent_tokens(rows, 2, 9).tolist() == [1, 5]
