"""The documents say what the project is: the generated table, the links and the files they name."""

import re
from pathlib import Path

import pytest
from support.families import families_table, written_table

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))


def test_the_table_of_targets_is_the_generated_one():
    assert written_table() == families_table(), "write it anew: PYTHONPATH=tests python -m support.families --write"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing, f"{path.name} links to {missing}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path):
    named = re.findall(r"`((?:mlx_dflash|tests|convert|examples|docs)/[\w./]+\.\w+)`", path.read_text())
    # Names in capitals stand for any file of the kind.
    missing = [name for name in named if not (ROOT / name).exists() and "NAME" not in name]
    assert not missing, f"{path.name} names {missing}"


def test_the_map_of_the_code_names_every_room():
    text = (ROOT / "README.md").read_text()
    rooms = [p for p in (ROOT / "mlx_dflash").iterdir() if p.name[0] not in "_." and p.suffix in ("", ".py")]
    missing = [p.name for p in rooms if f"{p.stem}" not in text]
    assert not missing, f"README.md has no word on {missing}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
