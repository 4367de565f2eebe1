"""Memory and per-request state: nothing is left behind by a request, and nothing is copied or kept by a long one."""

import gc

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_sampler
from support.drafts import draft_config
from support.runs import Watch, draft_run, forced_drafter, make_draft, small_pair, tokenizer
from support.targets import plain_tokens, tiny_target

import mlx_dflash


def settled_memory():
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


def test_requests_of_any_length_leave_no_memory_behind():
    model, draft = small_pair()
    rng = np.random.RandomState(0)

    def request():
        prompt = rng.randint(0, 6, rng.randint(1, 30)).tolist()
        options = dict(max_tokens=int(rng.randint(1, 8)), sampler=make_sampler(rng.choice([0.0, 1.0])))
        for _ in mlx_dflash.stream_generate(model, tokenizer(), prompt, draft_model=draft, **options):
            pass

    request()
    before = settled_memory()
    for _ in range(40):
        request()
    left = settled_memory() - before
    assert left <= 4096, f"{left} bytes are left after 40 requests"


def test_the_same_request_again_gives_the_same_proposals(monkeypatch):
    model, draft = small_pair()
    made = []
    original = mlx_dflash.drafter.Drafter.propose

    def propose(self, anchor, num_drafts):
        drafts = original(self, anchor, num_drafts)
        made[-1].append(drafts.tolist())
        return drafts

    monkeypatch.setattr("mlx_dflash.drafter.Drafter.propose", propose)
    runs = []
    for prompt in ([1, 2, 3], [4] * 20, [1, 2, 3]):
        made.append([])
        runs.append(draft_run(model, draft, prompt, seed=2, max_tokens=15, sampler=make_sampler(0.8)).tokens)
    assert runs[0] == runs[2]
    assert made[0] == made[2]


def test_a_long_run_keeps_only_its_caches():
    """900 tokens: the text is the target's, and neither memory nor the number of growths grows with the rounds."""
    model = tiny_target(num_hidden_layers=1)
    config = draft_config(
        dict(target_layer_ids=[0], block_size=16),
        num_target_layers=1,
        num_hidden_layers=1,
        layer_types=["full_attention"],
    )
    watch = Watch(model, [5, 17, 3], [15, 9, 12, 3, 15], num_tokens=900, draft=make_draft(config))
    capacities, memory, text = set(), [], []
    for latest in watch.rounds():
        text += latest.verdict.tokens
        capacities.add(watch.target.caches[0].keys.shape[2])
        if len(text) // 300 > (len(text) - len(latest.verdict.tokens)) // 300:
            memory.append(settled_memory() - sum(c.nbytes for c in [*watch.target.caches, *watch.inner.caches]))
    assert text == watch.text[:900]
    assert len(capacities) <= 15, f"the cache grew {len(capacities)} times"
    assert max(memory) - min(memory) < 200_000, f"memory beside the caches: {memory}"


def test_limits_and_the_default_stream_are_as_before_a_run(monkeypatch):
    model, draft = small_pair()
    text = plain_tokens(model, [1, 2], 6)
    monkeypatch.setattr("mlx_dflash.pair.Drafter", forced_drafter([1, 2], text, [2]))
    before = mx.default_stream(mx.default_device()), mx.default_device()
    draft_run(model, draft, [1, 2], max_tokens=6)
    assert (mx.default_stream(mx.default_device()), mx.default_device()) == before
