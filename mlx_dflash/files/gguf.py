"""A GGUF file: metadata as Python values, tensors as MLX arrays, and the type each tensor has in the file.

Tensor data are read by mx.load. A file with other types than it knows, such as k-quants, is read and dequantized by the
gguf package. Both get files only whose header has been checked. Knows no model.
"""

from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .gguf_header import Entry, read_header

EXACT = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")  # mx.load, or the raw bytes, give their values exactly
QUANTIZED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # affine, one scale and bias for 32 values
GROUP_SIZE = 32


class GGUFFile:
    """A GGUF file, opened and checked.

    metadata: key -> str, bool, int, float or list. tensors: name -> array, where a quantized X.weight comes with
    X.scales and X.biases. directory: name -> Entry. In a file with k-quants every quantized tensor is float16 instead;
    if it unpacks, in every file, and float32.
    Raises ValueError for a file that is not GGUF, is cut off, or holds a tensor type that cannot be read.
    """

    def __init__(self, path: str | Path, unpacks: bool = False):
        self.path = Path(path)
        self.metadata, self.directory = read_header(self.path)
        if not unpacks and all(entry.type in EXACT for entry in self.directory.values()):
            self.tensors = self._read_with_mlx()
        else:
            self.tensors = _read_with_library(self.path, mx.float32 if unpacks else mx.float16)
        if self.value("split.count", 1, int) > 1:
            raise ValueError(f"{self.path.name} is one of {self.value('split.count')} parts; merge them into one file")

    def value(self, key: str, default: Any = None, kind: Any = object) -> Any:
        """The metadata under `key`; without a default, ValueError names a missing key. kind: its type, checked."""
        if key not in self.metadata and default is None:
            raise ValueError(f"{self.path.name} has no {key} in its metadata")
        found = self.metadata.get(key, default)
        if not isinstance(found, kind):
            raise ValueError(f"{self.path.name} has {key} = {str(found)[:60]!r}; expected another type of value")
        return found

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

    def _read_with_mlx(self) -> dict[str, mx.array]:
        try:
            tensors = mx.load(str(self.path), format="gguf")
        except RuntimeError as error:
            raise ValueError(f"{self.path.name} cannot be read: {error}") from error
        return tensors | {name: self._read_bf16(e) for name, e in self.directory.items() if e.type == "BF16"}

    def _read_bf16(self, entry: Entry) -> mx.array:
        # mx.load would go through float16, whose range is smaller.
        with self.path.open("rb") as file:
            file.seek(entry.start)
            bits = np.fromfile(file, np.uint16, prod(entry.shape))
        return mx.array(bits.reshape(entry.shape)).view(mx.bfloat16)


def _read_with_library(path: Path, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Tensors by the gguf package, quantized ones as dtype."""
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        known = ", ".join(EXACT)
        raise ValueError(f"{path.name} holds types other than {known}; to read them: pip install gguf") from error
    try:
        reader = GGUFReader(path)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
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
    return tensors
