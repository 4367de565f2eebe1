"""The picture of a benchmark: written for every shape of report, as the ending of the name says."""

import matplotlib.figure
import pytest

from mlx_dflash import pair
from mlx_dflash.benchmark import __main__ as benchmark
from mlx_dflash.benchmark.figure import plot
from mlx_dflash.benchmark.report import ArmResult, Report, Rounds, Spread

SETUP = {"model": "m", "prompts": 2, "repeat": 1, "temp": 0.0, "device": "cpu", "mlx": "0.32"}


def result(tokens_per_second, histogram=None, speedup=None):
    rounds = Rounds(2.0, histogram, 0.5, [], 1.0, 1.0, 1.0) if histogram else None
    some = Spread(1.0, 1.0, 1.0)
    return ArmResult(2, 8, 1.0, some, some, tokens_per_second, 0.1, rounds, speedup_wall=speedup)


DRAFTED = result(9.0, [3, 0, 1])
COMPARED = result(9.0, [3, 0, 1], Spread(1.5, 1.2, 1.7))
PLAIN = result(6.0)


def draw(file, groups):
    plot(Report(SETUP, groups, next(iter(groups.values()))), str(file))


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn."""
    drawn, savefig = [], matplotlib.figure.Figure.savefig

    def save(figure, *arguments, **options):
        drawn.append(figure)
        savefig(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", save)
    return drawn


@pytest.mark.parametrize(
    "groups",
    [
        {"code": {"block 8": DRAFTED}},
        {name: {"block 4": COMPARED, "block 8": COMPARED, "mlx-lm": PLAIN} for name in "abcdefg"},
        {"context 100": {"block 8": COMPARED, "mlx-lm": PLAIN}, "context 2000": {"block 8": COMPARED, "mlx-lm": PLAIN}},
        {"code": {"mlx-lm": PLAIN}, "empty": {"mlx-lm": None}},
        {"empty": {"block 8": None}},
    ],
    ids=["one arm", "many", "sweep", "plain", "nothing"],
)
@pytest.mark.parametrize("ending, begins", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_picture_of_a_report(tmp_path, figures, groups, ending, begins):
    file = tmp_path / f"out.{ending}"
    draw(file, groups)
    assert file.read_bytes().startswith(begins)
    if ending == "svg":
        assert file.read_text().count('id="axes_') == 3
    (figure,) = figures
    for axes in figure.axes:
        assert axes.get_title() and axes.get_xlabel() and axes.get_ylabel(), axes.get_title()


def test_rounds_that_kept_nothing_have_an_axis_of_whole_numbers(tmp_path, figures):
    draw(tmp_path / "out.png", {"code": {"block 8": result(9.0, [5])}})
    kept = figures[0].axes[1]
    left, right = kept.get_xlim()
    assert [tick for tick in kept.get_xticks() if left <= tick <= right] == [0, 1]
    assert max(kept.get_yticks()) == 100, "percent"
    (bar,) = kept.patches
    assert bar.get_height() == 100 and bar.get_x() + bar.get_width() / 2 == pytest.approx(0)


@pytest.mark.parametrize(
    "name, told",
    [
        ("out.xyz", "got xyz"),
        ("out", "got none"),
        ("nowhere/out.png", "there is no folder"),
        ("folder.png", "folder.png cannot be written: Is a directory"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_any_work(tmp_path, name, told, monkeypatch, capsys):
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr(pair, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["--plot", str(tmp_path / name)])
    assert stop.value.code == 2 and told in capsys.readouterr().err


def test_what_is_refused_later_leaves_no_empty_picture(tmp_path, capsys):
    old, new = tmp_path / "old.png", tmp_path / "new.png"
    old.write_text("a picture")
    for file in (old, new):
        with pytest.raises(SystemExit):
            benchmark.main(["--model", str(tmp_path / "unknown"), "--plot", str(file)])
    assert "there is no folder" in capsys.readouterr().err
    assert old.read_text() == "a picture" and not new.exists()
