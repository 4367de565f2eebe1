"""The header of a GGUF file: metadata as Python values, and where each tensor lies.

Every length and count is checked against what is left of the file before memory is taken for it, and the tensors must
fill the file. Knows bytes; knows neither arrays nor models.
Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .json_text import told

# Number of a tensor's type in the file: its name, the values of a block, and the bytes of a block.
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
_BLOCKS = {name: (values, num_bytes) for name, values, num_bytes in _TYPES.values()}
# Number of a value's type: as struct and numpy write it, little-endian.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS, _MAX_DIMENSION = 8, 2**31 - 1


class Entry(NamedTuple):
    """One line of the directory: stored type, shape as MLX orders it (outermost first), first byte in the file."""

    type: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        values, size = _BLOCKS[self.type]
        return prod(self.shape) // values * size


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Return the metadata (key -> str, bool, int, float or list) and the directory (tensor -> Entry).

    Raises ValueError that names the file and the field for anything that does not fit.
    """
    with _opened(path) as header:
        metadata: dict[str, Any] = {}
        for key, value in header.values():
            if key in metadata:
                raise ValueError(f"{path.name} has {told(key)[1:-1]} twice in its metadata")
            metadata[key] = value
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise ValueError(f"{path.name} has general.alignment {told(alignment)}; expected a power of two")
        lines = [header.line(f"tensor {i + 1} of {header.num_tensors}") for i in range(header.num_tensors)]
        data = -(-header.position // alignment) * alignment
        directory: dict[str, Entry] = {}
        for name, kind, shape, offset in lines:
            if name in directory:
                raise ValueError(f"{path.name} has the tensor {told(name)[1:-1]} twice")
            directory[name] = Entry(kind, shape, data + offset)
        _check_places(path, directory, data, alignment)
    return metadata, directory


def gguf_architecture(path: Path) -> str:
    """Read what kind of model a file holds, without the rest. Raises ValueError for a file that is not GGUF."""
    with _opened(path) as header:
        for key, value in header.values():
            if key == "general.architecture" and isinstance(value, str):
                return value
    raise ValueError(f"{path.name} has no general.architecture in its metadata")


def _check_places(path: Path, directory: dict[str, Entry], data: int, alignment: int) -> None:
    """Raise ValueError unless the tensors fill the file from `data` on, each at the next aligned byte."""
    size, reached = path.stat().st_size, data
    for name, entry in sorted(directory.items(), key=lambda item: item[1].start):
        expected = -(-reached // alignment) * alignment
        if entry.start != expected:
            raise ValueError(
                f"{path.name}: {told(name)[1:-1]} starts at byte {entry.start}, expected {expected}: is it damaged?"
            )
        reached = entry.start + entry.num_bytes
        if reached > size:
            raise ValueError(f"{path.name} is cut off: {told(name)[1:-1]} ends at byte {reached} of {size}")
    if directory and size - reached >= alignment:
        raise ValueError(f"{path.name} has {size} bytes, its header says {reached}: is it damaged?")


@contextmanager
def _opened(path: Path) -> Iterator["_Header"]:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield _Header(path, content)


class _Header:
    """Reads a header from its start on. what: the field that is read, for messages."""

    def __init__(self, path: Path, content: mmap.mmap):
        self.path, self.content, self.position = path, content, 4
        version, self.num_tensors, self.num_values = self.numbers("IQQ", "the beginning")
        if version not in (2, 3):
            raise ValueError(f"{path.name} has GGUF version {version}; can read 2 and 3")
        # The shortest value takes 13 bytes, the shortest line of the directory 32.
        self.room(self.num_tensors * 32 + self.num_values * 13, f"{self.num_tensors} tensors, {self.num_values} values")

    def room(self, num_bytes: int, what: str) -> None:
        """Raise ValueError unless so many bytes are left."""
        left = len(self.content) - self.position
        if num_bytes > left:
            raise ValueError(
                f"{self.path.name} is cut off or damaged: {told(what)[1:-1]} needs {num_bytes} bytes, {left} are left"
            )

    def take(self, num_bytes: int, what: str) -> bytes:
        """Read so many bytes."""
        self.room(num_bytes, what)
        self.position += num_bytes
        return self.content[self.position - num_bytes : self.position]

    def numbers(self, layout: str, what: str) -> tuple:
        """Read numbers of fixed size."""
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout), what))

    def text(self, what: str) -> str:
        """Read a string."""
        (length,) = self.numbers("Q", what)
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path.name}: {told(what)[1:-1]} is no UTF-8 text") from error

    def values(self) -> Iterator[tuple[str, Any]]:
        """Read the metadata, in the order of the file."""
        for i in range(self.num_values):
            key = self.text(f"the key of value {i + 1} of {self.num_values}")
            (kind,) = self.numbers("I", key)
            yield key, self._array(key) if kind == _ARRAY else self._value(kind, key)

    def _value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind not in _NUMBERS:
            raise ValueError(f"{self.path.name}: {told(what)[1:-1]} has the type {kind}, which GGUF does not know")
        (value,) = self.numbers(_NUMBERS[kind], what)
        # The shortest decimal of the float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if _NUMBERS[kind] == "f" else value

    def _array(self, what: str) -> list:
        kind, length = self.numbers("IQ", what)
        if kind == _STRING:
            self.room(8 * length, what)
            return [self.text(what) for _ in range(length)]
        if kind not in _NUMBERS:
            raise ValueError(
                f"{self.path.name}: {told(what)[1:-1]} is a list of type {kind}; expected numbers or strings"
            )
        dtype = np.dtype("u1" if _NUMBERS[kind] == "?" else "<" + _NUMBERS[kind])
        found = np.frombuffer(self.take(length * dtype.itemsize, what), dtype)
        return (found != 0 if _NUMBERS[kind] == "?" else found).tolist()

    def line(self, what: str) -> tuple[str, str, tuple[int, ...], int]:
        """Read a line of the directory: name, type, shape, offset from the first byte of the data."""
        name = self.text(what)
        (num_dims,) = self.numbers("I", name)
        if not 1 <= num_dims <= _MAX_DIMENSIONS:
            raise ValueError(
                f"{self.path.name}: {told(name)[1:-1]} has {num_dims} dimensions; can read 1 to {_MAX_DIMENSIONS}"
            )
        *dims, kind, offset = self.numbers(f"{num_dims}QIQ", name)
        if kind not in _TYPES:
            raise ValueError(f"{self.path.name}: {told(name)[1:-1]} is stored as type {kind}, which cannot be read")
        stored, values, _ = _TYPES[kind]
        if not all(1 <= n <= _MAX_DIMENSION for n in dims) or dims[0] % values:
            raise ValueError(
                f"{self.path.name}: {told(name)[1:-1]} has the shape {dims[::-1]}; expected sizes from 1 to "
                f"{_MAX_DIMENSION}, the last one a multiple of {values} for {stored}"
            )
        return name, stored, tuple(reversed(dims)), offset
