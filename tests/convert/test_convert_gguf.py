"""GGUF targets: what plain mlx_lm.load gets is the file's own values, tokens and metadata, or nothing at all."""

import io
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from support import gguf_files as files
from support.gguf_files import Type

from convert import convert_gguf
from convert.__main__ import main

KINDS = [Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.F16, Type.BF16, Type.F32]
KIND_IDS = [kind.name for kind in KINDS]
PROMPT = [1, 70, 71, 72, 200, 31, 5, 259]


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "tiny.gguf", tmp_path / "mlx"


def hf_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Row s·d/2 + i of a half-split head is row 2i + s of the interleaved one."""
    half = files.HEAD_DIM // 2
    order = [h * files.HEAD_DIM + 2 * i + s for h in range(num_heads) for s in (0, 1) for i in range(half)]
    return values[order]


def loaded_values(folder: Path) -> dict[str, np.ndarray]:
    """Name -> float32 values of the model that mlx-lm loads, dequantized in float32."""
    model, _ = load(str(folder))
    parameters = dict(tree_flatten(model.parameters()))
    values = {}
    for name, module in model.named_modules():
        if "weight" not in module:
            continue
        weight = parameters[f"{name}.weight"]
        if f"{name}.scales" in parameters:
            scales, biases = (parameters[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            weight = mx.dequantize(weight, scales, biases, module.group_size, module.bits)
        values[name] = np.array(weight.astype(mx.float32))
    return values


@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
def test_values_are_bit_exact(paths, kind):
    source, folder = paths
    tensors = files.random_tensors(kind, is_tied=False)
    convert_gguf(files.write_gguf(source, tensors), folder)
    expected = files.dequantized(tensors)
    loaded = loaded_values(folder)
    assert len(loaded) == len(expected)
    assert (loaded["lm_head"] == expected["output.weight"]).all()
    assert (loaded["model.embed_tokens"] == expected["token_embd.weight"]).all()
    assert (loaded["model.norm"] == expected["output_norm.weight"]).all()
    for i in range(files.LAYERS):
        mine, its = f"model.layers.{i}", f"blk.{i}"
        for part, name in [("v", "attn_v"), ("o", "attn_output")]:
            assert (loaded[f"{mine}.self_attn.{part}_proj"] == expected[f"{its}.{name}.weight"]).all(), name
        for part, num_heads in [("q", files.HEADS), ("k", files.KV_HEADS)]:
            want = hf_rows(expected[f"{its}.attn_{part}.weight"], num_heads)
            assert (loaded[f"{mine}.self_attn.{part}_proj"] == want).all(), part
        for part in ("gate", "up", "down"):
            assert (loaded[f"{mine}.mlp.{part}_proj"] == expected[f"{its}.ffn_{part}.weight"]).all(), part
        assert (loaded[f"{mine}.input_layernorm"] == expected[f"{its}.attn_norm.weight"]).all()
        assert (loaded[f"{mine}.post_attention_layernorm"] == expected[f"{its}.ffn_norm.weight"]).all()


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "own_head"])
@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
def test_logits_are_those_of_an_independent_forward(paths, kind, is_tied):
    source, folder = paths
    tensors = files.random_tensors(kind, is_tied)
    convert_gguf(files.write_gguf(source, tensors), folder, dtype="float32")
    model, _ = load(str(folder))
    error = np.abs(np.array(model(mx.array([PROMPT]))[0]) - files.llama_logits(tensors, PROMPT)).max()
    assert error <= 1e-4, f"max |Δlogit| {error:.2e}"


def test_layers_of_different_types_keep_their_own_bits(paths):
    source, folder = paths
    tensors = files.random_tensors(Type.Q4_1)
    tensors["token_embd.weight"] = files.random_tensors(Type.Q8_0)["token_embd.weight"]
    tensors["blk.1.attn_q.weight"] = files.random_tensors(Type.Q8_0)["blk.1.attn_q.weight"]
    tensors["blk.0.ffn_up.weight"] = files.random_tensors(Type.F16)["blk.0.ffn_up.weight"]
    convert_gguf(files.write_gguf(source, tensors), folder, dtype="float32")
    quantization = json.loads((folder / "config.json").read_text())["quantization"]
    assert quantization == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8, "mode": "affine"},
        "model.layers.1.self_attn.q_proj": {"group_size": 32, "bits": 8, "mode": "affine"},
    }
    model, _ = load(str(folder))
    error = np.abs(np.array(model(mx.array([PROMPT]))[0]) - files.llama_logits(tensors, PROMPT)).max()
    assert error <= 1e-4, f"max |Δlogit| {error:.2e}"


def test_config_comes_from_the_metadata(paths):
    source, folder = paths
    convert_gguf(files.write_gguf(source, files.random_tensors(Type.F16), eot_token_id=4), folder)
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 512,
        "vocab_size": len(files.TOKENS),
        "tie_word_embeddings": True,
        "rope_scaling": None,
        "bos_token_id": 1,
        "eos_token_id": [2, 4],
        "dtype": "float16",
    }
    assert {key: config[key] for key in expected} == expected
    assert "quantization" not in config
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 4]


def test_a_folder_with_one_gguf_target_is_converted_and_checked(paths, capsys):
    source, folder = paths
    files.write_gguf(source, files.random_tensors(Type.F16))
    main(["--hf-path", str(source.parent), "--mlx-path", str(folder), "--check"])
    assert "bit for bit" in capsys.readouterr().out
    assert str(source) in (folder / "README.md").read_text()


def llama3_factors(theta: float) -> np.ndarray:
    """What Llama 3 divides each frequency by: 8 for waves over 8192 positions, 1 under 2048, a mixture in between."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, files.HEAD_DIM, 2) / files.HEAD_DIM)
    share = (8192 / wavelengths - 1) / 3
    between = 1 / ((1 - share) / 8 + share)
    return np.where(wavelengths > 8192, 8.0, np.where(wavelengths < 2048, 1.0, between)).astype(np.float32)


def test_llama3_rope_factors_become_its_rope_scaling(paths):
    source, folder = paths
    theta, factors = 500000.0, llama3_factors(500000.0)
    tensors = files.random_tensors(Type.F16) | {"rope_freqs.weight": (factors, Type.F32)}
    convert_gguf(files.write_gguf(source, tensors, rope_freq_base=theta), folder)
    scaling = json.loads((folder / "config.json").read_text())["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model, _ = load(str(folder))
    ratio = np.array(model.layers[0].self_attn.rope._freqs) / theta ** (np.arange(0, 16, 2) / 16)
    assert np.allclose(ratio, factors, rtol=1e-5), f"{ratio} against {factors}"


def test_other_rope_factors_are_refused(paths):
    source, folder = paths
    factors = np.linspace(1, 8, files.HEAD_DIM // 2).astype(np.float32)
    tensors = files.random_tensors(Type.F16) | {"rope_freqs.weight": (factors, Type.F32)}
    files.write_gguf(source, tensors, rope_freq_base=500000.0)
    with pytest.raises(ValueError, match="not Llama 3's RoPE scaling"):
        convert_gguf(source, folder)


def test_index_lists_exactly_what_the_files_hold(paths):
    source, folder = paths
    convert_gguf(files.write_gguf(source, files.random_tensors(Type.Q4_1)), folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held = {name: file.name for file in folder.glob("*.safetensors") for name in mx.load(str(file))}
    assert index["weight_map"] == held
    assert {p.name for p in folder.iterdir()} >= {"config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def tokenizer(paths):
    """The byte-level tokenizer of a converted file."""
    source, folder = paths
    convert_gguf(files.write_gguf(source, files.random_tensors(Type.F16)), folder)
    return load(str(folder))[1]


def test_byte_level_tokens_are_the_files(tokenizer):
    ids = {token: i for i, token in enumerate(files.TOKENS)}
    assert tokenizer.encode("abc 1234") == [ids["abc"], ids["Ġ"], *(ids[digit] for digit in "1234")]
    assert tokenizer.encode("ab a</s><user>") == [ids["ab"], ids["Ġa"], ids["</s>"], ids["<user>"]]
    assert tokenizer.decode([ids["</s>"], ids["a"], ids["<user>"]], skip_special_tokens=True) == "a<user>"


def test_any_text_comes_back_from_its_byte_level_tokens(tokenizer):
    text = "naïve – 日本語 🙂 \n\t  x"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_and_the_chat_template_come_from_the_metadata(tokenizer):
    assert tokenizer.eos_token_ids == {2} and tokenizer.bos_token == "<s>" and tokenizer.unk_token == "<unk>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat == "<s>user:a</s>"


@pytest.mark.parametrize("adds", [True, False])
def test_bos_is_added_when_the_file_says_so(paths, adds):
    source, folder = paths
    convert_gguf(files.write_gguf(source, files.random_tensors(Type.F16), add_bos_token=adds), folder)
    _, tokenizer = load(str(folder))
    assert tokenizer.encode("abc")[0] == (1 if adds else files.TOKENS.index("abc"))


@pytest.mark.parametrize(
    ("pre", "text", "cuts"),
    [
        ("gpt-2", "it's 1234 ab", ["it", "'s", "Ġ1234", "Ġab"]),
        ("smollm", "it's 1234 ab", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġab"]),
        ("llama-bpe", "it's 1234 ab", ["it", "'s", "Ġ", "123", "4", "Ġab"]),
        ("qwen2", "it's 1234 ab", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġab"]),
    ],
)
def test_pre_tokenizer_cuts_text_before_bpe(paths, pre, text, cuts):
    source, folder = paths
    convert_gguf(files.write_gguf(source, files.random_tensors(Type.F16), tokenizer_pre=pre), folder)
    _, tokenizer = load(str(folder))
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in pieces] == cuts


def test_sentencepiece_tokens_are_those_of_sentencepiece(paths):
    sentencepiece = pytest.importorskip("sentencepiece")
    source, folder = paths
    text = Path(__file__).read_text()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    spm = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = range(spm.vocab_size())
    kinds = [2 if spm.is_unknown(i) else 3 if spm.is_control(i) else 6 if spm.is_byte(i) else 1 for i in pieces]
    tokenizer = {
        "tokenizer_model": "llama",
        "token_list": [spm.id_to_piece(i) for i in pieces],
        "token_types": kinds,
        "token_scores": [spm.get_score(i) for i in pieces],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
    }
    tensors = files.random_tensors(Type.F16)
    tensors["token_embd.weight"] = (np.zeros((400, files.HIDDEN), np.float16), Type.F16)
    convert_gguf(files.write_gguf(source, tensors, tokenizer), folder)
    _, mine = load(str(folder))
    for line in ["def test_index(paths):", "  two  spaces", "naïve 日本語 🙂", "x", *text.splitlines()[:60]]:
        assert mine.encode(line) == [1, *spm.encode(line)], line
        assert mine.decode(spm.encode(line)) == line
        assert streamed(mine, spm.encode(line)).strip() == line.strip()


def streamed(tokenizer, tokens: list[int]) -> str:
    """The text that mlx-lm streams for the tokens."""
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text


def broken(change: str) -> tuple[dict, dict]:
    """Tensors and metadata of a file with one fault."""
    tensors, metadata = files.random_tensors(Type.Q4_1), {}
    if change == "missing tensor":
        del tensors["blk.1.ffn_up.weight"]
    elif change == "missing embedding":
        del tensors["token_embd.weight"]
    elif change == "unknown tensor":
        tensors["blk.0.attn_sinks.weight"] = tensors["blk.0.attn_norm.weight"]
    elif change == "wrong shape":
        tensors["blk.0.attn_v.weight"] = tensors["blk.0.attn_q.weight"]
    elif change == "other type":
        tensors["blk.0.ffn_up.weight"] = (np.zeros((files.MLP, files.HIDDEN)), Type.F64)
    elif change == "other architecture":
        metadata["architecture"] = "mamba"
    elif change == "unknown pre-tokenizer":
        metadata["tokenizer_pre"] = "falcon"
    elif change == "unknown tokenizer":
        metadata["tokenizer_model"] = "rwkv"
    elif change == "token twice":
        metadata["token_list"] = [*files.TOKENS[:-1], "a"]
    elif change == "too many tokens":
        metadata["token_list"] = [*files.TOKENS, "more"]
    elif change == "special token outside":
        metadata["pad_token_id"] = 2**32 - 1
    elif change == "partial rope":
        metadata["rope_dimension_count"] = 8
    elif change == "experts":
        metadata["expert_count"] = 8
    return tensors, metadata


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing tensor", "does not fill the model"),
        ("missing embedding", "lacks the tensor token_embd.weight"),
        ("unknown tensor", "no tensor 'blk.0.attn_sinks.weight'"),
        ("wrong shape", "does not fill the model"),
        ("other type", "blk.0.ffn_up.weight is stored as F64"),
        ("other architecture", "'mamba' model"),
        ("unknown pre-tokenizer", "'falcon'"),
        ("unknown tokenizer", "'rwkv' tokenizer"),
        ("token twice", "a token twice"),
        ("too many tokens", "an embedding of"),
        ("special token outside", "token 4294967295 as pad"),
        ("partial rope", "8 of 16 channels"),
        ("experts", "mixture of experts"),
    ],
)
def test_what_cannot_be_carried_over_is_named(paths, change, message):
    source, folder = paths
    tensors, metadata = broken(change)
    files.write_gguf(source, tensors, **metadata)
    with pytest.raises(ValueError, match=message):
        convert_gguf(source, folder)


def test_cut_off_file_is_refused(paths):
    source, folder = paths
    files.write_gguf(source, files.random_tensors(Type.Q4_1))
    content = source.read_bytes()
    for size in (3, 20, 1000, len(content) - 64):
        source.write_bytes(content[:size])
        with pytest.raises(ValueError, match="not a GGUF file|cut off"):
            convert_gguf(source, folder)
        assert not folder.exists()
