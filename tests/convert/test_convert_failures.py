"""A conversion that fails names the cause and leaves no folder, whatever is converted and however far it came."""

import numpy as np
import pytest
from support import gguf_files
from support.byte_tokenizer import byte_tokenizer
from support.drafts import draft_config, draft_weights
from support.folders import save_draft, save_target
from support.targets import target_config, tiny_target

from convert import convert_draft, convert_gguf, convert_target
from convert.__main__ import main
from convert.draft import Changes, Quantization


def draft(folder):
    return save_draft(folder / "source", draft_config(), draft_weights(draft_config()), shards=2)


def gguf(folder, **changes):
    tensors = gguf_files.random_tensors(gguf_files.Type.Q4_1)
    return gguf_files.write_gguf(folder / "source.gguf", tensors | changes)


def target(folder):
    return str(save_target(folder / "source", tiny_target(), target_config(), byte_tokenizer()))


KINDS = {"draft": (draft, convert_draft), "GGUF target": (gguf, convert_gguf), "target": (target, convert_target)}


@pytest.mark.parametrize("kind", KINDS)
def test_existing_folder_is_refused_and_kept(tmp_path, kind):
    make, convert = KINDS[kind]
    source = make(tmp_path)
    (tmp_path / "mlx").mkdir()
    with pytest.raises(ValueError, match="mlx exists already"):
        convert(source, tmp_path / "mlx")
    assert list((tmp_path / "mlx").iterdir()) == []


def draft_without_a_shard(folder, destination):
    source = draft(folder)
    (source / "model-00002-of-00002.safetensors").unlink()
    convert_draft(source, destination)


def draft_with_a_strange_tensor(folder, destination):
    weights = draft_weights(draft_config()) | {"markov_w1.weight": np.ones((4, 4), np.float32)}
    convert_draft(save_draft(folder / "source", draft_config(), weights), destination)


def draft_in_bits_that_mlx_lacks(folder, destination):
    convert_draft(draft(folder), destination, Changes(None, Quantization(7, 32)))


def gguf_beyond_float16(folder, destination):
    norm = np.full(gguf_files.HIDDEN, 1e5, np.float32), gguf_files.Type.F32
    convert_gguf(gguf(folder, **{"output_norm.weight": norm}), destination, dtype="float16")


def gguf_of_a_wrong_shape(folder, destination):
    tensors = gguf_files.random_tensors(gguf_files.Type.Q4_1)
    convert_gguf(gguf(folder, **{"blk.0.attn_v.weight": tensors["blk.0.attn_q.weight"]}), destination)


def target_with_cut_weights(folder, destination):
    source = target(folder)
    file = folder / "source" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    convert_target(source, destination)


FAILURES = {
    draft_without_a_shard: "lacks model-00002-of-00002.safetensors",
    draft_with_a_strange_tensor: "tensor markov_w1.weight: DSpark",
    draft_in_bits_that_mlx_lacks: "bits",
    gguf_beyond_float16: "model.norm.weight has values beyond the range of float16",
    gguf_of_a_wrong_shape: "does not fill the model",
    target_with_cut_weights: "invalid data offsets",
}


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
def test_failure_is_named_and_leaves_no_folder(tmp_path, fail):
    with pytest.raises((ValueError, FileNotFoundError, RuntimeError), match=FAILURES[fail]):
        fail(tmp_path, tmp_path / "mlx")
    assert [path.stem for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ([], 1, "error: RuntimeError: [load_safetensors]"),
        (["--debug"], 1, "Traceback"),
        (["--target", "x"], 2, "error: --target does not apply to a target; leave it out"),
    ],
)
def test_the_command_ends_in_one_line_whatever_fails(tmp_path, capsys, flags, status, message):
    source = target(tmp_path)
    file = tmp_path / "source" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(SystemExit) as stop:
        main(["--hf-path", source, "--mlx-path", str(tmp_path / "mlx"), *flags])
    error = capsys.readouterr().err
    assert stop.value.code == status and error.startswith(message)
    assert error.count("\n") == 1 or "--debug" in flags, error
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
