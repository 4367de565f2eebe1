"""C6, no trace: a run leaves the target as it was, and runs side by side, in threads too, do not meet."""

import gc
import os
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.sample_utils import make_sampler
from support.drafts import draft_config
from support.runs import PROMPT, draft_run, forced_drafter, in_thread, make_draft, plain_run, small_pair, tokenizer
from support.targets import plain_tokens, tiny_target

import mlx_dflash
from mlx_dflash.models.probe import probe
from mlx_dflash.target import Target

_SHARED = ("mlx.core.fast", "mlx_lm.models.cache", "mlx_lm.models.base")


def fingerprint(model):
    """What must not change: parameters, modules, and the attributes of all classes and modules involved."""
    classes = {type(m) for _, m in model.named_modules()}
    bases = {base for cls in classes for base in cls.__mro__}
    return (
        {name: id(value) for name, value in tree_flatten(model.parameters())},
        [(name, id(m), type(m)) for name, m in model.named_modules()],
        {cls: dict(vars(cls)) for cls in bases},
        {name: dict(vars(sys.modules[name])) for name in {*(cls.__module__ for cls in classes), *_SHARED}},
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("end", ["finished", "closed", "failed"])
def test_a_run_leaves_the_target_as_it_was(end, family):
    model, draft = small_pair(family, 97)
    draft_run(model, draft, PROMPT, max_tokens=2)  # so that everything that is imported late is imported
    before, logits = fingerprint(model), np.array(model(mx.array([PROMPT])))

    def fail(tokens, logits):
        raise RuntimeError("a processor failed")

    generator = mlx_dflash.stream_generate(
        model,
        tokenizer(),
        PROMPT,
        max_tokens=9,
        draft_model=draft,
        logits_processors=[fail] if end == "failed" else None,
    )
    if end == "failed":
        with pytest.raises(RuntimeError, match="a processor failed"):
            list(generator)
    else:
        list(islice(generator, 3))
        assert fingerprint(model) == before, "a scope stays open between two tokens"
        list(islice(generator, 0 if end == "closed" else 20))
        generator.close()
    after = fingerprint(model)
    for what, a, b in zip(("parameters", "modules", "classes", "module globals"), before, after):
        assert a == b, f"{what} changed"
    assert (np.array(model(mx.array([PROMPT]))) == logits).all()


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU may round the same pass otherwise")
def test_a_target_that_taps_change_by_a_hair_is_refused():
    model = tiny_target()
    kind = type(model.layers[0])

    class Nosy(type(model)):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs) * (1 if type(self.layers[0]) is kind else 1 + 1e-6)

    assert probe(model, [0, 2]) == 32
    model.__class__ = Nosy
    with pytest.raises(ValueError, match=r"tapping layers \[0, 2\] of .* changes its logits"):
        probe(model, [0, 2])


def test_a_process_may_end_with_a_run_unfinished():
    code = "\n".join(
        [
            "import mlx_dflash.api, mlx.core as mx",
            "from support.runs import small_pair",
            "model, draft = small_pair()",
            "session = mlx_dflash.api.open_session(mlx_dflash.pair.Pair(model, draft), mx.array([1, 2]))",
            "running = mlx_dflash.emission.emit(session, mx.array([1, 2]))",
            "next(running)",
        ]
    )
    end = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert end.returncode == 0, f"the process ended with {end.returncode}"


def test_a_closed_run_frees_its_caches():
    model, draft = tiny_target(), make_draft()

    def one_run():
        generator = mlx_dflash.stream_generate(model, tokenizer(), [1] * 300, max_tokens=50, draft_model=draft)
        next(generator)
        generator.close()

    one_run()
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    for _ in range(3):
        one_run()
    gc.collect()
    mx.synchronize()
    held = mx.get_active_memory() - before
    assert held <= 4096, f"{held} bytes are still held after three closed runs"


def test_two_sessions_with_other_taps_on_one_target_do_not_see_each_other():
    model = tiny_target()
    drafts = [make_draft(draft_config(dict(target_layer_ids=taps))) for taps in ([0, 2], [3, 1])]
    expected = plain_tokens(model, PROMPT, 12)
    generators = [mlx_dflash.stream_generate(model, tokenizer(), PROMPT, max_tokens=12, draft_model=d) for d in drafts]
    texts = [[], []]
    for responses in zip(*generators):
        for text, response in zip(texts, responses):
            text.append(response.token)
    assert texts == [expected, expected]


def test_one_draft_serves_two_targets_in_turn():
    draft = make_draft()
    targets = [tiny_target(seed=s) for s in (0, 7)]
    for model in [*targets, targets[0]]:
        assert draft_run(model, draft, PROMPT, max_tokens=9).tokens == plain_tokens(model, PROMPT, 9)


def test_a_target_whose_layer_was_replaced_is_tapped_where_it_now_is():
    """Adapters replace modules of a loaded model; nothing may remember the old ones."""
    model, draft = tiny_target(), make_draft()
    draft_run(model, draft, PROMPT, max_tokens=3)
    model.model.layers[2] = tiny_target(seed=9).model.layers[2]
    features = []
    Target(model, [2]).prefill(mx.array(PROMPT), features.append)
    hidden = model.model.embed_tokens(mx.array([PROMPT]))
    for layer in model.layers[:3]:
        hidden = layer(hidden, "causal", None)
    assert np.abs(np.array(features[0]) - np.array(hidden)).max() < 1e-5
    assert draft_run(model, draft, PROMPT, max_tokens=9).tokens == plain_tokens(model, PROMPT, 9)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_worker_thread_gives_the_same_text(temperature):
    model, draft = small_pair()

    def work():
        run = draft_run(model, draft, [1, 2, 3], seed=6, max_tokens=16, sampler=make_sampler(temperature))
        return run.tokens, run.random_state

    def plain():
        run = plain_run(model, [1, 2, 3], seed=6, max_tokens=16, sampler=make_sampler(temperature))
        return run.tokens, run.random_state

    assert in_thread(work) == in_thread(plain)
    assert in_thread(plain)[0] == plain()[0]


@pytest.mark.parametrize("take", [None, 3], ids=["finished", "closed"])
def test_a_conversation_moves_from_one_thread_to_another(take, monkeypatch):
    model, draft = tiny_target(), make_draft()
    cache = mlx_dflash.make_prompt_cache(model, draft)
    text = plain_tokens(model, PROMPT, 6)
    monkeypatch.setattr("mlx_dflash.pair.Drafter", forced_drafter(PROMPT, text, [4]))
    first = in_thread(lambda: draft_run(model, draft, PROMPT, take=take, max_tokens=6, prompt_cache=cache).tokens)
    monkeypatch.undo()
    assert first == text[:take]
    second = in_thread(lambda: draft_run(model, draft, [9, 8], max_tokens=6, prompt_cache=cache).tokens)
    assert second == plain_tokens(model, [*PROMPT, *first, 9, 8], 6)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3_text"])
def test_threads_that_share_a_target_do_not_disturb_each_other(family):
    """Two sessions with other taps, and plain generation at the same time."""
    model = tiny_target(family)
    kinds, hidden = [type(layer) for layer in model.layers], model.layers[0].mlp.gate_proj.weight.shape[-1]
    drafts = [make_draft(draft_config(dict(target_layer_ids=t), hidden_size=hidden)) for t in ([0, 2], [3, 1])]
    for draft in drafts:
        draft_run(model, draft, PROMPT, max_tokens=2)
    prompts = [PROMPT, [9, 8, 7], [1, 2]]
    expected = [plain_tokens(model, prompt, 12) for prompt in prompts]
    works = [lambda d=d, p=p: draft_run(model, d, p, max_tokens=12).tokens for d, p in zip(drafts, prompts)]
    works.append(lambda: plain_tokens(model, prompts[2], 12))
    texts = [None] * 3
    threads = [threading.Thread(target=lambda i=i: texts.__setitem__(i, works[i]())) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == expected
    assert [type(layer) for layer in model.layers] == kinds
