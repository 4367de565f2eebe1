"""Safetensors files whose header lies about the data: refused by the name of the file and of the tensor."""

import json
import struct

import mlx.core as mx
import numpy as np
import pytest
from support.drafts import draft_config, draft_weights
from support.folders import save_checkpoint

import mlx_dflash
from mlx_dflash.files.safetensors import read_safetensors


def write(path, entries, num_bytes, names=("a", "b")):
    """Write a file of F32 tensors of shape [2]. entries: changes to each. num_bytes: of data."""
    parts = []
    for i, (name, changes) in enumerate(zip(names, entries)):
        entry = {"dtype": "F32", "shape": [2], "data_offsets": [8 * i, 8 * i + 8], **changes}
        parts.append(f"{json.dumps(name)}:{json.dumps(entry)}")
    text = ("{" + ",".join(parts) + "}").encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + np.arange(num_bytes // 4, dtype=np.float32).tobytes())
    return path


def test_a_file_as_it_should_be_is_read(tmp_path):
    found = read_safetensors(write(tmp_path / "model.safetensors", [{}, {}], 16))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"a": [0, 1], "b": [2, 3]}


LIES = {
    "overlap": ([{}, {"data_offsets": [4, 12]}], 12, "b overlaps the one before it"),
    "the same bytes": ([{}, {"data_offsets": [0, 8]}], 8, "b overlaps"),
    "a gap": ([{}, {"data_offsets": [12, 20]}], 20, "b has unused bytes before it"),
    "a gap at the start": ([{"data_offsets": [4, 12]}, {"data_offsets": [12, 20]}], 20, "a has unused bytes"),
    "beyond the end": ([{}, {"data_offsets": [8, 16]}], 12, "28|has .* bytes, its header says"),
    "bytes after the last": ([{}, {}], 24, "its header says"),
    "too few bytes for the shape": ([{}, {"shape": [3]}], 16, "b has 8 bytes; F32 of shape .3. needs 12"),
    "a type of another size": ([{}, {"dtype": "F16"}], 16, "b has 8 bytes; F16"),
    "an unknown type": ([{}, {"dtype": "F99"}], 16, "b has the type 'F99'; expected one of F32"),
    "a type that is a list": ([{}, {"dtype": ["F32"]}], 16, "b has the type"),
    "a negative shape": ([{}, {"shape": [-1, -2]}], 16, "b has the shape"),
    "a shape beyond 32 bits": ([{}, {"shape": [2**33, 0]}], 8, "b has the shape"),
    "a shape of fractions": ([{}, {"shape": [2.0]}], 16, "b has the shape"),
    "offsets that run backwards": ([{}, {"data_offsets": [16, 8]}], 16, "b has -8 bytes"),
    "offsets that are no pair": ([{}, {"data_offsets": [8]}], 16, "b has the data_offsets"),
    "no offsets": ([{}, {"data_offsets": None}], 16, "b has the data_offsets"),
    "no object": ([{}, {"dtype": None}], 16, "b has the type"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_does_not_fill_the_file_is_refused(tmp_path, lie):
    entries, num_bytes, message = LIES[lie]
    with pytest.raises(ValueError, match=f"model.safetensors.*({message})"):
        read_safetensors(write(tmp_path / "model.safetensors", entries, num_bytes))


def test_a_name_may_stand_there_once(tmp_path):
    with pytest.raises(ValueError, match="model.safetensors.*'a' stands there twice"):
        read_safetensors(write(tmp_path / "model.safetensors", [{}, {}], 16, names=("a", "a")))


def test_a_deep_header_is_refused(tmp_path):
    text = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ValueError, match="model.safetensors.*nested more than"):
        read_safetensors(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["norm.weight", "layers.0.self_attn.q_proj.weight"])
def test_weights_must_be_floating(tmp_path, name):
    config = draft_config()
    weights = {key: mx.array(weight) for key, weight in draft_weights(config).items()}
    folder = save_checkpoint(tmp_path, config, weights | {name: weights[name].astype(mx.int32)})
    with pytest.raises(ValueError, match=f"{name} holds mlx.core.int32; expected floating numbers"):
        mlx_dflash.load_draft(str(folder))


def test_packed_weights_must_be_what_they_are_packed_in(tmp_path):
    config = draft_config(quantization={"group_size": 32, "bits": 4})
    weights = {name: mx.array(weight) for name, weight in draft_weights(config).items()}
    packed, scales, biases = mx.quantize(weights["fc.weight"], group_size=32, bits=4)
    weights |= {"fc.weight": packed, "fc.scales": scales, "fc.biases": biases}
    mlx_dflash.load_draft(str(save_checkpoint(tmp_path / "right", config, weights)))
    changes = {
        "fc.weight": (packed.view(mx.int32), "uint32"),
        "fc.scales": (scales.astype(mx.uint16), "floating numbers"),
    }
    for name, (changed, expected) in changes.items():
        folder = save_checkpoint(tmp_path / name, config, weights | {name: changed})
        with pytest.raises(ValueError, match=f"{name} holds .*; expected .*{expected}"):
            mlx_dflash.load_draft(str(folder))
