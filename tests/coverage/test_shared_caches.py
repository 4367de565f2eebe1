"""Caches that other threads, other runs or files meet in the middle of a run: right, or refused by name at once."""

import gc

import mlx.core as mx
import pytest
from support.byte_tokenizer import byte_tokenizer
from support.drafts import draft_config, draft_weights
from support.folders import save_draft, save_target
from support.runs import PROMPT, draft_run, in_thread, make_draft, tokenizer
from support.targets import build_target, plain_tokens, target_config, tiny_target

import mlx_dflash

IN_USE = "the prompt cache is in use by a generation that has not ended"


def started(model, draft, cache, take=1, prompt=PROMPT, max_tokens=12):
    """A run of which `take` responses were taken, and their tokens."""
    running = mlx_dflash.stream_generate(
        model, tokenizer(), mx.array(prompt), draft_model=draft, prompt_cache=cache, max_tokens=max_tokens
    )
    return running, [next(running).token for _ in range(take)]


SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_a_pair_with_scaled_rope_runs_in_another_thread_than_it_was_loaded_in(tmp_path):
    config = target_config("llama", rope_scaling=SCALED)
    save_target(tmp_path / "target", build_target(config), config, byte_tokenizer())
    drafted = draft_config(rope_scaling=SCALED)
    save_draft(tmp_path / "draft", drafted, draft_weights(drafted))
    (model, _), draft = in_thread(
        lambda: (mlx_dflash.load(str(tmp_path / "target")), mlx_dflash.load_draft(str(tmp_path / "draft")))
    )
    expected = plain_tokens(build_target(config), PROMPT, 8)
    assert plain_tokens(model, PROMPT, 8) == expected
    assert draft_run(model, draft, PROMPT, max_tokens=8).tokens == expected
    assert in_thread(lambda: draft_run(model, draft, PROMPT, max_tokens=8).tokens) == expected


@pytest.mark.parametrize("family", ["qwen3", "llama_sliding", "qwen3_5"])
@pytest.mark.parametrize("end", ["closed", "collected"])
def test_a_run_that_ends_in_a_foreign_thread_goes_on_in_its_own(family, end):
    model = tiny_target(family)
    hidden = model.layers[0].mlp.gate_proj.weight.shape[-1]
    draft = make_draft(draft_config(hidden_size=hidden))
    cache = mlx_dflash.make_prompt_cache(model, draft)
    running, tokens = started(model, draft, cache, take=3)
    box = [running]
    del running
    if end == "closed":
        assert in_thread(lambda: box[0].close()) is None
    else:
        in_thread(lambda: (box.clear(), gc.collect()))
    with pytest.raises(ValueError, match=IN_USE):
        in_thread(lambda: draft_run(model, draft, [9, 8], max_tokens=4, prompt_cache=cache))
    ours = draft_run(model, draft, [9, 8], max_tokens=6, prompt_cache=cache).tokens
    assert ours == plain_tokens(model, [*PROMPT, *tokens, 9, 8], 6)


@pytest.mark.parametrize("use", ["save", "second run"])
def test_a_cache_in_use_is_refused_by_name_and_its_run_goes_on(use, tmp_path):
    model, draft = tiny_target(), make_draft()
    cache = mlx_dflash.make_prompt_cache(model, draft)
    running, tokens = started(model, draft, cache, max_tokens=8)
    with pytest.raises(ValueError, match=IN_USE):
        if use == "save":
            mlx_dflash.save_prompt_cache(str(tmp_path / "c.safetensors"), cache)
        else:
            list(started(model, draft, cache)[0])
    assert not list(tmp_path.iterdir())
    assert tokens + [r.token for r in running] == plain_tokens(model, PROMPT, 8)
    mlx_dflash.save_prompt_cache(str(tmp_path / "c.safetensors"), cache)
    loaded = mlx_dflash.load_prompt_cache(str(tmp_path / "c.safetensors"))
    expected = plain_tokens(model, [*PROMPT, *plain_tokens(model, PROMPT, 8), 9], 5)
    assert draft_run(model, draft, [9], max_tokens=5, prompt_cache=loaded).tokens == expected


def test_a_run_made_before_another_used_its_cache_is_refused():
    model, draft = tiny_target(), make_draft()
    cache = mlx_dflash.make_prompt_cache(model, draft)
    first, second = started(model, draft, cache, take=0)[0], started(model, draft, cache, take=0)[0]
    tokens = [r.token for r in first]
    with pytest.raises(ValueError, match="another run used the cache since"):
        next(second)
    assert draft_run(model, draft, [9], max_tokens=5, prompt_cache=cache).tokens == plain_tokens(
        model, [*PROMPT, *tokens, 9], 5
    )


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_detokenizer_that_raises_leaves_the_caches_at_what_was_yielded(after, monkeypatch):
    model, draft = tiny_target(), make_draft()
    cache = mlx_dflash.make_prompt_cache(model, draft)
    kind, seen = type(tokenizer().detokenizer), []
    add = kind.add_token

    def failing(self, token):
        if len(seen) == after:
            raise OverflowError("no text for this token")
        seen.append(token)
        add(self, token)

    monkeypatch.setattr(kind, "add_token", failing)
    running, yielded = started(model, draft, cache, take=0)[0], []
    with pytest.raises(OverflowError, match="no text"):
        for response in running:
            yielded.append(response.token)
    monkeypatch.undo()
    assert len(yielded) == after and {c.offset for c in cache} == {len(PROMPT) + after}
    expected = plain_tokens(model, [*PROMPT, *yielded, 9], 5)
    assert draft_run(model, draft, [9], max_tokens=5, prompt_cache=cache).tokens == expected
