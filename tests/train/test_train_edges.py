"""Training at its edges: what is refused and how, what an interruption leaves, what two processes may not do."""

import json
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from support import models
from support.byte_tokenizer import byte_tokenizer
from support.targets import build_target, plain_tokens, target_config, tiny_target
from support.training import fit

from mlx_dflash.checkpoints.vocabulary import frequent
from mlx_dflash.commands.prompt_files import Prompt, read_prompts, read_texts
from mlx_dflash.models.structure import Structure
from mlx_dflash.train import fitting as fit_module
from mlx_dflash.train.__main__ import main
from mlx_dflash.train.files import open_alone
from mlx_dflash.train.new_draft import SIZES, draft_config, unused_token
from mlx_dflash.train.samples import order_of_visit, read_material
from mlx_dflash.train.text.answers import Style, batched_answers, can_batch
from mlx_dflash.train.text.corpus import FORMAT, CorpusWriter, Sample, read_corpus
from mlx_dflash.train.trainer import Trainer


def refused(capsys, *arguments):
    """The one line on stderr with which a command ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert ended.value.code == 2 and len(lines) == 1, (ended.value.code, lines)
    return lines[0]


def fit_refused(capsys, *arguments, **changes):
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        fit(*arguments, **changes)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


# Writing training text.


def test_a_file_of_something_else_is_left_as_it_is(place, tmp_path, capsys):
    path = tmp_path / "letter.txt"
    path.write_text("Dear all,\nyours")
    message = refused(capsys, "data", "--model", place / "target", "--prompts", place / "prompts.txt", "--out", path)
    assert "no training text" in message and path.read_text() == "Dear all,\nyours"


def test_a_file_is_begun_anew_if_its_header_was_cut_off(tmp_path):
    path = tmp_path / "data.jsonl"
    CorpusWriter(path, {"vocab_size": 9}).close()
    whole = path.read_text()
    path.write_text(whole[:20])
    CorpusWriter(path, {"vocab_size": 9}).close()
    assert path.read_text() == whole


def test_answers_to_other_prompts_are_not_continued(place, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "data.jsonl"
    command = ["data", "--model", place / "target", "--prompts", prompts, "--out", out, "--max-tokens", 4]
    prompts.write_text("one\ntwo\n")
    main([str(word) for word in command])
    prompts.write_text("one\ntwo\nthree\n")
    main([str(word) for word in command])
    assert len(list(read_corpus(out))) == 3, "prompts at the end may be added"
    prompts.write_text("one\nzwei\nthree\n")
    assert "another prompt 2" in refused(capsys, *command)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--text", "prompts.txt", "--temp", "0.3"], "--temp cannot go with --text"),
        (["--text", "prompts.txt", "--draft-model", "x"], "--draft-model cannot go with --text"),
        (["--prompts", "prompts.txt", "--max-length", "9"], "--max-length cannot go with --prompts"),
        (["--own-prompts", "3", "--max-length", "9"], "--max-length cannot go with --own-prompts"),
        (["--own-prompts", "0"], "--own-prompts must be 1 or more"),
        (["--own-prompts", "2"], "no chat template"),
        (["--prompts", "prompts.txt", "--draft-model", "x"], "--draft-model is for targets whose caches do not batch"),
        (["--prompts", "prompts.txt", "--seed", "-1"], "--seed must be 0 or more"),
        (["--prompts", "."], "Is a directory"),
    ],
)
def test_options_that_would_do_nothing_are_refused(place, tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.chdir(place)
    assert message in refused(capsys, "data", "--model", "target", "--out", tmp_path / "data.jsonl", *flags)


def test_interrupted_data_ends_with_the_status_of_ctrl_c_and_is_continued(place, tmp_path, monkeypatch, capsys):
    out, append = tmp_path / "data.jsonl", CorpusWriter.append
    command = [
        "data",
        "--model",
        str(place / "target"),
        "--prompts",
        str(place / "prompts.txt"),
        "--out",
        str(out),
        "--max-tokens",
        "4",
    ]

    def stopped(self, sample):
        if len(self.sources) == 3:
            raise KeyboardInterrupt
        append(self, sample)

    monkeypatch.setattr(CorpusWriter, "append", stopped)
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 130 and "3 of 10 samples" in capsys.readouterr().out
    monkeypatch.setattr(CorpusWriter, "append", append)
    main(command)
    assert sorted(s.source for s in read_corpus(out)) == list(range(10))


def test_a_model_that_reads_padding_is_not_run_in_batches():
    assert can_batch(tiny_target())
    assert not can_batch(models.build("mamba"))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_no_more_prompts_than_asked_for_are_answered_at_a_time(batch_size):
    model, widths = tiny_target(vocab_size=258), []

    class Watched:
        layers = model.layers

        def __call__(self, tokens, **options):
            widths.append(tokens.shape[0])
            return model(tokens, **options)

    todo = [(i, Prompt([1, 2, 3 + i], 3)) for i in range(5)]
    answers = list(batched_answers(Watched(), byte_tokenizer(), todo, Style(4, sampled_share=0), batch_size))
    assert max(widths) == batch_size
    assert all(s.tokens[3:] == plain_tokens(model, s.tokens[:3], 4)[: len(s.tokens) - 3] for s in answers)


def test_which_prompts_are_answered_greedily_is_the_same_in_every_run():
    def chosen(seed):
        return [Style(seed=seed).is_greedy(i) for i in range(64)]

    assert chosen(1) == chosen(1) != chosen(2)


# Reading prompts and text.


def test_a_line_that_is_no_utf8_or_that_the_chat_template_refuses_is_named(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"fine\n\xff\n")
    with pytest.raises(ValueError, match="prompts.txt, line 2: .*utf-8"):
        read_prompts(path, byte_tokenizer())
    path.write_text("fine\n")
    with pytest.raises(ValueError, match="line 1: roles must alternate"):
        read_prompts(path, byte_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}"))


def test_files_that_are_no_text_are_told(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.bin").write_bytes(b"\xff")
    assert [p.ids for p in read_texts(tmp_path, byte_tokenizer(), 9)] == [list(b"text")]
    assert "1 of 2 files are no UTF-8 text" in capsys.readouterr().err


def test_a_given_answer_ends_as_the_tokenizer_ends_one(tmp_path):
    path, tokenizer = tmp_path / "a.jsonl", byte_tokenizer()
    path.write_text('{"prompt": "a", "response": "b"}\n')
    tokenizer.add_eos_token("3")
    assert read_texts(path, tokenizer, 9)[0].ids == [*b"ab", 257]


# What is learned and measured.


def write(path, texts, vocab_size=9):
    writer = CorpusWriter(path, {"vocab_size": vocab_size})
    for i, tokens in enumerate(texts):
        writer.append(Sample(tokens, 1, i, is_greedy=True))
    writer.close()
    return str(path)


def test_what_is_measured_is_not_learned(tmp_path):
    texts = [[1, i // 2, 3] for i in range(16)]  # each twice
    path = write(tmp_path / "a.jsonl", texts)
    found = read_material([path], None, 3, 99, 9)
    measured = [s.tokens for s in found.measured]
    assert measured == [texts[0], texts[5], texts[10]], "not evenly from the whole"
    assert not [s for s in found.learned if s.tokens in measured]
    assert (len(found.learned), found.num_left_out) == (10, 3)
    other = write(tmp_path / "b.jsonl", texts[:4])
    found = read_material([path], other, 9, 99, 9)
    assert (len(found.learned), len(found.measured), found.num_left_out) == (12, 4, 4)


def test_every_sample_comes_once_in_each_visit_in_another_order():
    order = [i for step in range(14) for i in order_of_visit(7, step, 3, seed=0)]
    visits = [order[start : start + 7] for start in range(0, 42, 7)]
    assert all(sorted(visit) == list(range(7)) for visit in visits) and len(set(map(tuple, visits))) > 1


def test_a_file_given_twice_or_only_to_be_measured_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [[1, 2, 3]] * 3)
    with pytest.raises(ValueError, match="names a file twice"):
        read_material([path, f"{tmp_path}/./a.jsonl"], None, 1, 99, 9)
    with pytest.raises(ValueError, match="not held out"):
        read_material([path], path, 3, 99, 9)


def test_a_header_without_vocabulary_is_refused(place, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"format": FORMAT}) + "\n")
    assert "line 1: vocab_size must be a number" in fit_refused(capsys, place, tmp_path / "run", data=path)


def test_the_mask_token_is_one_that_no_answer_holds_or_the_rarest():
    tokenizer = byte_tokenizer()
    counts = np.full(258, 5)
    counts[[7, 256]] = 3, 2
    assert unused_token(counts, tokenizer) == 256
    counts[7] = 1
    assert unused_token(counts, tokenizer) == 7
    counts[256] = 0
    assert unused_token(counts, tokenizer) == 256
    assert frequent(np.array([5, 1, 9, 0, 7]), 3, [3]).tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    "changes",
    [{"rope_theta": 5000000}, {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5000000}}],
)
def test_a_new_draft_turns_as_its_target_does(changes):
    model = build_target(target_config("qwen3", **changes))
    assert draft_config(Structure(model), model.args, SIZES["tiny"], 1)["rope_theta"] == 5e6
    wrapped = SimpleNamespace(text_config={"rope_parameters": {"rope_theta": 5000000}})
    assert draft_config(Structure(model), wrapped, SIZES["tiny"], 1)["rope_theta"] == 5e6


# Runs.


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"learning_rate": 0}, "learning_rate must be above 0"),
        ({"block_sizes": 9}, "blocks must have 2 to 4 tokens"),
        ({"steps": 0}, "steps must be 1 or more"),
        ({"block_size": 0}, "block_size = 0"),
        ({"draft_vocab": 0}, "reduced vocabulary must have"),
        ({"loss_vocab": 0}, "reduced vocabulary must have"),
        ({"valid_tokens": 1}, "--valid-tokens must be 2 or more"),
        ({"seed": -1}, "--seed must be 0 or more"),
        ({"steps": None, "visits": "nan"}, "--visits must be above 0"),
    ],
)
def test_a_refused_request_begins_no_folder(place, tmp_path, capsys, changes, message):
    assert message in fit_refused(capsys, place, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_a_draft_with_a_head_of_its_own_gets_no_reduced_one(place, tmp_path, capsys):
    from support.drafts import draft_config, draft_weights
    from support.folders import save_draft

    config = draft_config(dflash={"mask_token_id": 257}, vocab_size=258, has_lm_head=True)
    save_draft(tmp_path / "draft", config, draft_weights(config) | {"lm_head.weight": np.ones((258, 32), np.float32)})
    message = fit_refused(capsys, place, tmp_path / "run", init_draft=tmp_path / "draft", size=None, draft_vocab=99)
    assert "--draft-vocab needs a draft that borrows" in message


def test_two_processes_do_not_write_in_one_place(place, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with open_alone(tmp_path / "run" / "lock"), open_alone(tmp_path / "data.jsonl"):
        assert "written by another process" in fit_refused(capsys, place, tmp_path / "run")
        command = [
            "data",
            "--model",
            place / "target",
            "--prompts",
            place / "prompts.txt",
            "--out",
            tmp_path / "data.jsonl",
        ]
        assert "written by another process" in refused(capsys, *command)


def test_machines_that_do_not_share_the_checkpoint_are_told(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mx.distributed, "init", lambda: SimpleNamespace(rank=lambda: 0, size=lambda: 2))
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, group: x + 4)
    assert "all need the same folder" in fit_refused(capsys, place, tmp_path / "run")


def test_a_draft_that_was_just_being_replaced_is_brought_back(place, tmp_path):
    fit(place, tmp_path / "run", steps=2)
    (tmp_path / "run" / "best").rename(tmp_path / "run" / ".best.old")
    fit(place, tmp_path / "run", steps=2)
    assert (tmp_path / "run" / "best" / "config.json").exists()


def test_without_measurements_no_draft_is_called_the_best(place, tmp_path, capsys):
    fit(place, tmp_path / "run", steps=2, valid_count=0)
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {"last", "checkpoint"} and not (
        tmp_path / "run" / "best"
    ).exists()
    assert capsys.readouterr().out.splitlines()[-1] == f"drafts: {tmp_path / 'run' / 'last'}"


def test_a_full_disk_is_told_and_leaves_the_checkpoint(place, tmp_path, capsys, monkeypatch):
    save, files = mx.save_safetensors, []

    def full(path, *arguments, **options):
        files.append(path)
        if len(files) > 4:  # best, last, last and a checkpoint before
            raise RuntimeError("[write] Unable to write 8 bytes to file.")
        save(path, *arguments, **options)

    monkeypatch.setattr(mx, "save_safetensors", full)
    message = fit_refused(capsys, place, tmp_path / "run", valid_count=0, steps=8, valid_every=2, save_every=2)
    assert "cannot be written, is the disk full?" in message
    monkeypatch.setattr(mx, "save_safetensors", save)
    assert json.loads((tmp_path / "run" / "checkpoint" / "counters.json").read_text())["step"] == 2
    fit(place, tmp_path / "run", valid_count=0, steps=8, valid_every=2, save_every=2)


def test_speed_counts_the_blocks_that_were_there_and_not_the_time_of_measuring(place, tmp_path, monkeypatch):
    now, step, validate = [0.0], Trainer.step, fit_module.Fit._validate

    def later(seconds, call):
        def run(*arguments):
            now[0] += seconds
            return call(*arguments)

        return run

    monkeypatch.setattr(fit_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Trainer, "step", later(1.0, step))
    monkeypatch.setattr(fit_module.Fit, "_validate", later(100.0, validate))
    fit(place, tmp_path / "run", steps=6, anchors=99, valid_every=2, save_every=3)
    log = map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    lengths = {len(s.tokens) - s.prompt_length for s in read_corpus(place / "data.jsonl")}
    assert lengths == {24}, lengths
    assert [line["blocks_per_second"] for line in log if "loss" in line] == [46.0, 46.0]


def test_eval_points_to_the_benchmark(capsys):
    message = refused(capsys, "eval", "--model", "demo", "--draft-model", "demo", "--some-flag")
    assert "use python -m mlx_dflash.benchmark --model TARGET --prompts FILE --draft-model DRAFT" in message
