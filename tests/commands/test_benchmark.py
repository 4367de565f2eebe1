"""The benchmark on a tiny constructed pair and on refused arguments."""

import json

import pytest
from support.byte_tokenizer import BYTE_VOCAB_SIZE, CHAT_TEMPLATE, byte_tokenizer
from support.drafts import draft_config, draft_weights
from support.folders import save_draft, save_target
from support.targets import target_config, tiny_target

import mlx_dflash
from mlx_dflash import pair as pair_module
from mlx_dflash.benchmark import __main__ as benchmark
from mlx_dflash.benchmark import measure, report, subject

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
    (tmp_path / "unknown").mkdir()
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
    wrong = measure.stream_generate

    def other_text(*args, **kwargs):
        for n, response in enumerate(wrong(*args, **kwargs)):
            response.token += n == 5
            yield response

    monkeypatch.setattr(measure, "stream_generate", other_text)
    report, _, _ = run(capsys, "--compare")
    assert report["all"]["block 16"]["identical"] == 0
    assert [d["position"] for d in report["differences"]] == [5, 5]
    difference = report["differences"][0]
    assert difference["drafted"]["token"] == difference["plain"]["token"] + 1
    assert difference["plain"]["logprob"] > difference["drafted"]["logprob"]


def test_a_text_of_one_token_is_no_measurement():
    short, longer = measure.Run([7], 0.1, 0.0, 0.0, 0.0, None), measure.Run([7, 8], 0.1, 2.0, 1.0, 0.0, None)

    def told(**runs):
        turn = measure.Turn(
            0, 0, subject.Case("chat", [1]), {name.replace("_", "-"): run for name, run in runs.items()}
        )
        return json.loads(json.dumps(report.Report({}, *report.summarize([turn])).as_json()))

    assert told(block=short)["groups"] == {"chat": {"block": {"runs": 0}}}
    numbers = told(block=longer, mlx_lm=short)["all"]
    assert numbers["mlx-lm"] == {"runs": 0} and numbers["block"]["wall_ms_per_token"] == [2000, 2000, 2000]
    assert numbers["block"]["identical"] == 0 and "speedup_wall" not in numbers["block"], "no time to compare with"


def test_drafts_run_side_by_side_on_prompts_of_ones_own(tmp_path, capsys):
    target = save_tiny_target(tmp_path / "target")
    drafts = [save_tiny_draft(tmp_path / run / "best") for run in ("one", "two")]
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "hello", "class": "chat"},
        {"text": "once upon"},
        {"messages": [{"role": "user", "content": "x"}]},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["--model", target, "--prompts", prompts, "--max-tokens", 12, "--repeat", 1, "--compare"]
    benchmark.main([*map(str, command), "--draft-model", *map(str, drafts), "--plot", str(tmp_path / "plot.png")])
    out = capsys.readouterr().out
    told = json.loads(out.splitlines()[-1])
    assert list(told["groups"]) == ["chat", "no class"] and told["setup"]["prompts"] == 3
    assert list(told["all"]) == ["one/best", "two/best", "mlx-lm"]
    assert told["setup"]["draft_model"] == [*map(str, drafts)] and told["setup"]["draft_block_size"] == [6, 6]
    for name in ("one/best", "two/best"):
        numbers = told["all"][name]
        histogram = numbers["histogram"]
        assert numbers["identical"] == numbers["runs"] == 3
        assert numbers["kept_by_slot"] == report.kept_by_slot(histogram)
        assert f"{name}: drafts kept by slot" in out
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_each_draft_has_an_arm_for_each_block_size(tmp_path, capsys):
    target = save_tiny_target(tmp_path / "target")
    drafts = [save_tiny_draft(tmp_path / name, dflash={"block_size": size}) for name, size in (("a", 4), ("b", 6))]
    flags = [word for draft in drafts for word in ("--draft-model", str(draft))]
    command = ["--model", str(target), *flags, "--max-tokens", "8", "--num-prompts", "1", "--repeat", "1", "--json"]
    benchmark.main([*command, "--block-size", "2", "3"])
    assert list(json.loads(capsys.readouterr().out)["all"]) == ["a block 2", "a block 3", "b block 2", "b block 3"]
    benchmark.main(command)
    told = json.loads(capsys.readouterr().out)
    assert list(told["all"]) == ["a", "b"] and told["setup"]["draft_block_size"] == [4, 6]
    assert len(told["all"]["a"]["histogram"]) <= 4, "the block that the draft was trained with"


def test_a_further_draft_of_another_target_is_refused_before_any_run(tmp_path, capsys):
    target, draft = save_tiny_target(tmp_path / "target"), save_tiny_draft(tmp_path / "draft")
    other = save_tiny_draft(tmp_path / "other", num_target_layers=99)
    message = refused(capsys, "--model", target, "--draft-model", draft, other, "--num-prompts", 1)
    assert "the draft was trained for a target of 99 layers" in message


def test_drafts_have_the_shortest_names_that_tell_them_apart():
    assert subject.short_names(["run/best"]) == ["best"]
    assert subject.short_names(["a/best", "b/last"]) == ["best", "last"]
    assert subject.short_names(["x/a/best", "x/b/best", "last"]) == ["a/best", "b/best", "last"]
    assert subject.short_names(["."]) == ["."]
    with pytest.raises(ValueError, match="names a draft twice: run/best, run/./best"):
        subject.short_names(["run/best", "run/./best"])


def test_a_draft_with_the_name_of_the_plain_arm_is_refused(tmp_path, capsys):
    target = save_tiny_target(tmp_path / "target")
    drafts = [save_tiny_draft(tmp_path / name) for name in ("mlx-lm", "b")]
    command = ["--model", target, "--draft-model", *drafts, "--num-prompts", 1]
    assert "give the draft's folder another name" in refused(capsys, *command, "--compare")


def test_kept_by_slot_is_of_the_drafts_whose_slot_was_reached():
    assert report.kept_by_slot([4, 2, 0, 2]) == [0.5, 0.5, 1.0]
    assert report.kept_by_slot([3]) == []


@pytest.mark.parametrize(
    "args, message",
    [
        (["--repeat", "0"], "--repeat must be at least 1, got 0"),
        (["--max-tokens", "1"], "--max-tokens must be at least 2, got 1"),
        (["--temp", "nan"], "--temp must be a number of 0 or more, got nan"),
        (["--seed", "-1"], "--seed: must be a whole number"),
        (["--temp", "-1"], "--temp must be a number of 0 or more, got -1.0"),
        (["--draft-model", "none"], "nothing to measure"),
        (["--constructed", "0.5", "--draft-model", "x"], "builds its own pair"),
        (["--constructed", "0.5", "--prompts", "x"], "builds its own pair and prompts"),
        (["--context", "90", "--prompts", "x"], "fills up the built-in prompts"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
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
        (
            ["--model", "/no/such/folder", "--prompts", "/no/such/file"],
            "--prompts /no/such/file: there is no such file",
        ),
    ],
)
def test_impossible_requests_end_with_a_message(args, message, capsys):
    assert message in refused(capsys, *([] if "--model" in args else TINY), *args)


def test_prompts_take_the_classes_in_turn():
    entries = map(json.loads, subject.PROMPTS.read_text().splitlines())
    built_in = [(entry["class"], entry["prompt"]) for entry in entries]
    sixty = subject.in_turn(built_in, 60)
    assert sorted(sixty) == sorted(built_in) and len(sixty) == 60
    assert len({name for name, _ in sixty[:6]}) == 6
    assert subject.in_turn(built_in, 3) == sixty[:3]
    assert subject.in_turn([("a", 1), ("a", 2), ("a", 3), ("b", 4)]) == [("a", 1), ("b", 4), ("a", 2), ("a", 3)]
    with pytest.raises(ValueError, match="there are 60 prompts, --num-prompts asks for 61"):
        subject.in_turn(built_in, 61)


def test_prompts_are_filled_up_to_the_length_of_the_context(tmp_path, capsys):
    target, draft = save_tiny_target(tmp_path / "target"), save_tiny_draft(tmp_path / "draft")
    command = ["--model", str(target), "--draft-model", str(draft), "--max-tokens", "2", "--num-prompts", "2"]
    benchmark.main([*command, "--repeat", "1", "--context", "600", "900"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(told["groups"]) == ["context 600", "context 900"] and told["setup"]["prompts"] == 4
    assert told["setup"]["prompt_tokens"] == [602, 902], "the empty line in between is not counted"
    assert "--context 9 is shorter than a prompt of" in refused(capsys, *command, "--context", 9)
