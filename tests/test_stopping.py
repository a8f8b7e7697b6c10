"""Where a text ends: at an end token inside an accepted path, or at the asked-for length."""

import dataclasses

import pytest
from engine_rig import TREE, Oracle, compilations, ids, make_head, make_target, random_prompts, until

import eagle_jax as ej

PROMPTS = random_prompts(50)
NEW = 64
CHAIN = ej.TreeConfig(kind="chain", nodes=13, depth=12)


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def plain(target):
    return ids(ej.generate(target, None, PROMPTS, max_new_tokens=NEW))


def with_ends(target, *tokens):
    return dataclasses.replace(target, eos_token_ids=tokens)


def check_ends(done, plain, *ends):
    """Every row is plain up to its first end token; ids, log-probabilities and counts agree."""
    for row, tokens in zip(done, plain, strict=True):
        expected = until(tokens, *ends)
        assert row.token_ids == expected
        assert row.finish_reason == ("stop" if expected[-1] in ends else "length")
        assert len(row.logprobs) == len(expected)
        assert len(row.accepted) == row.rounds
        assert 1 + sum(row.accepted[:-1]) + max(row.rounds - 1, 0) < len(expected) or row.rounds == 0
        assert len(expected) <= 1 + sum(row.accepted) + row.rounds


@pytest.mark.parametrize("k", range(1, 11))
def test_A1_an_end_token_inside_an_accepted_path_ends_the_text(target, plain, k):
    """The first round's path holds tokens 1 to 12; an end token is the k-th of them."""
    row, end = next((i, tokens[k]) for i, tokens in enumerate(plain) if tokens[k] not in tokens[:k])
    done = ej.generate(with_ends(target, end), Oracle(plain), PROMPTS, max_new_tokens=NEW, tree=CHAIN)
    assert done[row].accepted == [12]
    assert len(done[row].token_ids) == k + 1
    check_ends(done, plain, end)


def test_A1_an_end_token_inside_a_tree_ends_the_text(target, plain):
    head = make_head(target)
    inside = 0
    for end in {token for tokens in plain[:3] for token in tokens}:
        done = ej.generate(with_ends(target, end), head, PROMPTS, max_new_tokens=NEW, tree=TREE)
        check_ends(done, plain, end)
        inside += sum(
            row.finish_reason == "stop" and len(row.token_ids) < 1 + sum(row.accepted) + row.rounds for row in done
        )
    assert inside > 10  # some ends had accepted tokens after them


def test_A1_the_first_token_may_end_the_text(target, plain):
    end = plain[0][0]
    done = ej.generate(with_ends(target, end), Oracle(plain), PROMPTS, max_new_tokens=NEW, tree=CHAIN)
    assert (done[0].token_ids, done[0].rounds, done[0].accepted) == ([end], 0, [])
    check_ends(done, plain, end)


def test_A6_any_of_several_end_tokens_ends_the_text(target, plain):
    ends = plain[0][5], plain[1][9], plain[2][14]
    done = ej.generate(with_ends(target, *ends), Oracle(plain), PROMPTS, max_new_tokens=NEW, tree=CHAIN)
    assert len({row.token_ids[-1] for row in done if row.finish_reason == "stop"} & set(ends)) > 1
    check_ends(done, plain, *ends)


def test_A7_max_new_tokens_is_exact(target, plain):
    """Every length, though rounds bring six tokens; what is compiled depends on its bucket alone."""
    chain = ej.TreeConfig(kind="chain", nodes=6, depth=5)
    with compilations() as compiled:
        for most in range(41):
            done = ej.generate(target, Oracle(plain[:8]), PROMPTS[:8], max_new_tokens=most, tree=chain)
            assert ids(done) == [tokens[:most] for tokens in plain[:8]]
            assert all(row.finish_reason == "length" for row in done)
            assert all(row.rounds == max(0, -(-(most - 1) // 6)) for row in done)
    capacities = (32, 64, 128)  # powers of two that hold the prompts' bucket of 32 and the text
    assert sum("run_rounds" in name for name in compiled) == len(capacities)


@pytest.mark.parametrize("most", [33, 38])
def test_A7_max_new_tokens_is_exact_with_a_tree(target, plain, most):
    done = ej.generate(target, make_head(target), PROMPTS, max_new_tokens=most, tree=TREE)
    assert ids(done) == [tokens[:most] for tokens in plain]


def test_a_limit_right_at_the_end_token_counts_as_stop(target, plain):
    """One token more than the limit, the end token was never emitted."""
    k = 4
    row, end = next((i, tokens[k]) for i, tokens in enumerate(plain) if tokens[k] not in tokens[:k])
    for most, reason in ((k, "length"), (k + 1, "stop")):
        done = ej.generate(with_ends(target, end), Oracle(plain), PROMPTS, max_new_tokens=most, tree=CHAIN)[row]
        assert (done.token_ids, done.finish_reason) == (plain[row][:most], reason)
