"""C1, the same dice: tokens, text, logprobs and the random stream are those of mlx_lm.stream_generate.

Real drafts of a tiny vocabulary are often right by chance; where that is not enough, the oracle forces what a round
keeps. Everything goes through the public api.
"""

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from support.drafts import draft_config
from support.runs import PROMPT, assert_same, draft_run, forced_drafter, make_draft, plain_run, small_pair
from support.targets import tied_rows_target, tiny_target

import mlx_dflash

FAMILIES = {
    "qwen3": {},
    "llama": {},
    "llama_sliding": dict(layer_types=["sliding_attention", "full_attention"]),
    "gemma3_text": {},
}
TAPS = dict(target_layer_ids=[0, 1], mask_token_id=5)
BATCHES, CASES = 3, 17


@cache
def pair(family, vocab_size, block_size):
    changes = dict(num_hidden_layers=2, vocab_size=vocab_size, **FAMILIES[family])
    config = draft_config(dict(TAPS, block_size=block_size), vocab_size=vocab_size, num_target_layers=2)
    return tiny_target(family, seed=3, **changes), make_draft(config, seed=4)


class Alternating:
    """A sampler with a memory: every second token is drawn from a flatter distribution."""

    def __init__(self):
        self.calls = 0

    def __call__(self, logprobs):
        self.calls += 1
        return mx.random.categorical(logprobs if self.calls % 2 else logprobs * 0.3)


def draws_when_in_doubt(logprobs):
    """A sampler that draws only where no token is likely: the draws of a call depend on the row."""
    likeliest = mx.argmax(logprobs, axis=-1)
    return likeliest if mx.max(logprobs).item() > -0.7 else mx.random.categorical(logprobs)


def two_draws(logprobs):
    """A sampler that draws twice for one token: whether to sample, and what."""
    sampled = mx.random.categorical(logprobs)
    return mx.where(mx.random.uniform() < 0.7, sampled, mx.argmax(logprobs, axis=-1))


class Banning:
    """A processor with a memory: it forbids the token that was the likeliest at its last call."""

    def __init__(self):
        self.banned = None

    def __call__(self, tokens, logits):
        likeliest = mx.argmax(logits, axis=-1).item()
        if self.banned is not None:
            logits = logits.at[:, self.banned].add(-mx.inf)
        self.banned = likeliest
        return logits


SAMPLERS = {
    "greedy": lambda: None,
    "temperature": lambda: make_sampler(0.9),
    "top_p": lambda: make_sampler(1.0, top_p=0.8),
    "top_k": lambda: make_sampler(1.2, top_k=3),
    "min_p": lambda: make_sampler(1.0, min_p=0.1),
    "xtc": lambda: make_sampler(0.8, xtc_probability=0.5, xtc_threshold=0.05),
    "own categorical": lambda: lambda logprobs: mx.random.categorical(logprobs * 0.5),
    "own argmax": lambda: lambda logprobs: mx.argmax(logprobs, axis=-1),
    "with a memory": Alternating,
    "two draws": lambda: two_draws,
}
PROCESSORS = {
    "none": lambda: None,
    "repetition": lambda: make_logits_processors(repetition_penalty=1.3),
    "presence and frequency": lambda: make_logits_processors(presence_penalty=0.7, frequency_penalty=0.4),
    "bias": lambda: make_logits_processors(logit_bias={0: 2.0, 3: -1.5}),
    "with a memory": lambda: [Banning()],
}


def pick(rng, options):
    return options[rng.randint(len(options))]


def check_case(family, rng, monkeypatch):
    """Run a random case both ways; return the histogram of kept drafts."""
    sampler, processors = pick(rng, [*SAMPLERS]), pick(rng, [*PROCESSORS])
    vocab_size, block_size = pick(rng, [6, 97]), pick(rng, [2, 3, 6, 6])
    model, draft = pair(family, vocab_size, block_size)
    prompt = rng.randint(0, vocab_size, rng.randint(1, 20)).tolist()
    stops = [rng.randint(vocab_size)] if rng.rand() < 0.4 else []
    options = dict(max_tokens=int(rng.randint(1, 13)), prefill_step_size=pick(rng, [1, 3, 2048]))
    seed = int(rng.randint(1000))

    def arguments():
        return dict(
            seed=seed,
            stop_tokens=stops,
            sampler=SAMPLERS[sampler](),
            logits_processors=PROCESSORS[processors](),
            **options,
        )

    case = f"{family}, {sampler}, processors {processors}, V {vocab_size}, block {block_size}"
    case += f", {prompt}, {stops}, {options}"
    plain = plain_run(model, prompt, **arguments())
    with monkeypatch.context() as patch:
        if rng.rand() < 0.7:
            accepts = rng.randint(0, block_size, 7).tolist()
            patch.setattr("mlx_dflash.pair.Drafter", forced_drafter(prompt, plain.tokens, accepts))
        ours = draft_run(model, draft, prompt, **arguments())
    assert_same(ours, plain, case)
    stats = ours.last.stats
    assert sum(ours.from_draft) == stats.num_accepted, (
        f"{case}: {ours.from_draft}, but {stats.num_accepted} drafts kept"
    )
    return stats.accepted if block_size == 6 else []


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("family", FAMILIES)
def test_any_sampler_and_processor_give_mlx_lms_text(family, batch, monkeypatch):
    rng = np.random.RandomState(100 * batch + len(family))
    seen = [0] * 6
    for _ in range(CASES):
        for n, count in enumerate(check_case(family, rng, monkeypatch)):
            seen[n] += count
    assert sum(seen[1:]) > 0, f"rounds by kept drafts: {seen}"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_from_draft_marks_exactly_the_kept_drafts(sampler, monkeypatch):
    model, draft = pair("qwen3", 97, 6)
    plain = plain_run(model, PROMPT, max_tokens=22, sampler=SAMPLERS[sampler]())
    forced = forced_drafter(PROMPT, plain.tokens, [5, 0, 3, 1, 4, 2])
    monkeypatch.setattr("mlx_dflash.pair.Drafter", forced)
    ours = draft_run(model, draft, PROMPT, max_tokens=22, sampler=SAMPLERS[sampler]())
    expected = [False] + [i < n for n in (5, 0, 3, 1, 4, 2) for i in range(n + 1)]
    assert ours.tokens == plain.tokens
    assert ours.from_draft == expected


@pytest.mark.parametrize("vocab_size", [6, 97])
def test_a_sampler_whose_draws_depend_on_the_row_gives_mlx_lms_text(vocab_size, monkeypatch):
    """The random stream behind such a run is not promised: the draws of a token that nobody rolled are unknown."""
    model, draft = pair("qwen3", vocab_size, 6)
    for seed in range(4):
        plain = plain_run(model, [1, 2, 3], seed=seed, max_tokens=20, sampler=draws_when_in_doubt)
        monkeypatch.setattr("mlx_dflash.pair.Drafter", forced_drafter([1, 2, 3], plain.tokens, [2, 5, 0]))
        ours = draft_run(model, draft, [1, 2, 3], seed=seed, max_tokens=20, sampler=draws_when_in_doubt)
        assert ours.tokens == plain.tokens, f"seed {seed}: {ours.tokens} instead of {plain.tokens}"


@pytest.mark.parametrize("block_size", [2, 6])
def test_ties_fall_to_the_lower_id_in_a_block_too(block_size, monkeypatch):
    model, lower, higher = tied_rows_target(PROMPT)
    draft = make_draft(draft_config(dict(block_size=block_size)), dtype=mx.bfloat16)
    plain = plain_run(model, PROMPT, max_tokens=64)
    monkeypatch.setattr("mlx_dflash.pair.Drafter", forced_drafter(PROMPT, plain.tokens, [1, 5, 0, 3]))
    ours = draft_run(model, draft, PROMPT, max_tokens=64)
    assert ours.tokens == plain.tokens
    assert lower in ours.tokens and higher not in ours.tokens


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_processor_sees_the_prompt_and_the_tokens_before_its_row(sampler, monkeypatch):
    model, draft = pair("llama", 6, 6)
    prompt, seen = [1, 4, 2], []

    def spy(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    plain = plain_run(model, prompt, max_tokens=24, sampler=SAMPLERS[sampler]())
    monkeypatch.setattr("mlx_dflash.pair.Drafter", forced_drafter(prompt, plain.tokens, [5, 0, 3, 1, 4, 2]))
    ours = draft_run(model, draft, prompt, max_tokens=24, sampler=SAMPLERS[sampler](), logits_processors=[spy])
    assert ours.tokens == plain.tokens
    assert seen == [prompt + ours.tokens[:n] for n in range(24)]


def test_processors_of_a_next_turn_see_what_mlx_lm_shows_them():
    model, draft = pair("qwen3", 6, 6)
    histories = []
    for draft_model in (None, draft):
        cache = mlx_dflash.make_prompt_cache(model, draft_model)
        seen = []

        def spy(tokens, logits, seen=seen):
            seen.append(tokens.tolist())
            return logits

        for prompt in ([1, 4, 2], [3, 3]):
            runner = plain_run if draft_model is None else lambda model, *a, **k: draft_run(model, draft, *a, **k)
            runner(model, prompt, max_tokens=9, prompt_cache=cache, logits_processors=[spy])
        histories.append([h for h in seen if len(h) < 9 + (3 if h[0] == 1 else 2)])
    assert histories[0] == histories[1]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("block_size", [2, 6])
def test_every_element_type_is_exact(dtype, block_size):
    model, draft = small_pair("qwen3", dtype=dtype, block_size=block_size)
    for temperature in (0.0, 1.0):
        arguments = dict(max_tokens=16, sampler=make_sampler(temperature))
        assert_same(draft_run(model, draft, [1, 2, 3], **arguments), plain_run(model, [1, 2, 3], **arguments))
