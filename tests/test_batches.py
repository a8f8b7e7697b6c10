"""Rows of one batch do not feel each other: each comes out as if it were alone."""

import dataclasses

from engine_rig import TREE, ids, mean_accepted, random_prompts, until

import eagle_jax as ej

NEW = 32
WARM = ej.SamplingConfig(temperature=1.0)


def check_alone(target, head, prompts, seeds, sampling, **options):
    """Decodes a batch and each of its rows alone."""
    done = ej.generate(target, head, prompts, sampling=sampling, seed=seeds, tree=TREE, **options)
    assert mean_accepted(done) > 0.4
    for row, prompt, seed, config in zip(done, prompts, seeds, sampling, strict=True):
        [alone] = ej.generate(target, head, [prompt], sampling=config, seed=[seed], tree=TREE, **options)
        assert (row.token_ids, row.finish_reason) == (alone.token_ids, alone.finish_reason)
        assert row.accepted == alone.accepted
    return done


def test_G1_rows_with_seeds_of_their_own_are_their_single_runs(target, head):
    """Lengths, seeds and temperatures differ; a seed list of one is an int."""
    prompts = random_prompts(4, lengths=(2, 9, 17, 32), seed=1)
    sampling = [ej.SamplingConfig(temperature=temperature) for temperature in (1.0, 0.3, 1.5, 0.7)]
    done = check_alone(target, head, prompts, [3, 1, 4, 1], sampling, max_new_tokens=NEW)
    plain = ej.generate(target, None, prompts, max_new_tokens=NEW, sampling=sampling, seed=[3, 1, 4, 1])
    assert ids(done) == ids(plain)
    single = ej.generate(target, head, prompts[0], max_new_tokens=NEW, sampling=sampling[0], seed=3, tree=TREE)
    assert done[0].token_ids == single.token_ids


def test_G1_an_int_seed_draws_for_each_row_anew(target):
    same, other = (
        ids(ej.generate(target, None, [[1, 2, 3]] * 4, max_new_tokens=NEW, sampling=WARM, seed=seed)) for seed in (5, 6)
    )
    assert len({tuple(row) for row in same + other}) == 8


def test_G2_rows_end_at_their_own_ends(target, head):
    """Three rows meet the end token as their 2nd, 9th and 20th; the fourth never does."""
    prompts, seeds = random_prompts(50, seed=2), list(range(100, 150))
    plain = ids(ej.generate(target, None, prompts, max_new_tokens=NEW, sampling=WARM, seed=seeds))
    end, rows = next(found for found in (rows_ending(plain, end, (2, 9, 20)) for end in range(16)) if found)
    ended = dataclasses.replace(target, eos_token_ids=(end,))
    chosen = [prompts[row] for row in rows], [seeds[row] for row in rows], [WARM] * 4
    done = check_alone(ended, head, *chosen, max_new_tokens=NEW)
    assert [len(row.token_ids) for row in done] == [2, 9, 20, NEW]
    assert ids(done) == [until(plain[row], end) for row in rows]
    assert [row.finish_reason for row in done] == ["stop", "stop", "stop", "length"]
    for row in done:
        assert len(row.logprobs) == len(row.token_ids)
        assert len(row.accepted) == row.rounds


def rows_ending(plain, end, lengths):
    """The end token, a row that ends with it at each of these lengths, and one that it does not occur in."""
    ends = [tokens.index(end) + 1 if end in tokens else None for tokens in plain]
    wanted = (*lengths, None)
    return (end, [ends.index(length) for length in wanted]) if set(wanted) <= set(ends) else None


def test_G4_prompts_of_one_and_thirty_tokens_are_their_single_runs(target, head):
    prompts = random_prompts(4, lengths=(1, 30), seed=4)
    done = check_alone(target, head, prompts, [0, 1, 2, 3], [WARM] * 4, max_new_tokens=NEW)
    plain = ej.generate(target, None, prompts, max_new_tokens=NEW, sampling=WARM, seed=[0, 1, 2, 3])
    assert ids(done) == ids(plain)
