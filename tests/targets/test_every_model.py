"""Every model type of mlx-lm is a target: its own tokens, and caches as a fresh pass over the text leaves them."""

import importlib
import pkgutil

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.sample_utils import make_sampler
from support import models
from support.oracle import OracleDrafter
from support.targets import plain_tokens

from mlx_dflash.caches import rollback
from mlx_dflash.dice import Dice
from mlx_dflash.emission import emit
from mlx_dflash.models.probe import probe
from mlx_dflash.session import Session
from mlx_dflash.target import Target

NEW_TOKENS = 60
PROMPTS = {1: [3], 5: [1, 2, 3, 4, 5], 40: [(7 * i + i // 10) % 10 for i in range(40)]}
SEED = 11
NEAR_TIE = 1e-4  # of a log-probability; BLAS may round two rows otherwise than one


@pytest.fixture(autouse=True)
def uncompiled():
    """The CPU backend calls a C++ compiler for every fused function, which would be most of the time here."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def plain(model, prompt, temperature):
    """mlx-lm's own tokens."""
    return plain_tokens(model, prompt, NEW_TOKENS, make_sampler(temp=temperature), seed=SEED)


def speculate(model, prompt, expected, sampler, block_size, accepts):
    """Run a session whose rounds keep `accepts` drafts in turn. Returns our emissions and the session."""
    taps = [0, len(model.layers) - 2]
    target = Target(model, taps, block_size=block_size)
    drafter = OracleDrafter(prompt, expected, accepts, block_size - 1)
    session = Session(target, drafter, Dice(sampler), max_tokens=NEW_TOKENS)
    mx.random.seed(SEED)
    emissions = []
    try:
        emissions += emit(session, mx.array(prompt))
    except AssertionError as error:
        if "anchor" not in str(error):
            raise
    return emissions, session


def check_tokens(expected, emissions, sampler):
    """The same tokens, up to a near tie, behind which nothing can be said. Returns whether all were compared."""
    for i, (emission, token) in enumerate(zip(emissions, expected)):
        if emission.token != token:
            assert is_near_tie(emission.logprobs, i, token, sampler), (
                f"token {i} is {emission.token}, mlx-lm's is {token}"
            )
            return False
    assert len(emissions) == len(expected), f"{len(emissions)} tokens, mlx-lm gives {len(expected)}"
    return True


def is_near_tie(logprobs, draws, token, sampler):
    """Whether the sampler, after so many draws, takes this token if it is a hair more likely. logprobs: (V,)."""
    mx.random.seed(SEED)
    for _ in range(draws):
        sampler(logprobs[None])
    return sampler((logprobs + NEAR_TIE * (mx.arange(logprobs.size) == token))[None]).item() == token


def contents(cache):
    """What counts of a cache, as name -> array."""
    if isinstance(cache, RotatingKVCache):
        return dict(tree_flatten(cache.state[:2]))
    if isinstance(cache, (KVCache, QuantizedKVCache, ChunkedKVCache)):
        return dict(tree_flatten(cache.keys_and_values())) if cache.offset else {}
    return {name: value for name, value in tree_flatten(cache.__dict__) if isinstance(value, mx.array)}


def check_caches(target, model, prompt, emitted):
    """The caches hold what a fresh pass over the text leaves."""
    fresh = Target(model, target.target_layer_ids)
    fresh.prefill(mx.array(prompt[:-1], mx.uint32), lambda features: None)
    # In a chunk, PLaMo 3's windows show one row more than to a single token.
    step_size = 1 if model.model_type == "plamo3" else 2048
    fresh.prefill(mx.array([prompt[-1], *emitted]), lambda features: None, step_size)
    tokens = [*prompt, *emitted]
    assert target.length == fresh.length == len(tokens)
    for n, (cache, other) in enumerate(zip(rollback.leaves(target.caches), rollback.leaves(fresh.caches), strict=True)):
        ours, theirs = contents(cache), contents(other)
        assert ours.keys() == theirs.keys(), (
            f"cache {n}, a {type(cache).__name__}, holds {[*ours]}, expected {[*theirs]}"
        )
        for name, array in ours.items():
            wanted = theirs[name]
            if isinstance(cache, ChunkedKVCache):
                # The front is cut when the next pass begins.
                rows = min(array.shape[2], wanted.shape[2], cache.chunk_size)
                array, wanted = array[..., -rows:, :], wanted[..., -rows:, :]
            assert array.shape == wanted.shape, f"cache {n}, {name}: shape {array.shape}, expected {wanted.shape}"
            a, b = np.array(array.astype(mx.float32)), np.array(wanted.astype(mx.float32))
            error, scale = np.abs(a - b).max(initial=0), max(1, np.abs(b).max(initial=0))
            assert error <= 1e-4 * scale, (
                f"cache {n}, a {type(cache).__name__}, {name}: off by {error:.2g} of {scale:.2g}"
            )


def check(model, prompt, expected, sampler, block_size, accepts):
    """One run: its tokens, its caches, and that each round kept what the oracle wanted. Returns the target."""
    emissions, session = speculate(model, prompt, expected, sampler, block_size, accepts)
    if check_tokens(expected, emissions, sampler):
        check_caches(session.target, model, prompt, expected)
        kept = {n for n, count in enumerate(session.stats.accepted) if count}
        wanted = set(accepts[: session.stats.num_rounds - 1])  # the last round may be cut
        assert kept >= wanted, f"rounds kept {sorted(kept)} drafts, not {sorted(wanted)}"
    return session.target


def some_accepts(block_size, seed):
    """All numbers of kept drafts, 0 to γ, shuffled; large and small ones in turn come first."""
    order = np.random.RandomState(seed).permutation(block_size)
    return [int(n) for n in order]


# Greedy and sampled, each prompt, each block: every pair of two occurs in the runs of a type or of its neighbour.
RUNS = [
    [(0.0, 5, 6), (1.0, 40, 16), (0.0, 1, 2)],
    [(1.0, 5, 6), (0.0, 40, 2), (1.0, 1, 16)],
    [(0.0, 40, 6), (1.0, 5, 2), (0.0, 5, 16)],
    [(1.0, 1, 6), (1.0, 40, 2), (0.0, 1, 16)],
]


@pytest.mark.parametrize("model_type", models.TARGET_TYPES)
def test_tokens_and_caches_are_those_of_mlx_lm(model_type):
    model = models.build(model_type)
    index = models.TARGET_TYPES.index(model_type)
    probe(model, [0, 1])
    for temperature, prompt, block_size in RUNS[index % len(RUNS)]:
        expected, sampler = plain(model, PROMPTS[prompt], temperature), make_sampler(temp=temperature)
        target = check(model, PROMPTS[prompt], expected, sampler, block_size, some_accepts(block_size, index))
        assert models.way_back(target) == models.way(model_type)


@pytest.mark.grid
@pytest.mark.parametrize("model_type", models.TARGET_TYPES)
@pytest.mark.parametrize("block_size", [2, 6, 16])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_number_of_kept_drafts(model_type, temperature, prompt, block_size):
    model = models.build(model_type)
    expected, sampler = plain(model, PROMPTS[prompt], temperature), make_sampler(temp=temperature)
    for accepts in [[n] for n in range(block_size)] + [some_accepts(block_size, 0)]:
        check(model, PROMPTS[prompt], expected, sampler, block_size, accepts)


def test_table_holds_every_type_of_mlx_lm():
    names = {m.name for m in pkgutil.iter_modules(mlx_lm.models.__path__)}
    found = set()
    for name in names - set(models.NOT_ON_CPU):
        if hasattr(importlib.import_module(f"mlx_lm.models.{name}"), "Model"):
            found.add(name)
    assert found == set(models.CPU_TYPES), (
        f"missing {sorted(found - set(models.CPU_TYPES))}, unknown {sorted(set(models.CPU_TYPES) - found)}"
    )


@pytest.mark.skipif(mx.metal.is_available(), reason="they may run here")
@pytest.mark.parametrize("model_type", models.NOT_ON_CPU)
def test_types_left_out_do_not_run(model_type):
    with pytest.raises((RuntimeError, SystemExit)):
        plain_tokens(models.build(model_type), [1, 2], 2)


@pytest.mark.parametrize("model_type", models.REFUSED)
def test_a_type_that_computes_a_block_otherwise_is_refused(model_type):
    with pytest.raises(ValueError, match=f"{model_type} of mlx-lm gives other logits"):
        probe(models.build(model_type), [0, 1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_a_near_tie_excuses_another_token(temperature):
    sampler = make_sampler(temp=temperature)
    logprobs = mx.array([0.0, -1.0, -1e-5, -3.0])
    mx.random.seed(SEED)
    taken = [sampler(logprobs[None]).item() for _ in range(30)]
    excused = {t for i in range(30) for t in range(4) if t != taken[i] and is_near_tie(logprobs, i, t, sampler)}
    assert excused == ({2} if temperature == 0 else set()), "a token a hair below the best, and only with its own draws"
