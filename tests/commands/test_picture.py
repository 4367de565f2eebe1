"""The pictures of a trace show every token and what each cache covers, in well-formed files that need nothing else."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from support.chat_fixtures import save_pair

from mlx_dflash.trace.__main__ import main
from mlx_dflash.trace.drawing import draw, page
from mlx_dflash.trace.moments import Moment

WALK = [
    Moment(0, [], 5, 0, 10, 6, 5, 5, None),
    Moment(1, [10, 11, 12, 13], 5, 1, 22, 8, 7, 7, None),
    Moment(2, [22, 14, 15, 16], 7, 3, 30, 12, 11, 11, "stop"),
]
NS = "{http://www.w3.org/2000/svg}"


def cells(svg, kind):
    """The positions of the cells of a kind in each moment, read off the row's own ruler (the legend is in none)."""
    found = []
    for group in ET.fromstring(svg).findall(f"{NS}g"):
        numbers = [t for t in group.findall(f"{NS}text") if t.get("class") == "small middle" and t.text.isdecimal()]
        ruler = {float(t.get("x")): int(t.text) for t in numbers}
        boxes = [r for r in group.findall(f"{NS}rect") if r.get("class") == f"cell {kind}"]
        found.append([ruler[float(r.get("x")) + float(r.get("width")) / 2] for r in boxes])
    return found


def width_of(svg):
    return float(ET.fromstring(svg).get("width"))


def test_the_picture_shows_every_token_in_its_place_and_what_the_caches_cover():
    svg = draw(WALK, lambda token: f"t{token}")
    assert cells(svg, "anchor") == [[], [5], [7]]
    assert cells(svg, "kept") == [[], [6], [8, 9, 10]]
    assert cells(svg, "refused") == [[], [7], []] and cells(svg, "unread") == [[], [8], []]
    # The correction stands below the draft that it replaces, and is the next anchor.
    assert cells(svg, "said") == [[5], [7], [11]]
    texts = [t.text for t in ET.fromstring(svg).iter(f"{NS}text")]
    assert {f"t{i}" for i in (10, 11, 12, 13, 22, 14, 15, 16, 30)} <= set(texts)
    spans = [t for t in texts if re.fullmatch(r"0\.\.\d+", t or "")]
    assert spans == ["0..4", "0..4", "0..4", "0..4", "0..6", "0..6", "0..6", "0..10", "0..10"]


def test_the_picture_tells_prompt_and_answer_and_is_no_wider_for_a_long_text():
    long = [replace(WALK[1], number=i, block_start=5 + 2 * i, confirmed=8 + 2 * i) for i in range(100)]
    short, tall = (draw(moments, str, "", ("What is\nit?", "word " * 300)) for moments in (WALK, long))
    assert width_of(short) == width_of(tall) <= 1300
    lines = [t.text for t in ET.fromstring(tall).findall(f"{NS}text")]
    assert {"prompt", "What is", "it?", "answer", "…"} <= set(lines) and all(len(line) < 150 for line in lines)


def test_each_round_shows_the_end_of_the_text_before_it():
    svg = draw(WALK, lambda token: f" t{token}")
    texts = [[t.text for t in g.findall(f"{NS}text")] for g in ET.fromstring(svg).findall(f"{NS}g")]
    assert "prompt" in texts[0] and "prompt" in texts[1] and " t10 t11" in texts[2]


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "&", '"', "\x00\x1b", "\n", "  ", "é漢😀", "]]>", "</script>", "\ud800"]
)
def test_any_token_gives_a_well_formed_picture(text):
    ET.fromstring(draw(WALK, lambda token: text, text, (text, text)).encode("utf-8"))
    html = page(WALK, lambda token: text, [text] * 3, ("x", (text, text)))
    assert json.loads(re.search(r"const notes = (.*), moments", html)[1].replace("<\\/", "</")) == [text] * 3
    assert html.count("</script>") == 1 and "http" not in html.replace("http://www.w3.org/2000/svg", "")


def test_command_writes_the_pictures(tmp_path, monkeypatch, capsys):
    target, draft = save_pair(tmp_path)
    files = ["--svg", tmp_path / "a.svg", "--html", tmp_path / "a.html"]
    flags = ["--model", target, "--draft-model", draft, "-p", "hi", "--rounds", 4, *files]
    monkeypatch.setattr("sys.argv", ["trace", *map(str, flags)])
    main()
    svg = (tmp_path / "a.svg").read_text()
    assert len(cells(svg, "anchor")) == 5 and "round 4" in svg and "round 4" in (tmp_path / "a.html").read_text()
    said = capsys.readouterr().out
    assert "round 4" in said and said.splitlines()[-1].startswith("stopped after 4 rounds")


@pytest.mark.parametrize("flag", ["--svg", "--html"])
def test_a_picture_that_cannot_be_written_is_refused_before_the_run(flag, tmp_path, monkeypatch, capsys):
    file = tmp_path / "missing" / "a.picture"
    monkeypatch.setattr("sys.argv", ["trace", "--model", "/nonexistent", flag, str(file)])
    with pytest.raises(SystemExit, match="2"):
        main()
    out, err = capsys.readouterr()
    assert str(file) in err and "no folder" in err and not out
