"""Conversations to token rows and batches: what carries loss, and that every row is seen once an epoch."""

import json

import numpy as np
import pytest
from rig import WORDS, tiny_target, word_tokenizer

from eagle_jax import data, features


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def test_T2_loss_falls_on_the_assistants_words_and_end_tokens_only():
    row = data.encode(
        word_tokenizer(),
        chat(("system", "a b"), ("user", "c"), ("assistant", "d e"), ("user", "f"), ("assistant", "g")),
    )
    words = [WORDS[token] for token in row.tokens]
    assert [word for word, ours in zip(words, row.assistant, strict=True) if ours] == ["d", "e", "</s>", "g", "</s>"]


def test_T2_a_template_that_rewrites_earlier_turns_is_refused():
    trims = "{% for m in messages %}{% if loop.last %}<{{ m['role'] }}> {% endif %}{{ m['content'] }} </s>{% endfor %}"
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        data.encode(word_tokenizer(trims), chat(("user", "c"), ("assistant", "d"), ("user", "e"), ("assistant", "f")))


def test_rows_are_cut_and_counted():
    tokenizer = word_tokenizer()
    long, short = chat(("user", "a"), ("assistant", "b c d e f")), chat(("user", "a b c d e f g"), ("assistant", "b"))
    encoded = data.encode_all(tokenizer, [long, short], max_length=6)
    assert (len(encoded.rows), encoded.dropped, encoded.truncated) == (1, 1, 2)
    assert encoded.rows[0].assistant.sum() == 2
    with pytest.raises(ValueError, match="None of 1 conversations"):
        data.encode_all(tokenizer, [short], max_length=6)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2 is not of the form"),
        ('{"text": "a"}', "line 2 is not of the form"),
        ('{"messages": [{"role": "user"}]}', "line 2 is not of the form"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "line 2 has the role 'tool'"),
        ('{"messages": [{"role": "user", "content": 3}]}', "line 2 has a message whose content is a int"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "two lines.jsonl"
    path.write_text(json.dumps({"messages": chat(("user", "a"), ("assistant", "b"))}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        data.read_conversations(path)


def test_an_empty_file_is_an_error(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no conversation"):
        data.read_conversations(tmp_path / "empty.jsonl")


def test_an_epoch_holds_every_row_once_and_is_a_function_of_seed_and_epoch():
    lengths = np.random.default_rng(0).integers(5, 200, 97).tolist()
    settings = {"tokens_per_batch": 512, "bucket": 32}
    plans = data.epoch_plan(lengths, seed=3, epoch=1, **settings)
    assert sorted(index for plan in plans for index in plan.indices) == list(range(97))
    assert all(lengths[index] <= plan.length < lengths[index] + 32 for plan in plans for index in plan.indices)
    assert all(plan.length * plan.size <= 512 and len(plan.indices) <= plan.size for plan in plans)
    assert plans == data.epoch_plan(lengths, seed=3, epoch=1, **settings)
    assert plans != data.epoch_plan(lengths, seed=3, epoch=2, **settings)


def test_batches_from_a_step_are_those_of_an_unbroken_run():
    lengths = np.random.default_rng(0).integers(5, 100, 40).tolist()
    settings = {"tokens_per_batch": 256, "bucket": 32, "seed": 0}

    def take(step, count):
        plans = data.plan_from(lengths, step=step, **settings)
        return [next(plans) for _ in range(count)]

    whole = take(0, 60)
    for step in (1, 17, 40, 55):
        assert take(step, 5) == whole[step : step + 5]


def test_frequent_tokens_are_the_assistants_most_frequent():
    rows = [data.Row(np.asarray([7, 7, 7, 2, 5, 5, 1], np.int32), np.asarray([0, 0, 0, 1, 1, 1, 1], bool))]
    assert data.frequent_tokens(rows, 2, 9).tolist() == [1, 5]


def test_features_are_made_once_and_belong_to_their_target_and_rows(tmp_path):
    target = tiny_target()
    rng = np.random.default_rng(0)
    rows = [data.Row(rng.integers(0, 16, n).astype(np.int32), np.ones(n, bool)) for n in (5, 70, 12, 9)]
    directory = tmp_path / "kept here"
    made = features.load_or_make(directory, target, rows, tokens_per_batch=128)
    again = features.load_or_make(directory, target, rows, progress=lambda *_: pytest.fail("made twice"))
    np.testing.assert_array_equal(made.features, again.features)
    with pytest.raises(ValueError, match="rows_sha256"):
        features.load_or_make(directory, target, rows[:3])
    with pytest.raises(ValueError, match="hidden_size is 64, needed is 32"):
        features.load_or_make(directory, tiny_target(hidden_size=32), rows)


def test_T9_features_of_a_padded_batch_are_those_of_single_rows(tmp_path):
    from flax import nnx

    target = tiny_target()
    rng = np.random.default_rng(0)
    rows = [data.Row(rng.integers(0, 16, n).astype(np.int32), np.ones(n, bool)) for n in (5, 60, 12)]
    store = features.load_or_make(tmp_path, target, rows, tokens_per_batch=256)
    batch = store.batch([2, 0], 64, 3)
    for place, index in enumerate((2, 0)):
        count = len(rows[index].tokens)
        alone = features.features_of(*nnx.split(target.model), rows[index].tokens[None])[0]
        np.testing.assert_allclose(batch.features[place, :count], alone, atol=2e-3)  # float16
        assert not np.any(batch.assistant[place, count:])
    assert not np.any(batch.assistant[2])


def test_features_that_were_cut_short_are_made_again(tmp_path):
    target = tiny_target()
    rows = [data.Row(np.arange(9, dtype=np.int32), np.ones(9, bool))]
    first = np.array(features.load_or_make(tmp_path, target, rows).features)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "features.npy").write_bytes(b"half")
    np.testing.assert_array_equal(features.load_or_make(tmp_path, target, rows).features, first)
