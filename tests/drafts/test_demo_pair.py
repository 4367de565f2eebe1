"""The real pair: a 135 M target and its draft, offline."""

import subprocess
import sys

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.sample_utils import make_sampler

import mlx_dflash
from mlx_dflash.checkpoints.drafts import read_draft

pytestmark = pytest.mark.demo
QUESTIONS = ["Write a Python function that reverses a string.", "What is 12 + 30? Explain each step."]


@pytest.fixture(scope="module")
def pair():
    model, tokenizer = mlx_dflash.load("demo")
    return model, tokenizer, mlx_dflash.load_draft("demo")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("question", QUESTIONS)
def test_tokens_are_mlx_lms_and_drafts_are_kept(pair, question, temperature):
    model, tokenizer, draft = pair
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    tokens = []
    for generate, extra in ((mlx_lm.stream_generate, {}), (mlx_dflash.stream_generate, dict(draft_model=draft))):
        mx.random.seed(7)
        responses = list(generate(model, tokenizer, prompt, max_tokens=40, sampler=make_sampler(temperature), **extra))
        tokens.append([r.token for r in responses])
    assert tokens[0] == tokens[1]
    # A broken draft context would leave the text alone and refuse nearly everything.
    assert responses[-1].stats.acceptance_length > 1.25, responses[-1].stats.as_dict()


def test_weights_are_the_files_own_in_float32(pair):
    model, _, _ = pair
    quantized, _ = mlx_lm.load(str(mlx_dflash.demo.target_path()))
    layer = quantized.model.layers[3].mlp.up_proj
    exact = mx.dequantize(
        layer.weight, layer.scales.astype(mx.float32), layer.biases.astype(mx.float32), layer.group_size, layer.bits
    )
    if mx.default_device().type == mx.DeviceType.cpu:
        assert mx.array_equal(model.model.layers[3].mlp.up_proj.weight, exact)


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="a GPU multiplies packed weights")
def test_on_the_cpu_the_draft_is_float32_too(pair):
    draft = pair[2]
    _, file = read_draft(mlx_dflash.demo.draft_path())
    weight, scales, biases = (file[f"layers.1.mlp.up_proj.{name}"] for name in ("weight", "scales", "biases"))
    exact = mx.dequantize(weight, scales.astype(mx.float32), biases.astype(mx.float32), 64, 8)
    assert mx.array_equal(draft.layers[1].mlp.up_proj.weight, exact)


def test_the_readmes_first_command_answers():
    command = [sys.executable, "-m", "mlx_dflash.generate", "--prompt", "What is the capital of France?", "-m", "20"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
