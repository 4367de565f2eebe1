"""What is in a GGUF file: metadata as Python values, tensors as MLX arrays, and the type each tensor has in the file.

Tensor data and metadata are read by mx.load. Its result does not tell a tensor's stored type (types it does not
know become float16), so the directory of tensors is read here as well. A file with other types, such as k-quants, is
read and dequantized by the gguf package. Knows no model.
Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import mlx.core as mx
import numpy as np

TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
# Types whose values mx.load, or the raw bytes, give exactly.
BLOCK_BYTES = {"F32": 128, "F16": 64, "BF16": 64, "Q4_0": 18, "Q4_1": 20, "Q8_0": 34}  # of 32 values
QUANTIZED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # affine, one scale and bias for 32 values
GROUP_SIZE = 32

_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


class Entry(NamedTuple):
    """One line of the directory: stored type, shape as MLX orders it (outermost first), first byte in the file."""

    type: str
    shape: tuple[int, ...]
    start: int


class GGUFFile:
    """A GGUF file, opened and checked.

    metadata: key -> str, bool, int, float or list. tensors: name -> array, where a quantized X.weight comes with
    X.scales and X.biases. directory: name -> Entry. In a file with k-quants every quantized tensor is float16 instead;
    if it unpacks, in every file, and float32.
    Raises ValueError for a file that is not GGUF, is cut off, or holds a tensor type that cannot be read.
    """

    def __init__(self, path: str | Path, unpacks: bool = False):
        self.path = Path(path)
        with self.path.open("rb") as file:
            self.directory = _read_directory(file, self.path)
        self._check_size()
        if not unpacks and all(entry.type in BLOCK_BYTES for entry in self.directory.values()):
            tensors, metadata = mx.load(str(self.path), format="gguf", return_metadata=True)
            self.metadata = {key: _plain(value) for key, value in metadata.items()}
            self.tensors = tensors | {
                name: self._read_bf16(e) for name, e in self.directory.items() if e.type == "BF16"
            }
        else:
            self.tensors, self.metadata = _read_with_library(self.path, mx.float32 if unpacks else mx.float16)
        if self.value("split.count", 1) > 1:
            raise ValueError(f"{self.path.name} is one of {self.value('split.count')} parts; merge them into one file")

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata under `key`; without a default, ValueError names the missing key."""
        if key in self.metadata:
            return self.metadata[key]
        if default is None:
            raise ValueError(f"{self.path.name} has no {key} in its metadata")
        return default

    def entry(self, name: str) -> Entry:
        """The directory's line for a tensor; ValueError if the file lacks it."""
        if name not in self.directory:
            raise ValueError(f"{self.path.name} lacks the tensor {name}")
        return self.directory[name]

    @property
    def quantized_bits(self) -> dict[str, int]:
        """Name -> bits of the tensors that come with scales and biases."""
        return {
            n: QUANTIZED_BITS[e.type]
            for n, e in self.directory.items()
            if n.removesuffix("weight") + "scales" in self.tensors
        }

    def _check_size(self) -> None:
        num_bytes = self.path.stat().st_size
        for name, entry in self.directory.items():
            end = entry.start + prod(entry.shape) * BLOCK_BYTES.get(entry.type, 0) // 32
            if end > num_bytes:
                raise ValueError(f"{self.path.name} is cut off: {name} ends at byte {end} of {num_bytes}")

    def _read_bf16(self, entry: Entry) -> mx.array:
        # mx.load would go through float16, whose range is smaller.
        with self.path.open("rb") as file:
            file.seek(entry.start)
            bits = np.fromfile(file, np.uint16, prod(entry.shape))
        return mx.array(bits.reshape(entry.shape)).view(mx.bfloat16)


def gguf_architecture(path: Path) -> str:
    """Read what kind of model a file holds, without its tensors. Raises ValueError for a file that is not GGUF."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        try:
            _, _, num_values = _unpack(file, "IQQ")
            for _ in range(num_values):
                key, (kind,) = _string(file), _unpack(file, "I")
                if key == b"general.architecture" and kind == _STRING:
                    return _string(file).decode()
                _skip_value(file, kind)
        except (struct.error, KeyError, UnicodeDecodeError, OverflowError) as error:
            raise ValueError(f"{path.name} is cut off or damaged") from error
    raise ValueError(f"{path.name} has no general.architecture in its metadata")


def _read_with_library(path: Path, dtype: mx.Dtype) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Tensors and metadata by the gguf package, quantized tensors as dtype."""
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        known = ", ".join(BLOCK_BYTES)
        raise ValueError(f"{path.name} holds types other than {known}; to read them: pip install gguf") from error
    try:
        reader = GGUFReader(path)
    except ValueError as error:
        raise ValueError(f"{path.name} cannot be read: {error}; is it cut off?") from error
    tensors = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        if kind[0] == "I" and kind[1:].isdigit():
            values = mx.array(np.array(tensor.data))
        else:
            try:
                values = mx.array(dequantize(tensor.data, tensor.tensor_type))
            except NotImplementedError as error:
                raise ValueError(f"{path.name}: {tensor.name} is stored as {kind}, which cannot be read") from error
            values = values if kind == "F32" else values.astype(mx.bfloat16 if kind == "BF16" else dtype)
        shape = tuple(int(n) for n in reversed(tensor.shape))
        tensors[tensor.name] = values.reshape(shape)
        mx.eval(tensors[tensor.name])
    metadata = {name: _plain_contents(field) for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return tensors, metadata


def _plain_contents(field: Any) -> Any:
    value = field.contents()
    # The shortest decimal of the float32: 1e-05, not 9.999999747378752e-06.
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _read_directory(file: BinaryIO, path: Path) -> dict[str, Entry]:
    if file.read(4) != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file")
    try:
        version, num_tensors, num_values = _unpack(file, "IQQ")
        if version not in (2, 3):
            raise ValueError(f"{path.name} has GGUF version {version}; can read 2 and 3")
        alignment = 32
        for _ in range(num_values):
            key, (kind,) = _string(file), _unpack(file, "I")
            if key == b"general.alignment":
                (alignment,) = _unpack(file, "I")
            else:
                _skip_value(file, kind)
        lines = [_read_line(file) for _ in range(num_tensors)]
    except (struct.error, KeyError) as error:
        raise ValueError(f"{path.name} is cut off or broken: its header cannot be read") from error
    data = -(-file.tell() // alignment) * alignment
    return {name: Entry(kind, shape, data + offset) for name, kind, shape, offset in lines}


def _read_line(file: BinaryIO) -> tuple[str, str, tuple[int, ...], int]:
    name = _string(file).decode()
    (num_dims,) = _unpack(file, "I")
    *dims, kind, offset = _unpack(file, f"{num_dims}QIQ")
    return name, TYPES.get(kind, f"type {kind}"), tuple(reversed(dims)), offset


def _skip_value(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        _string(file)
    elif kind == _ARRAY:
        inner, length = _unpack(file, "IQ")
        if inner in _VALUE_BYTES:
            file.seek(_VALUE_BYTES[inner] * length, 1)
        else:
            for _ in range(length):
                _skip_value(file, inner)
    else:
        file.seek(_VALUE_BYTES[kind], 1)


def _string(file: BinaryIO) -> bytes:
    (length,) = _unpack(file, "Q")
    return file.read(length)


def _unpack(file: BinaryIO, layout: str) -> tuple:
    return struct.unpack("<" + layout, file.read(struct.calcsize("<" + layout)))


def _plain(value: Any) -> Any:
    if not isinstance(value, mx.array):
        return value
    if value.dtype == mx.float32 and value.ndim == 0:
        # The shortest decimal of the float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value.item())))
    return value.tolist()
