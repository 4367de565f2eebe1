"""Training from Python: the options with their checks, and runs that the command line began."""

import json
from dataclasses import replace

import pytest
from support.training import fit as fit_by_command

from mlx_dflash.train import FitOptions, fit

# What run.json of a run without any option held when options were still the flags themselves.
DEFAULTS = {
    "model": "t", "data": ["d.jsonl"], "valid_data": None, "valid_count": 16, "valid_tokens": 128, "max_length": 2048,
    "feature_dtype": None, "init_draft": None, "size": None, "block_size": None, "draft_vocab": None, "steps": None,
    "visits": 6.0, "batch_size": 4, "anchors": 32, "block_sizes": None, "learning_rate": 6e-4, "warmup": None,
    "weight_decay": 0.01, "clip": 1.0, "decay": 3.0, "soft": 0.5, "loss_vocab": None, "dtype": "float32",
    "grad_checkpoint": False, "seed": 0,
}  # fmt: skip


def test_settings_are_those_that_earlier_runs_wrote():
    assert FitOptions(model="t", data=["./d.jsonl"], out="o").settings() == DEFAULTS
    assert (
        json.dumps(FitOptions(model="t", data=("d",), out="o", block_sizes=(4, 8)).settings()["block_sizes"])
        == "[4, 8]"
    )


def test_a_run_of_the_command_line_is_continued_from_python(place, tmp_path):
    fit_by_command(place, tmp_path / "run", steps=4)
    begun = json.loads((tmp_path / "run" / "run.json").read_text())
    options = FitOptions(
        model=str(place / "target"), data=[place / "data.jsonl"], out=tmp_path / "run", size="tiny", block_size=4,
        steps=4, warmup=3, save_every=4, valid_every=6, valid_count=2, anchors=8, batch_size=2, feature_dtype="float32",
    )  # fmt: skip
    assert fit(options) == [tmp_path / "run" / "best", tmp_path / "run" / "last"]
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == begun


def test_a_refused_fit_leaves_the_folder_to_others(place, tmp_path):
    asked = FitOptions(
        model=str(place / "target"), data=[place / "data.jsonl"], out=tmp_path / "run", size="tiny", block_size=4,
        steps=1, valid_count=0, anchors=2, batch_size=1,
    )  # fmt: skip
    fit(asked)
    # The error, which is kept here, holds on to what it has seen.
    with pytest.raises(ValueError, match="learning_rate 0.0006, now 0.1") as refused:
        fit(replace(asked, learning_rate=0.1))
    assert fit(asked) == [tmp_path / "run" / "last"], refused


def test_no_samples_an_update_is_refused_by_its_name():
    with pytest.raises(ValueError, match="batch_size must be 1 or more, got 0"):
        FitOptions(model="t", data=["d"], out="o", batch_size=0).recipe(9, 1)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data": "d.jsonl"}, "data must be a list of files, got 'd.jsonl'"),
        ({"visits": 0}, "--visits must be above 0, got 0"),
        ({"valid_tokens": 1}, "--valid-tokens must be 2 or more, got 1"),
        ({"features": "recompute", "feature_dtype": "float16"}, "there are none"),
        ({"soft": 2}, "0 to 1, got 2"),
        ({"size": "huge"}, "--size must be one of tiny, small, base, large; got 'huge'"),
        ({"dtype": "float16"}, "--dtype must be one of float32, bfloat16; got 'float16'"),
        ({"init_draft": "demo", "size": "tiny"}, "give one of them"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        FitOptions(**{"model": "t", "data": ["d"], "out": "o"} | changes)
