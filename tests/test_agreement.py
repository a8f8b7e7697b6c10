"""What a completion says of itself agrees: text, ids, log-probabilities, counts and the reason it ended."""

import dataclasses

import numpy as np
import pytest
from engine_rig import TREE, Copy, Letters, full_logits, ids, make_head, make_target, random_prompts

import eagle_jax as ej

PROMPTS = [[0, *prompt] for prompt in random_prompts(4, seed=21)]
SEEDS = [7, 8, 9, 10]
WARM = ej.SamplingConfig(temperature=1.2, top_p=0.95, repetition_penalty=1.1)
NEW = 30  # and one end token at most, so that a batch's programs, and a row's, serve every case


@pytest.fixture(scope="module")
def target():
    return dataclasses.replace(make_target(), tokenizer=Letters())


def decoded(target, head, **options):
    return ej.generate(target, head, PROMPTS, **({"seed": SEEDS, "max_new_tokens": NEW, "tree": TREE} | options))


def check(target, done, streamed, stop, most):
    """One row against its parts, and against its stream."""
    assert 0 < len(done.token_ids) <= most
    ended = done.token_ids[-1] in target.eos_token_ids
    text = target.tokenizer.decode(done.token_ids[: len(done.token_ids) - ended])
    found = [text.index(string) for string in stop if string in text]
    assert done.text == text[: min(found, default=len(text))]
    assert done.finish_reason == ("stop" if ended or found else "length")
    # Nothing but the last token ends a text.
    assert not any(token in target.eos_token_ids for token in done.token_ids[:-1])
    assert not any(string in text[:-1] for string in stop)
    assert done.finish_reason == "stop" or len(done.token_ids) == most

    assert len(done.logprobs) == len(done.token_ids)
    assert len(done.accepted) == done.rounds
    whole = 1 + sum(done.accepted) + done.rounds
    assert whole - (done.accepted[-1] if done.rounds else 0) <= len(done.token_ids) <= whole

    assert [token for chunk in streamed for token in chunk.token_ids] == done.token_ids
    assert "".join(chunk.text for chunk in streamed) == done.text
    assert [chunk.accepted for chunk in streamed] == [None, *done.accepted]
    assert [chunk.finish_reason for chunk in streamed] == [None] * done.rounds + [done.finish_reason]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [("none", WARM), ("head", ej.SamplingConfig()), ("copy", WARM)],
    ids=["plain", "head, greedy", "copy"],
)
def test_A5_text_ids_logprobs_and_counts_agree(target, drafter, sampling):
    """At the length asked for, at an end token, at a stop string, at whichever of the last two comes first."""
    head = {"none": None, "head": make_head(target), "copy": Copy()}[drafter]
    plain = decoded(target, None, sampling=sampling)
    ends = (plain[0].token_ids[17],)
    stop = [plain[2].text[9:12], plain[0].text[25:27]]
    reasons = set()
    for tokens, strings, most in (((), [], NEW), (ends, [], NEW), ((), stop, NEW), (ends, stop, NEW), ((), stop, 11)):
        ended = dataclasses.replace(target, eos_token_ids=tokens)
        options = {"sampling": sampling, "stop": strings, "max_new_tokens": most}
        done = decoded(ended, head, **options)
        check_logprobs(target, done)
        for row, prompt, seed in zip(done, PROMPTS, SEEDS, strict=True):
            stream = ej.stream(ended, head, prompt, seed=seed, tree=TREE, **options)
            check(ended, row, list(stream), strings, most)
            reasons.add((bool(tokens), bool(strings), row.finish_reason))
        for row, whole in zip(done, plain, strict=True):
            assert row.token_ids == whole.token_ids[: len(row.token_ids)]
    assert {(True, False, "stop"), (False, True, "stop"), (True, True, "stop"), (False, False, "length")} <= reasons


def check_logprobs(target, done):
    """D5: each one is the target's raw log-softmax, rescored in one forward, wherever the text was cut."""
    whole = [prompt + row for prompt, row in zip(PROMPTS, ids(done), strict=True)]
    width = max(map(len, whole))
    logits = full_logits(target, [tokens + [0] * (width - len(tokens)) for tokens in whole]).astype(np.float64)
    for prompt, row, scores in zip(PROMPTS, done, logits, strict=True):
        scores = scores[len(prompt) - 1 :][: len(row.token_ids)]
        expected = scores[np.arange(len(scores)), row.token_ids] - np.log(np.sum(np.exp(scores), axis=-1))
        np.testing.assert_allclose(row.logprobs, expected, atol=1e-4)


def test_A6_an_end_token_that_completes_a_stop_string_is_no_text(target):
    """The end token ends the text, and a stop string is looked for in the text alone."""
    plain = decoded(target, None)[0]
    place = next(i for i in range(4, NEW) if plain.token_ids[i] not in plain.token_ids[:i])
    ended = dataclasses.replace(target, eos_token_ids=(plain.token_ids[place],))
    done = decoded(ended, None, stop=[plain.text[place - 1 : place + 1]])[0]
    assert done.token_ids == plain.token_ids[: place + 1]
    assert (done.text, done.finish_reason) == (plain.text[:place], "stop")
