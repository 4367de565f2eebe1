"""Tensors out of a .pt file of torch.save, without torch and without running anything that the file names.

Python's unpickler reads the description. It may use only the opcodes of containers, numbers, text and tensors, and gets
functions from here in place of what the file names. Knows nothing of models.
Source: the zip format of torch.save (torch 1.6 on) and Python's pickletools.
"""

import io
import pickle
import pickletools
import struct
import zipfile
import zlib
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from .json_text import told

_DTYPES = {
    "FloatStorage": (np.float32, mx.float32),
    "HalfStorage": (np.float16, mx.float16),
    "BFloat16Storage": (np.uint16, mx.bfloat16),
    "DoubleStorage": (np.float64, mx.float32),
    "LongStorage": (np.int64, mx.int64),
    "IntStorage": (np.int32, mx.int32),
}
_MAX_PICKLE = 1 << 20  # bytes
_OPCODES = set(
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE "
    "BINUNICODE8 EMPTY_TUPLE EMPTY_LIST EMPTY_DICT TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS BINPUT "
    "LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL BINPERSID REDUCE".split()
)
# What Python's unpickler and its reader of zip files raise for bytes that make no sense.
_DAMAGE = (IndexError, KeyError, TypeError, AttributeError, EOFError, OverflowError, OSError, pickle.UnpicklingError)
_DAMAGE += (NotImplementedError, RuntimeError, struct.error, zlib.error)


def read_torch_file(path: str | Path) -> Any:
    """Return the tensor, or the dict or list of tensors, numbers and text, that the file holds.

    Raises ValueError for anything else in it, for a damaged file, and for torch's format before 1.6.
    """
    # Opened here, so that an error of the disk is not taken for a damaged file.
    with open(path, "rb") as file:
        try:
            return _read(file)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path} is not what torch.save (1.6 or later) writes: {told(str(error))}") from error
        except _DAMAGE as error:
            raise ValueError(f"{path} is damaged, or holds something else than tensors: {told(error)}") from error
        except ValueError as error:
            raise ValueError(f"{path} {' '.join(str(error).split())[:300]}") from error


def _read(file: BinaryIO) -> Any:
    with zipfile.ZipFile(file) as archive:
        names = [n for n in archive.namelist() if n.endswith("/data.pkl")]
        if len(names) != 1:
            raise ValueError("is a zip file without one data.pkl; expected what torch.save writes")
        if archive.getinfo(names[0]).file_size > _MAX_PICKLE:
            raise ValueError(f"describes its tensors in more than {_MAX_PICKLE} bytes; expected one small tensor")
        pickled = archive.read(names[0])
        _check_opcodes(pickled)
        return _Tensors(pickled, archive, names[0].removesuffix("data.pkl")).load()


def _check_opcodes(pickled: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            _stand_in(*argument.split(" "))
        if opcode.name not in _OPCODES:
            raise ValueError(
                f"uses the pickle opcode {opcode.name}, which no file of plain tensors needs; it is refused"
            )
        if opcode.name == "LONG_BINPUT" and argument > len(pickled):
            raise ValueError(f"numbers an object {argument}, more than it can hold; it is refused")


class _Tensors(pickle.Unpickler):
    """An unpickler that can call two functions: one makes a tensor of a storage, the other an empty dict."""

    def __init__(self, pickled: bytes, archive: zipfile.ZipFile, folder: str):
        super().__init__(io.BytesIO(pickled))
        self.archive, self.folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name of torch's."""
        return _stand_in(module, name)

    def persistent_load(self, pid: tuple) -> tuple[np.ndarray, mx.Dtype]:
        """Return the numbers of one storage, (n,), and the type of their tensor."""
        kind, type_name, key, _, count = pid
        stored, dtype = _DTYPES[type_name]
        entry = self.archive.getinfo(f"{self.folder}data/{key}")
        size = count * np.dtype(stored).itemsize
        if kind != "storage" or entry.compress_type != zipfile.ZIP_STORED or entry.file_size != size:
            raise ValueError(f"has a storage {key} of {entry.file_size} bytes; expected {size}, not compressed")
        return np.frombuffer(self.archive.read(entry), stored), dtype


def _stand_in(module: str, name: str) -> Any:
    """Return a function of this file or, for a type of storage, its name."""
    if module == "torch" and name in _DTYPES:
        return name
    if (module, name) not in _FUNCTIONS:
        raise ValueError(f"names {module}.{name}, which is no tensor; it is refused, nothing was run")
    return _FUNCTIONS[module, name]


def _tensor(storage: tuple[np.ndarray, mx.Dtype], offset: int, shape: tuple, strides: tuple, *_: Any) -> mx.array:
    numbers, dtype = storage
    contiguous = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    if any(n > 1 and s != c for n, s, c in zip(shape, strides, contiguous)):
        raise ValueError(f"holds a tensor with strides {strides}; expected a contiguous one")
    array = mx.array(numbers[offset : offset + prod(shape)].reshape(shape))
    return array.view(dtype) if dtype == mx.bfloat16 else array.astype(dtype)


def _parameter(tensor: mx.array, *_: Any) -> mx.array:
    return tensor


def _empty_dict() -> dict:
    return {}


_FUNCTIONS = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("collections", "OrderedDict"): _empty_dict,
}
