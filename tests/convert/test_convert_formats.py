"""Conversions of every layout and family compute what their source computes, and say so."""

import json

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from support import gguf_files
from support.byte_tokenizer import byte_tokenizer
from support.draft_files import logits_of, logits_of_draft, speculators_config, write_gguf_draft
from support.drafts import draft2_config, draft_config, draft_weights
from support.folders import save_checkpoint, save_draft, save_target
from support.targets import target_config, tiny_target

from convert import convert_draft, convert_gguf
from convert.__main__ import main
from convert.draft import Changes, Quantization
from mlx_dflash import load_draft
from mlx_dflash.checkpoints.drafts import build_draft, read_draft
from mlx_dflash.checkpoints.packing import unpacked
from mlx_dflash.checkpoints.vocabulary import frequent_tokens

SLIDING = "sliding_attention"


def sources(folder):
    """Layout -> (source, its configuration in z-lab's layout)."""
    v1, v2 = draft_config(), draft2_config(layer_types=[SLIDING] * 2, sliding_window=8)
    reduced = {name: mx.array(w) for name, w in draft_weights(v1).items()}
    reduced |= {
        "lm_head.weight": mx.random.normal((4, 32)),
        "d2t": mx.array([0, 4, 9, 90]),
        "embed_tokens.weight": mx.random.normal((97, 32)),
    }
    return {
        "z-lab 1": (save_draft(folder / "a", v1, draft_weights(v1, mask_embedding=True), shards=2), v1),
        "z-lab 2": (save_draft(folder / "b", v2, draft_weights(v2)), v2),
        "bfloat16": (save_draft(folder / "c", v2, draft_weights(v2), dtype=mx.bfloat16), v2),
        "speculators": (save_checkpoint(folder / "d", speculators_config(v1, draft_vocab_size=4), reduced), v1),
        "gguf": (write_gguf_draft(folder / "e.gguf", v2, draft_weights(v2)), v2),
        "gguf Q8_0": (write_gguf_draft(folder / "f.gguf", v1, draft_weights(v1), gguf.GGMLQuantizationType.Q8_0), v1),
    }


@pytest.mark.parametrize("layout", ["z-lab 1", "z-lab 2", "bfloat16", "speculators", "gguf", "gguf Q8_0"])
def test_reloaded_equals_converted_equals_source(tmp_path, layout):
    source, config = sources(tmp_path)[layout]
    folder = convert_draft(source, tmp_path / "mlx")
    again = convert_draft(folder, tmp_path / "again")
    expected, path = logits_of(source, config=config)
    for converted in (folder, again):
        logits, proposal = logits_of(converted, config=config)
        assert np.array_equal(logits, expected) and proposal == path
    files = [
        {n: w for f in folder.glob("*.safetensors") for n, w in mx.load(str(f)).items()} for folder in (folder, again)
    ]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        assert tensor.dtype == files[1][name].dtype and mx.array_equal(tensor, files[1][name]).item(), name


@pytest.mark.parametrize(
    ("quantization", "bits", "worst"),
    [
        (Quantization(8, 32), 8, 0.02),
        (Quantization(4, 32), 4, 0.3),
        (Quantization(mode="mxfp4"), 4, 0.3),
        (Quantization(mode="mxfp8"), 8, 0.1),
        (Quantization(mode="nvfp4"), 4, 0.3),
        (Quantization(group_size=32, recipe="mixed_4_6"), 4, 0.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [draft_config, draft2_config], ids=["v1", "v2"])
def test_every_mode_of_quantization_loads_and_stays_close(tmp_path, make, quantization, bits, worst):
    config = make()
    source = save_draft(tmp_path / "hf", config, draft_weights(config, scale=0.1))
    folder = convert_draft(source, tmp_path / "mlx", Changes(quantization=quantization))
    entry = json.loads((folder / "config.json").read_text())["quantization"]
    assert entry["bits"] == bits and entry["mode"] == quantization.mode
    assert any(isinstance(value, dict) for value in entry.values()) == (quantization.recipe is not None)
    (logits, _), (expected, _) = logits_of(folder, config=config), logits_of(source, config=config)
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert 0 < error < worst, f"relative error {error}"
    packed, plain = build_draft(*read_draft(folder), folder), unpacked(build_draft(*read_draft(folder), folder))
    packed.fuse_context_projection()
    packed_logits, plain_logits = (logits_of_draft(draft, config=config)[0] for draft in (packed, plain))
    error = np.abs(packed_logits - plain_logits).max() / np.abs(plain_logits).max()
    assert error <= 1e-4, f"the packed draft is off by {error}"  # float32 sums in another order
    back = convert_draft(folder, tmp_path / "back", Changes(dequantizes=True))
    restored, _ = logits_of(back, config=config)
    assert np.abs(restored - logits).max() <= 1e-4 * np.abs(logits).max()
    with pytest.raises(ValueError, match="quantized already"):
        convert_draft(folder, tmp_path / "twice", Changes(quantization=quantization))
    assert not (tmp_path / "twice").exists()


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="a GPU multiplies packed weights")
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_on_the_cpu_a_quantized_draft_is_unpacked(tmp_path, mode):
    source = save_draft(tmp_path / "hf", draft_config(), draft_weights(draft_config()))
    quantization = Quantization(8, 32) if mode == "affine" else Quantization(mode=mode)
    folder = convert_draft(source, tmp_path / "mlx", Changes("bfloat16", quantization))
    assert {v.dtype for _, v in tree_flatten(load_draft(str(folder)).parameters())} == {mx.float32}
    assert {v.dtype for _, v in tree_flatten(load_draft(str(folder), dtype=mx.float16).parameters())} == {mx.float16}


@pytest.mark.parametrize("has_own_head", [False, True])
def test_reduced_head_keeps_the_logits_of_its_tokens(tmp_path, has_own_head):
    config, ids = draft_config(has_lm_head=has_own_head), [1, 5, 6, 40, 96]
    extra = {"lm_head.weight": np.random.RandomState(4).standard_normal((97, 32))} if has_own_head else {}
    source = save_draft(tmp_path / "hf", config, draft_weights(config) | extra)
    folder = convert_draft(source, tmp_path / "mlx", Changes(token_ids=ids))
    (logits, proposal), (whole, _) = logits_of(folder), logits_of(source)
    assert logits.shape[1] == 5 and np.abs(logits - whole[:, ids]).max() <= 1e-5
    assert set(proposal) <= set(ids)
    assert load_draft(str(folder)).token_ids.tolist() == ids


def test_frequent_tokens_are_special_ones_then_the_texts_then_the_first():
    tokenizer = byte_tokenizer(bos=True)
    assert frequent_tokens(tokenizer, 6, 258, "zzzz yyy xx") == [32, 120, 121, 122, 256, 257]
    assert frequent_tokens(tokenizer, 5, 258) == [0, 1, 2, 256, 257]
    for size in (0, 2, 258, 300):
        with pytest.raises(ValueError, match="3 to 257 tokens"):
            frequent_tokens(tokenizer, size, 258)


def test_command_line_checks_reduces_and_writes_a_card(tmp_path, capsys):
    config = draft_config(vocab_size=258)
    source = save_draft(tmp_path / "hf", config, draft_weights(config))
    target = tiny_target(vocab_size=258)
    save_target(tmp_path / "target", target, target_config(vocab_size=258), byte_tokenizer())
    (tmp_path / "text").write_text("zzzz yyy xx")
    flags = [
        "--draft-vocab",
        "6",
        "--draft-vocab-text",
        str(tmp_path / "text"),
        "--target",
        str(tmp_path / "target"),
        "--check",
    ]
    main(["--hf-path", str(source), "--mlx-path", str(tmp_path / "mlx"), *flags])
    assert "bit for bit" in capsys.readouterr().out
    assert load_draft(str(tmp_path / "mlx")).token_ids.tolist() == [32, 120, 121, 122, 256, 257]
    card = (tmp_path / "mlx" / "README.md").read_text()
    assert str(source) in card and "6 tokens" in card and "DFlash 1 draft" in card
    main(
        [
            "--hf-path",
            str(source),
            "--mlx-path",
            str(tmp_path / "q"),
            "-q",
            "--q-bits",
            "8",
            "--q-group-size",
            "32",
            "--check",
        ]
    )
    assert "same best entry in" in capsys.readouterr().out


def test_target_is_converted_by_mlx_lm_and_checked(tmp_path, capsys):
    target = tiny_target(vocab_size=258)
    source = save_target(tmp_path / "hf", target, target_config(vocab_size=258), byte_tokenizer())
    main(["--hf-path", str(source), "--mlx-path", str(tmp_path / "mlx"), "--check"])
    assert "bit for bit" in capsys.readouterr().out
    main(
        [
            "--hf-path",
            str(source),
            "--mlx-path",
            str(tmp_path / "q"),
            "-q",
            "--q-group-size",
            "32",
            "--quant-predicate",
            "mixed_4_6",
            "--check",
        ]
    )
    assert "same best entry" in capsys.readouterr().out
    assert "quantization" in json.loads((tmp_path / "q" / "config.json").read_text())


@pytest.mark.parametrize(
    ("config", "message"), [(None, "no config.json"), ('{"model_type": "qwen3"}', "No safetensors found")]
)
def test_command_line_names_what_mlx_lm_cannot_convert(tmp_path, capsys, config, message):
    (tmp_path / "hf").mkdir()
    if config:
        (tmp_path / "hf" / "config.json").write_text(config)
    with pytest.raises(SystemExit) as stop:
        main(["--hf-path", str(tmp_path / "hf"), "--mlx-path", str(tmp_path / "mlx")])
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


FAMILIES = {
    "llama": dict(model_type="llama"),
    "qwen2": dict(model_type="qwen2"),
    "qwen3": dict(model_type="qwen3"),
    "gemma3": dict(
        model_type="gemma3_text",
        query_pre_attn_scalar=16,
        sliding_window=8,
        rope_local_base_freq=10000.0,
        tie_word_embeddings=True,
    ),
    "phi3": dict(model_type="phi3"),
}
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def family_target(name):
    size = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6 if name == "gemma3" else 2,
        head_dim=16,
        vocab_size=len(gguf_files.TOKENS),
    )
    return tiny_target("qwen3", **{**size, **FAMILIES[name]})


def write_family(path, name, model, kind):
    """Write a model of mlx-lm's as llama.cpp's converter writes one of this family."""
    tensors = {}
    for full, value in tree_flatten(model.parameters()):
        value = np.array(value)
        stem, _, part = full.rpartition(".")
        if stem in TOP:
            new = TOP[stem]
        else:
            layer, _, rest = stem.removeprefix("model.layers.").partition(".")
            new = f"blk.{layer}.{(GEMMA_NAMES if name == 'gemma3' else {}).get(rest) or GGUF_NAMES[rest]}"
            if name == "llama" and rest in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = 4 if "q_proj" in rest else 2
                value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if name == "gemma3" and "norm" in stem:
            value = value + 1
        is_matrix = value.ndim == 2 and value.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        stored = kind if is_matrix else gguf.GGMLQuantizationType.F32
        tensors[f"{new}.{part}"] = (gguf.quants.quantize(value, stored), stored)
    more = {"sliding_window": 8, "block_count": 6} if name == "gemma3" else {}
    return gguf_files.write_gguf(
        path, tensors, architecture=name, key_length=16, layer_norm_rms_eps=1e-6, rope_freq_base=10000.0, **more
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_family_computes_what_its_source_does(tmp_path, family):
    model = family_target(family)
    file = write_family(tmp_path / "m.gguf", family, model, gguf.GGMLQuantizationType.F32)
    converted, config = load_model(convert_gguf(file, tmp_path / "mlx"))
    assert config["model_type"] == FAMILIES[family]["model_type"]
    tokens = mx.array([[1, 5, 9, 30, 31, 2, 7, 8, 40, 41, 42, 3]])
    difference = mx.abs(converted(tokens) - model(tokens)).max().item()
    assert difference <= 1e-5, f"logits differ by {difference}"


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_check_agrees_with_the_gguf_package(tmp_path, family, capsys):
    file = write_family(tmp_path / "m.gguf", family, family_target(family), gguf.GGMLQuantizationType.Q8_0)
    main(["--hf-path", str(file), "--mlx-path", str(tmp_path / "mlx"), "--check"])
    out = capsys.readouterr().out
    assert "check:" in out and ("bit for bit" in out or float(out.split("relative ")[1].split()[0]) < 2e-3), out


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q8_0"])
def test_types_that_need_the_gguf_package(tmp_path, kind, monkeypatch):
    kind = gguf.GGMLQuantizationType[kind]
    model = family_target("qwen3")
    file = write_family(tmp_path / "m.gguf", "qwen3", model, kind)
    converted, _ = load_model(convert_gguf(file, tmp_path / "mlx", dtype="float32"))
    for name, weight in tree_flatten(model.parameters()):
        if kind.name == "Q8_0" or weight.ndim < 2:
            continue
        read = gguf.quants.dequantize(gguf.quants.quantize(np.array(weight), kind), kind)
        ours = dict(tree_flatten(converted.parameters()))[name]
        assert np.abs(np.array(ours) - read).max() <= 1e-3 * np.abs(read).max(), name
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    if kind.name == "Q8_0":
        convert_gguf(file, tmp_path / "other")
    else:
        with pytest.raises(ValueError, match="pip install gguf"):
            convert_gguf(file, tmp_path / "other")
