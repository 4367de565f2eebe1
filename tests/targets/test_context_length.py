"""A target's context length is found wherever its model keeps it."""

from types import SimpleNamespace

import pytest
from support.targets import target_config, tiny_target

from mlx_dflash.models.context_length import context_length


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_models_of_mlx_lm_say_their_context_length(family):
    config = target_config(family)
    model = tiny_target(family)
    is_nested = hasattr(model.args, "text_config")
    assert is_nested == (family == "qwen3_5") and not (is_nested and hasattr(model.args, "max_position_embeddings"))
    assert context_length(model) == (config.get("text_config") or config)["max_position_embeddings"] == 4096


@pytest.mark.parametrize("text_config", [{"max_position_embeddings": 77}, SimpleNamespace(max_position_embeddings=77)])
def test_a_text_config_may_be_a_dict_or_an_object(text_config):
    assert context_length(SimpleNamespace(args=SimpleNamespace(text_config=text_config))) == 77


@pytest.mark.parametrize("args", [{}, {"text_config": None}, {"text_config": {}}, {"max_position_embeddings": None}])
def test_a_model_that_says_nothing_has_no_known_length(args):
    assert context_length(SimpleNamespace(args=SimpleNamespace(**args))) is None
    assert context_length(SimpleNamespace()) is None
