"""Damage to files, drawn from a seed: bits, bytes, lengths, cuts, and for JSON also values of other types."""

import json
import random
import re
import zipfile
from io import BytesIO

COUNTS = (0, 1, 2, 7, 2**8, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**33, 2**62, 2**63, 2**64 - 1)
VALUES = (None, True, False, 0, 1, -1, 2, 3, 10**7, 10**12, 2**31, 2**63, 10**400, 0.5, -1.5, 1e400, float("nan"))
VALUES += ("", "x", "float32", "F16", [], [[]], {}, {"a": 1}, [1, 2], ["x"], [None], "é\udcff", "x" * 10**5)


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Damage that any file may suffer; half of it falls on the first kilobyte, where headers are."""
    data = bytearray(data)
    place = rng.randrange(min(len(data), rng.choice((64, 1024, len(data)))))
    kind = rng.choice(("bits", "bytes", "count", "cut", "remove", "repeat", "insert"))
    if kind == "bits":
        for _ in range(rng.randrange(1, 4)):
            data[min(place + rng.randrange(4), len(data) - 1)] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        data[place : place + 4] = bytes(rng.randrange(256) for _ in range(4))
    elif kind == "count":
        size = rng.choice((4, 8))
        data[place : place + size] = (rng.choice(COUNTS) % 2 ** (8 * size)).to_bytes(size, "little")
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "remove":
        del data[place : place + rng.randrange(1, 64)]
    else:
        length = rng.randrange(1, 64)
        data[place:place] = data[place : place + length] if kind == "repeat" else rng.randbytes(length)
    return bytes(data)


def damaged_value(value, rng: random.Random):
    """A JSON value with one of its parts replaced, removed, or nested deeply. The value itself stays as it is."""
    value = json.loads(json.dumps(value))
    parents = [item for item in _containers(value) if len(item)]
    if not parents or rng.random() < 0.03:
        return rng.choice(VALUES)
    parent = rng.choice(parents)
    key = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
    kind = rng.choice(("value", "value", "value", "remove", "swap", "deep", "long"))
    if kind == "value":
        parent[key] = rng.choice(VALUES)
    elif kind == "remove":
        del parent[key]
    elif kind == "swap":
        other = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
        parent[key], parent[other] = parent[other], parent[key]
    elif kind == "deep":
        for _ in range(rng.choice((5, 90, 101, 300))):
            parent[key] = [parent[key]]
    else:
        parent[key] = [parent[key]] * rng.choice((2, 1000))
    return value


def damaged_json(data: bytes, rng: random.Random) -> bytes:
    """Damage to a file of one JSON value: to its bytes, its depth, or a part of the value."""
    if rng.random() < 0.3:
        return damaged_bytes(data, rng)
    if rng.random() < 0.1:
        depth = rng.choice((10, 1000, 50_000))
        return b"[" * depth + (data if rng.random() < 0.5 else b"") + b"]" * depth
    return _dumped(damaged_value(json.loads(data), rng))


def damaged_lines(data: bytes, rng: random.Random) -> bytes:
    """Damage to a file of JSON lines."""
    lines = data.splitlines(keepends=True)
    i = rng.randrange(len(lines))
    lines[i] = damaged_json(lines[i], rng).rstrip(b"\n") + rng.choice((b"\n", b"\n", b"", b"\r\n", b"\n\n"))
    return b"".join(lines)


def damaged_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Damage to a safetensors file: to its bytes, or to a part of its header, which stays valid JSON."""
    if rng.random() < 0.4:
        return damaged_bytes(data, rng)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = rng.choice([name for name in header if name != "__metadata__"])
    kind = rng.choice(("any", "dtype", "offsets", "shape", "name"))
    entry = header[name]
    if kind == "any":
        header = damaged_value(header, rng)
    elif kind == "dtype":
        entry["dtype"] = rng.choice(("F32", "F16", "BF16", "F64", "I32", "U32", "I8", "BOOL", "C64", "F8_E4M3", "x"))
    elif kind == "offsets":
        entry["data_offsets"][rng.randrange(2)] += rng.choice((-8, -4, -1, 1, 4, 8, 64, 2**33, 2**63))
    elif kind == "shape":
        entry["shape"] = rng.choice((entry["shape"][::-1], [1, *entry["shape"]], [-n for n in entry["shape"]], [2**32]))
    text = _dumped(header)
    if kind == "name":
        names = [json.dumps(key).encode() for key in header]
        text = text.replace(json.dumps(name).encode(), rng.choice((*names, b'"x"', b'""')), 1)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def damaged_zip(data: bytes, rng: random.Random) -> bytes:
    """Damage to a zip file: to its bytes, or to one of its files."""
    if rng.random() < 0.5:
        return damaged_bytes(data, rng)
    made = BytesIO()
    with zipfile.ZipFile(BytesIO(data)) as source, zipfile.ZipFile(made, "w") as target:
        names = source.namelist()
        hurt, level = rng.choice(names), rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
        for name in names:
            content = source.read(name)
            if name == hurt and rng.random() < 0.1:
                continue
            target.writestr(name, damaged_bytes(content, rng) if name == hurt else content, level)
    return made.getvalue()


def _containers(value) -> list:
    found, level = [], [value]
    while level:
        level = [item for item in level if isinstance(item, (dict, list))]
        found += level
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return found


def _dumped(value) -> bytes:
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"\bInfinity\b", "1e400", text).encode(errors="surrogateescape")
