"""The table of docs/targets.md: what the layers of each model type keep, and how refused tokens leave it.

Print it anew with `PYTHONPATH=tests python -m support.families --write`.
"""

import sys
from pathlib import Path

from mlx_lm.models.cache import make_prompt_cache

from mlx_dflash.caches import rollback
from support.models import MODEL_TYPES, NOT_ON_CPU, REFUSED, TARGET_TYPES, build, way

PAGE = Path(__file__).parents[2] / "docs" / "targets.md"
BEGIN, END = "<!-- generated: begin -->\n", "<!-- generated: end -->"
KEPT = {
    "KVCache": "rows",
    "RotatingKVCache": "windows",
    "ChunkedKVCache": "chunks",
    "ArraysCache": "recurrent state",
    "LayerCache": "compressed rows",
}
WAYS = {
    "rows": "they are cut off",
    "recurrence": "rows are cut off; only the recurrence runs again, from recorded inputs (fast)",
    "replay": "back to the state before the block; the kept tokens run in front of the next verify (general)",
}


def families_table():
    """The generated part of the page, in Markdown."""
    groups = {}
    for model_type in TARGET_TYPES:
        kinds = {KEPT[type(cache).__name__] for cache in rollback.leaves(make_prompt_cache(build(model_type)))}
        kept = " and ".join(kind for kind in KEPT.values() if kind in kinds)
        groups.setdefault((list(WAYS).index(way(model_type)), kept), []).append(model_type)
    lines = ["| The layers keep | After a refusal | Types |", "|---|---|---|"]
    for (order, kept), types in sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1]), item[0][1])):
        lines.append(f"| {kept} | {list(WAYS.values())[order]} | {len(types)}: {_listed(types)} |")
    left_out = "\n".join(f"- `{name}`: {reason}" for name, reason in NOT_ON_CPU.items())
    refused = "\n".join(f"- `{name}`: {reason}" for name, reason in REFUSED.items())
    return "\n".join(lines) + TEXT.format(len(TARGET_TYPES), len(MODEL_TYPES), left_out, refused)


TEXT = """

{} of mlx-lm's {} model types are tested: tiny random models, greedy and sampled, prompts of 1, 5 and 40 tokens,
blocks of 2, 6 and 16, changing numbers of kept drafts. The tests run a covering choice of these combinations;
`pytest -m grid` runs all of them, which takes an hour and a half of CPU time. The tokens are those of mlx-lm, and the
caches afterwards are those of a fresh pass over the text.

Not tested, because mlx-lm itself does not run them on a CPU:

{}

Refused by name, because in mlx-lm several tokens at once are not what they are one by one:

{}
"""


def _listed(types):
    return ", ".join(f"`{name}`" for name in types)


def written_table():
    """The generated part of the page as it stands there."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    table = families_table()
    print(table)
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2])
