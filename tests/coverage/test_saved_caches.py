"""Prompt-cache files: damaged, foreign or impossible ones are refused in one line that names the file."""

import json
import random

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from support.runs import PROMPT, draft_run, make_draft
from support.targets import tiny_target

import mlx_dflash

CASES = 150


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A pair, and the file of a cache that both filled."""
    model, draft = tiny_target(), make_draft()
    cache = mlx_dflash.make_prompt_cache(model, draft)
    draft_run(model, draft, PROMPT, max_tokens=5, prompt_cache=cache)
    file = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    mlx_dflash.save_prompt_cache(str(file), cache, {"model": "tiny"})
    return model, draft, file


def change_metadata(file, change):
    """Write the file anew with other metadata. change: works on [user's metadata, kinds, scalars], in place."""
    arrays, flat = mx.load(str(file), return_metadata=True)
    parts = tree_unflatten(list(flat.items()))
    change(parts)
    mx.save_safetensors(str(file), arrays, dict(tree_flatten(parts)))


@pytest.mark.parametrize("kind", ["create_causal_mask", "KVCache.from_state", "List", "NoSuchCache", "_BaseCacheX"])
def test_a_file_cannot_name_what_is_to_be_called(saved, tmp_path, kind):
    file = tmp_path / "foreign.safetensors"
    file.write_bytes(saved[2].read_bytes())
    change_metadata(file, lambda parts: parts[1].__setitem__(0, kind))
    with pytest.raises(ValueError, match=f"foreign.safetensors is no saved prompt cache: it names '{kind}'"):
        mlx_dflash.load_prompt_cache(str(file))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file .*none.safetensors"):
        mlx_dflash.load_prompt_cache(str(tmp_path / "none.safetensors"))


def test_a_kind_that_could_not_be_loaded_is_refused_before_anything_is_written(tmp_path):
    class Unknown:
        state = (mx.zeros(3),)

    with pytest.raises(ValueError, match="a Unknown cannot be saved"):
        mlx_dflash.save_prompt_cache(str(tmp_path / "c.safetensors"), [Unknown()])
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_and_the_old_file_stays(saved, tmp_path, monkeypatch):
    def full(name, arrays, metadata):
        with open(name, "wb") as part:
            part.write(b"half of it")
        raise RuntimeError("[write] Unable to write 9000 bytes")

    file = tmp_path / "c.safetensors"
    file.write_bytes(b"the old file")
    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(OSError, match="c.safetensors cannot be written, is the disk full"):
        mlx_dflash.save_prompt_cache(str(file), mlx_dflash.make_prompt_cache(saved[0]))
    assert file.read_bytes() == b"the old file" and [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_the_name_gets_mlx_lms_suffix(saved, tmp_path):
    mlx_dflash.save_prompt_cache(str(tmp_path / "talk"), mlx_dflash.make_prompt_cache(saved[0]))
    assert [p.name for p in tmp_path.iterdir()] == ["talk.safetensors"]


def test_rows_that_overlap_are_refused(saved, tmp_path):
    """The file of a draft's or another tool's making may lay two tensors over each other; MLX reads both."""
    data = saved[2].read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    first, second = [name for name in header if header[name].get("shape") == [1, 2, 10, 8]][:2]
    header[first]["data_offsets"] = header[second]["data_offsets"]
    text = json.dumps(header).encode()
    file = tmp_path / "overlapping.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ValueError, match="overlapping.safetensors"):
        mlx_dflash.load_prompt_cache(str(file))


def damage(data, rng):
    """Data with one of: flipped bits anywhere, letters of the header replaced, an end cut off, another header size."""
    data, header = bytearray(data), int.from_bytes(data[:8], "little")
    kind = rng.choice(["bits", "letters", "end", "size"])
    if kind == "bits":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "letters":
        for _ in range(rng.randrange(1, 4)):
            data[8 + rng.randrange(header)] = rng.randrange(32, 127)
    elif kind == "end":
        del data[rng.randrange(len(data)) :]
    else:
        data[:8] = rng.randrange(2 ** rng.randrange(1, 63)).to_bytes(8, "little")
    return bytes(data)


@pytest.mark.parametrize("seed", range(CASES))
def test_a_damaged_file_works_or_is_refused_in_one_line(saved, tmp_path, seed):
    model, draft, file = saved
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(damage(file.read_bytes(), random.Random(seed)))
    try:
        cache = mlx_dflash.load_prompt_cache(str(damaged))
    except ValueError as error:
        assert "damaged.safetensors" in str(error) and "\n" not in str(error)
        return
    try:
        draft_run(model, draft, [3], max_tokens=2, prompt_cache=cache)
    except ValueError as error:
        assert "\n" not in str(error)
