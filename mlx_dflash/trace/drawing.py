"""Draws the moments of a session: blocks, verdicts, and what the two caches cover, round by round; SVG or an HTML page.

Positions run to the right, one column each, the prompt drawn short; rounds run down. Knows moments and text only.
"""

import json
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

_COLUMN, _CELL, _BAR, _LEFT, _PROMPT, _ROUND, _TOP = 68, 24, 11, 150, 110, 112, 106  # pixels
_STYLE = """
svg { background: #ffffff; font: 13px ui-monospace, SFMono-Regular, Menlo, 'DejaVu Sans Mono', monospace; }
text { fill: #24292f; } .small { font-size: 11px; fill: #57606a; } .title { font-size: 17px; font-weight: bold; }
.round { font-weight: bold; } .middle { text-anchor: middle; }
.anchor { fill: #3b6fb6; } .kept { fill: #2a8c50; } .said { fill: #7a4fb5; } .prompt { fill: #8c959f; }
.refused { fill: #ffe0dc; stroke: #cf222e; stroke-width: 1.5; } .unread { fill: #f0f1f3; }
.light { fill: #ffffff; } .red { fill: #cf222e; text-decoration: line-through; } .grey { fill: #8c959f; }
.target { fill: #8ec7c3; } .target.new { fill: #1b7f79; } .context { fill: #f3c58f; } .context.new { fill: #c96a00; }
.temporary { fill: none; stroke: #8c959f; stroke-dasharray: 3 3; } .rule { stroke: #d8dee4; }
"""
_LEGEND = (
    ("anchor", "anchor: the last token of the text"),
    ("kept", "draft the target keeps"),
    ("refused", "draft it refuses"),
    ("unread", "drafts behind it, dropped"),
    ("said", "the target's own token: the next anchor"),
    ("target", "target KV (dark: new)"),
    ("context", "draft context KV (dark: new)"),
    ("temporary", "temporary, rolled back"),
)


def draw(moments: Sequence[Any], prompt_length: int, show: Callable[[int], str], title: str = "") -> str:
    """The moments as an SVG picture. show: the text of a token. Raises ValueError if there are none."""
    if not moments:
        raise ValueError("there is no moment to draw")
    last = max(max(m.confirmed, m.block_start + len(m.block)) for m in moments)
    width = max(_LEFT + _PROMPT + (last - prompt_length) * _COLUMN + 110, 1240)
    height = _TOP + 22 + len(moments) * _ROUND
    rounds = "".join(
        _moment(m, before, i, prompt_length, show) for i, (m, before) in enumerate(zip(moments, [None, *moments]))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"<style>{_STYLE}</style>{_header(title)}{_ruler(prompt_length, last)}{rounds}</svg>\n"
    )


def page(
    moments: Sequence[Any], prompt_length: int, show: Callable[[int], str], notes: Sequence[str], title: str = ""
) -> str:
    """The picture as an HTML page to step through; notes: a text for each moment. Needs nothing from elsewhere."""
    picture = draw(moments, prompt_length, show, title)
    data = json.dumps(list(notes)).replace("</", "<\\/")
    return (
        _PAGE.replace("{{title}}", escape(title or "trace")).replace("{{picture}}", picture).replace("{{notes}}", data)
    )


def _header(title: str) -> str:
    parts = [_text(16, 28, title or "Target and draft, round by round", "title")]
    for i, (kind, what) in enumerate(_LEGEND):
        x, y = 16 + i % 4 * 300, 44 + i // 4 * 20
        parts.append(
            f'<rect class="{kind}{" new" if kind in ("target", "context") else ""}" x="{x}" y="{y}" width="14" height="14"/>'
        )
        parts.append(_text(x + 20, y + 11, what, "small"))
    return "".join(parts)


def _ruler(prompt_length: int, last: int) -> str:
    marks = [_text(_LEFT + _PROMPT / 2, _TOP + 6, f"0..{prompt_length - 1}", "small middle")]
    marks += [
        _text(_x(i, prompt_length) + _COLUMN / 2, _TOP + 6, str(i), "small middle") for i in range(prompt_length, last)
    ]
    return _text(16, _TOP + 6, "position", "small") + "".join(marks)


def _x(position: int, prompt_length: int) -> float:
    """Where a position begins; positions of the prompt share its short box."""
    if position <= prompt_length:
        return _LEFT + _PROMPT * position / prompt_length
    return _LEFT + _PROMPT + (position - prompt_length) * _COLUMN


def _moment(m: Any, before: Any, row: int, prompt_length: int, show: Callable[[int], str]) -> str:
    y = _TOP + 22 + row * _ROUND
    num_drafts = len(m.block) - 1
    name, what = (
        ("prefill", f"{prompt_length} prompt tokens")
        if not m.block
        else (f"round {m.number}", f"keeps {m.kept} of {num_drafts}")
    )
    parts = [
        f'<line class="rule" x1="0" x2="100%" y1="{y}" y2="{y}"/>',
        _text(16, y + 24, name, "round"),
        _text(16, y + 40, what, "small"),
    ]
    if not m.block:
        parts.append(_cell((_LEFT, y + 10, _PROMPT), "prompt", "prompt", "light"))
    for i, token in enumerate(m.block):
        kind, ink = _draft_kind(i, m.kept)
        parts.append(_cell((_x(m.block_start + i, prompt_length), y + 10, _COLUMN), show(token), kind, ink))
    said_at = m.confirmed - 1
    parts.append(
        _cell(
            (_x(said_at, prompt_length), y + 10 + (_CELL + 2) * bool(m.block), _COLUMN),
            show(m.next_token),
            "said",
            "light",
        )
    )
    if m.block:
        parts.append(_text(_LEFT - 8, y + 26, "draft", "small end") + _text(_LEFT - 8, y + 52, "target", "small end"))
    end = m.block_start + len(m.block)
    for lane, (kind, label, covers, old) in enumerate(
        (
            ("target", "target KV", m.target_covers, before.target_covers if before else 0),
            ("context", "context KV", m.context_covers, before.context_covers if before else 0),
        )
    ):
        parts.append(_bar(y + 68 + lane * (_BAR + 5), (kind, label), (old, covers, end), prompt_length))
    return f'<g class="moment" data-moment="{row}">{"".join(parts)}</g>'


def _draft_kind(i: int, kept: int) -> tuple[str, str]:
    """The class of slot i of a block, and that of its text."""
    if i <= kept:
        return ("kept" if i else "anchor"), "light"
    return ("refused", "red") if i == kept + 1 else ("unread", "grey")


def _cell(place: tuple[float, float, float], text: str, kind: str, ink: str) -> str:
    """A token's box; place: x, y, width. kind, ink: classes of the box and of its text."""
    x, y, width = place
    text = text if len(text) <= 7 else text[:6] + "…"
    return f'<rect class="cell {kind}" x="{x + 1:.1f}" y="{y}" width="{width - 2}" height="{_CELL}" rx="4"/>' + _text(
        x + width / 2, y + 17, text, f"middle {ink}"
    )


def _bar(y: float, name: tuple[str, str], spans: tuple[int, int, int], prompt_length: int) -> str:
    """What one cache covers: before the round, after it, and the rows of the block that were only tried."""
    (kind, label), (old, covers, end) = name, spans
    start, middle, stop = (_x(p, prompt_length) for p in (0, old, covers))
    parts = [_text(_LEFT - 8, y + 10, label, "small end")]
    if old:
        parts.append(f'<rect class="{kind}" x="{start:.1f}" y="{y}" width="{middle - start:.1f}" height="{_BAR}"/>')
    parts.append(f'<rect class="{kind} new" x="{middle:.1f}" y="{y}" width="{stop - middle:.1f}" height="{_BAR}"/>')
    far = max(stop, _x(end, prompt_length))
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
    """Text that XML can hold and a reader can see."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    shown = "␣" * len(shown) if not shown.strip(" ") else shown
    return "".join(c if c.isprintable() else "�" for c in shown)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{title}}</title>
<style>
body { margin: 0; font: 15px system-ui, sans-serif; color: #24292f; }
header { position: sticky; top: 0; background: #f6f8fa; border-bottom: 1px solid #d8dee4; padding: 10px 16px; }
button { font: inherit; padding: 4px 14px; } #note { white-space: pre-wrap; font: 13px ui-monospace, monospace; margin: 8px 0 0; min-height: 7em; }
main { overflow-x: auto; } .moment { scroll-margin: 180px 40px 40px; opacity: 1; transition: opacity .15s; } .moment.later { opacity: 0.06; } .moment.earlier { opacity: 0.45; }
</style></head><body>
<header><button id="back">◀ back</button> <button id="on">next ▶</button> <button id="all">all</button>
<span id="where"></span> (arrow keys work too)<div id="note"></div></header>
<main>{{picture}}</main>
<script>
const notes = {{notes}}, moments = [...document.querySelectorAll(".moment")];
let at = 0;
function go(to) {
  at = Math.max(0, Math.min(moments.length, to));
  moments.forEach((g, i) => g.setAttribute("class", "moment" + (i > at ? " later" : i < at && at < moments.length ? " earlier" : "")));
  document.getElementById("note").textContent = at < moments.length ? notes[at] : "";
  document.getElementById("where").textContent = at < moments.length ? "moment " + (at + 1) + " of " + moments.length : "all moments";
  if (at < moments.length) moments[at].scrollIntoView({block: "nearest", inline: "nearest"});
}
document.getElementById("back").onclick = () => go(at - 1);
document.getElementById("on").onclick = () => go(at + 1);
document.getElementById("all").onclick = () => go(moments.length);
document.addEventListener("keydown", e => { if (e.key === "ArrowRight") go(at + 1); if (e.key === "ArrowLeft") go(at - 1); });
go(0);
</script></body></html>
"""
