"""Drafts and targets that belong together share what they should; all others are refused, and both sides named."""

import gc
import weakref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import quantize_model
from support.byte_tokenizer import byte_tokenizer
from support.drafts import draft_config, draft_weights
from support.folders import save_draft, save_target
from support.runs import PROMPT, draft_run, forced_drafter, make_draft, plain_run
from support.targets import plain_tokens, target_config, tiny_target

import mlx_dflash
from mlx_dflash.models.structure import Structure
from mlx_dflash.pair import Pair


@pytest.mark.parametrize(
    "target, draft, message",
    [
        (dict(hidden_size=64), {}, "hidden size is 32.*width 64"),
        (dict(vocab_size=100), {}, "vocabulary of 97.*100"),
        (dict(num_hidden_layers=6), {}, "4 layers.*6"),
        ({}, dict(target_hidden_size=64), "width 64, the target's layers give 32"),
        (dict(num_hidden_layers=2), dict(num_target_layers=None), r"taps layers \[0, 2\].*2 layers"),
    ],
)
def test_a_draft_for_another_target_is_refused_with_both_sides(target, draft, message):
    with pytest.raises(ValueError, match=message):
        Pair(tiny_target(**target), make_draft(draft_config(**draft)))


def test_other_heads_than_the_targets_are_fine():
    model = tiny_target()
    draft = make_draft(draft_config(num_attention_heads=2, num_key_value_heads=1, head_dim=16))
    assert draft_run(model, draft, PROMPT, max_tokens=9).tokens == plain_tokens(model, PROMPT, 9)


def test_swapped_roles_say_so(tmp_path):
    save_draft(tmp_path / "draft", draft_config(), draft_weights(draft_config()))
    save_target(tmp_path / "target", tiny_target(), target_config(), byte_tokenizer())
    with pytest.raises(ValueError, match="holds a DFlash draft, not a target"):
        mlx_dflash.load(str(tmp_path / "draft"))
    with pytest.raises(ValueError, match="'qwen3' model, not a DFlash draft"):
        mlx_dflash.load_draft(str(tmp_path / "target"))


def test_embedding_and_head_are_the_targets_own_arrays():
    model, draft = tiny_target(), make_draft()
    before = mx.get_active_memory()
    structure = Pair(model, draft).structure
    assert structure.embedding is model.model.embed_tokens and structure.unembed is model.lm_head
    assert mx.get_active_memory() - before <= 4096
    assert not [n for n, _ in tree_flatten(draft.parameters()) if "embed" in n]


def test_the_structure_of_a_target_is_found_once_a_run(monkeypatch):
    model, draft, find, found = tiny_target(), make_draft(), Structure.__init__, []
    monkeypatch.setattr(Structure, "__init__", lambda self, of: found.append(of) or find(self, of))
    for run in range(1, 3):
        draft_run(model, draft, PROMPT, max_tokens=2)
        assert found == [model] * run, f"{len(found)} times in {run} runs"


def test_two_targets_of_one_draft_keep_their_own_costs_and_heads():
    draft, ids = make_draft(), [1, 2, 40]
    first, second = tiny_target(seed=0), tiny_target(seed=1)
    draft.d2t = mx.array(ids) - mx.arange(3)
    Pair(first, draft).round_seconds[3] = 0.25
    Pair(second, draft).round_seconds[3] = 0.5
    hidden = mx.random.normal((1, 2, 32))
    for model, seconds in ((first, 0.25), (second, 0.5)):
        pair = Pair(model, draft)
        assert pair.round_seconds == {3: seconds}, f"{pair.round_seconds} of the other target"
        assert mx.allclose(pair.head(hidden), model.lm_head(hidden)[..., mx.array(ids)], atol=1e-5)


def test_a_draft_does_not_keep_its_targets_alive():
    draft, model = make_draft(), tiny_target()
    Pair(model, draft).round_seconds[1] = 1.0
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not Pair(tiny_target(), draft).round_seconds


def test_a_tied_target_lends_its_embedding_as_the_head():
    model = tiny_target(tie_word_embeddings=True)
    structure = Structure(model)
    hidden = mx.random.normal((1, 3, 32))
    assert mx.array_equal(structure.unembed(hidden), model.model.embed_tokens.as_linear(hidden))


QUANTIZED = {
    "8 bits": dict(bits=8, only=()),
    "4 bits": dict(bits=4, only=()),
    "the embedding only": dict(bits=4, only=("embed_tokens",)),
    "all but the head": dict(bits=4, without=("lm_head",)),
    "mixed": dict(bits=4, eight=("lm_head", "embed_tokens", "down_proj")),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_targets_give_their_own_text(kind, tied, tmp_path, monkeypatch):
    """Also after saving and loading; the draft reads the shared embedding and head as the target does."""
    how, config = QUANTIZED[kind], target_config(hidden_size=64, num_hidden_layers=2, tie_word_embeddings=tied)
    model = tiny_target(hidden_size=64, num_hidden_layers=2, tie_word_embeddings=tied)

    def settings(path, module):
        name = path.rpartition(".")[2]
        if (
            not hasattr(module, "to_quantized")
            or name in how.get("without", ())
            or (how.get("only") and name not in how["only"])
        ):
            return False
        return dict(group_size=32, bits=8, mode="affine") if name in how.get("eight", ()) else True

    model, config = quantize_model(model, config, 32, how["bits"], quant_predicate=settings)
    expected = np.array(model(mx.array([PROMPT])))
    save_target(tmp_path, model, config, byte_tokenizer())
    model, _ = mlx_dflash.load(str(tmp_path))
    assert (np.array(model(mx.array([PROMPT]))) == expected).all()
    dflash = dict(target_layer_ids=[0, 1])
    draft = make_draft(draft_config(dflash, hidden_size=64, num_target_layers=2))
    structure, hidden = Pair(model, draft).structure, mx.random.normal((1, 2, 64))
    head = model.model.embed_tokens.as_linear if tied else model.lm_head
    assert mx.array_equal(structure.unembed(hidden), head(hidden))
    plain = plain_run(model, PROMPT, max_tokens=12)
    monkeypatch.setattr("mlx_dflash.pair.Drafter", forced_drafter(PROMPT, plain.tokens, [3, 0, 5]))
    assert draft_run(model, draft, PROMPT, max_tokens=12).tokens == plain.tokens


DTYPES = [mx.float32, mx.bfloat16, mx.float16]


@pytest.mark.parametrize("draft_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
def test_target_and_draft_may_have_different_element_types(target_dtype, draft_dtype):
    """The text stays the target's; the draft computes and stores in its own type, the target in its own."""
    model, draft = tiny_target(dtype=target_dtype), make_draft(dtype=draft_dtype)
    cache = mlx_dflash.make_prompt_cache(model, draft)
    for temperature in (0.0, 1.0):
        arguments = dict(max_tokens=8, sampler=make_sampler(temperature))
        caches = dict(prompt_cache=cache) if temperature == 0 else {}
        ours = draft_run(model, draft, PROMPT, **arguments, **caches)
        assert ours.tokens == plain_run(model, PROMPT, **arguments).tokens
    assert {c.keys.dtype for c in cache[:4]} == {target_dtype}
    assert {c.keys.dtype for c in cache[4:]} == {draft_dtype}


@pytest.mark.parametrize("bits", [None, 4])
def test_a_half_draft_guesses_like_its_float32_self(bits):
    """Element types of a pair change draft logits by rounding only."""
    model = tiny_target(dtype=mx.bfloat16 if bits is None else mx.float32)
    if bits:
        nn.quantize(
            model, group_size=32, bits=bits, class_predicate=lambda p, m: p.endswith(("embed_tokens", "lm_head"))
        )
    structure, found = Structure(model), []
    from mlx_dflash.dice import Dice
    from mlx_dflash.drafter import Drafter
    from mlx_dflash.target import Target

    for dtype in (mx.float32, mx.bfloat16):
        drafter = Drafter(make_draft(dtype=dtype), structure.embed, structure.unembed, Dice())
        Target(model, [0, 2]).prefill(mx.array(PROMPT), drafter.extend_context)
        found.append(np.array(drafter.draft_logits(7).astype(mx.float32)))
    error, scale = np.abs(found[0] - found[1]).max(), np.abs(found[0]).max()
    assert error < 0.1 * scale, f"logits are off by {error}; the largest is {scale}"


def test_load_draft_can_change_the_element_type(tmp_path):
    save_draft(tmp_path, draft_config(), draft_weights(draft_config()))
    draft = mlx_dflash.load_draft(str(tmp_path), dtype=mx.bfloat16)
    assert {v.dtype for _, v in tree_flatten(draft.parameters())} == {mx.bfloat16}
    assert draft.dtype == mx.bfloat16
