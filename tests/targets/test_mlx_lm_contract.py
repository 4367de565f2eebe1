"""What we lean on in mlx and mlx-lm, one test a fact: a failure after an update names what must be looked at."""

import copy
import inspect
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.server
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import (
    GenerationResponse,
    generate_step,
    generation_stream,
    wired_limit,
)
from mlx_lm.models import cache as caches
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.models.gated_delta import gated_delta_update
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.models.ssm import ssm_update
from mlx_lm.sample_utils import greedy_sampler, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from support import models
from support.byte_tokenizer import byte_tokenizer
from support.targets import TARGET_FAMILIES, context_free_target, plain_tokens, tiny_target

import mlx_dflash
from mlx_dflash import api
from mlx_dflash.caches import saved
from mlx_dflash.target import Target

ROWS = mx.arange(2 * 3 * 4).astype(mx.float32).reshape(1, 2, 3, 4)


def parameters(function):
    return list(inspect.signature(function).parameters)


# Random numbers: dice.py


def test_the_random_state_is_two_words_that_seed_puts_back():
    mx.random.seed(12345)
    mx.random.uniform()
    state = mx.random.state[0]
    assert state.dtype == mx.uint32 and state.shape == (2,)
    high, low = state.tolist()
    expected = [mx.random.uniform().item() for _ in range(3)]
    mx.random.seed((high << 32) | low)
    assert [mx.random.uniform().item() for _ in range(3)] == expected


def test_any_draw_moves_the_state_as_one_uniform_does():
    after = []
    for draw in (mx.random.uniform, lambda: mx.random.categorical(mx.zeros((1, 97)))):
        mx.random.seed(3)
        draw()
        after.append(mx.random.state[0].tolist())
    assert after[0] == after[1]


def test_mlx_lms_samplers_come_from_its_module_and_greedy_is_one_object():
    assert make_sampler(0.0) is greedy_sampler
    assert make_sampler(0.7, top_p=0.9).__module__ == make_sampler.__module__ == "mlx_lm.sample_utils"


@pytest.mark.parametrize(
    "options", [dict(temp=0.7), dict(temp=1.0, top_p=0.9, top_k=5, min_p=0.05), dict(temp=1.0, xtc_probability=0.5)]
)
def test_a_sampler_makes_the_same_number_of_draws_for_any_row(options):
    sampler, draws = make_sampler(**options), set()
    for row in (mx.zeros((1, 97)), mx.arange(97).astype(mx.float32)[None] * -3):
        mx.random.seed(1)
        sampler(row - mx.logsumexp(row))
        end, count = mx.random.state[0].tolist(), 0
        mx.random.seed(1)
        while mx.random.state[0].tolist() != end and count < 9:
            mx.random.uniform()
            count += 1
        draws.add(count)
    assert len(draws) == 1 and draws < set(range(1, 9)), f"{draws} draws"


def test_samplers_take_one_row_and_return_one_token():
    assert greedy_sampler(mx.zeros((1, 97))).shape == make_sampler(0.5)(mx.zeros((1, 97))).shape == (1,)


# Generation: api.py, session.py


def test_the_signatures_that_we_match():
    assert parameters(mlx_lm.stream_generate) == [
        "model",
        "tokenizer",
        "prompt",
        "max_tokens",
        "draft_model",
        "stream",
        "kwargs",
    ]
    assert parameters(mlx_lm.generate) == ["model", "tokenizer", "prompt", "verbose", "kwargs"]
    options = set(parameters(generate_step)) - {"prompt", "model", "stream", "max_tokens"}
    assert options == {
        "sampler",
        "logits_processors",
        "max_kv_size",
        "prompt_cache",
        "prefill_step_size",
        "kv_bits",
        "kv_group_size",
        "quantized_kv_start",
        "prompt_progress_callback",
        "input_embeddings",
    }
    assert parameters(mlx_lm.load) == [
        "path_or_hf_repo",
        "tokenizer_config",
        "model_config",
        "adapter_path",
        "lazy",
        "return_config",
        "revision",
        "trust_remote_code",
    ]


def test_our_signatures_begin_like_mlx_lms():
    ours = [mlx_dflash.load, api.generate, api.stream_generate, saved.save_prompt_cache, saved.load_prompt_cache]
    for function in ours:
        home = caches if "cache" in function.__name__ else mlx_lm
        theirs = [p for p in parameters(getattr(home, function.__name__)) if p != "kwargs"]
        assert parameters(function)[: len(theirs)] == theirs, function.__name__


def test_responses_have_the_fields_that_we_fill():
    assert parameters(GenerationResponse) == [
        "text",
        "token",
        "logprobs",
        "from_draft",
        "prompt_tokens",
        "prompt_tps",
        "generation_tokens",
        "generation_tps",
        "peak_memory",
        "finish_reason",
    ]


def test_the_generation_stream_is_one_for_each_thread():
    assert isinstance(generation_stream, mx.ThreadLocalStream)
    with mx.stream(generation_stream):
        assert mx.array([1, 2]).sum().item() == 3


def test_wired_limit_takes_a_model_and_streams():
    with wired_limit(tiny_target(num_hidden_layers=1), [generation_stream]):
        pass
    assert parameters(wired_limit)[:2] == ["model", "streams"]


def test_plain_generation_rolls_one_token_ahead_of_the_text():
    """Session.emit leaves the caller's random stream accordingly."""
    model = context_free_target(np.ones(6) / 6)
    mx.random.seed(0)
    steps = generate_step(mx.array([1, 2]), model, max_tokens=10, sampler=make_sampler(1.0))
    next(steps), next(steps)
    steps.close()
    state = mx.random.state[0].tolist()
    mx.random.seed(0)
    for _ in range(3):
        mx.random.uniform()
    assert mx.random.state[0].tolist() == state


def test_log_probabilities_are_logits_minus_their_logsumexp():
    """Dice uses the expression itself, so that ties fall alike."""
    assert "logits - mx.logsumexp(logits, keepdims=True)" in inspect.getsource(generate_step)


def test_the_modules_name_is_shadowed_by_the_function():
    assert callable(mlx_lm.generate) and sys.modules["mlx_lm.generate"].stream_generate is mlx_lm.stream_generate


# Models: models/, target.py


@pytest.mark.parametrize("family", TARGET_FAMILIES)
def test_models_iterate_a_list_that_can_be_found_and_whose_entries_can_be_replaced(family):
    model = tiny_target(family)
    layers = model.layers
    lists = [
        value
        for _, module in model.named_modules()
        for value in module.values()
        if isinstance(value, list) and len(value) == len(layers) and all(a is b for a, b in zip(value, layers))
    ]
    assert len(lists) == 1
    calls, original = [], lists[0][1]

    class Stand(nn.Module):
        def __call__(self, *args, **kwargs):
            calls.append(kwargs)
            return original(*args, **kwargs)

        def __getattr__(self, name):
            return getattr(original, name)

    lists[0][1] = Stand()
    model(mx.array([[1, 2]]), cache=make_prompt_cache(model))
    assert len(calls) == 1, "the entry of the list was not called"


def test_layers_return_the_residual_stream():
    model = tiny_target()
    out = model.layers[0](mx.zeros((1, 3, 32)), "causal", KVCache())
    assert out.shape == (1, 3, 32)


def test_embeddings_can_be_a_head():
    assert nn.Embedding(97, 8).as_linear(mx.zeros((1, 2, 8))).shape == (1, 2, 97)
    assert nn.QuantizedEmbedding(97, 64).as_linear(mx.zeros((1, 2, 64))).shape == (1, 2, 97)
    assert tiny_target(tie_word_embeddings=True).get("lm_head") is None


def test_models_call_mlxs_fast_functions_through_their_module_and_with_keywords(monkeypatch):
    """Stand-ins for these functions take the entries of mx.fast, and the arguments under these names."""
    calls = {}

    def observe(name, original):
        def call(*args, **options):
            calls.setdefault(name, (len(args), set(options)))
            return original(*args, **options)

        monkeypatch.setitem(vars(mx.fast), name, call)

    for name in ("rope", "scaled_dot_product_attention"):
        observe(name, getattr(mx.fast, name))
    model = tiny_target()
    model(mx.array([[1, 2]]), cache=make_prompt_cache(model))
    assert calls["rope"] == (2, {"traditional", "base", "scale", "offset"})
    assert calls["scaled_dot_product_attention"] == (3, {"scale", "mask", "sinks"})


def test_a_quantized_linear_layers_fields():
    linear = nn.QuantizedLinear.from_linear(nn.Linear(64, 8), group_size=32, bits=4)
    assert (linear.group_size, linear.bits, linear.mode) == (32, 4, "affine")
    assert set(linear) == {"weight", "scales", "biases", "bias"}


# Caches: caches/


def test_make_prompt_cache_gives_the_stock_classes():
    assert {type(c) for c in make_prompt_cache(tiny_target())} == {KVCache}
    bounded = make_prompt_cache(tiny_target(), 12)
    assert {(type(c), c.max_size, c.keep) for c in bounded} == {(RotatingKVCache, 12, 4)}
    assert [type(c) for c in make_prompt_cache(tiny_target("llama_sliding"))] == [RotatingKVCache, KVCache] * 2


def test_a_kv_caches_fields():
    cache = KVCache()
    assert cache.empty() and (cache.keys, cache.values, cache.offset) == (None, None, 0)
    cache.update_and_fetch(ROWS, ROWS)
    assert cache.offset == 3 and cache.keys.shape[2] >= 3 and cache.size() == 3
    assert KVCache.from_state(cache.state).offset == 3
    assert cache.trim(2) == 2 and cache.offset == 1
    assert cache.keys_and_values()[0].shape[2] == 1


def test_a_rotating_caches_fields_and_its_temporal_order():
    cache = RotatingKVCache(2)
    assert (cache.keep, cache.max_size, cache.offset, cache._idx) == (0, 2, 0, 0)
    for i in range(3):
        cache.update_and_fetch(ROWS[..., i : i + 1, :], ROWS[..., i : i + 1, :])
    assert mx.array_equal(cache._temporal_order(cache.keys), ROWS[..., 1:, :])
    assert len(cache.state) == 6 and cache.state[2:] == (3, 0, 2, cache._idx)
    again = RotatingKVCache.from_state(cache.state)
    assert (again.offset, again.max_size, again._idx) == (3, 2, cache._idx)


def test_models_ask_a_cache_for_its_mask():
    for cls in (KVCache, RotatingKVCache):
        assert "make_mask" in vars(cls)
    assert parameters(RotatingKVCache.make_mask) == ["self", "N", "window_size", "return_array"]
    mask = np.array(create_causal_mask(2, 3, window_size=3))
    assert mask.astype(int).tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]


def test_mlx_lm_loads_caches_by_their_class_names(tmp_path):
    file = str(tmp_path / "cache.safetensors")
    caches.save_prompt_cache(file, [KVCache()], {"a": "b"})
    loaded, metadata = caches.load_prompt_cache(file, return_metadata=True)
    assert type(loaded[0]) is KVCache and metadata == {"a": "b"}
    assert "globals()" in inspect.getsource(caches.load_prompt_cache)


# mlx: draft/, caches/growing.py


def test_causal_attention_with_fewer_queries_is_aligned_to_the_end():
    q, k = mx.random.normal((1, 2, 2, 8)), mx.random.normal((1, 2, 5, 8))
    mask = create_causal_mask(2, 3)
    a, b = (mx.fast.scaled_dot_product_attention(q, k, k, scale=1.0, mask=m) for m in ("causal", mask))
    assert mx.abs(a - b).max().item() < 1e-6


def test_a_slice_assignment_is_in_place_while_nobody_else_holds_the_buffer():
    def address(array):
        return np.array(array, copy=False).__array_interface__["data"][0]

    buffer = mx.zeros((1, 2, 64, 4))
    mx.eval(buffer)
    before = address(buffer)
    buffer[..., 3:6, :] = ROWS
    mx.eval(buffer)
    assert address(buffer) == before
    held = buffer[..., :1, :]
    mx.eval(held)
    buffer[..., 3:6, :] = ROWS
    mx.eval(buffer)
    assert address(buffer) != before, "a held view no longer costs a copy; the donation rules can be relaxed"


def test_a_modules_arrays_and_modules_are_its_dict_and_all_else_its_attributes():
    linear = nn.Linear(4, 4)
    assert set(linear) == {"weight", "bias"}
    linear.note = "x"
    assert "note" not in linear and linear.note == "x"
    linear.weight = mx.ones((4, 4))
    assert linear["weight"] is linear.weight and dict(tree_flatten(linear.parameters()))["weight"].shape == (4, 4)
    twin = nn.Linear.__new__(nn.Linear)
    twin.__dict__.update(linear.__dict__)
    twin["weight"], twin["bias"] = linear["weight"], linear["bias"]
    assert mx.array_equal(twin(mx.ones((1, 4))), linear(mx.ones((1, 4))))


def test_rows_of_quantized_weights_can_be_concatenated():
    a, b = (nn.QuantizedLinear.from_linear(nn.Linear(64, 8, bias=False), group_size=32, bits=4) for _ in range(2))
    x = mx.random.normal((1, 64))
    parts = [mx.concatenate([a[n], b[n]]) for n in ("weight", "scales", "biases")]
    fused = mx.quantized_matmul(x, *parts, transpose=True, group_size=32, bits=4)
    assert mx.array_equal(fused, mx.concatenate([a(x), b(x)], axis=-1))


def test_the_small_functions_that_the_draft_borrows():
    assert parameters(initialize_rope)[:5] == [
        "dims",
        "base",
        "traditional",
        "scaling_config",
        "max_position_embeddings",
    ]
    x = mx.random.normal((1, 8))
    assert mx.allclose(swiglu(x, 2 * x), nn.silu(x) * 2 * x)


def test_kv_caches_grow_by_our_own_rule_and_not_by_mlx_lms():
    assert KVCache.step == 256


def test_tokenizers_have_what_we_read():
    for name in ("bos_token", "eos_token_ids", "detokenizer", "has_chat_template", "add_eos_token"):
        assert hasattr(TokenizerWrapper, name) or name in ("bos_token", "has_chat_template"), name
    tokenizer = byte_tokenizer()
    assert (tokenizer.has_thinking, tokenizer.has_tool_calling, tokenizer.tool_parser) == (False, False, None)
    assert (tokenizer.response_initial_state, tokenizer.response_transitions) == (None, {})


def test_tokenizers_know_the_marks_of_reasoning():
    plain = byte_tokenizer()
    plain._tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    tokenizer = TokenizerWrapper(plain._tokenizer)
    start, end = tokenizer.encode("<think></think>", add_special_tokens=False)
    assert (tokenizer.has_thinking, tokenizer.think_start, tokenizer.think_end) == (True, "<think>", "</think>")
    assert tuple(tokenizer.think_end_tokens) == (end,)
    prompt = [start, 65, end, 65]
    assert (tokenizer.rfind_think_start(prompt), tokenizer.rfind_think_end(prompt)) == (0, 2)
    assert (tokenizer.rfind_think_start([65]), tokenizer.rfind_think_end([65])) == (-1, -1)


def test_plain_greedy_text_does_not_depend_on_the_prefills_chunks():
    model = tiny_target()
    assert plain_tokens(model, [5] * 9, 8, prefill_step_size=2) == plain_tokens(model, [5] * 9, 8)


# Recurrent layers: caches/recurrences.py, caches/rollback.py


def test_recurrences_take_and_return_what_is_recorded():
    assert parameters(gated_delta_update)[:9] == ["q", "k", "v", "a", "b", "A_log", "dt_bias", "state", "mask"]
    assert parameters(ssm_update)[:8] == ["hidden_states", "A_log", "B", "C", "D", "dt", "dt_bias", "state"]
    q, v, gate = mx.ones((1, 3, 2, 8)), mx.ones((1, 3, 4, 8)), mx.ones((1, 3, 4))
    out, state = gated_delta_update(q, q, v, gate, gate, mx.zeros(4), mx.zeros(4))
    assert out.shape == v.shape and state.shape == (1, 4, 8, 8)
    B = mx.ones((1, 3, 2, 5))
    out, state = ssm_update(v, mx.zeros(4), B, B, mx.ones(4), gate, mx.zeros(4))
    assert out.shape == v.shape and state.shape == (1, 4, 8, 5)


@pytest.mark.parametrize("model_type", ["qwen3_5", "kimi_linear", "mamba2", "plamo2", "lfm2"])
def test_short_convolutions_see_the_state_in_front_of_the_tokens(model_type):
    """Entries of an ArraysCache are the last rows of a convolution's input, or the state that a recurrence returned."""
    model = models.build(model_type)
    target = Target(model, [0], block_size=4)
    target.verify(1, mx.array([2, 3, 4], mx.uint32))
    target.commit(2)
    assert models.way_back(target) == "recurrence"


def test_a_copied_array_is_safe_from_writes_in_place():
    array = mx.zeros(3)
    kept = copy.copy(array)
    array[1] = 5
    assert kept.tolist() == [0, 0, 0] and array.tolist() == [0, 5, 0]


def test_a_short_convolutions_weight_gives_its_width():
    assert nn.Conv1d(4, 4, kernel_size=3, groups=4).weight.shape[1] == 3


def test_caches_say_whether_they_can_be_trimmed():
    assert caches.can_trim_prompt_cache([KVCache()]) and not caches.can_trim_prompt_cache([KVCache(), ArraysCache(1)])
    assert [hasattr(c, "to_quantized") for c in (KVCache(), ArraysCache(1), QuantizedKVCache())] == [True, False, False]
    quantized = KVCache().to_quantized(group_size=32, bits=4)
    rows = mx.ones((1, 2, 3, 32))
    quantized.update_and_fetch(rows, rows)
    assert quantized.offset == 3 and quantized.trim(1) == 1 and quantized.offset == 2


def test_fields_of_caches_that_are_rolled_back():
    cache = ArraysCache(2)
    assert cache.cache == [None, None] and cache.lengths is None and cache.left_padding is None
    cache[1] = ROWS
    assert cache.cache[1] is ROWS and set(vars(cache)) >= {"cache", "lengths", "left_padding"}
    assert isinstance(CacheList(KVCache()).caches, tuple)
    chunked, joined = ChunkedKVCache(4), ConcatenateKVCache()
    for cache in (chunked, joined):
        cache.update_and_fetch(ROWS, ROWS)
    assert chunked.start_position == 0 and chunked.trim(1) == 1 and chunked.offset == ROWS.shape[2] - 1
    joined.trim(1)
    assert joined.keys.shape == ROWS.shape, "its trim cuts the arrays now; rollback.trim_to need not"
    assert isinstance(KVCache().to_quantized(group_size=32, bits=4), QuantizedKVCache)
