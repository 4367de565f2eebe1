"""The prefill: any chunking gives the same caches and the same drafts, and a long prompt is never held whole."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from support.drafts import draft_config
from support.runs import ROUNDING, Watch, assert_same_caches, draft_run, fresh_caches, make_draft, small_pair
from support.targets import plain_tokens, tiny_target

from mlx_dflash.dice import Dice
from mlx_dflash.drafter import Drafter
from mlx_dflash.models.structure import Structure
from mlx_dflash.pace import ReadingPace
from mlx_dflash.target import Target

LONG = np.random.RandomState(8).randint(0, 97, 61).tolist()


@pytest.mark.parametrize("step_size", [1, 2, 7, 8, 60, 61, 500])
@pytest.mark.parametrize("family", ["qwen3", "llama_sliding"])
def test_any_chunking_gives_the_same_caches_and_drafts(family, step_size):
    model = tiny_target(family)
    draft = make_draft(draft_config(layer_types=["sliding_attention", "full_attention"], sliding_window=8))
    structure = Structure(model)
    expected = fresh_caches(model, LONG, draft)
    found = fresh_caches(model, LONG, draft, step_size)
    assert_same_caches(found[0], expected[0], case="target")
    assert_same_caches(found[1], expected[1], case="draft")
    logits = [
        np.array(Drafter(draft, structure.embed, structure.unembed, Dice(), contexts).draft_logits(5))
        for _, contexts in (found, expected)
    ]
    error = np.abs(logits[0] - logits[1]).max()
    assert error <= ROUNDING, f"chunks of {step_size}: draft logits are off by {error}"


@pytest.mark.parametrize("step_size", [1, 9, 60])
def test_the_features_of_chunks_are_those_of_one_pass(step_size):
    model = tiny_target()
    whole, chunks = [], []
    Target(model, [3, 0]).prefill(mx.array(LONG), whole.append)
    Target(model, [3, 0]).prefill(mx.array(LONG), chunks.append, step_size)
    assert len(chunks) == -(-len(LONG) // step_size)
    error = mx.abs(mx.concatenate(chunks, axis=1) - whole[0]).max().item()
    assert error <= ROUNDING, f"features are off by {error}"


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_prompts_around_a_chunk_are_read_whole(length):
    watch = Watch(tiny_target(), LONG[:length], [2], num_tokens=6, draft=make_draft())
    calls, text = [], []
    for latest in watch.rounds(step_size=2, progress=lambda *call: calls.append(call)):
        text += latest.verdict.tokens
    assert text == watch.text[:6]
    assert calls[0] == (0, length) and calls[-1] == (length, length)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize("family", ["qwen3", "llama_sliding", "gemma3_text"])
def test_a_slow_machine_reads_in_short_steps_with_the_same_result(family, monkeypatch):
    """A made-up machine that needs a tenth of a second for a token reads about ten of them in a step."""
    model, draft, prompt, clock = tiny_target(family), make_draft(), LONG * 2, [0.0]
    monkeypatch.setattr("mlx_dflash.target.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    structure, contexts, sizes, reports = Structure(model), draft.make_cache(), [], []
    drafter = Drafter(draft, structure.embed, structure.unembed, Dice(), contexts)
    target = Target(model, draft.config.target_layer_ids, make_prompt_cache(model), reading_pace=ReadingPace(first=16))

    def read(features):
        sizes.append(features.shape[1])
        clock[0] += 0.1 * sizes[-1]
        drafter.extend_context(features)

    target.prefill(mx.array(prompt), read, 50, reports.append)
    assert sizes == [16, 10, 10, 10, 4, *[10] * 5, *[10] * 2, 2]
    assert reports == np.cumsum(sizes).tolist()
    expected = fresh_caches(model, prompt, draft)
    assert_same_caches(target.caches, expected[0], case="target")
    assert_same_caches(contexts, expected[1], case="draft")


@pytest.mark.parametrize("family", ["llama_sliding", "qwen3_5"])
def test_the_text_after_short_steps_is_mlx_lms(family, monkeypatch):
    model, draft = small_pair(family)
    prompt = [token % 6 for token in LONG]
    expected = draft_run(model, draft, prompt, max_tokens=20)
    monkeypatch.setattr(ReadingPace, "step", lambda self, most: min(most, 7))
    found = draft_run(model, draft, prompt, max_tokens=20)
    assert found.tokens == plain_tokens(model, prompt, 20) and found.from_draft == expected.from_draft
    assert found.last.stats.accepted == expected.last.stats.accepted


@pytest.mark.parametrize("options", [dict(max_kv_size=24), dict(kv_bits=8, kv_group_size=32, quantized_kv_start=20)])
def test_steps_that_matter_are_mlx_lms_on_a_slow_machine_too(options, monkeypatch):
    model, draft, seen = tiny_target(head_dim=32), make_draft(), []
    monkeypatch.setattr(ReadingPace, "step", lambda self, most: seen.append(most) or min(most, 8))
    run = draft_run(model, draft, LONG, max_tokens=12, prefill_step_size=50, **options)
    assert run.tokens == plain_tokens(model, LONG, 12, prefill_step_size=50, **options) and not seen
    draft_run(model, draft, LONG, max_tokens=2, prefill_step_size=50)
    assert seen, "without these options the pace decides"


def test_a_long_prompt_changes_nothing_for_the_next_short_one():
    model, draft = tiny_target("llama_sliding"), make_draft()
    expected = draft_run(model, draft, [1, 2, 3], max_tokens=12)
    draft_run(model, draft, LONG * 5, max_tokens=3)
    again = draft_run(model, draft, [1, 2, 3], max_tokens=12)
    assert (again.tokens, again.from_draft) == (expected.tokens, expected.from_draft)
    assert again.last.stats.accepted == expected.last.stats.accepted


def peak_of(work):
    """Bytes that a piece of work needs above what is held before."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    mx.synchronize()
    return mx.get_peak_memory() - before


def test_the_prefill_computes_one_row_of_logits():
    vocab_size, length = 50_000, 600
    model = tiny_target(vocab_size=vocab_size, num_hidden_layers=1)
    target = Target(model, [0])
    peak = peak_of(lambda: target.prefill(mx.array([7] * length), lambda features: None))
    assert peak < length * vocab_size * 4 / 4, (
        f"peak {peak / 1e6:.1f} MB; all rows of logits are {length * vocab_size * 4 / 1e6:.0f} MB"
    )


def test_a_long_prompts_features_are_not_held():
    """Chunk by chunk, features become context K/V; 30 chunks may not need 30 times the features of one."""
    model = tiny_target(num_hidden_layers=2, hidden_size=256)
    taps = [0, 1] * 8
    config = draft_config(
        dict(target_layer_ids=taps),
        hidden_size=256,
        num_target_layers=2,
        num_hidden_layers=1,
        layer_types=["full_attention"],
    )
    draft, length, step = make_draft(config), 3000, 100

    def read():
        contexts = draft.make_cache()
        drafter = Drafter(draft, Structure(model).embed, Structure(model).unembed, Dice(), contexts)
        target = Target(model, taps, make_prompt_cache(model))
        target.reserve(length), drafter.reserve(length)
        target.prefill(mx.array([7] * length), drafter.extend_context, step)

    peak, features = peak_of(read), length * len(taps) * 256 * 4
    assert peak < features / 2, (
        f"peak {peak / 1e6:.1f} MB; the features of the whole prompt are {features / 1e6:.1f} MB"
    )


def test_the_text_behind_a_long_prompt_is_mlx_lms():
    model, draft = tiny_target("gemma3_text"), make_draft()
    prompt = LONG * 4
    assert draft_run(model, draft, prompt, max_tokens=10, prefill_step_size=50).tokens == plain_tokens(
        model, prompt, 10
    )
