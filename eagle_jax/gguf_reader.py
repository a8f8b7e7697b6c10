"""The GGUF container: metadata by key, tensors by name, and nothing in a file believed before it is checked.

gguf's own reader follows whatever counts and sizes a damaged file states, until memory runs out, and makes several
objects for each of a vocabulary's tokens; the blocks' formats and what they hold stay gguf's.
"""

import math
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

VERSIONS = (2, 3)  # version 1 counted in 32 bits
MOST_DIMENSIONS = 4
LARGEST = 2**31 - 1  # sizes and ids are int32 where they are used

SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}

REQUIRED: Any = object()  # a default: the key must be there


class StoredTensor(NamedTuple):
    """Where a tensor lies in its file, and as what."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # rows first
    row_bytes: int
    start: int  # from the file's beginning


class GGUFFile:
    """A GGUF file whose header has been read; tensors are read one at a time, when they are asked for.

    Raises:
      ValueError: the file is no whole GGUF file.
      OSError: the file cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                header = _Header(file)
                self.metadata = header.metadata()
                self.tensors = header.tensors(self.metadata)
        except OSError as error:
            raise OSError(f"{path} cannot be read ({error.strerror}); check the path and its permissions.") from error
        except (ValueError, RecursionError) as error:  # arrays may be nested as deeply as a file likes
            raise ValueError(f"{path} is not a whole GGUF file ({error}); fetch it again.") from error

    def read(self, name: str) -> np.ndarray:
        """A tensor as float32, whatever it is stored as."""
        tensor = self.tensors[name]
        shape = (*tensor.shape[:-1], tensor.row_bytes)
        stored = np.fromfile(self.path, np.uint8, math.prod(shape), offset=tensor.start)
        try:
            return gguf.dequantize(stored.reshape(shape), tensor.kind)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path} stores {name} as {tensor.kind.name}, which cannot be read; convert it again."
            ) from error

    def whole(self, key: str, default: Any = REQUIRED, *, least: int = 1, most: int = LARGEST) -> Any:
        """A whole number within bounds."""
        wanted = f"a whole number from {least} to {most}"
        return self._value(key, default, wanted, lambda value: _is_whole(value) and least <= value <= most)

    def number(self, key: str, default: Any = REQUIRED) -> Any:
        """A positive number."""
        value = self._value(key, default, "a positive number", _is_positive)
        return default if value is default else float(value)

    def flag(self, key: str, default: Any = REQUIRED) -> Any:
        return self._value(key, default, "true or false", lambda value: isinstance(value, bool))

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        return self._value(key, default, "a text", lambda value: isinstance(value, str))

    def texts(self, key: str, default: Any = REQUIRED) -> Any:
        return self._value(
            key,
            default,
            "a list of texts",
            lambda value: isinstance(value, list) and all(isinstance(text, str) for text in value),
        )

    def numbers(self, key: str, default: Any = REQUIRED) -> Any:
        return self._value(key, default, "a list of numbers", lambda value: isinstance(value, np.ndarray))

    def _value(self, key: str, default: Any, wanted: str, fits: Callable[[Any], bool]) -> Any:
        value = self.metadata.get(key)
        if value is None:
            if default is REQUIRED:
                raise ValueError(
                    f"{self.path} has no metadata key {key!r}, which is needed; fetch or convert it again."
                )
            return default
        if not fits(value):
            raise ValueError(f"{self.path} has {shown(value)} for {key!r}; it must be {wanted}; convert it again.")
        return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return (_is_whole(value) or isinstance(value, float)) and 0 < value < math.inf


def shown(value: Any) -> str:
    """A value as an error shows it: on one line, and not all of a vocabulary."""
    if isinstance(value, (list, np.ndarray)):
        return f"a list of {len(value)} values"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


class _Header:
    """Reads a file from its start; every size is compared with what is left before it is followed."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self.at = 0
        if self.take(4, "the magic") != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        version = self.scalar("I")
        if version not in VERSIONS:
            kinds = " and ".join(map(str, VERSIONS))
            raise ValueError(f"its version is {version}; {kinds} can be read, little-endian")
        self.tensor_count, self.key_count = self.scalar("Q"), self.scalar("Q")

    def metadata(self) -> dict[str, Any]:
        values = {}
        for _ in range(self.key_count):
            key = self.text()
            if key in values:
                raise ValueError(f"it has the key {key!r} twice")
            values[key] = self.value(self.scalar("I"))
        return values

    def tensors(self, metadata: dict[str, Any]) -> dict[str, StoredTensor]:
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not _is_whole(alignment) or not 0 < alignment <= LARGEST:
            raise ValueError(f"general.alignment is {shown(alignment)}, not a positive whole number")
        entries = list(self.entries())
        beginning = -(-self.at // alignment) * alignment  # of the numbers, behind the last entry
        tensors = {}
        for name, tensor in entries:
            start = beginning + tensor.start
            end = start + math.prod(tensor.shape[:-1]) * tensor.row_bytes
            if end > self.size:
                raise ValueError(f"{name} ends at byte {end}, but the file has {self.size}")
            if name in tensors:
                raise ValueError(f"it has the tensor {name!r} twice")
            tensors[name] = tensor._replace(start=start)
        return tensors

    def entries(self) -> Iterator[tuple[str, StoredTensor]]:
        """The tensors' names with what the table says of them; starts are from the beginning of the numbers."""
        for _ in range(self.tensor_count):
            name, dimensions = self.text(), self.scalar("I")
            if not 1 <= dimensions <= MOST_DIMENSIONS:
                raise ValueError(f"{name} has {dimensions} dimensions; 1 to {MOST_DIMENSIONS} are possible")
            shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
            kind = _known(GGMLQuantizationType, self.scalar("I"), f"the type of {name}")
            per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            if shape[-1] % per_block:
                raise ValueError(f"{name} has rows of {shape[-1]}, but {kind.name} has blocks of {per_block}")
            yield name, StoredTensor(kind, shape, shape[-1] // per_block * block_bytes, self.scalar("Q"))

    def value(self, type_number: int) -> Any:
        kind = _known(GGUFValueType, type_number, "the type of a value")
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            return self.array(self.scalar("I"), self.scalar("Q"))
        # A file's float32 stands for its shortest decimal: 1e-5, not 9.999999747378752e-06.
        value = self.scalar(SCALARS[kind])
        return float(str(np.float32(value))) if kind == GGUFValueType.FLOAT32 else value

    def array(self, type_number: int, count: int) -> np.ndarray | list[Any]:
        letter = SCALARS.get(_known(GGUFValueType, type_number, "the type of an array"))
        if letter is None:
            return [self.value(type_number) for _ in range(count)]
        kind = np.dtype(letter).newbyteorder("<")
        return np.frombuffer(self.take(count * kind.itemsize, f"an array of {count} numbers"), kind)

    def text(self) -> str:
        at, length = self.at, self.scalar("Q")
        try:
            return self.take(length, "a text").decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"the text at byte {at} is not UTF-8") from error

    def scalar(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}"), "a number"))[0]

    def take(self, count: int, what: str) -> bytes:
        left = self.size - self.at
        if count > left:
            raise ValueError(f"{what} at byte {self.at} takes {count} bytes, but {left} are left")
        self.at += count
        return self.file.read(count)


def _known(kinds: Any, number: int, what: str) -> Any:
    if number not in set(kinds):
        raise ValueError(f"{what} is {number}, which is unknown")
    return kinds(number)
