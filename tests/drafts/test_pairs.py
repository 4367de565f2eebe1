"""Which names of a target lead to which draft."""

import pytest

from mlx_dflash.checkpoints.known_pairs import PAIRS, find_draft

NAMES = {
    "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
    "mlx-community/Qwen3-4B-4bit": "z-lab/Qwen3-4B-DFlash-b16",
    "mlx-community/Qwen3-4B-bf16": "z-lab/Qwen3-4B-DFlash-b16",
    "mlx-community/Qwen3-4B-4bit-DWQ": "z-lab/Qwen3-4B-DFlash-b16",
    "mlx-community/Qwen3-8B-MLX-8bit": "z-lab/Qwen3-8B-DFlash-b16",
    "Qwen/Qwen3-8B-MLX-4bit": "z-lab/Qwen3-8B-DFlash-b16",
    "unsloth/Qwen3-8B-GGUF": "z-lab/Qwen3-8B-DFlash-b16",
    "/models/qwen3-8b-q4_k_m.gguf": "z-lab/Qwen3-8B-DFlash-b16",
    "~/models/Qwen3-8B-Q4_K_M": "z-lab/Qwen3-8B-DFlash-b16",
    "./Qwen3.5-35B-A3B-mxfp4/": "z-lab/Qwen3.5-35B-A3B-DFlash",
    "Qwen/Qwen3.6-35B-A3B-FP8": "z-lab/Qwen3.6-35B-A3B-DFlash",
    "mlx-community/gpt-oss-20b-MXFP4-Q8": "z-lab/gpt-oss-20b-DFlash",
    "mlx-community/gemma-4-12b-it-4bit": "z-lab/gemma4-12B-it-DFlash",
    "mlx-community/gemma-4-26b-a4b-it-4bit": "z-lab/gemma-4-26B-A4B-it-DFlash",
    "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    "mlx-community/Qwen3.8-27B-nvfp4": "z-lab/Qwen3.8-27B-DFlash2",
    "mlx-community/MiniMax-M2.5-6.5bit": "z-lab/MiniMax-M2.5-DFlash",
    "/home/u/.cache/huggingface/hub/models--Qwen--Qwen3-4B/snapshots/0123abc": "z-lab/Qwen3-4B-DFlash-b16",
    "moonshotai/Kimi-K2.7-Code": "z-lab/Kimi-K2.7-Code-DFlash",
    "demo": "demo",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_a_target_lead_to_its_draft(name):
    assert find_draft(name) == NAMES[name]


@pytest.mark.parametrize("target", sorted({target for target, _ in PAIRS}))
@pytest.mark.parametrize("form", ["{}", "mlx-community/{}-4bit", "x/{}-8bit", "{}-bf16", "/a/b/{}-MLX-5bit"])
def test_every_listed_target_is_found_in_every_quantization(target, form):
    name = form.format(target.rpartition("/")[2] if "/" in form else target)
    assert find_draft(name) == next(draft for known, draft in PAIRS if known == target)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-1.7B",
        "Qwen/Qwen2.5-7B",
        "Qwen/Qwen3-14B-4bit",
        "meta-llama/Llama-3.2-1B",
        "gpt-oss",
        "Qwen3",
        "model",
        "/",
    ],
)
def test_unknown_targets_have_no_draft(name):
    assert find_draft(name) is None


@pytest.mark.parametrize(
    ("name", "candidate"),
    [
        ("Qwen/Qwen3-4B-Instruct-2507", "z-lab/Qwen3-4B-DFlash-b16 (for Qwen/Qwen3-4B)"),
        ("someone/Qwen3-8B-abliterated-4bit", "z-lab/Qwen3-8B-DFlash-b16"),
        ("someone/My-Qwen3.6-35B-A3B-tuned", "incoai/Qwen3.6-35B-A3B-DFlash2"),
        ("zai-org/GLM-5.3-Flash-Pro", "incoai/GLM-5.3-Flash-DFlash2"),
    ],
)
def test_variants_of_a_target_are_said_to_be_ambiguous(name, candidate):
    with pytest.raises(ValueError, match="may be a variant") as error:
        find_draft(name)
    assert candidate in str(error.value)


def test_a_folders_config_may_say_what_its_name_does_not():
    assert find_draft("/models/mine", {"_name_or_path": "Qwen/Qwen3-8B"}) == "z-lab/Qwen3-8B-DFlash-b16"
    assert find_draft("/models/mine", {"_name_or_path": ""}) is None
    assert find_draft("/models/mine", {"model_type": "qwen3"}) is None
