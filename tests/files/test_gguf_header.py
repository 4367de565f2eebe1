"""GGUF headers that ask for more than the file holds, or place tensors wrongly: one line, and no memory taken."""

import struct
import tracemalloc

import mlx.core as mx
import pytest

from mlx_dflash.files.gguf import GGUFFile
from mlx_dflash.files.gguf_header import gguf_architecture

F32, U32, TEXT, ARRAY = 0, 4, 8, 9


def text(value, length=None):
    return struct.pack("<Q", len(value) if length is None else length) + value


def number(key, value, kind=U32):
    return text(key) + struct.pack("<I", kind) + value


def line(name, dims=(2,), kind=F32, offset=0):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


A = line(b"a")
NAME = number(b"general.architecture", text(b"dflash"), TEXT)


def write(path, values=(NAME,), lines=(A,), data=bytes(range(32)), counts=None):
    num_lines, num_values = counts or (len(lines), len(values))
    header = b"GGUF" + struct.pack("<IQQ", 3, num_lines, num_values) + b"".join([*values, *lines])
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


def test_a_file_as_it_should_be_is_read(tmp_path):
    values = NAME, number(b"x.list", struct.pack("<IQ2H", 2, 2, 7, 9), ARRAY), number(b"x.on", b"\1", 7)
    lines = A, line(b"b", (2, 3), offset=32)
    found = GGUFFile(write(tmp_path / "x.gguf", values, lines, bytes(32) + struct.pack("<6f", *range(6))))
    assert found.metadata == {"general.architecture": "dflash", "x.list": [7, 9], "x.on": True}
    assert mx.array_equal(found.tensors["b"], mx.arange(6).reshape(3, 2))


LARGE = 2**62
DAMAGES = {
    "a long string": (dict(values=[number(b"x.name", text(b"abc", LARGE), TEXT)]), "x.name needs"),
    "a long key": (dict(values=[text(b"x", LARGE) + bytes(12)]), "the key of value 1 of 1 needs"),
    "many values": (dict(counts=(1, LARGE)), "values needs"),
    "many tensors": (dict(counts=(LARGE, 1)), "tensors, 1 values needs"),
    "a long list": (dict(values=[number(b"x.list", struct.pack("<IQ", 10, LARGE), ARRAY)]), "x.list needs"),
    "many strings": (dict(values=[number(b"x.list", struct.pack("<IQ", 8, LARGE), ARRAY)]), "x.list needs"),
    "lists in a list": (
        dict(values=[number(b"x.list", struct.pack("<IQ", 9, 1) + bytes(60), ARRAY)]),
        "list of type 9",
    ),
    "an unknown type": (dict(values=[number(b"x.y", bytes(8), 13)]), "x.y has the type 13"),
    "no UTF-8": (dict(values=[number(b"x.name", text(b"\xff"), TEXT)]), "x.name is no UTF-8"),
    "a key of no UTF-8": (dict(values=[number(b"\xff\xfe", bytes(4))]), "the key of value 1 of 1 is no UTF-8"),
    "a key twice": (dict(values=[NAME, NAME]), "general.architecture twice"),
    "no alignment": (dict(values=[number(b"general.alignment", bytes(4))]), "general.alignment 0; expected"),
    "an odd alignment": (dict(values=[number(b"general.alignment", b"\x21\0\0\0")]), "general.alignment 33; expected"),
    "an alignment of text": (dict(values=[number(b"general.alignment", text(b"32"), TEXT)]), "general.alignment '32'"),
    "many dimensions": (dict(lines=[text(b"a") + struct.pack("<I", 2**31) + bytes(40)]), "a has 2147483648 dimensions"),
    "no dimension": (dict(lines=[line(b"a", ())]), "a has 0 dimensions"),
    "a size of 0": (dict(lines=[line(b"a", (0,))]), "a has the shape"),
    "a large size": (dict(lines=[line(b"a", (2**33, 2**33))]), "a has the shape"),
    "an unknown tensor type": (dict(lines=[line(b"a", kind=99)]), "a is stored as type 99"),
    "a row of part of a block": (dict(lines=[line(b"a", (20,), 8)]), "a has the shape .*multiple of 32 for Q8_0"),
    "a tensor twice": (dict(lines=[A, line(b"a", offset=32)], data=bytes(64)), "the tensor a twice"),
    "overlapping tensors": (dict(lines=[A, line(b"b")]), "b starts at byte 160, expected 192"),
    "a gap": (dict(lines=[A, line(b"b", offset=64)], data=bytes(96)), "b starts at byte"),
    "an odd offset": (dict(lines=[line(b"a", offset=4)]), "a starts at byte"),
    "an offset beyond the end": (dict(lines=[line(b"a", offset=2**63)]), "a starts at byte"),
    "data cut off": (dict(lines=[line(b"a", (2, 5))]), "cut off: a ends at byte"),
    "bytes after the last": (dict(data=bytes(96)), "its header says"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damages_are_refused_in_one_line(tmp_path, damage):
    changes, message = DAMAGES[damage]
    file = write(tmp_path / "x.gguf", **changes)
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"x.gguf.*{message}") as caught:
        GGUFFile(file)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [4, 5, 20, 24, 30, 50, 60])
def test_files_cut_off_in_the_header(tmp_path, length):
    file = write(tmp_path / "x.gguf")
    file.write_bytes(file.read_bytes()[:length])
    for read in (GGUFFile, gguf_architecture):
        with pytest.raises(ValueError, match=r"x.gguf is cut off or damaged: .* needs \d+ bytes, \d+ are left"):
            read(file)
