"""Sizes that a draft's config asks for: refused at once if the tensors or the context cannot fill them."""

import resource
import time

import pytest
from support.draft_files import write_gguf_draft
from support.drafts import draft2_config, draft_config, draft_weights
from support.folders import save_draft

import mlx_dflash

LARGE = 10**6
HUGE = 10**400
ASKED = {
    "block_size": {"dflash": {"block_size": 10**7}},
    "block_size of a long context": {"dflash": {"block_size": 10**7}, "max_position_embeddings": 10**8},
    "block_size beyond the context": {"dflash": {"block_size": 65}, "max_position_embeddings": 64},
    "num_hidden_layers": {"num_hidden_layers": LARGE, "layer_types": None},
    "num_hidden_layers of some size": {"num_hidden_layers": 1000, "layer_types": None},
    "num_hidden_layers beyond counting": {"num_hidden_layers": 10**13, "layer_types": None},
    "num_hidden_layers with windows": {
        "num_hidden_layers": 10**13,
        "layer_types": None,
        "dflash": {"use_swa": True, "swa_window_size": 4},
    },
    "hidden_size": {"hidden_size": 2**30},
    "target_hidden_size": {"target_hidden_size": 2**30},
    "intermediate_size": {"intermediate_size": 2**30},
    "head_dim": {"head_dim": 2**30},
    "num_attention_heads": {"num_attention_heads": 2**30},
    "vocab_size": {"vocab_size": 2**40},
    "conv_kernel_size": {"version": 2, "dflash": {"conv_kernel_size": 2**30}},
    "selector_rank": {"version": 2, "dflash": {"selector_rank": 2**30}},
    "rope_theta": {"rope_theta": HUGE},
    "rms_norm_eps": {"rms_norm_eps": HUGE},
    "factor": {"rope_scaling": {"rope_type": "linear", "factor": HUGE}},
    "original_max_position_embeddings": {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "many"}
    },
}


@pytest.mark.parametrize("what", ASKED)
def test_a_config_that_asks_for_too_much_is_refused_at_once(tmp_path, what):
    changes = dict(ASKED[what])
    make = draft2_config if changes.pop("version", 1) == 2 else draft_config
    folder = save_draft(tmp_path, make(**changes), draft_weights(make()))
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=f"{tmp_path.name}.*{what.split()[0]}") as caught:
        mlx_dflash.load_draft(str(folder))
    assert time.perf_counter() - began < 1 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200e3
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_gguf_draft_of_many_layers_is_refused_at_once(tmp_path):
    config = draft_config()
    file = write_gguf_draft(tmp_path / "draft.gguf", config | {"num_hidden_layers": 2**32 - 1}, draft_weights(config))
    with pytest.raises(ValueError, match="draft.gguf has 4294967295 layers"):
        mlx_dflash.load_draft(str(file))
