"""Files as torch.save writes them, made without torch."""

import pickle
import sys
import types
import zipfile

import numpy as np


class TorchTensor:
    """Stands for a torch tensor while it is pickled as torch.save does it."""

    def __init__(self, values, kind="FloatStorage"):
        self.values, self.kind = np.ascontiguousarray(values), kind


def save_torch(path, content, monkeypatch):
    """Write content, with TorchTensors in it, as the zip file of torch.save, without torch."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")

    def rebuild(*_):
        raise AssertionError("nothing in the file may be called")

    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2, torch._utils = rebuild, utils
    for kind in ("FloatStorage", "HalfStorage", "BFloat16Storage", "LongStorage"):
        setattr(torch, kind, type(kind, (), {"__module__": "torch"}))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)
    storages = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, item):
            if not isinstance(item, np.ndarray):
                return None
            storages.append(item)
            kind = (
                "BFloat16Storage"
                if item.dtype == np.uint16
                else {"f4": "FloatStorage", "f2": "HalfStorage", "i8": "LongStorage"}[item.dtype.str[1:]]
            )
            return "storage", getattr(torch, kind), str(len(storages) - 1), "cpu", item.size

        def reducer_override(self, item):
            if not isinstance(item, TorchTensor):
                return NotImplemented
            values = item.values
            strides = tuple(s // values.itemsize for s in values.strides)
            return rebuild, (values.reshape(-1), 0, values.shape, strides, False, {})

    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("archive/data.pkl", "w") as file:
            Pickler(file, protocol=2).dump(content)
        for i, storage in enumerate(storages):
            archive.writestr(f"archive/data/{i}", storage.tobytes())
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delitem(sys.modules, "torch._utils")
    return path
