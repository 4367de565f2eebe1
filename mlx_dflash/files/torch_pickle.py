"""Tensors out of a .pt file of torch.save, without torch and without unpickling.

The pickle inside is walked opcode by opcode: only containers, numbers, text and tensors are known, everything else is
refused, and nothing the file names is ever imported or called. Knows nothing of models.
Source: the zip format of torch.save (torch 1.6 on) and Python's pickletools.
"""

import pickletools
import zipfile
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

_DTYPES = {
    "FloatStorage": (np.float32, mx.float32),
    "HalfStorage": (np.float16, mx.float16),
    "BFloat16Storage": (np.uint16, mx.bfloat16),
    "DoubleStorage": (np.float64, mx.float32),
    "LongStorage": (np.int64, mx.int64),
    "IntStorage": (np.int32, mx.int32),
}
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_REBUILD_PARAMETER = ("torch._utils", "_rebuild_parameter")
_ORDERED_DICT = ("collections", "OrderedDict")
_GLOBALS = {_REBUILD, _REBUILD_PARAMETER, _ORDERED_DICT, *(("torch", name) for name in _DTYPES)}
_MAX_PICKLE = 1 << 20  # bytes
_MARK = object()
_PUSHED = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def read_torch_file(path: str | Path) -> Any:
    """Return the tensor, or the dict or list of tensors, numbers and text, that the file holds.

    Raises ValueError for anything else in it, for a damaged file, and for torch's format before 1.6.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.endswith("/data.pkl")]
            if len(names) != 1:
                raise ValueError(f"{path} is a zip file without one data.pkl; expected what torch.save writes")
            if archive.getinfo(names[0]).file_size > _MAX_PICKLE:
                raise ValueError(
                    f"{path} describes its tensors in more than {_MAX_PICKLE} bytes; expected one small tensor"
                )
            folder = names[0].removesuffix("data.pkl")
            return _Walk(path, archive, folder).run(archive.read(names[0]))
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is not what torch.save (1.6 or later) writes: {error}") from error
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged, or holds something else than tensors: {error!r}") from error


class _Walk:
    """One walk over a pickle, with its stack and memo. Names stand for themselves, as (module, name) pairs."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, folder: str):
        self.path, self.archive, self.folder = path, archive, folder
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, pickled: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name == "STOP":
                return self.stack.pop()
            self._step(opcode.name, argument)
        raise ValueError(f"{self.path} ends inside its description")

    def _step(self, name: str, argument: Any) -> None:
        if name in ("PROTO", "FRAME"):
            return
        if name in _PUSHED:
            self.stack.append(_CONSTANTS.get(name, argument))
        elif name == "MARK":
            self.stack.append(_MARK)
        elif name in ("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"):
            self.stack.append({"T": (), "L": [], "D": {}}[name[6]])
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            n = int(name[-1])
            self.stack[-n:] = [tuple(self.stack[-n:])]
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self.stack.append(
                self._name(argument.split(" ") if name == "GLOBAL" else [self.stack.pop(-2), self.stack.pop()])
            )
        elif name in ("TUPLE", "SETITEMS", "APPENDS"):
            self._collect(name, self._since_mark())
        elif name in ("SETITEM", "APPEND"):
            n = 2 if name == "SETITEM" else 1
            items, self.stack = self.stack[-n:], self.stack[:-n]
            self._collect(name + "S", items)
        elif name == "BINPERSID":
            self.stack.append(self._storage(self.stack.pop()))
        elif name == "REDUCE":
            arguments, function = self.stack.pop(), self.stack.pop()
            self.stack.append(self._rebuild(function, arguments))
        else:
            raise ValueError(
                f"{self.path} uses the pickle opcode {name}, which no file of plain tensors needs; it is refused"
            )

    def _since_mark(self) -> list[Any]:
        at = max(i for i, item in enumerate(self.stack) if item is _MARK)
        items, self.stack = self.stack[at + 1 :], self.stack[:at]
        return items

    def _collect(self, name: str, items: list[Any]) -> None:
        if name == "TUPLE":
            self.stack.append(tuple(items))
        elif name == "APPENDS":
            self.stack[-1].extend(items)
        else:
            self.stack[-1].update(zip(items[::2], items[1::2]))

    def _name(self, parts: list[str]) -> tuple[str, str]:
        if tuple(parts) not in _GLOBALS:
            raise ValueError(
                f"{self.path} names {'.'.join(map(str, parts))}, which is no tensor; it is refused, nothing was run"
            )
        return tuple(parts)

    def _storage(self, description: tuple) -> tuple[np.ndarray, str]:
        """The numbers of one storage, (n,), and the name of its type."""
        kind, (_, type_name), key, _, count = description
        stored, _ = _DTYPES[type_name]
        entry = self.archive.getinfo(f"{self.folder}data/{key}")
        size = count * np.dtype(stored).itemsize
        if kind != "storage" or entry.compress_type != zipfile.ZIP_STORED or entry.file_size != size:
            raise ValueError(f"{self.path}: storage {key} has {entry.file_size} bytes; expected {size}, not compressed")
        return np.frombuffer(self.archive.read(entry), stored), type_name

    def _rebuild(self, function: tuple[str, str], arguments: tuple) -> Any:
        if function == _ORDERED_DICT and arguments == ():
            return {}
        if function == _REBUILD_PARAMETER and isinstance(arguments[0], mx.array):
            return arguments[0]
        if function != _REBUILD:
            raise ValueError(
                f"{self.path} calls something else than the rebuilding of a tensor; it is refused, nothing was run"
            )
        (numbers, type_name), offset, shape, strides = arguments[:4]
        contiguous = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        if any(n > 1 and s != c for n, s, c in zip(shape, strides, contiguous)):
            raise ValueError(f"{self.path} holds a tensor with strides {strides}; expected a contiguous one")
        part = numbers[offset : offset + prod(shape)].reshape(shape)
        array, dtype = mx.array(part), _DTYPES[type_name][1]
        return array.view(dtype) if dtype == mx.bfloat16 else array.astype(dtype)
