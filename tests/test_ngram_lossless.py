"""Look-up, REST and lookahead in the decoding loop: the text is plain decoding's, in batches, alone, and turn by turn.

CONTRIBUTING.md's example of a drafter is held to the same.
"""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_rig import Letters, ids, make_target, mean_accepted, random_prompts
from test_conversation import MESSAGES, begin, check_turn

import eagle_jax as ej
from eagle_jax import decoding
from eagle_jax.datastore import suffix_array
from eagle_jax.pool import Request, RowPool
from eagle_jax.rest import Datastore

TREE = ej.TreeConfig(nodes=16, depth=4)
PROMPTS = random_prompts(6, lengths=(1, 2, 9, 20), seed=8)
SEEDS = [10 + row for row in range(6)]
HALF_GREEDY = [ej.SamplingConfig(temperature=float(row % 2 == 0)) for row in range(6)]
OPTIONS = {"max_new_tokens": 32, "tree": TREE}
METHODS = ("example", "lookup", "rest", "lookahead")
CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The module that CONTRIBUTING.md shows."""
    _, _, shown = CONTRIBUTING.read_text().partition("## How to add a drafter")
    code = shown.split("```python\n")[1].split("```")[0]
    assert code.count("\n") < 150
    path = tmp_path_factory.mktemp("example") / "bigram.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("bigram", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def method_for(name, documents, example):
    if name == "example":
        return example.Bigram()
    if name == "lookup":
        return ej.PromptLookup(matches=4)
    if name == "lookahead":
        return ej.Lookahead(window=4, levels=3, guesses=3, buckets=8)
    tokens = np.asarray([token for document in documents for token in (*document, -1)], np.int32)
    arrays = {"tokens": jnp.asarray(tokens), "suffixes": jnp.asarray(suffix_array(tokens))}
    return ej.Rest(store=Datastore(**arrays, vocab_size=16, name="texts"), max_ngram=4, matches=8)


@pytest.fixture(autouse=True)
def no_transfers(monkeypatch):
    """Nothing goes between host and device while rounds run."""
    run_rounds = decoding.run_rounds

    def guarded(*arguments, **options):
        with jax.transfer_guard("disallow"):
            return run_rounds(*arguments, **options)

    monkeypatch.setattr(decoding, "run_rounds", guarded)


def decoded(target, method):
    return ej.generate(target, method, PROMPTS, sampling=HALF_GREEDY, seed=SEEDS, **OPTIONS)


def some_slow(*slow):
    """The methods, these of them among the slow tests."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in METHODS]


@pytest.mark.parametrize("name", some_slow("rest", "lookahead"))
def test_the_text_is_plain_decodings_greedy_and_drawn(target, name, example):
    """Rows of both kinds, two of them prompts of one token; and each row is drafted for as if it were alone."""
    plain = ids(decoded(target, None))
    method = method_for(name, plain, example)
    done = decoded(target, method)
    assert ids(done) == plain
    assert mean_accepted(done) > (0.5 if name == "rest" else 0.02)
    for row in (0, 2):
        one = slice(row, row + 1)
        [alone] = ej.generate(target, method, PROMPTS[one], sampling=HALF_GREEDY[one], seed=SEEDS[one], **OPTIONS)
        assert (alone.token_ids, alone.accepted) == (done[row].token_ids, done[row].accepted)


@pytest.mark.parametrize("name", some_slow("lookup"))
def test_texts_that_repeat_take_fewer_rounds(name, example):
    """A target with smaller weights falls into loops where it is greedy."""
    target = make_target(sharpness=3.0)
    plain = ids(decoded(target, None))
    assert all(len(set(text[-16:])) < 3 for text in plain[1::2])
    done = decoded(target, method_for(name, plain, example))
    assert ids(done) == plain
    assert mean_accepted(done[1::2]) > 1


# `Rest` remembers as `PromptLookup` does.
@pytest.mark.parametrize("name", some_slow("rest"))
def test_a_turn_is_generate_for_the_messages_so_far(name, example):
    """Rounds and what they accepted agree too: rewinding leaves nothing of what came after."""
    target = dataclasses.replace(make_target(max_position_embeddings=128), tokenizer=Letters())
    method = method_for(name, random_prompts(40, lengths=(9,), seed=9), example)
    talk, alone = begin(target, method, tree=TREE, sampling=ej.SamplingConfig(temperature=1.0))
    accepted = [n for message in MESSAGES for n in check_turn(talk, alone, message).accepted]
    assert talk.prefilled < 12 or name == "example"  # which forgets all
    assert sum(accepted) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_row_that_is_refilled_knows_nothing_of_its_last_text(target, name, example):
    """Rounds and what they accepted agree with those of the prompt alone."""
    sampling = ej.SamplingConfig(temperature=1.0)
    method = method_for(name, random_prompts(40, lengths=(9,), seed=9), example)
    pool = RowPool(target, method, rows=2, newcomers=1, max_length=100, sampling=[sampling], tree=TREE, rounds=3)
    prompts = random_prompts(7, lengths=(40, 3, 9), seed=12)
    for row, prompt in enumerate(prompts):
        pool.add(Request(tokens=prompt, seed=row, sampling=sampling, max_new_tokens=20), tag=row)
    found = {}
    while pool.busy:
        found |= {ended.tag: ended.completion for ended in pool.step()}
    for row, prompt in enumerate(prompts):
        alone = ej.generate(target, method, prompt, max_new_tokens=20, sampling=sampling, seed=[row], tree=TREE)
        assert (found[row].token_ids, found[row].accepted) == (alone.token_ids, alone.accepted)
