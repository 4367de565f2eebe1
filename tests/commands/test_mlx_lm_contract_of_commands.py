"""What the commands lean on in mlx-lm and the hub's client, one test a fact, as in test_mlx_lm_contract.py."""

import importlib
import inspect
from pathlib import Path

import huggingface_hub
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.server
from huggingface_hub import constants, errors, hf_hub_download, snapshot_download
from mlx_lm import utils
from mlx_lm.generate import (
    BatchGenerator,
    TextStateMachine,
    make_text_state_machine,
)
from mlx_lm.models.cache import (
    KVCache,
    LRUPromptCache,
)
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import _download, dequantize_model, load_model, make_shards, quantize_model
from support.byte_tokenizer import byte_tokenizer
from support.folders import save_target
from support.targets import VOCAB_SIZE, plain_tokens, target_config, tiny_target

ROWS = mx.arange(2 * 3 * 4).astype(mx.float32).reshape(1, 2, 3, 4)


def parameters(function):
    return list(inspect.signature(function).parameters)


# The text of answers and the server: commands/answers.py, server/


def test_a_state_machine_takes_text_apart_and_holds_back_what_may_be_a_mark():
    transitions = {"normal": [("<a>", "tool")], "tool": [("</a>", "normal")]}
    state, segments = TextStateMachine.split(TextStateMachine(transitions).make_state("normal"), "x<a>y<")
    assert segments == [("normal", "x"), ("tool", "y")]
    assert TextStateMachine.flush(state)[1:] == ("<", "tool")
    assert TextStateMachine.split(state, "/a>z")[1] == [("tool", ""), ("normal", "z")]
    assert parameters(make_text_state_machine)[0] == "tokenizer"


def test_the_prompt_cache_of_many_sequences_gives_copies_of_the_nearest_one():
    store, cache = LRUPromptCache(2, 1 << 30), KVCache()
    cache.update_and_fetch(ROWS, ROWS)
    store.insert_cache("model", [1, 2, 3], [cache])
    found, rest = store.fetch_nearest_cache("model", [1, 2, 3, 4])
    assert found[0].offset == 3 and found[0] is not cache and rest == [4]
    assert store.fetch_nearest_cache("other", [1, 2, 3]) == (None, [1, 2, 3])
    assert len(store) == 1 and store.nbytes == cache.nbytes > 0
    store.trim_to(n_sequences=0)
    assert len(store) == 0 == store.nbytes


def test_the_small_functions_that_the_server_borrows():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert mlx_lm.server.process_message_content(messages) == [] and messages[0]["content"] == "ab"
    assert "USER: ab" in mlx_lm.server.convert_chat(messages, None)
    make_call = mlx_lm.server.ToolCallFormatter(lambda text, tools: {"name": text, "arguments": {"x": 1}}, None, True)
    (call,) = make_call(["f"])
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'} and (call["type"], call["index"]) == (
        "function",
        0,
    )
    assert mx.__version__ in mlx_lm.server.get_system_fingerprint()
    assert parameters(make_logits_processors) == ["logit_bias"] + [
        f"{kind}_{what}" for kind in ("repetition", "presence", "frequency") for what in ("penalty", "context_size")
    ]


# Conversions, the hub and the cache folder: convert/, files/


def test_mlx_lms_converter_has_the_flags_and_the_arguments_that_ours_passes_on():
    convert = importlib.import_module("mlx_lm.convert")
    flags = {action.dest: action.default for action in convert.configure_parser()._actions}
    assert flags.keys() - {"help"} == {
        *("hf_path", "mlx_path", "quantize", "q_group_size", "q_bits", "q_mode", "quant_predicate"),
        *("dtype", "upload_repo", "dequantize", "trust_remote_code"),
    }
    assert (flags["q_bits"], flags["q_group_size"], flags["q_mode"], flags["hf_path"]) == (None, None, "affine", None)
    assert flags.keys() - {"help"} < set(parameters(convert.convert)) and "revision" in parameters(convert.convert)


def test_mlx_lms_mixtures_of_bits_take_a_layers_number_from_the_second_place_of_a_path():
    convert = importlib.import_module("mlx_lm.convert")
    model = nn.Module()
    model.layers = [nn.Module() for _ in range(8)]
    for layer in model.layers:
        layer.down_proj = nn.Linear(64, 64)
    bits_of = convert.mixed_quant_predicate_builder("mixed_4_6", model, 32)
    bits = [bits_of(f"layers.{i}.down_proj", layer.down_proj)["bits"] for i, layer in enumerate(model.layers)]
    assert bits == [6, 4, 4, 6, 4, 4, 6, 6]
    assert bits_of("fc", nn.Linear(64, 64)) == {"group_size": 32, "bits": 4, "mode": "affine"}


def test_weights_are_quantized_unpacked_and_cut_into_files_by_mlx_lm():
    model = nn.Sequential(nn.Linear(64, 8), nn.RMSNorm(8))
    quantized, config = quantize_model(model, {}, 32, 4, mode="affine", quant_predicate=lambda path, module: True)
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"} == config["quantization_config"]
    assert isinstance(quantized.layers[0], nn.QuantizedLinear)
    assert type(dequantize_model(quantized).layers[0]) is nn.Linear
    weights = {name: mx.zeros((1 << 28,), mx.uint32) for name in "abcdef"}  # 1 GB each, and never computed
    assert [list(shard) for shard in make_shards(weights)] == [list("abcde"), list("f")]


def test_a_folder_is_loaded_without_its_weights_read(tmp_path):
    folder = save_target(tmp_path, tiny_target(), target_config(), byte_tokenizer())
    model, config = load_model(folder, lazy=True)
    assert config["model_type"] == "qwen3" and len(model.layers) == config["num_hidden_layers"]
    assert isinstance(load_tokenizer(folder), TokenizerWrapper)


def test_mlx_lm_downloads_the_files_of_these_patterns(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr("mlx_lm.utils.snapshot_download", lambda name, **options: asked.update(options) or tmp_path)
    assert _download("owner/name", allow_patterns=["*.json"]) == tmp_path
    assert asked["allow_patterns"] == ["*.json"]


def test_the_hubs_functions_errors_and_cache_folder():
    assert {"repo_id", "filename", "revision"} <= set(parameters(hf_hub_download))
    assert {"repo_id", "revision", "allow_patterns"} <= set(parameters(snapshot_download))
    # The order of the except clauses in files/hub.py: the narrow ones first.
    assert issubclass(errors.GatedRepoError, errors.RepositoryNotFoundError)
    assert issubclass(errors.LocalEntryNotFoundError, errors.EntryNotFoundError)
    assert issubclass(errors.RevisionNotFoundError, errors.HfHubHTTPError)
    assert issubclass(errors.HFValidationError, ValueError) and issubclass(errors.HfHubHTTPError, OSError)
    assert constants.default_home == str(Path.home() / ".cache")


def test_the_hub_takes_a_folder():
    assert {"repo_id", "exist_ok"} <= set(parameters(huggingface_hub.HfApi.create_repo))
    assert {"repo_id", "folder_path"} <= set(parameters(huggingface_hub.HfApi.upload_folder))


# The doctor: doctor.py


def test_a_models_classes_are_found_by_its_config():
    config = target_config("llama")
    model_class, arguments = utils._get_classes(config)
    assert model_class.__module__ == "mlx_lm.models.llama" and hasattr(arguments, "from_dict")


# Training: train/text/answers.py


def test_a_batch_gives_each_prompts_tokens_by_its_number():
    model = tiny_target()
    generator = BatchGenerator(model, max_tokens=4, stop_tokens=[], completion_batch_size=2, prefill_batch_size=2)
    prompts = [[5, 17, 3], [40, 8, 2]]
    places = generator.insert(prompts, samplers=[greedy_sampler, greedy_sampler])
    found = {place: [] for place in places}
    while any(len(tokens) < 4 for tokens in found.values()):
        for response in generator.next_generated():
            found[response.uid].append(response.token)
            assert response.logprobs.shape == (VOCAB_SIZE,)
    generator.close()
    assert [found[place] for place in places] == [plain_tokens(model, prompt, 4) for prompt in prompts]
