"""Draft folders: every tensor arrives under its name, in the type that was asked for, or nothing does."""

import inspect
import json
from pathlib import Path

import huggingface_hub
import mlx.core as mx
import pytest

from convert import convert_draft
from convert.__main__ import main
from convert.draft import Changes, Quantization
from mlx_dflash import load_draft

HIDDEN, MLP, NUM_LAYERS, NUM_TAPS = 64, 128, 2, 3


def draft_weights() -> dict[str, mx.array]:
    """The tensors of a z-lab DFlash 1 draft with 4 heads of 16 and 2 KV heads."""
    mx.random.seed(3)
    shapes = {"fc.weight": (HIDDEN, NUM_TAPS * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for i in range(NUM_LAYERS):
        layer = {
            "self_attn.q_proj": (64, HIDDEN),
            "self_attn.k_proj": (32, HIDDEN),
            "self_attn.v_proj": (32, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 64),
            "self_attn.q_norm": (16,),
            "self_attn.k_norm": (16,),
            "mlp.gate_proj": (MLP, HIDDEN),
            "mlp.up_proj": (MLP, HIDDEN),
            "mlp.down_proj": (HIDDEN, MLP),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return {name: mx.random.normal(shape).astype(mx.bfloat16) for name, shape in shapes.items()}


def draft_config() -> dict:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 3, 5]},
    }


def write_folder(folder: Path, shards: list[dict[str, mx.array]], config: dict | None = None) -> Path:
    """Write a Hugging Face folder: one file, or several and an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(draft_config() if config is None else config))
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    names = ["model.safetensors"] if len(shards) == 1 else names
    for name, shard in zip(names, shards):
        mx.save_safetensors(str(folder / name), shard)
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def read(folder: Path) -> dict[str, mx.array]:
    """Everything the files hold, after checking it against the index."""
    held = {name: (file.name, w) for file in folder.glob("*.safetensors") for name, w in mx.load(str(file)).items()}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for name, (file, _) in held.items()}
    assert index["metadata"]["total_size"] == sum(w.nbytes for _, w in held.values())
    return {name: w for name, (_, w) in held.items()}


def halves(weights: dict[str, mx.array]) -> list[dict[str, mx.array]]:
    names = sorted(weights)
    return [{n: weights[n] for n in names[::2]}, {n: weights[n] for n in names[1::2]}]


def test_every_tensor_arrives_unchanged(tmp_path):
    weights = draft_weights()
    convert_draft(write_folder(tmp_path / "hf", [weights]), tmp_path / "mlx")
    converted = read(tmp_path / "mlx")
    assert converted.keys() == weights.keys()
    for name, weight in weights.items():
        assert converted[name].dtype == weight.dtype and mx.array_equal(converted[name], weight).item(), name
    config = draft_config()
    config["dtype"] = config.pop("torch_dtype")
    assert json.loads((tmp_path / "mlx" / "config.json").read_text()) == config


def test_shards_are_joined(tmp_path):
    weights = draft_weights()
    convert_draft(write_folder(tmp_path / "hf", halves(weights)), tmp_path / "mlx")
    converted = read(tmp_path / "mlx")
    assert converted.keys() == weights.keys()
    assert all(mx.array_equal(converted[name], weights[name]).item() for name in weights)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtype_is_that_of_every_tensor_and_of_the_config(tmp_path, dtype):
    weights = draft_weights()
    convert_draft(write_folder(tmp_path / "hf", [weights]), tmp_path / "mlx", Changes(dtype))
    for name, converted in read(tmp_path / "mlx").items():
        assert mx.array_equal(converted, weights[name].astype(getattr(mx, dtype))).item(), name
        assert converted.dtype == getattr(mx, dtype), name
    config = json.loads((tmp_path / "mlx" / "config.json").read_text())
    assert config["dtype"] == dtype and "torch_dtype" not in config


def test_a_wrong_dtype_in_the_config_is_put_right(tmp_path):
    source = write_folder(tmp_path / "hf", [draft_weights()])
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    convert_draft(source, tmp_path / "mlx")
    converted = json.loads((tmp_path / "mlx" / "config.json").read_text())
    assert converted["dtype"] == "bfloat16" and "torch_dtype" not in converted


@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (8, 32), (4, 64), (4, 32)])
def test_matrices_are_quantized_and_norms_stay(tmp_path, bits, group_size):
    weights = draft_weights()
    source = write_folder(tmp_path / "hf", [weights])
    convert_draft(source, tmp_path / "mlx", Changes("float16", Quantization(bits, group_size)))
    converted = read(tmp_path / "mlx")
    matrices = {name.removesuffix(".weight") for name, weight in weights.items() if weight.ndim == 2}
    extra = {f"{name}.{part}" for name in matrices for part in ("scales", "biases")}
    assert converted.keys() == weights.keys() | extra
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module not in matrices:
            assert mx.array_equal(converted[name], weight.astype(mx.float16)).item(), name
            continue
        rows, columns = weight.shape
        scales, biases = (converted[f"{module}.{part}"] for part in ("scales", "biases"))
        assert converted[name].shape == (rows, columns * bits // 32) and scales.shape == (rows, columns // group_size)
        assert scales.dtype == biases.dtype == mx.float16
        values = mx.dequantize(converted[name], scales.astype(mx.float32), biases.astype(mx.float32), group_size, bits)
        groups = weight.astype(mx.float32).reshape(rows, -1, group_size)
        # Half a step, and as much again for what mx.quantize and float16 round in scale and bias.
        bound = (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / (2**bits - 1)
        error = mx.abs(values.reshape(groups.shape) - groups)
        assert mx.all(error <= bound).item(), f"{name}: error {error.max().item():.4f}"
    quantization = json.loads((tmp_path / "mlx" / "config.json").read_text())["quantization"]
    assert quantization == {"bits": bits, "group_size": group_size, "mode": "affine"}


def test_quantized_folder_loads_as_a_draft(tmp_path):
    source = write_folder(tmp_path / "hf", [draft_weights()])
    convert_draft(source, tmp_path / "mlx", Changes("float32", Quantization(8, 32)))
    weights, converted = draft_weights(), read(tmp_path / "mlx")
    features = mx.random.normal((1, 4, NUM_TAPS * HIDDEN))
    fused = load_draft(str(tmp_path / "mlx")).fc(features)
    scales, biases = converted["fc.scales"], converted["fc.biases"]
    expected = features @ mx.dequantize(converted["fc.weight"], scales, biases, 32, 8).T
    assert mx.allclose(fused, expected, atol=1e-4).item()
    exact = features @ weights["fc.weight"].astype(mx.float32).T
    error = (mx.linalg.norm(fused - exact) / mx.linalg.norm(exact)).item()
    assert 0 < error < 0.01, f"relative error {error:.4f}"


def test_matrix_that_does_not_divide_into_groups_stays(tmp_path):
    source = write_folder(tmp_path / "hf", [draft_weights()])
    convert_draft(source, tmp_path / "mlx", Changes(None, Quantization(8, 128)))
    packed = {name.removesuffix(".scales") for name in read(tmp_path / "mlx") if name.endswith(".scales")}
    assert packed == {f"layers.{i}.mlp.down_proj" for i in range(NUM_LAYERS)}


def test_command_line_converts_and_quantizes_a_draft(tmp_path, capsys):
    source = write_folder(tmp_path / "hf", [draft_weights()])
    flags = ["--hf-path", str(source), "--mlx-path", str(tmp_path / "mlx"), "-q", "--q-bits", "8", "--dtype", "float16"]
    main(flags)
    assert capsys.readouterr().out == f"{tmp_path / 'mlx'}\n"
    config = json.loads((tmp_path / "mlx" / "config.json").read_text())
    assert config["quantization"] == {"bits": 8, "group_size": 64, "mode": "affine"} and config["dtype"] == "float16"


def test_the_new_folder_is_uploaded(tmp_path, capsys, monkeypatch):
    """The hub's client is called as its own signatures say; nothing leaves this machine."""
    calls = []
    for name in ("create_repo", "upload_folder"):
        signature = inspect.signature(getattr(huggingface_hub.HfApi, name))

        def call(*args, name=name, signature=signature, **kwargs):
            calls.append((name, signature.bind(*args, **kwargs).arguments))

        monkeypatch.setattr(huggingface_hub.HfApi, name, call)
    source = write_folder(tmp_path / "hf", [draft_weights()])
    main(["--hf-path", str(source), "--mlx-path", str(tmp_path / "mlx"), "--upload-repo", "acme/draft"])
    (made, repo), (uploaded, what) = calls
    assert made == "create_repo" and uploaded == "upload_folder"
    assert repo["repo_id"] == what["repo_id"] == "acme/draft" and what["folder_path"] == str(tmp_path / "mlx")
    assert "https://huggingface.co/acme/draft" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--q-mode", "mxfp4"], "go with -q"),
        (["--q-bits", "8"], "go with -q"),
        (["--dequantize"], "not quantized"),
        (["-q", "-d"], "not both"),
        (["-q", "--q-group-size", "128", "--q-mode", "mxfp4"], "group"),
        (["-q", "--q-mode", "nvfp4", "--quant-predicate", "mixed_2_6"], "affine"),
        (["--trust-remote-code"], "--trust-remote-code does not apply to a draft"),
        (["--draft-vocab-text", "x"], "--draft-vocab"),
        (["--draft-vocab", "50"], "--target"),
    ],
)
def test_command_line_drops_no_flag(tmp_path, capsys, flags, message):
    source = write_folder(tmp_path / "hf", [draft_weights()])
    with pytest.raises(SystemExit) as stop:
        main(["--hf-path", str(source), "--mlx-path", str(tmp_path / "mlx"), *flags])
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "mlx").exists()
