"""Rows refilled as they end: every text is that of its prompt alone, refills compile nothing and copy no cache."""

import dataclasses
import string

import jax
import numpy as np
import pytest
from engine_rig import Copy, compilations, ids, make_head, make_target, random_prompts
from rig import tiny_target

import eagle_jax as ej
from eagle_jax.pool import Request, RowPool, seat

TREE = ej.TreeConfig(nodes=6, depth=2, top_k=2)
SAMPLINGS = [ej.SamplingConfig(temperature=temperature) for temperature in (0.0, 0.7, 1.5)]
LENGTHS = (3, 40, 5, 8, 60, 13)  # of two buckets


@pytest.fixture(scope="module")
def target():
    return make_target(eos=(2,))


def requests_for(prompts, most=24):
    return [
        Request(tokens=prompt, seed=100 + i, sampling=SAMPLINGS[i % 3], max_new_tokens=most)
        for i, prompt in enumerate(prompts)
    ]


def drain(pool, requests):
    """What each request came to, in their order; never more than the pool wants waits."""
    left, found = list(enumerate(requests)), {}
    while left or pool.busy:
        while left and pool.wanted > 0:
            index, request = left.pop(0)
            pool.add(request, tag=index)
        found |= {ended.tag: ended.completion for ended in pool.step()}
    return [found[index] for index in range(len(requests))]


def generated(target, requests):
    """The same requests through `generate`, each under a seed of its own."""
    return ej.generate(
        target,
        None,
        [request.tokens for request in requests],
        max_new_tokens=requests[0].max_new_tokens,
        sampling=[request.sampling for request in requests],
        seed=[request.seed for request in requests],
    )


def pool_of(target, head=None, **options):
    options = {"rows": 4, "max_length": 100, "sampling": SAMPLINGS, "tree": TREE} | options
    return RowPool(target, head, **options)


@pytest.mark.parametrize(
    "drafts", ["a head", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nothing", "a copy"))]
)
def test_a_text_is_that_of_its_prompt_alone(target, drafts):
    """Whoever stood in the row before, whoever came with it, and in whatever order."""
    drafter = {"nothing": None, "a head": make_head(target), "a copy": Copy()}[drafts]
    requests = requests_for([[0, *prompt] for prompt in random_prompts(18, LENGTHS)])
    wanted = generated(target, requests)
    assert {done.finish_reason for done in wanted} == {"stop", "length"}
    done = drain(pool_of(target, drafter, newcomers=2), requests)
    back = drain(pool_of(target, drafter, newcomers=2, rounds=3), requests[::-1])[::-1]
    for one, other, expected in zip(done, back, wanted, strict=True):
        assert one.token_ids == other.token_ids == expected.token_ids
        assert one.finish_reason == other.finish_reason == expected.finish_reason
        assert np.allclose(one.logprobs, expected.logprobs, atol=1e-3)
    if drafts == "a copy":
        assert sum(one.rounds for one in done) < sum(one.rounds for one in wanted)


def test_a_prompt_longer_than_a_chunk(monkeypatch, target):
    monkeypatch.setattr("eagle_jax.generation.CHUNK", 32)
    requests = requests_for(random_prompts(4, (75, 90)))
    done = drain(pool_of(target, max_length=120), requests)
    monkeypatch.undo()
    assert ids(done) == ids(generated(target, requests))


def test_strings_and_tokens_of_its_own_end_a_text():
    class Letters:
        bos_token = None

        def decode(self, ids, skip_special_tokens=False):
            return "".join(string.ascii_lowercase[token] for token in ids)

    target = dataclasses.replace(make_target(), tokenizer=Letters())
    plain = requests_for(random_prompts(12))
    wanted = generated(target, plain)
    middle = [len(done.token_ids) // 2 for done in wanted]
    ends = [done.token_ids[place] for done, place in zip(wanted, middle, strict=True)]
    stops = [done.text[place : place + 2] for done, place in zip(wanted, middle, strict=True)]
    pool = pool_of(target)
    by_token = [dataclasses.replace(one, end=end) for one, end in zip(plain, ends, strict=True)]
    for request, done, whole in zip(by_token, drain(pool, by_token), wanted, strict=True):
        assert done.token_ids == whole.token_ids[: whole.token_ids.index(request.end) + 1]
        assert done.finish_reason == "stop" and done.text == whole.text[: len(done.token_ids) - 1]
    by_string = [dataclasses.replace(one, stop=(stop, "zz")) for one, stop in zip(plain, stops, strict=True)]
    for stop, done, whole in zip(stops, drain(pool, by_string), wanted, strict=True):
        place = whole.text.find(stop)
        assert done.finish_reason == "stop" and done.text == whole.text[:place]
        assert done.token_ids == whole.token_ids[: place + 2]


def test_J1_refills_compile_nothing_once_each_bucket_has_been_seen(target):
    pool = pool_of(target, make_head(target))
    drain(pool, requests_for(random_prompts(12, LENGTHS)))
    with compilations() as compiled:
        drain(pool, requests_for(random_prompts(30, LENGTHS, seed=1), most=17))
    assert compiled == []


def test_no_row_waits_for_the_longest(target):
    """One long text and many short ones: they are all there by the end of the long one."""
    calls = []
    pool = pool_of(make_target(), rows=2, rounds=2)
    step = pool.step
    pool.step = lambda: calls.append(1) or step()
    long, *short = requests_for(random_prompts(9, (3,)), most=9)
    drain(pool, [dataclasses.replace(long, max_new_tokens=80), *short])
    assert len(calls) < 80 / 2 + 4


def test_a_refill_copies_no_cache():
    """What writing newcomers takes beside the state is less than the keys and values of one layer."""
    target = tiny_target(num_key_value_heads=4, head_dim=64, max_position_embeddings=4096)
    pool = RowPool(target, ej.Head.random(target), rows=16, max_length=4096, sampling=SAMPLINGS, tree=TREE)
    newcomers = pool._job(requests_for(random_prompts(1)), 32).empty()
    compiled = seat.lower(pool._state, newcomers, jax.numpy.zeros(1, "int32")).compile()
    layer = pool._state.cache.keys[0].nbytes * 2
    assert compiled.memory_analysis().temp_size_in_bytes < layer / 4


@pytest.mark.parametrize("length", [0, 100])
def test_a_prompt_that_leaves_no_room_is_refused(target, length):
    with pytest.raises(ValueError, match=f"A prompt has {length} tokens; it must have 1 to 99"):
        pool_of(target).add(requests_for([[1] * length])[0])
