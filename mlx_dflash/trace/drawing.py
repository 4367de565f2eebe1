"""The picture of a trace: the blocks of all rounds, the verdicts, and what the two caches cover.

An SVG picture, or an HTML page to step through. Positions run to the right, one column each, but the prompt is drawn
short; rounds run down. Knows moments and the texts of tokens; knows nothing of sessions or models.
"""

import json
from collections.abc import Callable, Sequence
from html import escape

from .moments import Moment

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
    ("unread", "drafts after it, dropped"),
    ("said", "the target's own token: the next anchor"),
    ("target", "target KV (dark: new)"),
    ("context", "draft context KV (dark: new)"),
    ("temporary", "temporary, not committed"),
)


def draw(moments: Sequence[Moment], prompt_length: int, show: Callable[[int], str], title: str = "") -> str:
    """Return an SVG picture of the moments.

    prompt_length: tokens. show: the text of a token. Raises ValueError if there are no moments.
    """
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
    moments: Sequence[Moment], prompt_length: int, show: Callable[[int], str], notes: Sequence[str], title: str = ""
) -> str:
    """Return an HTML page that steps through the picture and loads nothing. notes: one text for each moment."""
    picture = draw(moments, prompt_length, show, title)
    data = json.dumps(list(notes)).replace("</", "<\\/")
    return (
        _PAGE.replace("{{title}}", escape(title or "trace")).replace("{{picture}}", picture).replace("{{notes}}", data)
    )


def _header(title: str) -> str:
    parts = [_text(16, 28, title or "Target and draft, round by round", "title")]
    for i, (kind, what) in enumerate(_LEGEND):
        x, y = 16 + i % 4 * 300, 44 + i // 4 * 20
        shade = " new" if kind in ("target", "context") else ""
        parts.append(f'<rect class="{kind}{shade}" x="{x}" y="{y}" width="14" height="14"/>')
        parts.append(_text(x + 20, y + 11, what, "small"))
    return "".join(parts)


def _ruler(prompt_length: int, last: int) -> str:
    marks = [_text(_LEFT + _PROMPT / 2, _TOP + 6, f"0..{prompt_length - 1}", "small middle")]
    marks += [
        _text(_x(i, prompt_length) + _COLUMN / 2, _TOP + 6, str(i), "small middle") for i in range(prompt_length, last)
    ]
    return _text(16, _TOP + 6, "position", "small") + "".join(marks)


def _x(position: int, prompt_length: int) -> float:
    """Return the pixel where a position begins; the positions of the prompt share its short box."""
    if position <= prompt_length:
        return _LEFT + _PROMPT * position / prompt_length
    return _LEFT + _PROMPT + (position - prompt_length) * _COLUMN


def _moment(m: Moment, before: Moment | None, row: int, prompt_length: int, show: Callable[[int], str]) -> str:
    """Return one row of the picture: the block, what the target said of it, and what the caches cover."""
    y = _TOP + 22 + row * _ROUND
    name, what = f"round {m.number}", f"keeps {m.kept} of {len(m.block) - 1}"
    if not m.block:
        name, what = "prefill", f"{prompt_length} prompt tokens"
    parts = [
        f'<line class="rule" x1="0" x2="100%" y1="{y}" y2="{y}"/>',
        _text(16, y + 24, name, "round"),
        _text(16, y + 40, what, "small"),
    ]
    if m.block:
        parts += [_text(_LEFT - 8, y + 26, "draft", "small end"), _text(_LEFT - 8, y + 52, "target", "small end")]
    else:
        parts.append(_cell((_LEFT, y + 10, _PROMPT), "prompt", "prompt", "light"))
    for i, token in enumerate(m.block):
        place = (_x(m.block_start + i, prompt_length), y + 10, _COLUMN)
        parts.append(_cell(place, show(token), *_draft_kind(i, m.kept)))
    # The target's own token stands below the draft that it replaces.
    place = (_x(m.confirmed - 1, prompt_length), y + 10 + (_CELL + 2) * bool(m.block), _COLUMN)
    parts.append(_cell(place, show(m.next_token), "said", "light"))
    end = m.block_start + len(m.block)
    for bar, (kind, field) in enumerate((("target", "target_covers"), ("context", "context_covers"))):
        spans = (getattr(before, field, 0), getattr(m, field), end)
        parts.append(_bar(y + 68 + bar * (_BAR + 5), kind, spans, prompt_length))
    return f'<g class="moment" data-moment="{row}">{"".join(parts)}</g>'


def _draft_kind(i: int, kept: int) -> tuple[str, str]:
    """Return the CSS classes of slot i of a block and of its text."""
    if i <= kept:
        return ("kept" if i else "anchor"), "light"
    return ("refused", "red") if i == kept + 1 else ("unread", "grey")


def _cell(place: tuple[float, float, float], text: str, kind: str, ink: str) -> str:
    """Return the box of a token. place: x, y, width. kind, ink: CSS classes of the box and of its text."""
    x, y, width = place
    text = text if len(text) <= 7 else text[:6] + "…"
    return f'<rect class="cell {kind}" x="{x + 1:.1f}" y="{y}" width="{width - 2}" height="{_CELL}" rx="4"/>' + _text(
        x + width / 2, y + 17, text, f"middle {ink}"
    )


def _bar(y: float, kind: str, spans: tuple[int, int, int], prompt_length: int) -> str:
    """Return a bar for one cache: what it covered, what the round added, and the rows that were not committed.

    kind: CSS class. spans: positions where the three parts end.
    """
    old, covers, end = spans
    start, middle, stop = (_x(p, prompt_length) for p in (0, old, covers))
    parts = [_text(_LEFT - 8, y + 10, f"{kind} KV", "small end")]
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
.moment.later { opacity: 0.06; } .moment.earlier { opacity: 0.45; }
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
  moments.forEach((g, i) => g.setAttribute("class", "moment" + (i > at ? " later" : i < at && one ? " earlier" : "")));
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
