"""The picture of a benchmark: written for every shape of report, as the ending of the name says."""

import pytest

pytest.importorskip("matplotlib")
import mlx_dflash.train.__main__ as train
from mlx_dflash.benchmark import __main__ as benchmark
from mlx_dflash.benchmark.figure import plot
from mlx_dflash.checkpoints import targets

SETUP = {"model": "m", "prompts": 2, "repeat": 1, "temp": 0.0, "device": "cpu", "mlx": "0.32"}
DRAFTED = {"runs": 2, "tokens_per_second": 9.0, "acceptance_length": 2.0, "histogram": [3, 0, 1]}
COMPARED = {**DRAFTED, "speedup_wall": [1.5, 1.2, 1.7]}
PLAIN = {"runs": 2, "tokens_per_second": 6.0}


@pytest.mark.parametrize(
    "groups",
    [
        {"code": {"block 8": DRAFTED}},
        {name: {"block 4": COMPARED, "block 8": COMPARED, "mlx-lm": PLAIN} for name in "abcdefg"},
        {"context 100": {"block 8": COMPARED, "mlx-lm": PLAIN}, "context 2000": {"block 8": COMPARED, "mlx-lm": PLAIN}},
        {"code": {"mlx-lm": PLAIN}, "empty": {"mlx-lm": {"runs": 0}}},
    ],
    ids=["one arm", "many", "sweep", "plain"],
)
@pytest.mark.parametrize("ending, begins", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_picture_of_a_report(tmp_path, groups, ending, begins):
    file = tmp_path / f"out.{ending}"
    plot({"setup": SETUP, "groups": groups, "all": next(iter(groups.values()))}, str(file), "mlx-lm")
    assert file.read_bytes().startswith(begins)
    if ending == "svg":
        assert file.read_text().count('id="axes_') == 3


@pytest.mark.parametrize(
    "name, told", [("out.xyz", "got xyz"), ("out", "got none"), ("nowhere/out.png", "there is no folder")]
)
@pytest.mark.parametrize(
    "command", [benchmark.main, lambda args: train.main(["eval", "--model", "demo", "--draft-model", "demo", *args])]
)
def test_a_picture_that_cannot_be_written_is_refused_before_any_work(
    tmp_path, name, told, command, monkeypatch, capsys
):
    monkeypatch.setattr(targets, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setattr(benchmark, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as stop:
        command(["--plot", str(tmp_path / name)])
    assert told in f"{stop.value}{capsys.readouterr().err}"
