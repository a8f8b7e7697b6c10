"""REST: the datastore on disk, and proposals against a search through lists."""

import json
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_rig import greedy_sampler, make_target
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import TEMPLATE, WORDS, tiny_target, word_tokenizer
from test_lookup import seen, texts_of
from test_trie import paths_of

import eagle_jax as ej
from eagle_jax import datastore, loading

ROOT = Path(__file__).parent.parent
TREE = ej.TreeConfig(nodes=12, depth=3)
MATCHES = 5


def to_the_end(tokens, place):
    """What stands at a place, up to the document's end."""
    return tokens[place : tokens.index(-1, place)]


@settings(max_examples=60)
@given(documents=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=5))
def test_suffixes_are_in_lexical_order(documents):
    tokens = [token for document in documents for token in (*document, -1)]
    places = [place for place, token in enumerate(tokens) if token != -1]
    expected = sorted(places, key=lambda place: (to_the_end(tokens, place), place))
    assert datastore.suffix_array(np.asarray(tokens, np.int32)).tolist() == expected


def build(directory, documents, target, **options):
    options = {"target": target.name, "vocab_size": target.config.vocab_size} | options
    datastore.build_datastore(directory, documents, **options)
    return ej.load_datastore(directory, target)


def slow_tree(text, documents, options, tree):
    """{path: share of the continuations taken} of the longest suffix that the documents hold, best first."""
    for size in range(min(options.max_ngram, len(text)), options.min_ngram - 1, -1):
        suffix = text[len(text) - size :]
        found = sorted(
            (document[place:], index, place)
            for index, document in enumerate(documents)
            for place in range(len(document) - size + 1)
            if document[place : place + size] == suffix
        )
        if found:
            taken = [number * len(found) // MATCHES for number in range(MATCHES)]
            taken = taken if len(found) > MATCHES else range(len(found))
            following = [found[i][0][size : size + tree.depth] for i in taken]
            paths = {}
            for level in range(1, tree.depth + 1):
                for one in (one for one in following if len(one) >= level):
                    paths[tuple(one[:level])] = paths.get(tuple(one[:level]), 0) + 1
            kept = sorted(paths, key=lambda path: -paths[path])[: tree.nodes - 1]
            return {path: paths[path] / sum(len(one) > 0 for one in following) for path in kept}
    return {}


@pytest.mark.parametrize("min_ngram", [1, 3])
def test_proposals_are_what_follows_in_the_datastore(tmp_path, min_ngram):
    """Documents of three tokens, texts of five: some suffixes are found at many places, some at none."""
    documents, target = texts_of(3, 30, seed=1), make_target()
    store = build(tmp_path, documents, target)
    options = ej.Rest(store=store, max_ngram=6, min_ngram=min_ngram, matches=MATCHES)
    drafter, params = options.bind(target, TREE)
    texts = texts_of(5 if min_ngram == 1 else 3, 32, seed=2)
    state = seen(drafter, params, texts, 40)
    root = jnp.asarray([text[-1] for text in texts])
    tree, _ = jax.jit(drafter.propose)(params, state, root, greedy_sampler(len(texts)))
    tree, sizes = jax.device_get(tree), set()
    for i, text in enumerate(texts):
        paths = paths_of(tree, i)
        del paths[()]
        expected = slow_tree(text, documents, options, TREE)
        assert set(paths) == set(expected), text
        for path, node in paths.items():
            np.testing.assert_allclose(np.exp(tree.log_scores[i, node]), expected[path], rtol=1e-5)
        sizes.add(len(paths))
    assert 0 in sizes and max(sizes) > MATCHES


def test_no_draft_runs_over_a_documents_end(tmp_path):
    target = make_target()
    store = build(tmp_path, [[1, 2, 3], [4, 1, 2], [3, 9, 9]], target)
    drafter, params = ej.Rest(store=store).bind(target, TREE)
    state = seen(drafter, params, [[1, 2], [2, 3], [7, 7]], 4)
    tree, _ = jax.jit(drafter.propose)(params, state, jnp.asarray([2, 3, 7]), greedy_sampler(3))
    assert [set(paths_of(tree, i)) - {()} for i in range(3)] == [{(3,)}, set(), set()]


# --- On disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def words():
    """A target whose tokenizer takes words."""
    target = tiny_target(vocab_size=len(WORDS))
    return type(target)(config=target.config, model=target.model, tokenizer=word_tokenizer(), name="words")


def written(directory, tokenizer, target):
    datastore.build_datastore(
        directory, [[4, 5]], target=target.name, vocab_size=target.config.vocab_size, tokenizer=tokenizer
    )
    return directory


def test_another_vocabulary_is_refused(tmp_path, words):
    renamed = word_tokenizer()
    renamed.add_tokens(["other"])
    assert ej.load_datastore(written(tmp_path / "same", word_tokenizer(), words), words).vocab_size == len(WORDS)
    with pytest.raises(ValueError, match="is of the vocabulary of words, 13 tokens, but the target words has another"):
        ej.load_datastore(written(tmp_path / "renamed", renamed, words), words)
    larger = make_target()
    with pytest.raises(ValueError, match="13 tokens, but the target random has another one, 16 tokens"):
        ej.load_datastore(tmp_path / "same", larger)
    store = ej.load_datastore(tmp_path / "same", words)
    with pytest.raises(ValueError, match="of 13 tokens, but the target random has 16"):
        ej.Rest(store=store).bind(larger, TREE)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "manifest.json").unlink(), "so it is no datastore"),
        (lambda path: (path / "manifest.json").write_text("{"), "cannot be read"),
        (lambda path: (path / "tokens.npy").write_bytes(b""), "cannot be read"),
        (
            lambda path: np.save(path / "suffixes.npy", np.zeros(5, np.int32)),
            r"int32\[5\] .* int32\[2\] .* is expected",
        ),
        (
            lambda path: (path / "manifest.json").write_text(
                json.dumps(json.loads((path / "manifest.json").read_text()) | {"form": "datastore 9"})
            ),
            "of the form 'datastore 9'",
        ),
    ],
)
def test_what_is_damaged_is_refused(tmp_path, words, damage, message):
    damage(written(tmp_path, word_tokenizer(), words))
    with pytest.raises(ValueError, match=message):
        ej.load_datastore(tmp_path, words)


def test_senseless_builds_are_refused(tmp_path):
    build_of = lambda *documents: datastore.build_datastore(tmp_path, documents, target="t", vocab_size=9)  # noqa: E731
    with pytest.raises(ValueError, match="hold token id 9, but the vocabulary has 9"):
        build_of([1, 9])
    with pytest.raises(ValueError, match="hold token id -1"):
        build_of([1, -1])
    with pytest.raises(ValueError, match="hold no token"):
        build_of([])
    build_of([1])
    with pytest.raises(ValueError, match="already; give another directory"):
        build_of([1])
    with pytest.raises(ValueError, match="matches is 0"):
        ej.Rest(store=None, matches=0)  # pyright: ignore[reportArgumentType]


def test_the_script_builds_from_conversations_and_texts(tmp_path, monkeypatch, capsys, words):
    chat = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]}
    lines = [chat, {"text": "d e"}, {"text": ""}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "notes.txt").write_text("f g\nh\n")
    described = loading.Description(words.config, words.tokenizer)
    monkeypatch.setattr(loading, "describe_target", lambda _: described)
    data = ["--data", str(tmp_path / "chats.jsonl"), str(tmp_path / "notes.txt")]
    monkeypatch.setattr(
        sys, "argv", ["build_datastore.py", *data, "--output", str(tmp_path / "store"), "--target", "t"]
    )
    runpy.run_path(str(ROOT / "train/build_datastore.py"), run_name="__main__")
    store = ej.load_datastore(tmp_path / "store", words)
    spelt = words.tokenizer.decode([token for token in store.tokens.tolist() if token != -1])
    assert spelt == "<user> a b </s> <assistant> c </s> d e f g h"
    assert [place for place, token in enumerate(store.tokens.tolist()) if token == -1] == [7, 10, 14]
    assert "3 documents, 12 tokens" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert manifest["target"] == "t" and len(manifest["vocabulary_sha256"]) == 64
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "train/build_datastore.py"), run_name="__main__")
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ('{"text": 3}', "line 1 has a text that is a int"),
        ('{"other": ""}', "line 1 is not of the form"),
        ('{"messages": [{"role": "nobody", "content": ""}]}', "line 1 has the role 'nobody'"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 1 is refused by the chat template .*no such"),
    ],
)
def test_a_line_that_is_no_document_is_refused(tmp_path, line, message):
    (tmp_path / "data.jsonl").write_text(line + "\n")
    tokenizer = word_tokenizer("{{ raise_exception('no such chat') }}" if "user" in line else TEMPLATE)
    with pytest.raises(ValueError, match=message):
        list(datastore.read_documents(tmp_path / "data.jsonl", tokenizer))


def test_a_text_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match=r"notes.txt is not UTF-8 .* at byte 3"):
        list(datastore.read_documents(tmp_path / "notes.txt", word_tokenizer()))
