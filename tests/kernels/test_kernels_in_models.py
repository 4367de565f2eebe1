"""Whole passes and whole generations with every kernel run by the emulator: the tokens are those of the twins."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.drafts import draft_config, draft_inputs, draft_weights
from support.folders import save_draft
from support.metal_emulator import Emulator, why_unavailable
from support.targets import build_target, plain_tokens, target_config

import mlx_dflash
from mlx_dflash.api import open_session
from mlx_dflash.dice import Dice
from mlx_dflash.drafter import Drafter
from mlx_dflash.emission import emit
from mlx_dflash.kernels import Kernels, Keys, Sight, choice, trial
from mlx_dflash.kernels.record import Record
from mlx_dflash.pair import Pair
from mlx_dflash.target import Target

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
WIDE = dict(hidden_size=64, head_dim=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128)
MIXED = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
PROMPT = [5, 17, 3, 60, 22, 9, 41, 8, 33, 2, 71]


def pair(folder, kernels, quantized=True):
    """A tiny quantized target and a draft whose attention has the kernel's shapes."""
    target = build_target(target_config(num_hidden_layers=4, **WIDE))
    if quantized:
        nn.quantize(target, group_size=64, bits=4, class_predicate=lambda _, m: isinstance(m, nn.Linear))
    config = draft_config(dict(block_size=8), **WIDE, **MIXED)
    save_draft(folder, config, draft_weights(config))
    draft = mlx_dflash.load_draft(str(folder))
    draft.kernels = kernels
    for layer in draft.layers:
        layer.self_attn.kernels = kernels
    return target, draft


def tokens(session):
    return [emission.token for emission in emit(session, mx.array(PROMPT))]


@pytest.mark.parametrize("num_context", [1, 40])
def test_draft_logits_are_those_of_the_twin(tmp_path, num_context):
    features, embed, head = (mx.array(x) for x in draft_inputs(draft_config(**WIDE, **MIXED), num_context))
    logits = []
    for kernels in (Kernels("off"), Kernels("force", run=Emulator())):
        _, draft = pair(tmp_path, kernels)
        drafter = Drafter(draft, lambda ids: embed[ids], lambda h: h @ head.T, Dice())
        drafter.extend_context(features[None])
        logits.append(np.array(drafter.draft_logits(7)))
    assert len(kernels._run.reports) == 2 * 2  # two layers, two passes each
    assert np.abs(logits[0] - logits[1]).max() < 1e-4


@pytest.mark.parametrize("mode", ["force", "check"])
def test_generation_by_kernels_gives_the_tokens_of_the_target_alone(tmp_path, mode):
    emulator = Emulator(order=7)
    target, draft = pair(tmp_path, Kernels(mode, run=emulator))
    assert tokens(open_session(Pair(target, draft), mx.array(PROMPT), 6)) == plain_tokens(target, PROMPT, 6)
    launched = {report.call.name for report in emulator.reports}
    assert launched == {"dflash_attention", "dflash_attention_merge", "dflash_matmul"}


@pytest.mark.parametrize("kernel, name", [("dflash_attention_merge", "attention"), ("dflash_matmul", "product")])
def test_check_mode_stops_a_pair_before_its_first_token_where_force_does_not(tmp_path, kernel, name):
    emulator = Emulator(checked=False)

    def spoiled(call):
        outputs = emulator(call)
        return [1.01 * x for x in outputs] if call.name == kernel else outputs

    target, draft = pair(tmp_path, Kernels("check", run=spoiled))
    with pytest.raises(RuntimeError, match=f"the {name} kernel and its twin differ"):
        open_session(Pair(target, draft), mx.array(PROMPT), 6)
    target, draft = pair(tmp_path, Kernels("force", run=spoiled))
    assert len(tokens(open_session(Pair(target, draft), mx.array(PROMPT), 2))) == 2


@pytest.fixture
def winning(monkeypatch):
    """Short self-checks, races that the kernel wins; lists the shapes that are tried."""
    tried, check = [], trial.check_attention

    def short(shape, run, simdgroups):
        tried.append(shape)
        return check(shape, run, (33,), simdgroups)

    monkeypatch.setattr(trial, "check_attention", short)

    def passing(x_shape, w, run):
        tried.append((x_shape, w.weight.shape))
        return trial.Accuracy(0.0, 0.0, None)

    monkeypatch.setattr(trial, "check_product", passing)
    monkeypatch.setattr(trial, "race_attention", lambda *_, **__: trial.Race({"": (1.0, 2.0)}, cores=20))
    monkeypatch.setattr(trial, "race_product", lambda *_: trial.Race({"": (1.0, 2.0)}))
    return tried


def test_all_shapes_of_a_pair_are_decided_before_its_first_round(tmp_path, winning):
    emulator = Emulator(checked=False)
    kernels = Kernels("auto", Record(tmp_path / "kernels.json"), run=emulator)
    target, draft = pair(tmp_path, kernels)
    session = open_session(Pair(target, draft), mx.array(PROMPT), 9)
    decided, tried, compiled = dict(kernels.verdicts), list(winning), {program(r.call) for r in emulator.reports}
    rows = {shape.rows for shape in decided if isinstance(shape, trial.AttentionShape)}
    assert rows == {2, 4, 8} and {shape[0][0] for shape in decided if isinstance(shape, tuple)} == {5, 7}
    assert kernels.is_active and len(set(tried)) == len(tried) == len(decided)
    assert tokens(session) == plain_tokens(target, PROMPT, 9)
    assert kernels.verdicts == decided and winning == tried
    assert {program(r.call) for r in emulator.reports} == compiled

    again = Kernels("auto", kernels.record, run=emulator)  # another run on this machine
    open_session(Pair(target, pair(tmp_path, again)[1]), mx.array(PROMPT))
    assert again.verdicts == decided and winning == tried


def program(call):
    """What a launch is compiled from."""
    return call.name, str(call.template), *(str(x.dtype) for x in call.inputs.values())


def test_shape_that_did_not_come_up_in_the_rehearsal_runs_by_its_twin(tmp_path, winning):
    kernels = Kernels("auto", run=Emulator(checked=False))
    open_session(Pair(*pair(tmp_path, kernels)), mx.array(PROMPT))
    decided = dict(kernels.verdicts)
    q, block = mx.ones((1, 4, 20, 128)), mx.ones((1, 2, 700, 128))
    kernels._run = None  # nothing can be launched
    kernels.attend(q, Keys(block, block, 680), Sight(), 0.1)
    assert kernels.verdicts == decided


def test_without_a_gpu_nothing_is_rehearsed(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: False)
    monkeypatch.setattr(Target, "verify", None)
    kernels = Kernels("auto")
    open_session(Pair(*pair(tmp_path, kernels)), mx.array(PROMPT))
    assert not kernels.verdicts


def test_draft_attention_reads_the_buffers_of_its_caches(tmp_path):
    emulator, launches = Emulator(checked=False), []

    def run(call):
        if call.template.get("BLOCK"):
            launches.append(call.inputs["keys"])
        return emulator(call)

    target, draft = pair(tmp_path, Kernels("force", run=run), quantized=False)
    session = open_session(Pair(target, draft), mx.array(PROMPT), 8)
    launches.clear()
    for _ in emit(session, mx.array(PROMPT)):
        assert all(any(keys is cache.keys for cache in session.drafter.caches) for keys in launches[-2:])
    assert launches


def test_pass_that_is_not_finite_is_repeated_by_the_twins(tmp_path):
    emulator = Emulator(checked=False)

    def broken(call):
        outputs = emulator(call)
        return [x * float("nan") for x in outputs] if call.name == "dflash_matmul" else outputs

    target, draft = pair(tmp_path, Kernels("off"))
    seen = Target(target, draft.config.target_layer_ids, block_size=8, kernels=Kernels("force", run=broken))
    plain = Target(target, draft.config.target_layer_ids, block_size=8)
    for one in (seen, plain):
        one.prefill(mx.array(PROMPT), lambda features: None)
    drafts = mx.array([1, 2, 3, 4, 5, 6, 7], mx.uint32)
    with pytest.warns(UserWarning, match="not finite"):
        scores = seen.verify(4, drafts)
    assert mx.array_equal(scores.logits, plain.verify(4, drafts).logits)
    assert seen.length == plain.length
