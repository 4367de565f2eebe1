"""C2 with a caller's cache: however a run ends, both sides cover the prompt and every yielded token, and go on."""

import copy
from itertools import islice

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_sampler
from support.drafts import draft_config
from support.runs import (
    PROMPT,
    assert_same_caches,
    draft_run,
    forced_drafter,
    fresh_caches,
    make_draft,
    plain_run,
    tokenizer,
)
from support.targets import plain_tokens, tiny_target

import mlx_dflash.api
from mlx_dflash.draft.model import DraftModel
from mlx_dflash.target import Target

SLIDING = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
PAIRS = {
    "qwen3": ({}, {}),
    "llama_sliding": (dict(layer_types=["sliding_attention", "full_attention"]), SLIDING),
}
NEXT = [11, 2, 60]


class Interrupted(Exception):
    """What a test throws into a run."""


@pytest.fixture(params=PAIRS)
def pair(request):
    target_changes, draft_changes = PAIRS[request.param]
    model = tiny_target(request.param, num_hidden_layers=2, **target_changes)
    draft = make_draft(draft_config(dict(target_layer_ids=[0, 1]), num_target_layers=2, **draft_changes))
    return model, draft


def force(monkeypatch, model, prompt, accepts=(2, 5, 0, 3)):
    text = plain_tokens(model, prompt, 30)
    monkeypatch.setattr("mlx_dflash.pair.Drafter", forced_drafter(prompt, text, list(accepts)))
    return text


def start(model, draft, cache, prompt=PROMPT, **options):
    options = {"max_tokens": 24, **options}
    return mlx_dflash.stream_generate(
        model, tokenizer(), mx.array(prompt), draft_model=draft, prompt_cache=cache, **options
    )


def check_caches(cache, model, draft, tokens, case=""):
    """The caches are those of a fresh pass over these tokens, and a next turn gives what it gives after that pass."""
    target, context = fresh_caches(model, tokens, draft)
    num_target = len(target)
    assert_same_caches(cache[:num_target], target, case=f"{case}, target")
    assert_same_caches(cache[num_target:], context, case=f"{case}, draft")


def check_next_turn(cache, model, draft, tokens, monkeypatch):
    monkeypatch.undo()
    expected = plain_tokens(model, [*tokens, *NEXT], 9)
    assert draft_run(model, draft, NEXT, max_tokens=9, prompt_cache=cache).tokens == expected
    check_caches(cache, model, draft, [*tokens, *NEXT, *expected], "after the next turn")


def run_into(exception, generator):
    """Take responses until the generator raises; return their tokens."""
    tokens = []
    with pytest.raises(exception):
        for response in generator:
            tokens.append(response.token)
    return tokens


@pytest.mark.parametrize("taken", range(1, 11))
def test_closing_at_any_token_leaves_the_caches_at_the_text(pair, taken, monkeypatch):
    model, draft = pair
    text = force(monkeypatch, model, PROMPT)
    cache = mlx_dflash.make_prompt_cache(model, draft)
    generator = start(model, draft, cache)
    assert [r.token for r in islice(generator, taken)] == text[:taken]
    generator.close()
    check_caches(cache, model, draft, PROMPT + text[:taken], f"closed after {taken}")
    if taken % 5 == 3:
        check_next_turn(cache, model, draft, PROMPT + text[:taken], monkeypatch)


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 9])
def test_the_length_limit_leaves_the_caches_at_the_text(pair, max_tokens, monkeypatch):
    model, draft = pair
    text = force(monkeypatch, model, PROMPT)
    cache = mlx_dflash.make_prompt_cache(model, draft)
    assert draft_run(model, draft, PROMPT, max_tokens=max_tokens, prompt_cache=cache).tokens == text[:max_tokens]
    check_caches(cache, model, draft, PROMPT + text[:max_tokens])
    check_next_turn(cache, model, draft, PROMPT + text[:max_tokens], monkeypatch)


def test_a_generator_that_is_dropped_unread_changes_nothing(pair):
    model, draft = pair
    cache = mlx_dflash.make_prompt_cache(model, draft)
    generator = start(model, draft, cache)
    generator.close()
    assert {c.offset for c in cache} == {0}
    check_next_turn(cache, model, draft, [], pytest.MonkeyPatch())


@pytest.mark.parametrize("call", [1, 3, 8])
@pytest.mark.parametrize("where", ["processor", "sampler"])
def test_an_exception_of_the_callers_functions_leaves_the_caches_at_the_text(pair, where, call, monkeypatch):
    model, draft = pair
    text = force(monkeypatch, model, PROMPT)
    calls = []

    def fail_at(*args):
        calls.append(args)
        if len(calls) == call:
            raise Interrupted
        return args[-1] if where == "processor" else mx.argmax(args[-1], axis=-1)

    options = dict(logits_processors=[fail_at]) if where == "processor" else dict(sampler=fail_at)
    cache = mlx_dflash.make_prompt_cache(model, draft)
    tokens = run_into(Interrupted, start(model, draft, cache, **options))
    assert tokens == text[: len(tokens)] and len(tokens) < call
    check_caches(cache, model, draft, PROMPT + tokens, f"{where} failed at call {call}, after {len(tokens)} tokens")
    check_next_turn(cache, model, draft, PROMPT + tokens, monkeypatch)


def fail_once(monkeypatch, owner, name, call, after=False):
    """Let a method fail at its call-th call, before or after it has done its work."""
    original, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(name)
        if len(calls) == call and not after:
            raise Interrupted
        result = original(*args, **kwargs)
        if len(calls) == call:
            raise Interrupted
        return result

    monkeypatch.setattr(owner, name, failing)


PLACES = {
    "target layer": lambda model, forced: (type(model.layers[1]), "__call__"),
    "target": lambda model, forced: (type(model), "__call__"),
    "draft pass": lambda model, forced: (DraftModel, "__call__"),
    "context projection": lambda model, forced: (DraftModel, "project_context"),
    "proposal": lambda model, forced: (forced, "propose"),
    "extending the context": lambda model, forced: (forced, "extend_context"),
    "commit": lambda model, forced: (Target, "commit"),
    "verify": lambda model, forced: (Target, "verify"),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_anywhere_in_a_round_leaves_the_caches_at_the_text(pair, place, after, monkeypatch):
    """Ctrl-C can come between any two steps of a round."""
    model, draft = pair
    sampler = make_sampler(0.0)
    for call in (2, 4):
        with monkeypatch.context() as patch:
            text = force(patch, model, PROMPT)
            cache = mlx_dflash.make_prompt_cache(model, draft)
            generator = start(model, draft, cache, sampler=sampler)
            fail_once(patch, *PLACES[place](model, mlx_dflash.pair.Drafter), call, after)
            tokens = run_into(Interrupted, generator)
        assert tokens == text[: len(tokens)]
        if not tokens:  # the prefill failed: nothing was read
            assert len({c.offset for c in cache}) == 1
            check_caches(cache, model, draft, PROMPT[: cache[0].offset], f"{place}, call {call}")
            continue
        check_caches(cache, model, draft, PROMPT + tokens, f"{place}, call {call}, after {len(tokens)} tokens")


@pytest.mark.parametrize("taken", [1, 7, 18])
def test_closing_while_nothing_is_drafted(pair, taken, monkeypatch):
    model, draft = pair
    cache, text = mlx_dflash.make_prompt_cache(model, draft), plain_tokens(model, PROMPT, taken)
    generator = start(model, draft, cache, block_size=1)
    assert [r.token for r in islice(generator, taken)] == text
    generator.close()
    check_caches(cache, model, draft, PROMPT + text, f"closed after {taken}")
    check_next_turn(cache, model, draft, PROMPT + text, monkeypatch)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", [place for place in PLACES if place != "draft pass"])
def test_an_exception_while_nothing_is_drafted_leaves_the_caches_at_the_text(pair, place, after, monkeypatch):
    model, draft = pair
    cache, text = mlx_dflash.make_prompt_cache(model, draft), plain_tokens(model, PROMPT, 24)
    generator = start(model, draft, cache, block_size=1)
    # The context is projected at the prefill, with the last token of the prompt and, when enough rows wait, once more.
    call = 3 if place == "context projection" else 20
    fail_once(monkeypatch, *PLACES[place](model, mlx_dflash.pair.Drafter), call, after)
    tokens = run_into(Interrupted, generator)
    assert tokens == text[: len(tokens)] and len(tokens) >= 8
    check_caches(cache, model, draft, PROMPT + tokens, f"{place}, after {len(tokens)} tokens")


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6])
def test_an_interrupt_during_the_prefill_leaves_the_caches_as_they_were(pair, call):
    model, draft = pair
    cache = mlx_dflash.make_prompt_cache(model, draft)
    earlier = draft_run(model, draft, NEXT, max_tokens=4, prompt_cache=cache).tokens
    calls = []

    def progress(processed, total):
        calls.append((processed, total))
        if len(calls) == call:
            raise KeyboardInterrupt

    prompt = list(range(20, 28))
    tokens = run_into(
        KeyboardInterrupt, start(model, draft, cache, prompt, prefill_step_size=2, prompt_progress_callback=progress)
    )
    assert tokens == [] and len(calls) == call
    # The last call comes when the whole prompt is read, but no token was given yet.
    covered = NEXT + earlier + (prompt if call == 6 else [])
    check_caches(cache, model, draft, covered, f"interrupted at {calls[-1]}")
    check_next_turn(cache, model, draft, covered, pytest.MonkeyPatch())


def test_progress_is_reported_as_mlx_lm_reports_it(pair):
    model, draft = pair
    reports = []
    for runner in (plain_run, lambda model, *args, **kwargs: draft_run(model, draft, *args, **kwargs)):
        calls = []
        runner(
            model, PROMPT, max_tokens=2, prefill_step_size=3, prompt_progress_callback=lambda *call: calls.append(call)
        )
        reports.append(calls)
    assert reports[0] == reports[1]


def test_an_exception_thrown_into_the_generator_leaves_the_caches_at_the_text(pair, monkeypatch):
    model, draft = pair
    text = force(monkeypatch, model, PROMPT)
    cache = mlx_dflash.make_prompt_cache(model, draft)
    generator = start(model, draft, cache)
    tokens = [next(generator).token for _ in range(6)]
    with pytest.raises(KeyboardInterrupt):
        generator.throw(KeyboardInterrupt)
    assert tokens == text[:6]
    check_caches(cache, model, draft, PROMPT + tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_conversation_of_several_turns_is_mlx_lms(pair, temperature):
    """Turns of many lengths, through the window of the sliding layers, one of them a single token."""
    model, draft = pair
    ours, plain = mlx_dflash.make_prompt_cache(model, draft), mlx_dflash.make_prompt_cache(model)
    said = []
    for turn, prompt in enumerate([PROMPT, [7], list(range(30, 50)), NEXT]):
        options = dict(
            seed=turn,
            max_tokens=5 + 4 * turn,
            sampler=make_sampler(temperature),
            stop_tokens=[said[-1]] if turn == 2 else [],
        )
        expected = plain_run(model, prompt, prompt_cache=plain, **options)
        found = draft_run(model, draft, prompt, prompt_cache=ours, **options)
        assert found.tokens == expected.tokens, f"turn {turn}: {found.tokens} instead of {expected.tokens}"
        assert found.random_state == expected.random_state
        said += prompt + found.tokens
    check_caches(ours, model, draft, said)


@pytest.mark.parametrize("reader", ["ours", "mlx-lm"])
def test_a_saved_conversation_goes_on_identically(pair, reader, tmp_path):
    from mlx_lm.models.cache import load_prompt_cache

    model, draft = pair
    cache = mlx_dflash.make_prompt_cache(model, draft)
    earlier = draft_run(model, draft, list(range(12)), max_tokens=6, prompt_cache=cache).tokens
    file = str(tmp_path / "chat.safetensors")
    mlx_dflash.save_prompt_cache(file, cache, {"model": "tiny"})
    loaded, metadata = (mlx_dflash.load_prompt_cache if reader == "ours" else load_prompt_cache)(
        file, return_metadata=True
    )
    assert metadata == {"model": "tiny"}
    assert [c.offset for c in loaded] == [c.offset for c in cache]
    check_next_turn(loaded, model, draft, [*range(12), *earlier], pytest.MonkeyPatch())


def test_mlx_lm_goes_on_from_the_targets_part_of_a_saved_conversation(pair, tmp_path):
    from mlx_lm.models.cache import load_prompt_cache

    model, draft = pair
    cache = mlx_dflash.make_prompt_cache(model, draft)
    earlier = draft_run(model, draft, list(range(12)), max_tokens=6, prompt_cache=cache).tokens
    file = str(tmp_path / "chat.safetensors")
    mlx_dflash.save_prompt_cache(file, cache[: len(model.layers)])
    tokens = plain_run(model, NEXT, max_tokens=9, prompt_cache=load_prompt_cache(file)).tokens
    assert tokens == plain_tokens(model, [*range(12), *earlier, *NEXT], 9)


def test_an_empty_cache_can_be_saved(pair, tmp_path):
    model, draft = pair
    file = str(tmp_path / "empty.safetensors")
    mlx_dflash.save_prompt_cache(file, mlx_dflash.make_prompt_cache(model, draft))
    check_next_turn(mlx_dflash.load_prompt_cache(file), model, draft, [], pytest.MonkeyPatch())


def test_a_copied_conversation_goes_on_by_itself(pair):
    """A server keeps copies of caches for several continuations."""
    model, draft = pair
    cache = mlx_dflash.make_prompt_cache(model, draft)
    earlier = draft_run(model, draft, PROMPT, max_tokens=6, prompt_cache=cache).tokens
    twin = copy.deepcopy(cache)
    draft_run(model, draft, [1, 2, 3, 4], max_tokens=7, prompt_cache=twin)
    check_caches(cache, model, draft, PROMPT + earlier, "the original")
    check_next_turn(cache, model, draft, PROMPT + earlier, pytest.MonkeyPatch())


def test_a_trimmed_conversation_goes_on_from_there():
    from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

    model, draft = tiny_target(), make_draft()
    cache = mlx_dflash.make_prompt_cache(model, draft)
    earlier = draft_run(model, draft, PROMPT, max_tokens=6, prompt_cache=cache).tokens
    assert can_trim_prompt_cache(cache) and trim_prompt_cache(cache, 3) == 3
    check_next_turn(cache, model, draft, PROMPT + earlier[:3], pytest.MonkeyPatch())


def test_a_wrapped_window_is_not_trimmed_by_halves(pair):
    """mlx-lm trims all entries or none; a window that has lost rows must not say that it can be trimmed."""
    from mlx_lm.models.cache import trim_prompt_cache

    model, draft = pair
    cache = mlx_dflash.make_prompt_cache(model, draft)
    earlier = draft_run(model, draft, list(range(90)), max_tokens=6, prompt_cache=cache, prefill_step_size=7).tokens
    trim_prompt_cache(cache, 60)
    covered = {c.offset for c in cache}
    assert len(covered) == 1, f"the caches now cover {covered} tokens"
    check_next_turn(cache, model, draft, [*range(90), *earlier][: covered.pop()], pytest.MonkeyPatch())


@pytest.mark.parametrize("change", ["target only", "one entry short", "uneven"])
def test_caches_that_do_not_fit_are_refused(change):
    model, draft = tiny_target(), make_draft()
    cache = mlx_dflash.make_prompt_cache(model, draft)
    draft_run(model, draft, PROMPT, max_tokens=3, prompt_cache=cache)
    if change == "uneven":
        cache[-1].trim(1)
    elif change == "target only":
        del cache[4:]
    else:
        cache.pop()
    with pytest.raises(ValueError, match="the caches cover" if change == "uneven" else "prompt_cache has"):
        start(model, draft, cache)


def test_mlx_lms_own_empty_cache_is_completed_with_the_drafts_part(pair):
    model, draft = pair
    cache = mlx_dflash.make_prompt_cache(model)
    tokens = draft_run(model, draft, PROMPT, max_tokens=6, prompt_cache=cache).tokens
    check_caches(cache, model, draft, PROMPT + tokens)
