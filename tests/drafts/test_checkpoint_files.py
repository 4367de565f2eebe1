"""Damaged and hostile files: every one gives a clear error before anything is computed, and none is ever executed."""

import os
import struct
import types
import zipfile

import mlx.core as mx
import numpy as np
import pytest
from support.drafts import draft_config, draft_inputs, draft_weights
from support.folders import save_checkpoint, save_draft
from support.reference import reference_draft_logits
from support.torch_files import TorchTensor, save_torch

import mlx_dflash
from mlx_dflash.dice import Dice
from mlx_dflash.drafter import Drafter
from mlx_dflash.files.safetensors import read_mask_embedding, read_safetensors, read_tensors
from mlx_dflash.files.torch_pickle import read_torch_file

VECTOR = np.arange(32, dtype=np.float32) / 8
MASKS = {
    "bare": TorchTensor(VECTOR),
    "row": TorchTensor(VECTOR[None]),
    "half": TorchTensor(VECTOR.astype(np.float16)),
    "bfloat16": TorchTensor((VECTOR.view(np.uint32) >> 16).astype(np.uint16)),
    "dict": {"mask_token_id": 96, "embedding": TorchTensor(VECTOR)},
    "dict with a tensor": {"mask_token_id": TorchTensor(np.array(96)), "embedding": TorchTensor(VECTOR)},
    "other dict": {"mask_embedding": TorchTensor(VECTOR)},
}


@pytest.mark.parametrize("form", MASKS)
def test_mask_embedding_replaces_the_mask_row(tmp_path, form, monkeypatch):
    config = draft_config(dict(mask_token_id=None) if "dict" in form and form != "other dict" else {})
    weights = draft_weights(config)
    features, embed, head = draft_inputs(config, 9)
    folder = save_draft(tmp_path, config, weights)
    save_torch(folder / "mask_embedding.pt", MASKS[form], monkeypatch)
    draft = mlx_dflash.load_draft(str(folder))
    drafter = Drafter(draft, lambda ids: mx.array(embed)[ids], lambda h: h @ mx.array(head).T, Dice())
    drafter.extend_context(mx.array(features[None]))
    expected = reference_draft_logits(config, weights | {"mask_embedding": VECTOR}, features, 7, embed, head)
    assert np.abs(np.array(drafter.draft_logits(7)) - expected).max() <= 1e-5
    assert draft.config.mask_token_id == 96


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


HOSTILE = {
    "a call": (lambda p: Hostile(p), "mkdir"),
    "a call beside a tensor": (lambda p: {"embedding": TorchTensor(VECTOR), "x": Hostile(p)}, "mkdir"),
    "a class": (lambda p: {"x": zipfile.ZipFile}, "ZipFile"),
    "an instance": (lambda p: types.SimpleNamespace(a=1), "SimpleNamespace"),
    "eval": (lambda p: {"x": eval}, "eval"),
    "bytes": (lambda p: b"abc", "refused"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_pickles_are_refused_and_not_run(tmp_path, what, monkeypatch):
    make, message = HOSTILE[what]
    file = save_torch(tmp_path / "mask_embedding.pt", make(tmp_path / "proof"), monkeypatch)
    with pytest.raises(ValueError, match=message):
        read_torch_file(file)
    assert not (tmp_path / "proof").exists()


CRAFTED = {
    "an extension": (b"\x80\x02\x82\x01.", "opcode EXT1"),
    "bytes": (b"\x80\x04C\x01a.", "opcode SHORT_BINBYTES"),
    "a name made on the stack": (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", "posix.system"),
    "a storage that is called": (b"\x80\x02ctorch\nFloatStorage\n)R.", "damaged"),
    "a dict of something": (b"\x80\x02ccollections\nOrderedDict\n]\x85R.", "damaged"),
    "a memo of 4 G entries": (b"\x80\x02Nr\xff\xff\xff\xff.", "4294967295"),
    "no end": (b"\x80\x02N", "mask_embedding.pt"),
    "nothing on the stack": (b"\x80\x02.", "damaged"),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_crafted_pickles_are_refused(tmp_path, what):
    pickled, message = CRAFTED[what]
    file = tmp_path / "mask_embedding.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    with pytest.raises(ValueError, match=message):
        read_torch_file(file)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"other": 1},
        5,
        TorchTensor(np.ones((2, 32), np.float32)),
        {"embedding": [1.0]},
        {"mask_token_id": "x", "embedding": TorchTensor(VECTOR)},
    ],
)
def test_mask_file_without_one_vector_is_refused(tmp_path, content, monkeypatch):
    save_torch(tmp_path / "mask_embedding.pt", content, monkeypatch)
    with pytest.raises(ValueError, match="mask_embedding.pt"):
        read_mask_embedding(tmp_path)


def test_damaged_mask_files_are_refused(tmp_path, monkeypatch):
    whole = save_torch(tmp_path / "whole.pt", TorchTensor(VECTOR), monkeypatch).read_bytes()
    file = tmp_path / "mask_embedding.pt"
    for damaged in (b"", b"\x80\x02}q\x00.", whole[: len(whole) // 2]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="mask_embedding.pt"):
            read_torch_file(file)
    with (
        zipfile.ZipFile(whole_zip := tmp_path / "short.pt", "w") as archive,
        zipfile.ZipFile(tmp_path / "whole.pt") as source,
    ):
        archive.writestr("archive/data.pkl", source.read("archive/data.pkl"))
        archive.writestr("archive/data/0", b"\0" * 16)
    with pytest.raises(ValueError, match="16 bytes; expected 128"):
        read_torch_file(whole_zip)


def header(text: bytes, length=None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


ENTRY = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
BROKEN_SAFETENSORS = {
    "empty": b"",
    "short": b"\x01\x02",
    "a web page": b"<!DOCTYPE html><html>not here</html>",
    "a 2 GB header": header(ENTRY + bytes(8), 2 << 30),
    "a header of 2^63": header(ENTRY, 1 << 63),
    "header is no JSON": header(b"{" * 40),
    "header is a list": header(b"[1, 2, 3]"),
    "no offsets": header(b'{"a":{"dtype":"F32","shape":[2]}}'),
    "data cut off": header(ENTRY) + bytes(5),
    "data too long": header(ENTRY) + bytes(80),
    "unknown type": header(ENTRY.replace(b"F32", b"F99")) + bytes(8),
}


@pytest.mark.parametrize("how", BROKEN_SAFETENSORS)
def test_broken_safetensors_are_named(tmp_path, how):
    file = tmp_path / "model.safetensors"
    file.write_bytes(BROKEN_SAFETENSORS[how])
    with pytest.raises(ValueError, match="model.safetensors"):
        read_safetensors(file)


@pytest.fixture
def sharded(tmp_path):
    """A draft in three shards with an index, and a file that the index does not name."""
    folder = save_draft(tmp_path, draft_config(), draft_weights(draft_config()), shards=3)
    (folder / "model.safetensors").write_bytes(b"stale")
    return folder


def test_a_file_that_the_index_does_not_name_is_not_read(sharded):
    assert read_tensors(sharded).keys() == draft_weights(draft_config()).keys()


def test_without_an_index_one_set_of_shards_is_read_and_a_mixture_refused(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="cannot tell which"):
        read_tensors(sharded)
    (sharded / "model.safetensors").unlink()
    assert read_tensors(sharded).keys() == draft_weights(draft_config()).keys()


def test_missing_shards_are_counted(sharded):
    for name in ("model.safetensors", "model.safetensors.index.json", "model-00002-of-00003.safetensors"):
        (sharded / name).unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks shards \[2\] of 3"):
        read_tensors(sharded)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{}", "weight_map"),
        ("[]", "JSON object"),
        ("{", "valid JSON"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "same folder"),
        ('{"weight_map": {"a": 5}}', "same folder"),
        ('{"weight_map": {"a": "model.safetensors"}}', "promises tensors that its files do not hold: a"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "lacks absent.safetensors"),
    ],
)
def test_a_broken_index_is_named(tmp_path, index, message):
    folder = save_draft(tmp_path, draft_config(), draft_weights(draft_config()))
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_tensors(folder)


@pytest.mark.parametrize("loader", [mlx_dflash.load, mlx_dflash.load_draft], ids=["load", "load_draft"])
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("absent", FileNotFoundError, "no folder .*absent"),
        ("empty", FileNotFoundError, "empty has no config.json"),
        ("folder", FileNotFoundError, "folder has no config.json"),
        ("file.txt", ValueError, "file.txt is a file"),
    ],
)
def test_what_is_no_model_folder_is_named_without_asking_the_hub(tmp_path, loader, name, error, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("a path reached the hub"))
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    with pytest.raises(error, match=message):
        loader(str(tmp_path / name))


DAMAGED_DRAFTS = {
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[1]"), "config.json must hold a JSON object"),
    "cut weights": (lambda folder: os.truncate(folder / "model.safetensors", 5000), "has 5000 bytes, its header says"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "lacks safetensors files"),
}


@pytest.mark.parametrize("how", DAMAGED_DRAFTS)
def test_a_damaged_draft_is_named_with_its_folder(tmp_path, how):
    damage, message = DAMAGED_DRAFTS[how]
    damage(save_draft(tmp_path, draft_config(), draft_weights(draft_config())))
    with pytest.raises((ValueError, FileNotFoundError), match=f"{tmp_path}.*{message}"):
        mlx_dflash.load_draft(str(tmp_path))


def test_a_file_that_is_gguf_by_name_only_is_named(tmp_path):
    (tmp_path / "fake.gguf").write_bytes(b"GGML" + bytes(40))
    with pytest.raises(ValueError, match="fake.gguf is not a GGUF file"):
        mlx_dflash.load_draft(str(tmp_path / "fake.gguf"))


LEFT_OUT = None  # In the place of a tensor.


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        ({"fc.weight": LEFT_OUT}, {}, "lacks 1 tensors of a DFlash draft, among them fc.weight"),
        ({"fc.weight": np.ones((32, 96))}, {}, r"fc.weight has shape \(32, 96\).*\(32, 64\)"),
        ({"d2t": np.zeros(4, np.int64)}, {"draft_vocab_size": 5}, "d2t has shape"),
        ({"d2t": np.array([0, -1, 0])}, {"draft_vocab_size": 3}, "different tokens"),
        ({"d2t": np.array([0, 0, 96])}, {"draft_vocab_size": 3}, "different tokens"),
        ({"d2t": np.zeros(3, np.float32)}, {"draft_vocab_size": 3}, "whole numbers"),
        ({}, {"draft_vocab_size": 3}, "no d2t"),
    ],
)
def test_tensors_that_do_not_fit_the_configuration_are_named(tmp_path, tensors, changes, message):
    weights = {name: mx.array(w) for name, w in (draft_weights(draft_config()) | tensors).items() if w is not LEFT_OUT}
    folder = save_checkpoint(tmp_path, draft_config(**changes), weights)
    with pytest.raises(ValueError, match=message):
        mlx_dflash.load_draft(str(folder))
