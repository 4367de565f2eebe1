"""The doctor says that a pair fits if it does, names every mismatch as a fault, and its exit status says which."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest
from support.byte_tokenizer import byte_tokenizer
from support.draft_files import speculators_config, write_gguf_draft
from support.drafts import draft2_config, draft_config, draft_weights
from support.folders import save_draft, save_target
from support.targets import target_config, tiny_target

from convert import convert_draft
from convert.draft import Changes, Quantization
from mlx_dflash import doctor
from mlx_dflash.pair import load_pair


def save_pair(folder, config=None, target=None):
    config = config or draft_config()
    changes = target or {}
    save_draft(
        folder / "draft", config, draft_weights(draft_config() if "transformer_layer_config" in config else config)
    )
    save_target(folder / "target", tiny_target(**changes), target_config(**changes), byte_tokenizer())
    return ["--model", str(folder / "target"), "--draft-model", str(folder / "draft")]


def run(capsys, flags):
    try:
        doctor.main(flags)
        code = 0
    except SystemExit as stop:
        code = stop.code
    return code, capsys.readouterr().out


def test_a_pair_that_fits_is_said_to_fit_with_its_facts(tmp_path, capsys):
    flags = save_pair(tmp_path)
    status, text = run(capsys, flags)
    assert status == 0 and "target and draft fit" in text and "[ !! ]" not in text
    assert "DFlash 1, 2 layers (2 full), block 6 = 5 drafts" in text and "taps layers 0, 2" in text
    status, text = run(capsys, [*flags, "--json"])
    content = json.loads(text)
    assert status == 0 and content["ok"] and content["facts"]["draft"]["num_drafts"] == 5
    assert content["facts"]["machine"]["versions"]["mlx"] == mx.__version__
    assert content["facts"]["memory"]["needed_bytes"] > 0


def on_machine(monkeypatch, **changes):
    """Let the doctor find this machine with other properties."""
    here = doctor.this_machine()
    monkeypatch.setattr(doctor, "this_machine", lambda: replace(here, **changes))


@pytest.mark.parametrize("blas", ["libblis.so.4", None])
def test_the_blas_is_named_or_its_absence_noted(tmp_path, capsys, monkeypatch, blas):
    on_machine(monkeypatch, system="Linux", device="cpu", blas=blas)
    status, text = run(capsys, save_pair(tmp_path))
    assert status == 0 and ("apt-get install libblis4-openmp" in text) is (blas is None)
    assert ("matrix products on the CPU run in libblis.so.4" in text) is (blas is not None)


def test_a_mac_needs_no_other_blas(tmp_path, capsys, monkeypatch):
    on_machine(monkeypatch, system="Darwin", device="gpu", has_metal=True, chip="Apple M9", blas=None)
    text = run(capsys, save_pair(tmp_path))[1]
    assert "GPU: Apple M9" in text and "BLAS" not in text


def test_the_doctor_reads_no_weights(tmp_path, capsys):
    """Damage after the headers goes unnoticed, so a report on large files is quick."""
    flags = save_pair(tmp_path)
    file = tmp_path / "target" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-400:] = bytes([255]) * 400
    file.write_bytes(content)
    assert run(capsys, flags)[0] == 0


def test_the_numbering_of_tap_layers_is_told(tmp_path, capsys):
    status, text = run(capsys, save_pair(tmp_path, speculators_config(draft_config())))
    assert status == 0 and "taps layers 0, 2 of its target (aux_hidden_state_layer_ids, less one each)" in text


@pytest.mark.parametrize(
    ("config", "target", "message"),
    [
        (draft_config(), dict(num_hidden_layers=5), "a target of 4 layers, this target has 5"),
        (draft_config(num_target_layers=None), dict(num_hidden_layers=2), "taps layers [0, 2], but the target has 2"),
        (draft_config(), dict(hidden_size=64), "the draft's hidden size is 32, the target's embedding has width 64"),
        (draft_config(target_hidden_size=48), {}, "hidden states of width 48, the target's layers give 32"),
        (draft_config(vocab_size=98), {}, "a vocabulary of 98 tokens, the target one of 97"),
    ],
)
def test_the_doctor_says_of_a_pair_that_does_not_fit_what_loading_it_says(tmp_path, capsys, config, target, message):
    flags = save_pair(tmp_path, config, target)
    status, text = run(capsys, flags)
    assert status == 1 and message in text and "[ !! ]" in text
    assert json.loads(run(capsys, [*flags, "--json"])[1])["ok"] is False
    with pytest.raises(ValueError) as error:
        load_pair(flags[1], flags[3])
    assert str(error.value) in text


def test_a_draft_that_lacks_a_key_is_a_fault(tmp_path, capsys):
    status, text = run(capsys, save_pair(tmp_path, draft2_config(dict(mask_token_id=None))))
    assert status == 1 and "mask_token_id" in text and "[ !! ]" in text


def test_swapped_roles_are_named(tmp_path, capsys):
    flags = save_pair(tmp_path)
    status, text = run(capsys, ["--model", flags[3], "--draft-model", flags[1]])
    assert status == 1 and "this is a DFlash draft" in text and "not a DFlash draft" in text


def test_an_absent_folder_is_a_fault(tmp_path, capsys):
    status, text = run(capsys, ["--model", str(tmp_path / "absent")])
    assert status == 1 and "no folder" in text


def test_a_model_that_mlx_lm_does_not_know_is_a_fault(tmp_path, capsys):
    flags = save_pair(tmp_path)
    (tmp_path / "target" / "config.json").write_text('{"model_type": "nonesuch"}')
    status, text = run(capsys, flags)
    assert status == 1 and "nonesuch" in text


def test_a_target_can_be_examined_without_a_draft(tmp_path, capsys):
    status, text = run(capsys, [*save_pair(tmp_path)[:2], "--draft-model", "none"])
    assert status == 0 and "draft" not in text


def test_a_target_without_a_known_draft_is_a_fault_with_its_cure(tmp_path, capsys):
    save_pair(tmp_path)
    status, text = run(capsys, ["--model", str(tmp_path / "target")])
    assert status == 1 and "no public DFlash draft is known" in text and "--draft-model none" in text


def test_a_variant_of_a_known_target_names_the_drafts_that_may_fit(tmp_path, capsys):
    save_pair(tmp_path)
    (tmp_path / "target").rename(tmp_path / "Qwen3-8B-abliterated")
    status, text = run(capsys, ["--model", str(tmp_path / "Qwen3-8B-abliterated")])
    assert status == 1 and "z-lab/Qwen3-8B-DFlash-b16" in text


def test_a_gguf_file_is_a_draft_as_it_is(tmp_path, capsys):
    config = draft2_config()
    file = write_gguf_draft(tmp_path / "d.gguf", config, draft_weights(config))
    status, text = run(capsys, ["--draft-model", str(file)])
    assert status == 0 and "DFlash 2" in text


def test_a_gguf_file_must_be_converted_to_be_a_target(tmp_path, capsys):
    (tmp_path / "t.gguf").write_bytes(b"GGUF")
    status, text = run(capsys, ["--model", str(tmp_path / "t.gguf")])
    assert status == 1 and "convert it first" in text


def test_weights_that_do_not_fit_the_memory_are_a_fault(tmp_path, capsys, monkeypatch):
    flags = save_pair(tmp_path)
    on_machine(monkeypatch, memory_bytes=1000)
    status, text = run(capsys, flags)
    assert status == 1 and "fewer bits" in text


@pytest.mark.parametrize("device, share", [(mx.cpu, 4), (mx.gpu, 1)], ids=["CPU", "GPU"])
def test_a_quantized_draft_needs_room_for_what_it_is_unpacked_to(tmp_path, monkeypatch, device, share):
    source = save_draft(tmp_path / "draft", draft_config(), draft_weights(draft_config()))
    folder = convert_draft(source, tmp_path / "mlx", Changes(quantization=Quantization(8, 32)))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    report = doctor.examine(None, str(folder))
    assert report.facts["memory"]["needed_bytes"] == share * size
