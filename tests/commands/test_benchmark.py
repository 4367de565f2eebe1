"""The benchmark on a tiny constructed pair and on refused arguments."""

import json

import pytest
from support.fixtures import (
    BYTE_VOCAB_SIZE,
    CHAT_TEMPLATE,
    byte_tokenizer,
    draft_config,
    draft_weights,
    save_draft,
    save_target,
    target_config,
    tiny_target,
)

import mlx_dflash
from mlx_dflash import pair as pair_module
from mlx_dflash.benchmark import __main__ as benchmark

TINY = ["--constructed", "0.8", "--shape", "tiny", "--max-tokens", "12", "--num-prompts", "2", "--repeat", "2"]


def run(capsys, *args):
    benchmark.main([*TINY, *args])
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), out, err


def save_tiny_target(folder):
    size = dict(vocab_size=BYTE_VOCAB_SIZE)
    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    return save_target(folder, tiny_target(**size), target_config(**size), tokenizer)


def save_tiny_draft(folder, **changes):
    config = draft_config(vocab_size=BYTE_VOCAB_SIZE, **changes)
    return save_draft(folder, config, draft_weights(config))


def refused(capsys, *args):
    """Run a command that is refused; return its message."""
    with pytest.raises(SystemExit) as ended:
        benchmark.main([*map(str, args)])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_public_draft_is_found_by_the_targets_name(tmp_path, monkeypatch, capsys):
    target, draft = save_tiny_target(tmp_path / "Qwen3-4B-4bit"), save_tiny_draft(tmp_path / "draft")
    asked = []

    def load_draft(name):
        asked.append(name)
        return mlx_dflash.load_draft(str(draft))

    monkeypatch.setattr(pair_module, "load_draft", load_draft)
    benchmark.main(["--model", str(target), "--num-prompts", "1", "--max-tokens", "4", "--repeat", "1"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert asked == [report["setup"]["draft_model"]] == ["z-lab/Qwen3-4B-DFlash-b16"]
    assert report["all"]["block 6"]["tokens"] == 4


def test_a_target_without_a_known_draft_is_refused(tmp_path, capsys):
    message = refused(capsys, "--model", tmp_path / "unknown")
    assert "no public DFlash draft is known for" in message and "--draft-model" in message


def test_a_draft_of_another_target_is_refused_before_any_run(tmp_path, capsys):
    target, draft = save_tiny_target(tmp_path / "target"), save_tiny_draft(tmp_path / "draft", num_target_layers=99)
    message = refused(capsys, "--model", target, "--draft-model", draft, "--num-prompts", 1)
    assert "the draft was trained for a target of 99 layers" in message


def test_compares_with_mlx_lm(capsys):
    report, out, _ = run(capsys, "--compare", "--block-size", "4", "16")
    assert list(report["all"]) == ["block 4", "block 16", "mlx-lm"]
    assert report["differences"] == []
    assert report["setup"]["rate"] == 0.8
    for name, told in report["all"].items():
        assert told["runs"] == told["identical"] == 4 and told["tokens"] == 48, name
        assert told["peak_gb"] > 0 and all(x > 0 for x in told["wall_ms_per_token"] + told["cpu_ms_per_token"]), name
    for name in ("block 4", "block 16"):
        told = report["all"][name]
        assert 1 < told["acceptance_length"] <= int(name.split()[1])
        low, high = sorted(told["speedup_wall"])[::2]
        assert low <= told["speedup_wall"][0] <= high
        assert name in out
    assert report["all"]["block 4"]["acceptance_length"] < report["all"]["block 16"]["acceptance_length"]
    assert "acceptance_length" not in report["all"]["mlx-lm"]


def test_json_is_all_of_stdout_when_asked(capsys):
    report, out, err = run(capsys, "--json", "--temp", "0.8")
    assert out.count("\n") == 1 and err == ""
    assert "differences" not in report and "speedup_wall" not in report["all"]["block 16"]


def test_context_sweep_has_a_group_a_length(capsys):
    report, _, _ = run(capsys, "--context", "76", "150")
    assert list(report["groups"]) == ["context 76", "context 150"]
    assert report["setup"]["prompt_tokens"] == [76, 150]


def test_a_different_text_is_reported(capsys, monkeypatch):
    wrong = benchmark.stream_generate

    def other_text(*args, **kwargs):
        for n, response in enumerate(wrong(*args, **kwargs)):
            response.token += n == 5
            yield response

    monkeypatch.setattr(benchmark, "stream_generate", other_text)
    report, _, _ = run(capsys, "--compare")
    assert report["all"]["block 16"]["identical"] == 0
    assert [d["position"] for d in report["differences"]] == [5, 5]
    difference = report["differences"][0]
    assert difference["drafted"]["token"] == difference["plain"]["token"] + 1
    assert difference["plain"]["logprob"] > difference["drafted"]["logprob"]


def test_a_text_of_one_token_is_no_measurement():
    run = benchmark.Run("block 4", [7], 0.1, 0.0, 0.0, 0.0, None)
    assert benchmark.summarize([[[run]]], ["chat"], ["block 4"])["all"] == {"block 4": {"runs": 0}}


@pytest.mark.parametrize(
    "args, message",
    [
        (["--repeat", "0"], "--repeat must be at least 1, got 0"),
        (["--max-tokens", "1"], "--max-tokens must be at least 2, got 1"),
        (["--temp", "-1"], "--temp must not be negative"),
        (["--draft-model", "none"], "nothing to measure"),
        (["--constructed", "0.5", "--draft-model", "x"], "builds its own pair"),
        (["--shape", "huge"], "invalid choice"),
    ],
)
def test_bad_arguments_end_with_a_message(args, message, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(args)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "args, message",
    [
        (["--constructed", "2"], "0 to 1, got 2.0"),
        (["--max-tokens", "500"], "up to 64 tokens a prompt, got --max-tokens 500"),
        (["--context", "20"], "at least 76 tokens, got 20"),
        (["--block-size", "99"], "block_size must be 1 to 16"),
        (["--model", "/no/such/folder", "--draft-model", "demo"], "/no/such/folder"),
    ],
)
def test_impossible_requests_end_with_a_message(args, message, capsys):
    assert message in refused(capsys, *([] if "--model" in args else TINY), *args)


def test_prompts_take_the_classes_in_turn():
    sixty = benchmark.prompts(60)
    assert len({text for _, text in sixty}) == 60
    assert len({name for name, _ in sixty[:6]}) == 6
    assert benchmark.prompts(3) == sixty[:3]
    with pytest.raises(ValueError, match="there are 60 built-in prompts, 61 were asked for"):
        benchmark.prompts(61)
