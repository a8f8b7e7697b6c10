"""What several processes agree on, seen from one of two: the other is played by what is gathered."""

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from eagle_jax import distributed


@pytest.fixture
def two(monkeypatch):
    """Makes this process one of two; the other one says what it is given, call by call."""

    def play(index, *others):
        asked = []

        def gather(own):
            other = np.zeros_like(own)
            text = others[len(asked)].encode()
            asked.append(own)
            other[: len(text)] = np.frombuffer(text, np.uint8)
            return np.stack([own, other] if index == 0 else [other, own])

        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: index)
        monkeypatch.setattr(multihost_utils, "process_allgather", gather)
        return asked

    return play


def fail():
    raise OSError("The disk is full.")


def test_a_process_alone_asks_nobody(monkeypatch):
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda _: pytest.fail("asked"))
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda _: pytest.fail("asked"))
    assert distributed.in_all(lambda: 1) == distributed.main_first(lambda: 1) == 1
    assert distributed.from_main(np.arange(3)).tolist() == [0, 1, 2]
    with pytest.raises(OSError, match="disk is full"):
        distributed.in_all(fail)


@pytest.mark.parametrize("index", [0, 1])
def test_what_one_cannot_do_is_an_error_in_each(two, index):
    two(index, "", "A disk é is full.", "")
    assert distributed.in_all(lambda: "done") == "done"
    with pytest.raises(RuntimeError, match=rf"^Process {1 - index} of 2: A disk é is full\.$"):
        distributed.in_all(lambda: "done")
    with pytest.raises(OSError, match=r"^The disk is full\.$"):
        distributed.in_all(fail)


def test_an_error_without_words_is_an_error_too(two):
    told = two(0, "")

    def fail():
        raise ValueError

    with pytest.raises(ValueError):
        distributed.in_all(fail)
    assert told[0].tobytes().rstrip(b"\0") == b"ValueError()"


@pytest.mark.parametrize("index", [0, 1])
def test_the_others_begin_when_the_first_is_through(two, index):
    asked = two(index, "", "")
    assert distributed.main_first(lambda: len(asked)) == index  # how often all had met before
    assert len(asked) == 2
