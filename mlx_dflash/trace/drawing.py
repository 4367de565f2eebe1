"""The picture of a trace: prompt and answer, the blocks of all rounds, the verdicts, and what the two caches cover.

An SVG picture, or an HTML page to step through. A round is a row; what was there before its block is drawn short, so
that a long text is as wide as a short one. Knows moments and the texts of tokens; knows nothing of sessions or models.
"""

import json
import textwrap
from collections.abc import Callable, Sequence
from html import escape

from .moments import Moment

_COLUMN, _CELL, _BAR, _LEFT, _BEFORE, _ROUND, _TOP = 68, 24, 11, 150, 170, 126, 84  # pixels
_LINE, _LETTER = 18, 7.9  # pixels of a line of text, and of one of its letters
_MOST_LINES = 8  # of the prompt, and of the answer
_STYLE = """
svg { background: #ffffff; font: 13px ui-monospace, SFMono-Regular, Menlo, 'DejaVu Sans Mono', monospace; }
text { fill: #24292f; } .small { font-size: 11px; fill: #57606a; } .title { font-size: 17px; font-weight: bold; }
.round { font-weight: bold; } .middle { text-anchor: middle; }
.anchor { fill: #3b6fb6; } .kept { fill: #2a8c50; } .said { fill: #7a4fb5; } .prompt { fill: #8c959f; }
.refused { fill: #ffe0dc; stroke: #cf222e; stroke-width: 1.5; } .unread { fill: #f0f1f3; }
.light { fill: #ffffff; } .red { fill: #cf222e; text-decoration: line-through; } .grey { fill: #8c959f; }
.target { fill: #8ec7c3; } .target.new { fill: #1b7f79; } .context { fill: #f3c58f; } .context.new { fill: #c96a00; }
.temporary { fill: none; stroke: #8c959f; stroke-dasharray: 3 3; } .rule { stroke: #d8dee4; } .mark { fill: none; }
"""
_LEGEND = (
    ("anchor", "anchor: the last token of the text"),
    ("kept", "draft the target keeps"),
    ("refused", "draft it refuses"),
    ("unread", "drafts after it, dropped"),
    ("said", "the target's own token: the next anchor"),
    ("target", "target KV (dark: new)"),
    ("context", "draft context KV (dark: new)"),
    ("temporary", "temporary, not committed"),
)


def draw(
    moments: Sequence[Moment], show: Callable[[int], str], title: str = "", words: tuple[str, str] = ("", "")
) -> str:
    """Return an SVG picture of the moments.

    show: the text of a token. words: the prompt and the answer, which are written above the rounds. Raises ValueError
    if there are no moments.
    """
    if not moments:
        raise ValueError("there is no moment to draw")
    width = max(_LEFT + _BEFORE + (max(len(m.block) for m in moments) + 1) * _COLUMN + 110, 1240)
    header, top = _header(title, words, width)
    rounds, text = [], ""
    for row, (moment, before) in enumerate(zip(moments, [None, *moments])):
        rounds.append(_moment(moment, before, (row, top + row * _ROUND), text, show))
        text += "".join(map(show, moment.block[: moment.kept + 1]))
    height = top + len(moments) * _ROUND
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"<style>{_STYLE}</style>{header}{''.join(rounds)}</svg>\n"
    )


def page(
    moments: Sequence[Moment],
    show: Callable[[int], str],
    notes: Sequence[str],
    heading: tuple[str, tuple[str, str]] = ("", ("", "")),
) -> str:
    """Return an HTML page that steps through the picture and loads nothing.

    notes: one text for each moment. heading: title and words, as in draw.
    """
    title, words = heading
    picture = draw(moments, show, title, words)
    data = json.dumps(list(notes)).replace("</", "<\\/")
    return (
        _PAGE.replace("{{title}}", escape(title or "trace")).replace("{{picture}}", picture).replace("{{notes}}", data)
    )


def _header(title: str, words: tuple[str, str], width: int) -> tuple[str, int]:
    """Return the title, the legend, the prompt and the answer, and the pixel where the rounds begin."""
    parts = [_text(16, 28, title or "Target and draft, round by round", "title")]
    for i, (kind, what) in enumerate(_LEGEND):
        x, y = 16 + i % 4 * 300, 44 + i // 4 * 20
        shade = " new" if kind in ("target", "context") else ""
        parts.append(f'<rect class="{kind}{shade}" x="{x}" y="{y}" width="14" height="14"/>')
        parts.append(_text(x + 20, y + 11, what, "small"))
    y = _TOP
    for name, text in zip(("prompt", "answer"), words):
        for i, line in enumerate(_lines(text, int((width - _LEFT - 40) / _LETTER))):
            y += _LINE
            parts += [_text(16, y, name, "round")] * (i == 0) + [_text(_LEFT, y, line)]
    return "".join(parts), y + 22


def _lines(text: str, letters: int) -> list[str]:
    """Break a text into lines of so many letters; of a long one, the beginning and the end."""
    lines = [part for line in text.splitlines() if line.strip() for part in textwrap.wrap(line, letters)]
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES // 2], "…", *lines[1 - _MOST_LINES // 2 :]]
    return lines


def _x(position: int, start: int) -> float:
    """Return the pixel where a position begins; those before `start` share a short box."""
    if position <= start:
        return _LEFT + _BEFORE * position / max(start, 1)
    return _LEFT + _BEFORE + (position - start) * _COLUMN


def _moment(m: Moment, before: Moment | None, place: tuple[int, int], text: str, show: Callable[[int], str]) -> str:
    """Return one row of the picture: the block, what the target said of it, and what the caches cover.

    place: number of the row, and its pixel. text: the answer before the block.
    """
    row, y = place
    start = m.block_start if m.block else m.confirmed - 1
    name, what = f"round {m.number}", f"keeps {m.kept} of {len(m.block) - 1}"
    if not m.block:
        name, what = "prefill", f"{start} prompt tokens"
    parts = [
        f'<rect class="mark" x="0" y="{y}" width="100%" height="{_ROUND}"/>',
        f'<line class="rule" x1="0" x2="100%" y1="{y}" y2="{y}"/>',
        _text(16, y + 38, name, "round"),
        _text(16, y + 54, what, "small"),
        _text(_LEFT - 8, y + 17, "position", "small end"),
        _text(_LEFT + _BEFORE / 2, y + 17, f"0..{start - 1}", "small middle"),
        _box((_LEFT, y + 24, _BEFORE), "prompt", "light", _end_of(text, 19) or "prompt"),
    ]
    positions = range(start, start + max(len(m.block), m.confirmed - start))
    parts += [_text(_x(i, start) + _COLUMN / 2, y + 17, str(i), "small middle") for i in positions]
    if m.block:
        parts += [_text(_LEFT - 8, y + 40, "draft", "small end"), _text(_LEFT - 8, y + 66, "target", "small end")]
    for i, token in enumerate(m.block):
        parts.append(_cell((_x(start + i, start), y + 24, _COLUMN), show(token), *_draft_kind(i, m.kept)))
    # The target's own token stands below the draft that it replaces.
    at = (_x(m.confirmed - 1, start), y + 24 + (_CELL + 2) * bool(m.block), _COLUMN)
    parts.append(_cell(at, show(m.next_token), "said", "light"))
    end = m.block_start + len(m.block)
    for bar, (kind, field) in enumerate((("target", "target_covers"), ("context", "context_covers"))):
        spans = (getattr(before, field, 0), getattr(m, field), end)
        parts.append(_bar(y + 82 + bar * (_BAR + 5), kind, spans, start))
    return f'<g class="moment" data-moment="{row}">{"".join(parts)}</g>'


def _end_of(text: str, letters: int) -> str:
    return text if len(text) <= letters else "…" + text[1 - letters :]


def _draft_kind(i: int, kept: int) -> tuple[str, str]:
    """Return the CSS classes of slot i of a block and of its text."""
    if i <= kept:
        return ("kept" if i else "anchor"), "light"
    return ("refused", "red") if i == kept + 1 else ("unread", "grey")


def _cell(place: tuple[float, float, float], text: str, kind: str, ink: str) -> str:
    """Return the box of a token. place: x, y, width. kind, ink: CSS classes of the box and of its text."""
    return _box(place, f"cell {kind}", ink, text if len(text) <= 7 else text[:6] + "…")


def _box(place: tuple[float, float, float], kind: str, ink: str, text: str) -> str:
    x, y, width = place
    box = f'<rect class="{kind}" x="{x + 1:.1f}" y="{y}" width="{width - 2}" height="{_CELL}" rx="4"/>'
    return box + _text(x + width / 2, y + 17, text, f"middle {ink}")


def _bar(y: float, kind: str, spans: tuple[int, int, int], start: int) -> str:
    """Return a bar for one cache: what it covered, what the round added, and the rows that were not committed.

    kind: CSS class. spans: positions where the three parts end. start: the position before which all is drawn short.
    """
    old, covers, end = spans
    begin, middle, stop = (_x(p, start) for p in (0, old, covers))
    parts = [_text(_LEFT - 8, y + 10, f"{kind} KV", "small end")]
    if old:
        parts.append(f'<rect class="{kind}" x="{begin:.1f}" y="{y}" width="{middle - begin:.1f}" height="{_BAR}"/>')
    parts.append(f'<rect class="{kind} new" x="{middle:.1f}" y="{y}" width="{stop - middle:.1f}" height="{_BAR}"/>')
    far = max(stop, _x(end, start))
    if far > stop:
        parts.append(f'<rect class="temporary" x="{stop:.1f}" y="{y}" width="{far - stop:.1f}" height="{_BAR}"/>')
    parts.append(_text(far + 6, y + 10, f"0..{covers - 1}", "small"))
    return "".join(parts)


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    anchor = ' text-anchor="end"' if "end" in kind.split() else ""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{anchor} xml:space="preserve">{escape(_printable(text))}</text>'
    )


def _printable(text: str) -> str:
    """Return a text that XML can hold and a reader can see."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    shown = "␣" * len(shown) if not shown.strip(" ") else shown
    return "".join(c if c.isprintable() else "�" for c in shown)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{title}}</title>
<style>
body { margin: 0; font: 15px system-ui, sans-serif; color: #24292f; }
header { position: sticky; top: 0; background: #f6f8fa; border-bottom: 1px solid #d8dee4; padding: 10px 16px; }
button { font: inherit; padding: 4px 14px; }
#note { white-space: pre-wrap; font: 13px ui-monospace, monospace; margin: 8px 0 0; min-height: 7em; }
main { overflow-x: auto; }
.moment { scroll-margin: 180px 40px 40px; opacity: 1; transition: opacity .15s; }
.moment.later { opacity: 0.4; } .moment.now .mark { fill: #fff8c5; }
</style></head><body>
<header><button id="back">◀ back</button> <button id="on">next ▶</button> <button id="all">all</button>
<span id="where"></span> (arrow keys work too)<div id="note"></div></header>
<main>{{picture}}</main>
<script>
const notes = {{notes}}, moments = [...document.querySelectorAll(".moment")];
let at = 0;
function go(to) {
  at = Math.max(0, Math.min(moments.length, to));
  const one = at < moments.length;  // else all are shown
  moments.forEach((g, i) => g.setAttribute("class", "moment" + (i > at ? " later" : i === at ? " now" : "")));
  document.getElementById("note").textContent = one ? notes[at] : "";
  document.getElementById("where").textContent = one ? "moment " + (at + 1) + " of " + moments.length : "all moments";
  if (one) moments[at].scrollIntoView({block: "nearest", inline: "nearest"});
}
document.getElementById("back").onclick = () => go(at - 1);
document.getElementById("on").onclick = () => go(at + 1);
document.getElementById("all").onclick = () => go(moments.length);
document.addEventListener("keydown", e => {
  if (e.key === "ArrowRight") go(at + 1);
  if (e.key === "ArrowLeft") go(at - 1);
});
go(0);
</script></body></html>
"""
