"""Windows and limits, and what is refused before anything runs."""

import dataclasses

import numpy as np
import pytest
from engine_rig import TREE, Oracle, ids, make_head, make_target, mean_accepted, random_prompts
from flax import nnx

import eagle_jax as ej
from eagle_jax.head import HeadModel

WINDOW = 48
PROMPTS = random_prompts(10, lengths=range(WINDOW - 10, WINDOW), seed=6)  # room for 10 tokens down to 1


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def plain(target):
    """Far beyond the window."""
    return ids(ej.generate(target, None, PROMPTS, max_new_tokens=24))


def with_window(target, length):
    return dataclasses.replace(target, config=dataclasses.replace(target.config, max_position_embeddings=length))


def test_F1_a_head_with_a_smaller_window_changes_nothing(target):
    prompts = random_prompts(4, lengths=(10, 30), seed=7)
    head = make_head(target)
    config = dataclasses.replace(head.config, max_position_embeddings=16)
    _, params = nnx.split(head.model)
    graphdef, _ = nnx.split(HeadModel(config, rngs=nnx.Rngs(1)))
    narrow = dataclasses.replace(head, config=config, model=nnx.merge(graphdef, params))
    plain = ids(ej.generate(target, None, prompts, max_new_tokens=64))
    done = ej.generate(target, narrow, prompts, max_new_tokens=64, tree=TREE)
    assert ids(done) == plain
    assert mean_accepted(done) > 0.4


@pytest.mark.parametrize("limit", ["window", "max_length"])
@pytest.mark.parametrize("drafter", ["oracle", "head"])
def test_F3_text_runs_up_to_the_limit(target, plain, limit, drafter):
    """Each row stands another number of tokens before the limit, so that a tree straddles it at every offset."""
    narrow, options = (with_window(target, WINDOW), {}) if limit == "window" else (target, {"max_length": WINDOW})
    if drafter == "oracle":
        head, tree = Oracle(plain), ej.TreeConfig(kind="chain", nodes=9, depth=8)
    else:
        head, tree = make_head(target), TREE
    done = ej.generate(narrow, head, PROMPTS, max_new_tokens=24, tree=tree, **options)
    for row, prompt, tokens in zip(done, PROMPTS, plain, strict=True):
        assert row.token_ids == tokens[: WINDOW - len(prompt)]
        assert row.finish_reason == "length"
        assert len(row.logprobs) == len(row.token_ids)
    assert any(1 + sum(row.accepted) + row.rounds > len(row.token_ids) for row in done)  # some rounds were cut


def test_F3_the_smaller_limit_holds(target, plain):
    for window, most, expected in ((WINDOW, 512, WINDOW), (512, WINDOW, WINDOW), (64, 45, 45)):
        done = ej.generate(with_window(target, window), None, PROMPTS[0], max_new_tokens=24, max_length=most)
        assert done.token_ids == plain[0][: expected - len(PROMPTS[0])]
    done = ej.generate(with_window(target, WINDOW), None, PROMPTS[0], max_new_tokens=3, max_length=512)
    assert done.token_ids == plain[0][:3]


@pytest.mark.parametrize("length", [WINDOW, WINDOW + 1, 700])
def test_F5_a_prompt_at_or_over_the_limit_is_refused(target, length):
    prompt = [1] * length
    message = f"has {length} tokens, but the limit is {WINDOW}"
    with pytest.raises(ValueError, match=message):
        ej.generate(with_window(target, WINDOW), None, prompt)
    with pytest.raises(ValueError, match=message):
        ej.generate(target, None, [[1, 2], prompt], max_length=WINDOW)
    with pytest.raises(ValueError, match=message):
        ej.stream(target, None, prompt, max_length=WINDOW)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([[]], {}, "prompt is empty"),
        ([[1], []], {}, "prompt is empty"),
        ([16], {}, "token id 16, but the vocabulary has 16"),
        ([3, -1], {}, "token id -1, but the vocabulary has 16"),
        ([[3], [1, 99]], {}, "token id 99"),
        ("a text", {}, "no tokenizer"),
        (["a text", [1]], {}, "no tokenizer"),
        ([{"role": "user", "content": "a text"}], {}, "no tokenizer"),
        (7, {}, "got a int"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens is -1"),
        ([1], {"max_length": 0}, "max_length is 0"),
        ([1], {"max_length": -5}, "max_length is -5"),
        ([[1], [2]], {"seed": [1, 2, 3]}, "seed is a list of 3, but there are 2 prompts"),
        ([[1], [2]], {"sampling": [ej.SamplingConfig()]}, "sampling is a list of 1, but there are 2 prompts"),
        ([1], {"stop": "x"}, "no"),
    ],
)
def test_bad_inputs_are_refused(target, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        ej.generate(target, None, prompts, **options)


def test_an_empty_string_is_refused(target):
    with pytest.raises(ValueError):
        ej.generate(target, None, "")


def test_stream_refuses_a_list_of_prompts_at_once(target):
    with pytest.raises(ValueError, match="a list of 2"):
        ej.stream(target, None, [[1], [2]])


@pytest.mark.parametrize("field", ["nodes", "depth", "top_k"])
@pytest.mark.parametrize("value", [0, -3])
def test_tree_sizes_that_are_not_positive_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        ej.TreeConfig(**{field: value})


def test_tree_sizes_beyond_what_exists_are_clamped(target, plain):
    """More children than there are tokens, more nodes than the pool holds."""
    tree = ej.TreeConfig(nodes=1000, depth=2, top_k=100)
    done = ej.generate(target, make_head(target), PROMPTS, max_new_tokens=24, tree=tree)
    assert ids(done) == plain
    assert all(n == 2 for row in done for n in row.accepted[:-1])  # the tree holds every pair of tokens


def test_prompts_may_be_arrays(target):
    listed = ej.generate(target, None, [1, 2, 3], max_new_tokens=4)
    assert ej.generate(target, None, np.asarray([1, 2, 3]), max_new_tokens=4) == listed
    assert ej.generate(target, None, [np.asarray([1, 2, 3])], max_new_tokens=4) == [listed]
