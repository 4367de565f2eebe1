"""Draw a benchmark's report: tokens a second, what rounds kept, and how the gain depends on the text or the context.

Knows the report and matplotlib only.
"""

from pathlib import Path
from typing import Any

from .measure import PLAIN
from .report import Report, Results

_COLOURS = ("#1b7f79", "#c96a00", "#3b6fb6", "#7a4fb5", "#2a8c50")
_PLAIN_COLOUR = "#8c959f"
_MANY = 5  # groups; their names need to be turned
_CONTEXT = "context "  # begins the name of a group of prompts of one length


def check_plot(file_name: str) -> None:
    """Raise ValueError for a picture that plot could not write: no matplotlib, an unknown format, no such folder."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError as error:
        raise ValueError("--plot needs matplotlib: pip install 'mlx-dflash[plot]'") from error
    path = Path(file_name)
    known, ending = sorted(FigureCanvasBase.get_supported_filetypes()), path.suffix[1:].lower()
    if ending not in known:
        raise ValueError(f"--plot {file_name}: the ending must be one of {', '.join(known)}, got {ending or 'none'}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {file_name}: there is no folder {path.parent}")
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"--plot {file_name} cannot be written: {error.strerror}") from error
    if is_new:
        path.unlink()


def plot(report: Report, file_name: str) -> None:
    """Write the picture of a report; the ending of the file's name says its format."""
    from matplotlib.figure import Figure

    arms = [name for name, result in report.everything.items() if result]
    colours = dict(zip((arm for arm in arms if arm != PLAIN), _COLOURS * len(arms))) | {PLAIN: _PLAIN_COLOUR}
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    speed, kept, gain = figure.subplots(1, 3, width_ratios=[1.5, 1, 1.2])
    _speeds(speed, report.groups, arms, colours)
    _kept_drafts(kept, report.everything, colours)
    _gains(gain, report.groups, arms, colours)
    for axes in (speed, kept, gain):
        axes.spines[["top", "right"]].set_visible(False)
    told = report.setup
    name = told.get("model") or f"constructed pair {told.get('constructed')}"
    figure.suptitle(
        f"{name}: {told['prompts']} prompts x {told['repeat']}, temperature {told['temp']}, {told['device']}, "
        f"mlx {told['mlx']}",
        fontsize=11,
    )
    figure.savefig(file_name, dpi=120)


def _speeds(axes: Any, groups: dict[str, Results], arms: list[str], colours: dict[str, str]) -> None:
    """Draw bars of tokens a second, by group and arm."""
    width = 0.8 / max(1, len(arms))
    for i, arm in enumerate(arms):
        found = [results.get(arm) for results in groups.values()]
        values = [result.tokens_per_second if result else 0 for result in found]
        places = [x + (i - (len(arms) - 1) / 2) * width for x in range(len(groups))]
        bars = axes.bar(places, values, width * 0.94, label=arm, color=colours[arm])
        if len(groups) * len(arms) <= 20:
            axes.bar_label(bars, fmt="%.3g", fontsize=8, padding=1)
    _name_groups(axes, groups)
    axes.set_title("speed of generation", fontsize=10)
    axes.set_ylabel("tokens a second", fontsize=9)
    axes.margins(y=0.18)
    if arms:
        axes.legend(fontsize=8, frameon=False, ncols=min(3, len(arms)), loc="upper left")


def _kept_drafts(axes: Any, everything: Results, colours: dict[str, str]) -> None:
    """Draw the share of the rounds by the number of drafts that they kept."""
    rounds = {arm: result.rounds for arm, result in everything.items() if result and result.rounds}
    width = 0.8 / max(1, len(rounds))
    for i, (arm, kept) in enumerate(rounds.items()):
        places = [n + (i - (len(rounds) - 1) / 2) * width for n in range(len(kept.histogram))]
        shares = [100 * count / sum(kept.histogram) for count in kept.histogram]
        label = f"{arm}: {kept.acceptance_length:.2f} tokens a round"
        axes.bar(places, shares, width * 0.94, color=colours[arm], label=label)
    axes.set_title("what rounds keep", fontsize=10)
    axes.set_xlabel("number of drafts kept", fontsize=9)
    axes.set_ylabel("% of the rounds", fontsize=9)
    # At least the places of no draft and of one, so that the numbers on the axis are whole ones.
    most = max([1, *(len(kept.histogram) - 1 for kept in rounds.values())])
    axes.set_xlim(-0.6, most + 0.6)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if rounds:
        axes.margins(y=0.06 * (3 + len(rounds)))  # room for the legend
        axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 100])
        axes.legend(fontsize=8, frameon=False, loc="upper right")
    else:
        _say(axes, "no arm had drafts")


def _gains(axes: Any, groups: dict[str, Results], arms: list[str], colours: dict[str, str]) -> None:
    """Draw how many times as fast as plain mlx-lm each arm is, against the context or else by group."""
    is_sweep = all(name.startswith(_CONTEXT) for name in groups)
    places = [int(name.removeprefix(_CONTEXT)) if is_sweep else i for i, name in enumerate(groups)]
    for i, arm in enumerate(arms):
        shift = 0 if is_sweep else 0.12 * (i - (len(arms) - 2) / 2)
        found = [(place + shift, results.get(arm)) for place, results in zip(places, groups.values())]
        points = [(place, result.speedup_wall) for place, result in found if result and result.speedup_wall]
        if points:
            axes.errorbar(
                [place for place, _ in points],
                [ratio.middle for _, ratio in points],
                [[ratio.middle - ratio.low for _, ratio in points], [ratio.high - ratio.middle for _, ratio in points]],
                fmt="o-" if is_sweep else "o",
                capsize=3,
                color=colours[arm],
            )
    axes.set_title(f"gain over {PLAIN}: median and quartiles", fontsize=10)
    axes.set_ylabel(f"times as fast as {PLAIN}", fontsize=9)
    if axes.containers:
        axes.axhline(1, color=_PLAIN_COLOUR, linewidth=1, linestyle="--")
    else:
        _say(axes, "--compare measures this")
    if is_sweep:
        axes.set_xlabel("prompt tokens", fontsize=9)
    else:
        _name_groups(axes, groups)
        axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set_ylim(bottom=0)


def _name_groups(axes: Any, groups: dict[str, Results]) -> None:
    is_many = len(groups) >= _MANY
    axes.set_xticks(range(len(groups)), groups, rotation=30 if is_many else 0, ha="right" if is_many else "center")
    axes.set_xlabel("prompts", fontsize=9)


def _say(axes: Any, text: str) -> None:
    """Write in the middle of axes that have nothing to show, and take their numbers away."""
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=_PLAIN_COLOUR)
    axes.set_yticks([])
