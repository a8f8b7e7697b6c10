"""Batches: every row once an epoch, in an order of (seed, step) alone, however many processes share them."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from eagle_jax.data import Row
from eagle_jax.pipeline import GROWTH, NO_ROW, BatchConfig, Order, Pipeline

LENGTHS = np.random.RandomState(0).randint(5, 200, 197).tolist()
CONFIG = BatchConfig(tokens_per_batch=512, bucket=16, rows_multiple=4, seed=3)


def rows_of(lengths=LENGTHS):
    """Rows that say in each token which they are; the assistant wrote all but the first."""
    return [Row(np.full(n, i, np.int32), np.arange(n) > 0) for i, n in enumerate(lengths)]


def ids(batch):
    """The rows of a batch; padding has no token of the assistant's."""
    there = batch.assistant.any(-1)
    return batch.tokens[..., 0][there].tolist()


def epoch_of(order, epoch=0):
    first = epoch * order.steps_per_epoch
    return [order.at(step) for step in range(first, first + order.steps_per_epoch)]


def rows_in(steps):
    taken = np.concatenate([step.rows.ravel() for step in steps])
    return taken[taken != NO_ROW].tolist()


def test_an_epoch_holds_every_row_once():
    order = Order(LENGTHS, CONFIG)
    for epoch in range(3):
        assert sorted(rows_in(epoch_of(order, epoch))) == list(range(len(LENGTHS)))


def test_the_order_differs_by_seed_and_by_epoch_and_by_nothing_else():
    order = Order(LENGTHS, CONFIG)
    first = rows_in(epoch_of(order))
    assert first == rows_in(epoch_of(Order(LENGTHS, CONFIG)))
    others = [rows_in(epoch_of(order, 1)), rows_in(epoch_of(Order(LENGTHS, dataclasses.replace(CONFIG, seed=4))))]
    # Seed 3's second epoch is not seed 4's first.
    assert first not in others and others[0] != others[1]


def test_rows_of_like_length_stand_together():
    lengths = np.random.RandomState(1).randint(1, 513, 20_000)
    order = Order(lengths, BatchConfig(tokens_per_batch=4096))
    steps = epoch_of(order)
    sizes = {step.length for step in steps}
    assert sizes == {64, 128, 192, 256, 320, 448, 512}
    for step in steps:
        assert step.rows.size == 4096 // step.length  # full but for one
        assert lengths[step.rows[step.rows != NO_ROW]].max() <= step.length
    assert sum((step.rows == NO_ROW).any() for step in steps) <= 1
    # Below a quarter and one bucket, but for the few rows that fill another bucket's batch.
    close = sum(int((GROWTH * lengths[row] + 64 > step.length).sum()) for step in steps for row in [step.rows])
    assert close > 0.99 * len(lengths)
    assert lengths.sum() > 0.85 * sum(step.rows.size * step.length for step in steps)


def test_a_bucket_that_fills_no_batch_is_filled_with_shorter_rows():
    order = Order([5] * 3 + [20] * 6 + [100], BatchConfig(tokens_per_batch=256, bucket=32, seed=0))
    steps = sorted(epoch_of(order), key=lambda step: step.length)
    assert [(step.length, step.rows.size, int((step.rows == NO_ROW).sum())) for step in steps] == [
        (32, 8, 0),
        (128, 2, 0),
    ]


def test_the_first_batches_are_these():
    """Whoever resumes a run with another version meets the same order."""
    order = Order(LENGTHS, CONFIG)
    assert [(step.length, step.rows.tolist()) for step in map(order.at, range(3))] == GOLDEN


GOLDEN = [(208, [[14, 29, 161, 104]]), (112, [[115, 74, 186, 78]]), (144, [[129, 159, 133, 55]])]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_share_the_batch_of_one(count, accumulate):
    config = dataclasses.replace(CONFIG, accumulate=accumulate, tokens_per_batch=1024)
    rows = rows_of()
    alone = Pipeline(rows, config)
    together = [Pipeline(rows, config, process_index=index, process_count=count) for index in range(count)]
    for step in (0, 5, alone.order.steps_per_epoch + 2):
        whole, parts = alone.batch_at(step), [one.batch_at(step) for one in together]
        assert whole.tokens.ndim == (2 if accumulate == 1 else 3)
        assert len({part.tokens.shape for part in parts}) == 1
        for name in ("tokens", "assistant"):
            joined = np.concatenate([getattr(part, name) for part in parts], axis=-2)
            np.testing.assert_array_equal(joined, getattr(whole, name))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("count", "multiple"), [(1, 1), (2, 2), (2, 6)])
def test_other_devices_keep_the_order_that_a_run_was_begun_with(count, multiple, accumulate):
    """R5's other half: the rows of each step are those of the mesh before, filled up with rows that are nobody's."""
    config = dataclasses.replace(CONFIG, accumulate=accumulate, tokens_per_batch=1024)
    rows = rows_of()
    before = Pipeline(rows, config)
    parts = [
        Pipeline(rows, config, rows_multiple=multiple, process_index=index, process_count=count)
        for index in range(count)
    ]
    for step in (0, 5, before.order.steps_per_epoch + 2):
        whole = before.batch_at(step)
        joined = np.concatenate([part.batch_at(step).tokens for part in parts], axis=-2)
        size = whole.tokens.shape[-2]
        assert joined.shape[-2] == size + -size % multiple
        np.testing.assert_array_equal(joined[..., :size, :], whole.tokens)
        assert not joined[..., size:, :].any()


def test_pieces_hold_the_rows_of_the_whole_batch():
    whole, pieces = (Order(LENGTHS, dataclasses.replace(CONFIG, rows_multiple=4 // n, accumulate=n)) for n in (1, 4))
    for one, other in zip(epoch_of(whole), epoch_of(pieces), strict=True):
        np.testing.assert_array_equal(one.rows.ravel(), other.rows.ravel())
        assert len(other.rows) == 4


def test_batches_hold_tokens_mask_and_features_and_padding_is_nobodys():
    rows = rows_of([3, 5, 9])
    features = [np.full((len(row.tokens), 2), index + 1, np.float16) for index, row in enumerate(rows)]
    pipeline = Pipeline(rows, BatchConfig(tokens_per_batch=64, bucket=16), features=features)
    batch = pipeline.batch_at(0)
    assert batch.tokens.shape == (4, 16) and batch.features.shape == (4, 16, 2)
    assert (batch.tokens.dtype, batch.assistant.dtype, batch.features.dtype) == (np.int32, bool, np.float16)
    for place, index in enumerate(pipeline.order.at(0).rows[0]):
        count = 0 if index == NO_ROW else len(rows[index].tokens)
        assert (batch.features[place, :count] == index + 1).all() and (batch.tokens[place, :count] == index).all()
        for part in batch:
            assert not part[place, count:].any()
    assert pipeline.order.tokens_at(0) == 17
    assert Pipeline(rows, BatchConfig()).batch_at(0).features is None


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_reading_ahead_changes_nothing(threads):
    pipeline = Pipeline(rows_of(), CONFIG)
    start, stop = 4, pipeline.order.steps_per_epoch + 7
    for step, batch in zip(range(start, stop), pipeline.batches(start, stop, threads=threads), strict=True):
        np.testing.assert_array_equal(batch.tokens, pipeline.batch_at(step).tokens)
    assert list(pipeline.batches(3, 3, threads=threads)) == []


def test_a_grain_dataset_gives_any_step_by_its_index():
    pipeline = Pipeline(rows_of(), CONFIG)
    dataset = pipeline.dataset(100)
    assert len(dataset) == 100
    np.testing.assert_array_equal(dataset[57].tokens, pipeline.batch_at(57).tokens)


def test_R2_resumed_in_the_middle_of_an_epoch_each_row_is_seen_once():
    """Also by another number of processes than before."""
    seen, step = Counter[int](), 0
    for count, stop in ((1, 5), (4, 6), (2, 13), (4, None)):
        processes = [Pipeline(rows_of(), CONFIG, process_index=index, process_count=count) for index in range(count)]
        stop = processes[0].order.steps_per_epoch if stop is None else stop
        for process in processes:
            for batch in process.batches(step, stop):
                seen.update(ids(batch))
        step = stop
    assert seen == Counter(range(len(LENGTHS)))


READ = """
import json, os, signal, sys
import test_pipeline as here

log, kill_at = sys.argv[1], int(sys.argv[2])
pipeline = here.Pipeline(here.rows_of(), here.CONFIG)
done = [json.loads(line) for line in open(log)] if os.path.exists(log) else []
with open(log, "a") as file:
    for step, batch in enumerate(pipeline.batches(len(done), pipeline.order.steps_per_epoch), start=len(done)):
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        print(json.dumps(here.ids(batch)), file=file, flush=True)
"""


@pytest.mark.slow
def test_R2_killed_in_the_middle_of_an_epoch_each_row_is_seen_once(tmp_path):
    log, tests = tmp_path / "rows seen.jsonl", Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    for kill_at, ended in ((4, -signal.SIGKILL), (11, -signal.SIGKILL), (-1, 0)):
        done = subprocess.run([sys.executable, "-c", READ, log, str(kill_at)], env=environment)
        assert done.returncode == ended
    seen = Counter(row for line in log.read_text().splitlines() for row in json.loads(line))
    assert seen == Counter(range(len(LENGTHS)))


@pytest.mark.parametrize(
    ("field", "value"), [("tokens_per_batch", 0), ("bucket", 0), ("accumulate", 0), ("rows_multiple", 0), ("seed", -1)]
)
def test_a_configuration_refuses_senseless_values(field, value):
    with pytest.raises(ValueError, match=f"BatchConfig.{field} is {value}"):
        BatchConfig(**{field: value})


def test_processes_that_cannot_share_a_batch_are_refused():
    with pytest.raises(ValueError, match="rows_multiple is 4, which 3 processes cannot share"):
        Pipeline(rows_of(), CONFIG, process_count=3)
    with pytest.raises(ValueError, match="process_index is 2; it must be below process_count, 2"):
        Pipeline(rows_of(), CONFIG, process_index=2, process_count=2)
    with pytest.raises(ValueError, match="features of 1 rows, but 197 rows"):
        Pipeline(rows_of(), CONFIG, features=[np.zeros((5, 2))])
    with pytest.raises(ValueError, match="There are 0 rows"):
        Pipeline([], CONFIG)
