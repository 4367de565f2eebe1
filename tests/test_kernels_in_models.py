"""Whole passes and whole generations with every kernel run by the emulator: the tokens are those of the twins."""
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from fixtures import build_target, draft_config, draft_inputs, draft_weights, plain_tokens, save_draft, target_config
from metal_emulator import Emulator, why_unavailable

import mlx_dflash
from mlx_dflash.api import open_session
from mlx_dflash.dice import Dice
from mlx_dflash.draft.drafter import Drafter
from mlx_dflash.kernels import Kernels
from mlx_dflash.target import Target, by_kernels, quantized_linears

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
    return [emission.token for emission in session.emit(mx.array(PROMPT))]


@pytest.mark.parametrize("num_context", [1, 40])
def test_draft_logits_are_those_of_the_twin(tmp_path, num_context):
    logits = []
    for kernels in (Kernels("off"), Kernels("force", run=Emulator())):
        _, draft = pair(tmp_path, kernels)
        features, embed, head = (mx.array(x) for x in draft_inputs(draft_config(**WIDE, **MIXED), num_context))
        drafter = Drafter(draft, lambda ids: embed[ids], lambda h: h @ head.T, Dice())
        drafter.extend_context(features[None])
        logits.append(np.array(drafter.draft_logits(7)))
    assert len(kernels._run.reports) == 2 * 2  # two layers, two passes each
    assert np.abs(logits[0] - logits[1]).max() < 1e-4


def test_generation_by_kernels_gives_the_tokens_of_the_target_alone(tmp_path):
    emulator = Emulator(order=7)
    target, draft = pair(tmp_path, Kernels("force", run=emulator))
    assert tokens(open_session(target, draft, mx.array(PROMPT), 6)) == plain_tokens(target, PROMPT, 6)
    launched = {report.call.name for report in emulator.reports}
    assert launched == {"dflash_attention", "dflash_attention_merge", "dflash_matmul"}


def test_draft_attention_reads_the_buffers_of_its_caches(tmp_path):
    emulator, launches = Emulator(checked=False), []

    def run(call):
        if call.template.get("BLOCK"):
            launches.append(any(call.inputs["keys"] is cache.keys for cache in session.drafter.caches))
        return emulator(call)

    target, draft = pair(tmp_path, Kernels("force", run=run), quantized=False)
    session = open_session(target, draft, mx.array(PROMPT), 8)
    tokens(session)
    assert launches and all(launches)


def test_scope_leaves_the_model_and_mlx_as_they_were(tmp_path):
    target, _ = pair(tmp_path, Kernels("off"))
    before = {name: module for name, module in target.named_modules()}
    stock = mx.fast.scaled_dot_product_attention
    with pytest.raises(KeyError), by_kernels(quantized_linears(target), Kernels("force", run=Emulator())):
        assert mx.fast.scaled_dot_product_attention is not stock
        assert type(target.layers[0].mlp.up_proj) is not nn.QuantizedLinear
        raise KeyError
    assert mx.fast.scaled_dot_product_attention is stock
    assert all(module is before[name] for name, module in target.named_modules())


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
