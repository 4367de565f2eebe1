"""Draws a benchmark's report: tokens a second, what rounds kept, and how the gain depends on the text or the context.

Knows the report and matplotlib only.
"""

from pathlib import Path
from typing import Any

_COLOURS = ("#1b7f79", "#c96a00", "#3b6fb6", "#7a4fb5", "#2a8c50")
_PLAIN_COLOUR = "#8c959f"


def check_plot(file_name: str) -> None:
    """Raise ValueError for a picture that plot could not write: no matplotlib, an unknown format, or no such folder."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError as error:
        raise ValueError("--plot needs matplotlib: pip install 'mlx-dflash[plot]'") from error
    known, ending = sorted(FigureCanvasBase.get_supported_filetypes()), Path(file_name).suffix[1:].lower()
    if ending not in known:
        raise ValueError(f"--plot {file_name}: the ending must be one of {', '.join(known)}, got {ending or 'none'}")
    if not Path(file_name).absolute().parent.is_dir():
        raise ValueError(f"--plot {file_name}: there is no folder {Path(file_name).parent}")


def plot(report: dict[str, Any], file_name: str, plain: str) -> None:
    """Write the picture; the ending of the name says its format. plain: the name of the arm without a draft."""
    from matplotlib.figure import Figure

    arms = [name for name, told in report["all"].items() if told["runs"]]
    colours = dict(zip((a for a in arms if a != plain), _COLOURS * len(arms))) | {plain: _PLAIN_COLOUR}
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    speed, kept, gain = figure.subplots(1, 3, width_ratios=[1.5, 1, 1.2])
    _speeds(speed, report["groups"], arms, colours)
    _kept_drafts(kept, report["all"], arms, colours)
    _gains(gain, report["groups"], arms, colours)
    for axes in (speed, kept, gain):
        axes.spines[["top", "right"]].set_visible(False)
    told = report["setup"]
    name = told.get("model") or f"constructed pair {told.get('constructed')}"
    figure.suptitle(
        f"{name}: {told['prompts']} prompts x {told['repeat']}, temperature {told['temp']}, {told['device']}, mlx {told['mlx']}",
        fontsize=11,
    )
    figure.savefig(file_name, dpi=120)


def _speeds(axes: Any, groups: dict, arms: list[str], colours: dict[str, str]) -> None:
    """Bars of tokens a second, by group and arm."""
    width = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        values = [told.get(arm, {}).get("tokens_per_second", 0) for told in groups.values()]
        places = [x + (i - (len(arms) - 1) / 2) * width for x in range(len(groups))]
        bars = axes.bar(places, values, width * 0.94, label=arm, color=colours[arm])
        if len(groups) * len(arms) <= 20:
            axes.bar_label(bars, fmt="%.3g", fontsize=8, padding=1)
    axes.set_xticks(
        range(len(groups)), groups, rotation=0 if len(groups) < 5 else 30, ha="center" if len(groups) < 5 else "right"
    )
    axes.set_title("tokens a second", fontsize=10)
    axes.margins(y=0.18)
    axes.legend(fontsize=8, frameon=False, ncols=len(arms), loc="upper left")


def _kept_drafts(axes: Any, everything: dict, arms: list[str], colours: dict[str, str]) -> None:
    """Share of the rounds by the number of drafts that they kept."""
    drafted = [arm for arm in arms if everything[arm].get("histogram")]
    width = 0.8 / max(1, len(drafted))
    for i, arm in enumerate(drafted):
        counts = everything[arm]["histogram"]
        places = [n + (i - (len(drafted) - 1) / 2) * width for n in range(len(counts))]
        label = f"{everything[arm]['acceptance_length']:.2f} tokens a round"
        axes.bar(places, [100 * c / sum(counts) for c in counts], width * 0.94, color=colours[arm], label=label)
    axes.set_title("rounds by drafts kept, %", fontsize=10)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if drafted:
        axes.legend(fontsize=8, frameon=False)


def _gains(axes: Any, groups: dict, arms: list[str], colours: dict[str, str]) -> None:
    """How many times sooner than plain, median and quartiles: against the context, or else by group."""
    is_sweep = all(name.startswith("context ") for name in groups)
    places = [int(name.split()[1]) if is_sweep else i for i, name in enumerate(groups)]
    for i, arm in enumerate(arms):
        told = [
            (x, numbers[arm]["speedup_wall"])
            for x, numbers in zip(places, groups.values())
            if "speedup_wall" in numbers.get(arm, {})
        ]
        if not told:
            continue
        shift = 0 if is_sweep else 0.12 * (i - (len(arms) - 2) / 2)
        middles = [m for _, (m, _, _) in told]
        spread = [[m - low for _, (m, low, _) in told], [high - m for _, (m, _, high) in told]]
        axes.errorbar(
            [x + shift for x, _ in told], middles, spread, fmt="o-" if is_sweep else "o", capsize=3, color=colours[arm]
        )
    axes.axhline(1, color=_PLAIN_COLOUR, linewidth=1, linestyle="--")
    axes.set_title("times as fast as plain, with quartiles", fontsize=10)
    if not axes.containers:
        axes.text(
            0.5, 0.5, "--compare measures this", ha="center", va="center", transform=axes.transAxes, color=_PLAIN_COLOUR
        )
    if is_sweep:
        axes.set_xlabel("prompt tokens", fontsize=9)
    else:
        axes.set_xticks(
            places, groups, rotation=0 if len(groups) < 5 else 30, ha="center" if len(groups) < 5 else "right"
        )
        axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set_ylim(bottom=0)
