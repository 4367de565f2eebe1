"""Training from the command line on a tiny target: data, fit; what a killed run loses; bad files."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.targets import plain_tokens
from support.training import WORDS, data, fit, fit_arguments, losses

from mlx_dflash import load, load_draft, stream_generate
from mlx_dflash.models.structure import Structure
from mlx_dflash.train import lessons as features
from mlx_dflash.train.__main__ import main
from mlx_dflash.train.lessons import LessonStore, Teacher
from mlx_dflash.train.replay import replay
from mlx_dflash.train.text.corpus import FORMAT, CorpusWriter, read_corpus
from mlx_dflash.train.trainer import Trainer

pytestmark = pytest.mark.process


def test_greedy_answers_are_the_targets_own_and_the_others_are_sampled(place):
    samples = list(read_corpus(place / "data.jsonl"))
    assert sorted(s.source for s in samples) == list(range(len(WORDS)))
    model, tokenizer = load(str(place / "target"))
    greedy = [s for s in samples if s.is_greedy]
    assert 0 < len(greedy) < len(samples)
    for sample in greedy:
        prompt = sample.tokens[: sample.prompt_length]
        assert prompt == tokenizer.encode(f"say {WORDS[sample.source]}")
        assert sample.tokens[sample.prompt_length :] == plain_tokens(model, prompt, 24)
    others = [s for s in samples if not s.is_greedy]
    assert any(s.tokens[s.prompt_length :] != plain_tokens(model, s.tokens[: s.prompt_length], 24) for s in others)


def test_data_goes_on_where_it_was_cut_off(place, capsys):
    whole = (place / "data.jsonl").read_text().splitlines(keepends=True)
    (place / "part.jsonl").write_text("".join(whole[:4]) + whole[4][:17])
    data(place, out="part.jsonl")
    assert "3 samples were there already" in capsys.readouterr().out
    samples = list(read_corpus(place / "part.jsonl"))
    assert sorted(s.source for s in samples) == list(range(len(WORDS)))
    assert [s for s in samples if s.source == 0] == [s for s in read_corpus(place / "data.jsonl") if s.source == 0]


def test_data_refuses_to_mix_two_ways_of_answering(place, capsys):
    with pytest.raises(SystemExit):
        data(place, "--temp", "0.3")
    assert "temperature 0.7, now 0.3" in capsys.readouterr().err


def test_a_model_whose_caches_do_not_batch_is_asked_one_by_one(place, monkeypatch):
    from mlx_dflash.train import step_data

    monkeypatch.setattr(step_data, "can_batch", lambda model: False)
    data(place, "--sampled-share", "0", out="single.jsonl")
    model, _ = load(str(place / "target"))
    for sample in read_corpus(place / "single.jsonl"):
        prompt = sample.tokens[: sample.prompt_length]
        assert sample.tokens[sample.prompt_length :] == plain_tokens(model, prompt, 24)


def test_text_is_taken_as_it_is(place, tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    (source / "a.py").write_text("def f(x):\n    return x\n" * 3)
    (source / "b.bin").write_bytes(b"\xff\xfe\x00")
    main(
        [
            "data",
            "--model",
            str(place / "target"),
            "--text",
            str(source),
            "--out",
            str(tmp_path / "text.jsonl"),
            "--max-length",
            "40",
        ]
    )
    samples = list(read_corpus(tmp_path / "text.jsonl"))
    joined = "".join(bytes(s.tokens).decode() for s in samples)
    assert joined == (source / "a.py").read_text() and all(len(s.tokens) <= 40 for s in samples)


def test_fit_writes_drafts_that_load_and_keep_the_text(place, tmp_path, capsys):
    fit(place, tmp_path / "run")
    told = capsys.readouterr()
    assert "12 updates" in told.out and "blocks/s" in told.out and "from target layers 3" in told.err
    model, tokenizer = load(str(place / "target"))
    for name in ("best", "last"):
        draft = load_draft(str(tmp_path / "run" / name))
        assert draft.config.block_size == 4 and draft.dtype == mx.bfloat16
        tokens = [r.token for r in stream_generate(model, tokenizer, "say two", draft_model=draft, max_tokens=20)]
        assert tokens == plain_tokens(model, tokenizer.encode("say two"), 20)
    assert "| tap layers of the target | 1, 2, 3 |" in (tmp_path / "run" / "best" / "README.md").read_text()
    numbers = [loss for _, loss in losses(tmp_path / "run")]
    assert numbers[-1] < numbers[0], numbers


def test_text_of_another_target_is_told(place, tmp_path, capsys):
    header, rest = (place / "data.jsonl").read_text().split("\n", 1)
    for name, target in (("own", place / "target"), ("other", "somebody/else")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**json.loads(header), "target": str(target)}) + "\n" + rest)
        fit(place, tmp_path / name, data=tmp_path / f"{name}.jsonl", steps=1)
        assert ("made with somebody/else" in capsys.readouterr().err) == (name == "other")


def test_resumed_run_equals_the_run_that_was_not_stopped(place, tmp_path, monkeypatch):
    fit(place, tmp_path / "whole")
    step = Trainer.step

    def stopped(self, number, lessons):
        if number == 9:
            raise KeyboardInterrupt
        return step(self, number, lessons)

    monkeypatch.setattr(Trainer, "step", stopped)
    with pytest.raises(SystemExit):
        fit(place, tmp_path / "parts")
    monkeypatch.setattr(Trainer, "step", step)
    made = []
    monkeypatch.setattr(
        Trainer, "step", lambda self, number, lessons: (made.append(number), step(self, number, lessons))[1]
    )
    fit(place, tmp_path / "parts")
    assert made == [8, 9, 10, 11], f"made the updates {made} again; the last checkpoint was after 8"
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    one, other = (mx.load(str(tmp_path / run / "checkpoint" / "state.safetensors")) for run in ("whole", "parts"))
    assert one.keys() == other.keys()
    different = [name for name in one if not mx.array_equal(one[name], other[name]).item()]
    assert not different, different


def test_killed_run_loses_at_most_what_came_after_the_last_checkpoint(place, tmp_path):
    arguments = fit_arguments(place, tmp_path / "run", steps=4000, save_every=5, valid_every=4000)
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_dflash.train", *arguments], cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL
    )
    counters = tmp_path / "run" / "checkpoint" / "counters.json"

    def saved():
        try:
            return json.loads(counters.read_text())["step"]
        except FileNotFoundError:  # none yet, or just being replaced
            return 0

    try:
        until = time.time() + 120
        while saved() < 10:
            assert process.poll() is None and time.time() < until, "no checkpoint"
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    logged = [
        line["step"]
        for line in map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines())
        if "loss" in line
    ]
    from mlx_dflash.train.folder import RunFolder

    run = RunFolder(tmp_path / "run", json.loads((tmp_path / "run" / "run.json").read_text()))
    _, found = run.load()
    run.forget_after(found["step"])
    assert found["step"] >= 10 and found["step"] >= logged[-1] - 5, f"{found} after {logged[-1]} updates were logged"
    assert all(line["step"] <= found["step"] for line in run.log())


def test_overfitting_one_text_reaches_full_acceptance(place, tmp_path, capsys):
    text = tmp_path / "one.jsonl"
    writer = CorpusWriter(text, {"target": "tiny", "vocab_size": 258})
    (sample, *_) = (s for s in read_corpus(place / "data.jsonl") if s.is_greedy)
    writer.append(sample)
    writer.close()
    fit(
        place,
        tmp_path / "run",
        data=text,
        valid_count=0,
        steps=150,
        valid_every=150,
        save_every=150,
        batch_size=1,
        anchors=32,
        learning_rate=0.003,
        soft=0,
        save_dtype="float32",
    )
    model, tokenizer = load(str(place / "target"))
    draft = load_draft(str(tmp_path / "run" / "last"))
    responses = list(
        stream_generate(model, tokenizer, sample.tokens[: sample.prompt_length], draft_model=draft, max_tokens=24)
    )
    assert [r.token for r in responses] == sample.tokens[sample.prompt_length :]
    stats = responses[-1].stats
    assert stats.num_accepted == stats.num_drafted, f"{stats.num_accepted} of {stats.num_drafted} drafts kept"


def test_replayed_rounds_are_those_of_a_session(place, tmp_path):
    fit(
        place,
        tmp_path / "run",
        save_dtype="float32",
        steps=120,
        valid_every=120,
        save_every=120,
        valid_count=0,
        learning_rate=0.003,
        soft=0,
        anchors=32,
    )
    model, tokenizer = load(str(place / "target"))
    draft = load_draft(str(tmp_path / "run" / "last"))
    structure = Structure(model)
    teacher = Teacher(model, structure, draft.config.target_layer_ids)
    kept = 0
    for sample in [s for s in read_corpus(place / "data.jsonl") if s.is_greedy]:
        lesson = teacher.lesson(sample)
        replayed = replay(draft, structure, [lesson], 24)
        *_, last = stream_generate(
            model, tokenizer, sample.tokens[: sample.prompt_length], draft_model=draft, max_tokens=24
        )
        assert (replayed.accepted, replayed.num_drafted) == (last.stats.accepted, last.stats.num_drafted)
        kept += replayed.num_accepted
    assert kept > 20, f"{kept} drafts kept, too few to tell the two apart"


def test_reduced_head_learns_and_drafts_its_own_tokens_only(place, tmp_path):
    fit(place, tmp_path / "run", draft_vocab=100)
    draft = load_draft(str(tmp_path / "run" / "last"))
    assert draft.config.draft_vocab_size == 100
    counts = np.zeros(258)
    for sample in read_corpus(place / "data.jsonl"):
        np.add.at(counts, sample.tokens[sample.prompt_length :], 1)
    ids = set(draft.token_ids.tolist())
    # Held-out samples do not count, so only what is frequent beyond doubt must be there.
    assert set(np.argsort(-counts)[:20].tolist()) <= ids and {256, 257} <= ids
    model, tokenizer = load(str(place / "target"))
    tokens = [r.token for r in stream_generate(model, tokenizer, "say two", draft_model=draft, max_tokens=20)]
    assert tokens == plain_tokens(model, tokenizer.encode("say two"), 20)


def test_fit_goes_on_with_a_given_draft(place, tmp_path):
    fit(place, tmp_path / "first", save_dtype="float32")
    fit(place, tmp_path / "more", init_draft=tmp_path / "first" / "last", size=None, steps=8, draft_vocab=None)
    start = losses(tmp_path / "more")[0][1]
    assert start < losses(tmp_path / "first")[0][1], "the second run starts where a new draft would"


def test_lessons_made_anew_teach_the_same_as_lessons_on_disk(place, tmp_path):
    fit(place, tmp_path / "disk")
    fit(place, tmp_path / "fresh", features="recompute", feature_dtype=None)
    assert np.allclose([x for _, x in losses(tmp_path / "disk")], [x for _, x in losses(tmp_path / "fresh")], atol=1e-6)


def test_checkpointed_gradients_and_a_smaller_loss_vocabulary_train_too(place, tmp_path):
    main(
        [
            *fit_arguments(place, tmp_path / "run", loss_vocab=120, block_size=5),
            "--grad-checkpoint",
            "--block-sizes",
            "5",
            "3",
        ]
    )
    numbers = [loss for _, loss in losses(tmp_path / "run")]
    assert numbers[-1] < numbers[0], numbers


def test_interrupted_lessons_are_completed(place, tmp_path):
    model, _ = load(str(place / "target"))
    teacher = Teacher(model, Structure(model), [0, 2])
    samples = list(read_corpus(place / "data.jsonl"))
    store = LessonStore(tmp_path / "s", samples, mx.bfloat16, teacher.width, {"text": "x"})
    calls = []

    def stop(done):
        calls.append(done)
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.fill(teacher, stop)
    with (tmp_path / "s" / "features.bin").open("ab") as file:
        file.write(b"12345")  # half a row
    again = LessonStore(tmp_path / "s", samples, mx.bfloat16, teacher.width, {"text": "x"})
    again.fill(teacher, calls.append)
    assert calls == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 10]
    for i in (0, 4, 9):
        read, made = again.lesson(i), teacher.lesson(samples[i])
        assert mx.array_equal(read.features, made.features.astype(mx.bfloat16)).item()
        assert read.tokens.tolist() == samples[i].tokens
        order = [np.argsort(np.array(x.top_ids), axis=1) for x in (read, made)]
        assert np.array_equal(*(np.take_along_axis(np.array(x.top_ids), o, 1) for x, o in zip((read, made), order)))
    with pytest.raises(ValueError, match="holds lessons of"):
        LessonStore(tmp_path / "s", samples, mx.bfloat16, teacher.width, {"text": "y"})


def test_lessons_hold_what_the_target_says_after_each_row_however_long_the_text(place, monkeypatch):
    model, _ = load(str(place / "target"))
    teacher = Teacher(model, Structure(model), [0, 2])
    sample = next(s for s in read_corpus(place / "data.jsonl") if s.is_greedy)
    whole = teacher.lesson(sample)
    monkeypatch.setattr(features, "_STEP", 7)
    parts = teacher.lesson(sample)
    logits = np.array(model(mx.array([sample.tokens]))[0])
    for lesson in (whole, parts):
        said = np.take_along_axis(np.array(lesson.top_ids), np.array(lesson.top_logits).argmax(1)[:, None], 1)[:, 0]
        assert said[sample.prompt_length - 1 : -1].tolist() == sample.tokens[sample.prompt_length :]
        known = np.take_along_axis(logits, np.array(lesson.top_ids), 1)
        assert np.abs(known - np.array(lesson.top_logits)).max() <= 1e-4
    assert mx.abs(whole.features - parts.features).max().item() <= 1e-4


def test_top_tokens_are_the_greatest_logits():
    from mlx_dflash.train.lessons import _greatest

    for vocab_size in (97, 2048, 5000):
        logits = np.random.default_rng(0).standard_normal((7, vocab_size)).astype(np.float32)
        ids, values = _greatest(mx.array(logits))
        assert np.array_equal(np.sort(np.array(ids)), np.sort(np.argsort(-logits)[:, :8])), vocab_size
        assert np.array_equal(np.array(values), np.take_along_axis(logits, np.array(ids), 1))


HEADER = json.dumps({"format": FORMAT, "vocab_size": 258})


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"tokens": [1]}\n', "line 1 must say"),
        (
            HEADER + '\n{"tokens": [1, 2], "prompt_length": 1}\n{"tokens": [1, 300], "prompt_length": 1}\n',
            "line 3: tokens reach from 1 to 300",
        ),
        (HEADER + '\n{"tokens": [1, 2], "prompt_length": 3}\n', "line 2: prompt_length must be 1 to 2"),
        (HEADER + '\n{"tokens": "ab", "prompt_length": 1}\n', "line 2: tokens must be a list"),
        (HEADER + '\n{"tokens": [1, 2], "prompt_length": 1, "colour": 3}\n', "line 2: .*colour"),
        (HEADER + "\n[1, 2]\n", "line 2: expected an object"),
        (HEADER + "\n{oops\n", "line 2"),
    ],
)
def test_bad_training_text_is_refused_by_line(place, tmp_path, capsys, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit):
        fit(place, tmp_path / "run", data=path)
    import re

    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": 3}', "line 2: prompt must be text"),
        ('{"question": "x"}', "line 2: expected one of prompt, messages, text"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 2: the last message must be the user's"),
        ('{"prompt": "x", "class": 4}', "line 2: class must be text"),
        ("nonsense", "line 2"),
    ],
)
def test_bad_prompts_are_refused_by_line(place, tmp_path, capsys, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(SystemExit):
        main(["data", "--model", str(place / "target"), "--prompts", str(path), "--out", str(tmp_path / "x.jsonl")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"size": "small"}, "cannot be tapped 5 times"),
        ({"draft_vocab": 1}, "reduced vocabulary must have"),
        ({"steps": 1, "visits": 2}, "not allowed with argument --steps"),
        ({"block_size": 1}, "block_size"),
        ({"init_draft": "demo"}, "give one of them"),
        ({"features": "recompute"}, "--feature-dtype is of the features on disk"),
    ],
)
def test_senseless_requests_are_refused_before_any_work(place, tmp_path, capsys, changes, message):
    with pytest.raises(SystemExit):
        fit(place, tmp_path / "run", **changes)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "lessons").exists()


def test_another_recipe_is_refused_in_a_folder_that_was_begun(place, tmp_path, capsys):
    fit(place, tmp_path / "run", steps=2)
    with pytest.raises(SystemExit):
        fit(place, tmp_path / "run", steps=2, learning_rate=0.1)
    assert "learning_rate" in capsys.readouterr().err


def test_two_machines_share_the_work(place, tmp_path):
    launch = Path(sys.executable).with_name("mlx.launch")
    if not launch.exists():
        pytest.skip("mlx.launch is not installed")
    # Of nine samples, one machine has five and the other four.
    arguments = fit_arguments(place, tmp_path / "run", steps=None, visits=1, batch_size=1, valid_count=1, save_every=2)
    command = [launch, "-n", "2", "--backend", "ring", "--", sys.executable, "-m", "mlx_dflash.train", *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "9 samples" in done.stderr and "of 4 done" in done.stderr and "on 2 machines" in done.stderr
    shares = [json.loads((tmp_path / "run" / f"lessons-{i}" / "learned" / "about.json").read_text()) for i in (0, 1)]
    assert [share["samples"] for share in shares] == [5, 4] and shares[0]["text"] != shares[1]["text"]
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {"lessons-0", "lessons-1", "checkpoint", "best", "last"}
