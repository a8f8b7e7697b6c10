"""A file that is replaced is there as it was or whole, whatever happens while it is written."""

import os

import pytest

from eagle_jax.files import replacing


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        done = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, done=done: (calls.append(name), done(*args)))
    path = tmp_path / "config.json"
    with replacing(path) as scratch:
        scratch.write_text("new")
        assert not path.exists()
    assert calls == ["fsync", "replace"]
    assert [one.name for one in tmp_path.iterdir()] == ["config.json"] and path.read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_the_old_file_stays_and_nothing_else(tmp_path, error):
    path = tmp_path / "config.json"
    path.write_text("old")
    with pytest.raises(error), replacing(path) as scratch:
        scratch.write_text("half")
        raise error
    assert [one.name for one in tmp_path.iterdir()] == ["config.json"] and path.read_text() == "old"


def test_writers_that_meet_have_scratch_files_of_their_own(tmp_path):
    path = tmp_path / "manifest.json"
    with replacing(path, ".1.partial") as first, replacing(path, ".2.partial") as second:
        first.write_text("first")
        second.write_text("second")
        assert {first.name, second.name} == {"manifest.json.1.partial", "manifest.json.2.partial"}
    assert path.read_text() == "first"
