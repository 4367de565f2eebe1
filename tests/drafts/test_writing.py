"""A draft is written with what its tensors are, and is read back as it was."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.drafts import draft2_config, draft_config
from support.runs import make_draft

from mlx_dflash import load_draft
from mlx_dflash.checkpoints.writing import write_draft
from mlx_dflash.files.card import Card


@pytest.mark.parametrize("config", [draft_config(torch_dtype="float32"), draft2_config()], ids=["v1", "v2"])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_a_draft_is_written_and_read_back(tmp_path, config, dtype):
    draft = make_draft(config, dtype=mx.float16)
    write_draft(tmp_path, draft, config, Card("A title", "A text.", {"trained on": "nothing"}, "acme/base"), dtype)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dtype"] == (dtype or "float16") and "torch_dtype" not in written
    back = dict(tree_flatten(load_draft(str(tmp_path)).parameters()))
    for name, tensor in tree_flatten(draft.parameters()):
        assert mx.array_equal(back[name], tensor.astype(getattr(mx, dtype or "float16"))), name
    readme = (tmp_path / "README.md").read_text()
    size = sum(tensor.size for _, tensor in tree_flatten(draft.parameters()))
    layers = f"{draft.config.num_layers}, {draft.config.hidden_size}, {size / 1e6:.1f} M"
    assert f"| layers, hidden size, parameters | {layers} |" in readme
    assert "base_model: acme/base\n" in readme and readme.endswith("| trained on | nothing |\n")


def test_values_beyond_the_type_are_refused(tmp_path):
    draft = make_draft()
    draft.norm.weight = mx.full(draft.norm.weight.shape, 1e5)
    with pytest.raises(ValueError, match="norm.weight has values beyond the range of float16"):
        write_draft(tmp_path, draft, draft_config(), Card("A title", "A text."), "float16")
