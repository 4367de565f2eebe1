"""The pictures of a trace show every token and what each cache covers, in well-formed files that need nothing else."""

import json
import re
import xml.etree.ElementTree as ET

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
    """x of the cells of a kind in each moment (the legend is in none)."""
    groups = ET.fromstring(svg).findall(f"{NS}g")
    return [[float(r.get("x")) for r in g.findall(f"{NS}rect") if r.get("class") == f"cell {kind}"] for g in groups]


def test_the_picture_shows_every_token_in_its_place_and_what_the_caches_cover():
    svg = draw(WALK, 5, lambda token: f"t{token}")
    assert [len(x) for x in cells(svg, "anchor")] == [0, 1, 1]
    assert [len(x) for x in cells(svg, "kept")] == [0, 1, 3]
    assert [len(x) for x in cells(svg, "refused")] == [0, 1, 0]
    assert [len(x) for x in cells(svg, "unread")] == [0, 1, 0]
    refused, said = cells(svg, "refused")[1], cells(svg, "said")
    assert said[1] == refused, "the correction stands below the draft that it replaces"
    assert said[0] == cells(svg, "anchor")[1] and said[1] == cells(svg, "anchor")[2], (
        "what the target says is the next anchor"
    )
    texts = [t.text for t in ET.fromstring(svg).iter(f"{NS}text")]
    assert {f"t{i}" for i in (10, 11, 12, 13, 22, 14, 15, 16, 30)} <= set(texts)
    assert [t for t in texts if re.fullmatch(r"0\.\.\d+", t or "")] == [
        "0..4",
        "0..4",
        "0..4",
        "0..6",
        "0..6",
        "0..10",
        "0..10",
    ]


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "&", '"', "\x00\x1b", "\n", "  ", "é漢😀", "]]>", "</script>", "\ud800"]
)
def test_any_token_gives_a_well_formed_picture(text):
    ET.fromstring(draw(WALK, 5, lambda token: text, title=text).encode("utf-8"))
    html = page(WALK, 5, lambda token: text, [text] * 3, title="x")
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
