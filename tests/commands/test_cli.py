"""The command lines of generate and trace: text on stdout, everything else on stderr, one-line errors, exit codes."""

import io
import json
import re
import signal
import subprocess
import sys
import time

import pytest
from support.byte_tokenizer import BYTE_VOCAB_SIZE, CHAT_TEMPLATE, byte_tokenizer
from support.drafts import draft_config, draft_weights
from support.folders import save_draft, save_target
from support.targets import target_config, tiny_target

import mlx_dflash
from mlx_dflash.generate import compare
from mlx_dflash.generate import main as generate
from mlx_dflash.trace import __main__ as trace


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    size = dict(vocab_size=BYTE_VOCAB_SIZE)
    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    save_target(folder / "target", tiny_target(**size), target_config(**size), tokenizer)
    config = draft_config(**size)
    save_draft(folder / "draft", config, draft_weights(config))
    return ["--model", str(folder / "target"), "--draft-model", str(folder / "draft")]


def run(monkeypatch, main, *arguments, stdin=""):
    """Run a command in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    try:
        main()
    except SystemExit as end:
        return end.code
    return 0


def plain_text(pair, prompt, max_tokens):
    model, tokenizer = mlx_dflash.load(pair[1])
    return mlx_dflash.generate(model, tokenizer, prompt, max_tokens=max_tokens)


def test_stdout_is_the_text_and_nothing_else(monkeypatch, capfd, pair):
    assert run(monkeypatch, generate, *pair, "-p", "hi", "--stats", "-m", 20) == 0
    out, err = capfd.readouterr()
    assert out == plain_text(pair, "user: hi\nassistant: ", 20) + "\n"
    assert "acceptance length" in err and "tokens-per-sec" in err


@pytest.mark.parametrize("how", ["stdin", "file"])
def test_the_prompt_may_come_from_stdin_or_a_file(monkeypatch, capfd, pair, tmp_path, how):
    (tmp_path / "prompt.txt").write_text("a\nb")
    source = ("-p", "-") if how == "stdin" else ("--prompt-file", tmp_path / "prompt.txt")
    assert run(monkeypatch, generate, *pair, *source, "-m", 8, stdin="a\nb") == 0
    assert capfd.readouterr().out == plain_text(pair, "user: a\nb\nassistant: ", 8) + "\n"


def test_prompt_flags_reach_the_chat_template_or_go_around_it(monkeypatch, capfd, pair):
    flags = ("--system-prompt", "be", "--prefill-response", "So")
    assert run(monkeypatch, generate, *pair, "-p", "x", *flags, "-m", 8) == 0
    out = capfd.readouterr().out
    assert out == plain_text(pair, "system: be\nuser: x\nassistant: So", 8) + "\n"
    assert run(monkeypatch, generate, *pair, "-p", "x", "--ignore-chat-template", "-m", 8) == 0
    assert capfd.readouterr().out == plain_text(pair, "x", 8) + "\n"


@pytest.mark.parametrize("sampling", [(), ("--temp", 0.9), ("--temp", 1, "--top-k", 5, "--xtc-probability", 0.5)])
def test_compare_finds_the_same_tokens(monkeypatch, capfd, pair, sampling):
    assert run(monkeypatch, generate, *pair, "-p", "hi", "-m", 30, "--compare", *sampling) == 0
    assert "the same tokens as plain mlx-lm" in capfd.readouterr().err


def test_compare_tells_where_the_tokens_begin_to_differ(monkeypatch, capfd, pair):
    class Response:
        def __init__(self, token):
            self.token = token

    assert not compare(iter(map(Response, [1, 2, 3])), [1, 5, 3], 1.0)
    assert "from token 1 on" in capfd.readouterr().err
    assert not compare(iter(map(Response, [1, 2])), [1, 2, 3], 1.0)
    assert "from token 2 on" in capfd.readouterr().err


def test_the_same_seed_gives_the_same_text_and_another_seed_another(monkeypatch, capfd, pair):
    texts = []
    for seed in (1, 1, 2):
        assert run(monkeypatch, generate, *pair, "-p", "hi", "-m", 30, "--temp", 1, "--seed", seed) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_a_prompt_cache_file_continues_its_conversation(monkeypatch, capfd, pair, tmp_path):
    model, tokenizer = mlx_dflash.load(pair[1])
    draft = mlx_dflash.load_draft(pair[3])
    cache = mlx_dflash.make_prompt_cache(model, draft)
    first = "user: one\nassistant: "
    mlx_dflash.generate(model, tokenizer, first, draft_model=draft, prompt_cache=cache, max_tokens=12)
    mlx_dflash.save_prompt_cache(str(tmp_path / "c.safetensors"), cache, {"model": pair[1]})
    flags = ("--prompt-cache-file", tmp_path / "c.safetensors", "-p", "two", "-m", 8)
    assert run(monkeypatch, generate, "--draft-model", pair[3], *flags) == 0
    expected = mlx_dflash.generate(
        model, tokenizer, "two\nassistant: ", draft_model=draft, prompt_cache=cache, max_tokens=8
    )
    assert capfd.readouterr().out == expected + "\n"


@pytest.mark.parametrize(
    "flags, says",
    [
        (("-m", 0), "max_tokens must be positive"),
        (("--block-size", 99), "block_size must be 1 to 6"),
        (("--block-size", 2, "--num-draft-tokens", 3), "not both"),
        (("--prompt-file", "/no/such/file"), "No such file"),
        (("--model", "/no/such/folder"), "no folder"),
        (("--draft-model", "none", "--block-size", 2), "need a draft"),
        (("--draft-model", "none", "--compare"), "--compare needs a draft"),
        (("--extra-eos-token", "nonsense"), "nonsense"),
        (("-p", "a", "--prompt-file", "b"), "--prompt or --prompt-file, not both"),
        (("--temp", -1), "--temp must be a number of 0 or more, got -1.0"),
        (("--temp", "nan"), "--temp must be a number of 0 or more, got nan"),
        (("--temp", "inf"), "--temp must be a number of 0 or more, got inf"),
        (("--top-p", 1.5), "--top-p must be a number of 0 to 1, got 1.5"),
        (("--min-p", -0.1), "--min-p must be a number of 0 to 1, got -0.1"),
        (("--top-k", -4), "--top-k must be a number of 0 or more, got -4"),
        (("--xtc-threshold", 0.6), "--xtc-threshold must be a number of 0 to 0.5"),
        (("--seed", -1), "argument --seed: must be a whole number from 0 to 2**64 - 1, got '-1'"),
        (("--seed", 2**64), "argument --seed"),
        (("--wrong-flag",), "unrecognized arguments: --wrong-flag"),
        (("--max-tokens", "many"), "argument --max-tokens"),
        (("--json-schema", "[1]"), "--json-schema must be a JSON object"),
        (("--json-schema", '{"type": }'), "--json-schema is no JSON: Expecting value: line 1 column 10"),
        (("--json-schema", "/no/such/schema"), "No such file"),
    ],
)
def test_mistakes_are_one_line(monkeypatch, capfd, pair, flags, says):
    assert run(monkeypatch, generate, *pair, *flags) == 2
    out, err = capfd.readouterr()
    assert says in err and err.count("\n") == 1 and not out


def test_an_error_of_ours_is_one_line_too_and_debug_shows_where(monkeypatch, capfd, pair):
    def failing(*arguments, **options):
        raise RuntimeError("the array\nis gone")

    monkeypatch.setattr("mlx_dflash.api.stream_generate", failing)
    assert run(monkeypatch, generate, *pair) == 1
    assert capfd.readouterr().err == "error: RuntimeError: the array is gone (--debug shows where)\n"
    assert run(monkeypatch, generate, *pair, "--debug") == 1
    err = capfd.readouterr().err
    assert "Traceback" in err and "in failing" in err and err.endswith("(--debug shows where)\n")


def test_a_saved_prompt_cache_does_not_decide_what_code_may_run(monkeypatch, capfd, pair, tmp_path):
    model, _ = mlx_dflash.load(pair[1])
    metadata = {"model": pair[1], "tokenizer_config": '{"trust_remote_code": true, "eos_token": "<bos>"}'}
    mlx_dflash.save_prompt_cache(str(tmp_path / "c.safetensors"), mlx_dflash.make_prompt_cache(model), metadata)
    seen, load = [], mlx_dflash.pair.load
    monkeypatch.setattr("mlx_dflash.pair.load", lambda *a, **options: seen.append(options) or load(*a, **options))
    flags = ("--draft-model", "none", "--prompt-cache-file", tmp_path / "c.safetensors", "-m", 1)
    assert run(monkeypatch, generate, *flags) == 0, capfd.readouterr().err
    assert seen[0]["tokenizer_config"] == {"trust_remote_code": False, "eos_token": "<bos>"}
    metadata["tokenizer_config"] = "[]"
    mlx_dflash.save_prompt_cache(str(tmp_path / "c.safetensors"), mlx_dflash.make_prompt_cache(model), metadata)
    assert run(monkeypatch, generate, *flags) == 2
    assert "tokenizer_config of the prompt cache must be a JSON object" in capfd.readouterr().err


def test_a_reader_that_goes_away_ends_the_program_silently(pair):
    command = [sys.executable, "-m", "mlx_dflash.generate", *pair, "-p", "hi", "-m", "400"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    running.stdout.read(1)
    running.stdout.close()
    assert running.stderr.read() == b"" and running.wait(timeout=60) == 141


def test_what_is_piped_in_is_the_prompt(pair):
    command = [sys.executable, "-m", "mlx_dflash.generate", *pair, "-m", "8"]
    for flags, text in (([], "one two"), (["-p", "three"], "three")):
        done = subprocess.run([*command, *flags], input="one two", capture_output=True, text=True)
        assert done.stdout == plain_text(pair, f"user: {text}\nassistant: ", 8) + "\n", done.stderr


@pytest.mark.parametrize("after", [0.05, 0.3, 0.6, 1.0])
def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(after, pair):
    command = [sys.executable, "-m", "mlx_dflash.generate", *pair, "-p", "hi", "-m", "-1"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    wait_for_python(running.pid)
    time.sleep(after)
    running.send_signal(signal.SIGINT)
    err = running.stderr.read().decode()
    assert running.wait(timeout=60) in (130, -signal.SIGINT) and "Traceback" not in err, err


def wait_for_python(pid):
    """Wait until the process has loaded this package's BLAS, so that Python itself is up."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        maps = open(f"/proc/{pid}/maps").read() if sys.platform == "linux" else "blas"
        if "blas" in maps or "blis" in maps:
            return
        time.sleep(0.005)


def test_target_without_a_draft_asks_for_one(monkeypatch, capfd, pair):
    assert run(monkeypatch, generate, *pair[:2]) == 2
    assert "--draft-model" in capfd.readouterr().err


def test_target_and_draft_in_each_others_place_are_named(monkeypatch, capfd, pair):
    assert run(monkeypatch, generate, "--model", pair[3], "--draft-model", pair[3]) == 2
    assert "holds a DFlash draft, not a target" in capfd.readouterr().err
    assert run(monkeypatch, generate, "--model", pair[1], "--draft-model", pair[1]) == 2
    assert "not a DFlash draft" in capfd.readouterr().err


def test_interrupt_ends_with_the_text_so_far(monkeypatch, capfd, pair):
    def interrupting(*arguments, **options):
        for n, response in enumerate(real(*arguments, **options)):
            if n == 5:
                raise KeyboardInterrupt
            yield response

    real = mlx_dflash.api.stream_generate
    monkeypatch.setattr("mlx_dflash.api.stream_generate", interrupting)
    assert run(monkeypatch, generate, *pair, "-p", "hi", "--stats", "-m", 20) == 130
    out, err = capfd.readouterr()
    assert out.strip() and "interrupted" in err and "acceptance length" in err


def test_trace_moments_are_consistent(monkeypatch, capfd, pair):
    assert run(monkeypatch, trace.main, *pair, "-p", "hi", "--rounds", 5, "--json") == 0
    moments = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [m["number"] for m in moments] == list(range(6))
    for before, after in zip(moments, moments[1:]):
        assert after["block"][0] == before["next_token"]
        assert after["block_start"] == before["target_covers"]
        assert after["confirmed"] == before["confirmed"] + after["kept"] + 1
    assert all(m["target_covers"] == m["context_covers"] == m["confirmed"] - 1 for m in moments)


def test_trace_tells_of_the_prefill_and_of_every_round(monkeypatch, capfd, pair):
    assert run(monkeypatch, trace.main, *pair, "-p", "hi", "--rounds", 2) == 0
    out = capfd.readouterr().out
    assert out.startswith("prefill: the target reads 20 prompt tokens")
    assert out.count("MASK") == 2 * 5 and out.count("target KV covers") == 3


@pytest.mark.parametrize(
    "flags, says",
    [
        (("--block-size", 4, "--num-draft-tokens", 3), "not both"),
        (("--block-size", 7), "block_size must be 1 to 6"),
        (("--num-draft-tokens", 6), "block_size must be 1 to 6"),
        (("--draft-model", "none"), "a trace needs a draft"),
        (("--rounds", 0), "--rounds must be at least 1"),
    ],
)
def test_trace_refuses_what_it_cannot_show(monkeypatch, capfd, pair, flags, says):
    assert run(monkeypatch, trace.main, *pair, *flags) == 2
    out, err = capfd.readouterr()
    assert says in err and err.count("\n") == 1 and not out


def block_size_help(monkeypatch, capfd, main):
    """The help of --block-size, on one line."""
    assert run(monkeypatch, main, "--help") == 0
    words = " ".join(capfd.readouterr().out.split())
    return words[words.rindex("--block-size N") : words.rindex("--num-draft-tokens")]


@pytest.mark.parametrize("flags, rows", [((), {6}), (("--block-size", 4), {4}), (("--num-draft-tokens", 2), {3})])
def test_trace_shows_blocks_of_the_size_that_its_help_names(monkeypatch, capfd, pair, flags, rows):
    assert "(default: the block that the draft was trained with)" in block_size_help(monkeypatch, capfd, trace.main)
    assert run(monkeypatch, trace.main, *pair, "-p", "hi", "--rounds", 3, "--json", *flags) == 0
    moments = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert {len(moment["block"]) for moment in moments[1:]} == rows


def test_generate_chooses_the_block_size_as_its_help_says(monkeypatch, capfd, pair):
    assert "(default: auto)" in block_size_help(monkeypatch, capfd, generate)
    asked = []
    real = mlx_dflash.api.stream_generate

    def watched(*arguments, **options):
        asked.append(options["block_size"])
        return real(*arguments, **options)

    monkeypatch.setattr("mlx_dflash.api.stream_generate", watched)
    assert run(monkeypatch, generate, *pair, "-p", "hi", "-m", 2) == 0
    assert asked == ["auto"]


@pytest.mark.parametrize("module", ["mlx_dflash", "mlx_dflash.generate", "mlx_dflash.trace"])
def test_help_is_shown_without_a_word_on_stderr(module):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "usage" in done.stdout and not done.stderr


def test_unknown_command_is_named():
    done = subprocess.run([sys.executable, "-m", "mlx_dflash", "dance"], capture_output=True, text=True)
    assert done.returncode == 1 and "no command 'dance'" in done.stderr


def test_generate_is_a_function_also_after_its_module_was_imported():
    code = (
        "import mlx_dflash.generate; assert callable(mlx_dflash.generate)\n"
        "from mlx_dflash import generate; assert callable(generate)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_token_has_no_rate():
    from types import SimpleNamespace

    from mlx_dflash.api import report

    told = dict(prompt_tokens=5, prompt_tps=10.0, generation_tps=5633.0, peak_memory=0.1)
    assert "5633" not in report(SimpleNamespace(generation_tokens=1, **told))
    assert "2 tokens, 5633.0 tokens-per-sec" in report(SimpleNamespace(generation_tokens=2, **told))


@pytest.mark.parametrize("command", ["generate", "trace"])
def test_a_prompt_that_the_context_cannot_hold_is_refused_before_it_is_read(command, tmp_path, monkeypatch, capfd):
    import importlib

    from support.chat_fixtures import save_pair

    target, draft = save_pair(tmp_path)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 60}))
    module = importlib.import_module("mlx_dflash.generate" if command == "generate" else "mlx_dflash.trace.__main__")

    def run(prompt):
        flags = ["--model", str(target), "--draft-model", str(draft), "-p", prompt, "-m", "40"]
        monkeypatch.setattr("sys.argv", [command, *flags])
        module.main()
        return capfd.readouterr().err

    with pytest.raises(SystemExit, match="2"):
        run("x" * 100)
    out, err = capfd.readouterr()
    assert re.fullmatch(r"error: the prompt has 1\d\d tokens; the model's context has 60\n", err) and not out
    told = run("short")
    if command == "generate":
        assert re.search(r"note: the prompt has \d+ tokens and --max-tokens is 40; the model's context has 60", told)
