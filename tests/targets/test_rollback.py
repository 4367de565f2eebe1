"""What the table of types does not reach: quantized rows, kept rows, odd caches, failures, early ends."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from support import models
from support.oracle import OracleDrafter
from support.targets import plain_tokens

from mlx_dflash.caches import rollback
from mlx_dflash.caches.quantization import KVQuantization
from mlx_dflash.caches.saved import load_prompt_cache, save_prompt_cache
from mlx_dflash.caches.windowed import WindowedKVCache
from mlx_dflash.dice import Dice
from mlx_dflash.emission import emit
from mlx_dflash.session import Session
from mlx_dflash.target import Target

PROMPT = [1, 2, 3, 4, 5]
LONG_PROMPT = [(7 * i + i // 10) % 10 for i in range(40)]
# A type for each kind of cache: rows, windows, chunks, lists, recurrences that run again, states that do not.
KINDS = (
    "llama",
    "gemma3_text",
    "llama4",
    "deepseek_v32",
    "qwen3_5",
    "mamba2",
    "lfm2",
    "falcon_h1",
    "mamba",
    "rwkv7",
    "deepseek_v41",
)


@pytest.fixture(autouse=True)
def uncompiled():
    mx.disable_compile()
    yield
    mx.enable_compile()


def session(model, prompt, expected, accepts=(2, 0, 5, 1, 4, 3), max_tokens=40, sampler=None, **target):
    """A session whose drafter knows the text."""
    drafter = OracleDrafter(prompt, expected, accepts, 5)
    return Session(Target(model, [0, 1], block_size=6, **target), drafter, Dice(sampler), max_tokens=max_tokens)


def tokens_of(running, prompt, **prefill):
    return [emission.token for emission in emit(running, mx.array(prompt), **prefill)]


def arrays(caches):
    """The rows and states that count, as a flat list."""
    found = []
    for cache in rollback.leaves(caches):
        if isinstance(cache, RotatingKVCache):
            found += cache.state[:2]
        elif isinstance(cache, QuantizedKVCache):
            found += [mx.dequantize(*part, cache.group_size, cache.bits) for part in cache.keys_and_values()]
        elif hasattr(cache, "keys_and_values"):
            found += [array for _, array in tree_flatten(cache.keys_and_values())] if cache.offset else []
        else:
            found += [array for _, array in tree_flatten(cache.__dict__) if isinstance(array, mx.array)]
    return [np.array(array.astype(mx.float32)) for array in found]


def codes(caches):
    return [part[0] for cache in caches if isinstance(cache, QuantizedKVCache) for part in cache.keys_and_values()]


def assert_close(ours, theirs, tolerance=1e-4):
    assert len(ours) == len(theirs)
    for n, (a, b) in enumerate(zip(ours, theirs)):
        assert a.shape == b.shape, f"array {n}: {a.shape}, expected {b.shape}"
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max(initial=0)))


@pytest.mark.parametrize("start", [0, 3, 4, 5, 9, 20, 5000])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5", "jamba"])
def test_quantized_rows_begin_where_those_of_mlx_lm_do(model_type, start):
    model = models.build(model_type, head_dim=32, hidden_size=128)
    # In four bits, rounding turns jamba's codes into their neighbours and these, now and then, its tokens into others.
    bits = 8 if model_type == "jamba" else 4
    options = dict(kv_bits=bits, kv_group_size=32, quantized_kv_start=start)
    for prompt, step_size in ((PROMPT, 2048), (LONG_PROMPT, 9), ([3], 2048)):
        caches = make_prompt_cache(model)
        expected = plain_tokens(model, prompt, 40, prompt_cache=caches, prefill_step_size=step_size, **options)
        running = session(model, prompt, expected, quantization=KVQuantization(bits, 32, start))
        assert tokens_of(running, prompt, step_size=step_size) == expected
        ours = running.target.caches
        assert [isinstance(c, QuantizedKVCache) for c in ours] == [isinstance(c, QuantizedKVCache) for c in caches]
        # Where rounding changes a code, a row moves by a step, and what later layers keep by no more. The step, of the
        # largest value:
        same = all(mx.array_equal(a, b) for a, b in zip(codes(ours), codes(caches), strict=True))
        assert_close(arrays(ours), arrays(caches), 1e-4 if same else 2 / (2**bits - 1))


def test_the_caller_sees_the_quantized_caches():
    model = models.build("qwen3", head_dim=32)
    caches = [*make_prompt_cache(model), "the draft's"]
    expected = plain_tokens(model, PROMPT, 20, kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    tokens_of(
        session(model, PROMPT, expected, max_tokens=20, caches=caches, quantization=KVQuantization(8, 32, 0)), PROMPT
    )
    assert all(type(c) is QuantizedKVCache and c.offset == 25 for c in caches[:-1]) and caches[-1] == "the draft's"


@pytest.mark.parametrize("size", [5, 8, 12, 100])
@pytest.mark.parametrize("step_size", [3, 16, 2048])
def test_max_kv_size_keeps_what_mlx_lm_keeps(size, step_size):
    model = models.build("qwen3")
    for prompt in (PROMPT, LONG_PROMPT, [3]):
        caches = make_prompt_cache(model, size)
        sampler = make_sampler(temp=1.0)
        expected = plain_tokens(model, prompt, 40, sampler, seed=5, prompt_cache=caches, prefill_step_size=step_size)
        running = session(model, prompt, expected, caches=make_prompt_cache(model, size), sampler=sampler)
        mx.random.seed(5)
        assert tokens_of(running, prompt, step_size=step_size) == expected
        for cache in running.target.caches:
            assert type(cache) is WindowedKVCache and cache.state[0].shape[2] <= size
        theirs = [WindowedKVCache.adopt(c) for c in caches]
        assert_close(arrays(running.target.caches), arrays(theirs))


def test_a_second_turn_with_max_kv_size_goes_on_as_mlx_lm_does(tmp_path):
    model = models.build("qwen3")
    caches, theirs = make_prompt_cache(model, 12), make_prompt_cache(model, 12)
    expected = plain_tokens(model, LONG_PROMPT, 20, prompt_cache=theirs)
    assert tokens_of(session(model, LONG_PROMPT, expected, max_tokens=20, caches=caches), LONG_PROMPT) == expected
    save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
    again = plain_tokens(model, PROMPT, 20, prompt_cache=theirs)
    for cache in (caches, load_prompt_cache(str(tmp_path / "cache.safetensors"))):
        running = session(model, [*LONG_PROMPT, *expected, *PROMPT], again, max_tokens=20, caches=cache)
        running.drafter.context_length = 60
        assert tokens_of(running, PROMPT) == again


class Sealed:
    """A cache of an unknown class that cannot take back anything, around rows of its own."""

    def __init__(self):
        self.parts = {"rows": KVCache(), "seen": []}

    @property
    def offset(self):
        return len(self.parts["seen"])

    def update_and_fetch(self, keys, values):
        self.parts["seen"].extend([0] * keys.shape[2])
        self.rows = keys if self.offset == keys.shape[2] else mx.concatenate([self.rows, keys], axis=2)
        self.values = values if self.offset == values.shape[2] else mx.concatenate([self.values, values], axis=2)
        return self.rows, self.values

    state = property(lambda self: [self.rows, self.values])

    def is_trimmable(self):
        return False

    def make_mask(self, *args, **kwargs):
        return KVCache.make_mask(self, *args, **kwargs)


@pytest.mark.parametrize("kind", [ConcatenateKVCache, Sealed])
def test_caches_of_classes_that_are_not_replaced_end_at_the_text(kind):
    model = models.build("qwen3")
    expected = plain_tokens(model, PROMPT, 40)
    running = session(model, PROMPT, expected, caches=[kind() for _ in model.layers])
    assert tokens_of(running, PROMPT) == expected
    assert {c.offset for c in running.target.caches} == {45}
    fresh = make_prompt_cache(model)
    model(mx.array([PROMPT + expected]), cache=fresh)
    theirs = [c.keys_and_values()[0] for c in fresh]
    ours = [c.keys if kind is ConcatenateKVCache else c.rows for c in running.target.caches]
    assert_close([np.array(a) for a in ours], [np.array(a) for a in theirs])


@pytest.mark.parametrize("model_type", KINDS[2:])  # rows and windows: tests/coverage/test_conversation.py
def test_early_end_leaves_the_yielded_tokens(model_type):
    model = models.build(model_type)
    expected = plain_tokens(model, PROMPT, 30)
    for taken in (1, 2, 5, 7, 8, 13):
        running = session(model, PROMPT, expected, accepts=(5, 3, 2, 4))
        emissions = emit(running, mx.array(PROMPT))
        for _ in range(taken):
            next(emissions)
        emissions.close()
        assert running.target.length == 5 + taken
        fresh = Target(model, [0], block_size=6)
        fresh.prefill(mx.array(PROMPT + expected[:taken]), lambda features: None)
        if model_type != "llama4":  # whose front is cut when the next pass begins
            assert_close(arrays(running.target.caches), arrays(fresh.caches))
        rest = [running.target.verify(expected[taken], mx.zeros((0,), mx.uint32)).logits]
        rest += [fresh.verify(expected[taken], mx.zeros((0,), mx.uint32)).logits]
        assert_close([np.array(rest[0])], [np.array(rest[1])])


@pytest.mark.parametrize("model_type", KINDS[2:])
def test_failing_pass_leaves_the_caches_as_they_were(model_type):
    model = models.build(model_type)
    target = Target(model, [0], block_size=6)
    target.prefill(mx.array(LONG_PROMPT), lambda features: None)
    target.verify(1, mx.array([2, 3, 4, 5, 6], mx.uint32))
    target.commit(3)
    before, waiting = arrays(target.caches), target._waiting.tolist()

    class Broken:
        def __getattr__(self, name):
            return getattr(last, name)

        def __call__(self, *args, **kwargs):
            last(*args, **kwargs)
            raise KeyboardInterrupt

    [(container, key)] = target.structure.places[-1]
    last = container[key]
    container[key] = Broken()
    try:
        with pytest.raises(KeyboardInterrupt):
            target.verify(4, mx.array([2, 3], mx.uint32))
        with pytest.raises(KeyboardInterrupt):
            target.prefill(mx.array(LONG_PROMPT), lambda features: None)
    finally:
        container[key] = last
    assert target.length == 43 and target._waiting.tolist() == waiting
    if model_type != "llama4":  # whose front is cut when a pass begins
        assert_close(arrays(target.caches), before)
    fresh = Target(model, [0], block_size=6)
    fresh.prefill(mx.array([*LONG_PROMPT, 1, 2, 3]), lambda features: None)
    drafts = mx.array([2, 3], mx.uint32)
    assert_close([np.array(target.verify(4, drafts).logits)], [np.array(fresh.verify(4, drafts).logits)])


@pytest.mark.parametrize("model_type", KINDS)
def test_a_round_is_one_pass_of_the_target(model_type):
    model = models.build(model_type)
    expected = plain_tokens(model, PROMPT, 60)
    calls = []

    class Counted:
        def __call__(self, tokens, **kwargs):
            calls.append(tokens.shape[1])
            return model(tokens, **kwargs)

    running = session(model, PROMPT, expected, accepts=(2, 1, 3), max_tokens=60)
    running.target.model = Counted()
    assert tokens_of(running, PROMPT) == expected
    rounds = running.stats.num_rounds + 3  # prefill, the prompt's last token, the settling at the end
    is_replay = models.way(model_type) == "replay"
    assert len(calls) <= (1.4 if is_replay else 1) * rounds, f"{len(calls)} passes in {rounds} rounds"
    assert max(calls) <= (12 if is_replay else 6), f"a pass of {max(calls)} rows"


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3_5", "mamba"])
def test_sequences_of_one_target_do_not_meet(model_type):
    model, other = models.build(model_type), models.build(model_type, seed=1)
    texts = [plain_tokens(m, p, 30) for m, p in ((model, PROMPT), (model, LONG_PROMPT), (other, PROMPT))]
    running = [
        emit(session(m, p, text, accepts=accepts, max_tokens=30), mx.array(p))
        for m, p, text, accepts in (
            (model, PROMPT, texts[0], (1, 3)),
            (model, LONG_PROMPT, texts[1], (4, 0, 2)),
            (other, PROMPT, texts[2], (5, 2)),
        )
    ]
    assert [[e.token for e in step] for step in zip(*running)] == [list(step) for step in zip(*texts)]


def test_refusals_name_the_reason():
    windows = models.build("gemma3_text")
    with pytest.raises(ValueError, match="sliding window"):
        Target(windows, [0], quantization=KVQuantization(8))
    with pytest.raises(ValueError, match="2, 4 or 8, got 3"):
        Target(models.build("qwen3"), [0], quantization=KVQuantization(3))

    class Slotted:
        __slots__ = ("offset",)

    with pytest.raises(ValueError, match="Slotted"):
        Target(models.build("qwen3"), [0], caches=[Slotted()] * 4)
