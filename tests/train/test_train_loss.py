"""The loss and its gradient against numpy; the training pass against inference; anchors and weights."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.drafts import draft_config, draft_weights
from support.reference import reference_draft_logits
from support.targets import tiny_target

from mlx_dflash.checkpoints.drafts import build_draft
from mlx_dflash.dice import Dice
from mlx_dflash.drafter import Drafter
from mlx_dflash.models.structure import Structure
from mlx_dflash.train.forward import block_logits
from mlx_dflash.train.lessons import Lesson
from mlx_dflash.train.loss import Columns, Weighting, block_loss, slot_weights
from mlx_dflash.train.trainer import Head, Recipe, Trainer

PROMPT, LENGTH = 3, 14
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}


@pytest.fixture(scope="module")
def structure():
    return Structure(tiny_target("qwen3"))


def make_draft(config, seed=1, extra=()):
    weights = {name: mx.array(value) for name, value in draft_weights(config, seed=seed).items()} | dict(extra)
    return build_draft(config, weights, Path("draft"))


def make_lesson(structure, seed=0):
    random = np.random.default_rng(seed)
    features = random.standard_normal((LENGTH, 2 * 32)).astype(np.float32)
    ids = np.array([random.permutation(90)[:8] for _ in range(LENGTH)]).astype(np.int32)
    logits = random.standard_normal((LENGTH, 8)).astype(np.float32) * 2
    tokens = random.integers(0, 90, LENGTH).astype(np.int32)
    return Lesson(mx.array(tokens), PROMPT, mx.array(features), mx.array(ids), mx.array(logits))


def head_of(structure, ids=None):
    return Head(structure.embed, structure.unembed, Columns(ids, structure.vocab_size))


def reference_loss(config, weights, lesson, anchors, tables, decay, soft):
    """The mean loss in float64, straight from its description; anchors: positions."""
    tokens, features = np.array(lesson.tokens), np.array(lesson.features, np.float64)
    ids, tops = np.array(lesson.top_ids), np.array(lesson.top_logits, np.float64)
    total = weight_sum = 0.0
    for a in anchors:
        rows = reference_draft_logits(config, weights, features[:a], tokens[a], *tables)
        for k, row in enumerate(rows):
            place = a + 1 + k
            if place >= len(tokens):
                continue
            logp = row - row.max() - np.log(np.exp(row - row.max()).sum())
            chances = np.exp(tops[place - 1] - tops[place - 1].max())
            chances /= chances.sum()
            loss = -(1 - soft) * logp[tokens[place]] - soft * (chances * logp[ids[place - 1]]).sum()
            total += np.exp(-k / decay) * loss
            weight_sum += np.exp(-k / decay)
    return total / weight_sum


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("changes", [{}, {"is_causal": True}, SLIDING], ids=["full", "causal", "sliding"])
def test_gradient_equals_a_difference_quotient_of_the_reference(structure, changes, checkpointed):
    config = draft_config(**changes)
    draft, lesson = make_draft(config), make_lesson(structure)
    decay, soft = 2.0, 0.3
    trainer = Trainer(
        draft, head_of(structure), Recipe(1, anchors=4, checkpointed=checkpointed), Weighting(decay, soft)
    )
    anchors = trainer.anchors(0, 0, lesson)
    slots = mx.array(Weighting(decay, soft).slots(5))
    weights = slot_weights(lesson, anchors, trainer.head.columns, slots)
    loss, gradients = trainer._sum_of_gradients([((lesson, anchors), weights)], weights.sum())
    gradients = {name: np.array(value) for name, value in tree_flatten(gradients)}
    tables = [np.array(m, np.float64) for m in (structure.embedding.weight, structure.unembed.weight)]
    plain = {name: np.array(value, np.float64) for name, value in tree_flatten(draft.parameters())}
    places = anchors.tolist()
    expected = reference_loss(config, plain, lesson, places, tables, decay, soft)
    assert abs(loss.item() - expected) <= 2e-5, f"loss {loss.item()} against {expected}"
    random = np.random.default_rng(3)
    assert gradients.keys() == plain.keys()
    for name in plain:
        at = tuple(random.integers(0, n) for n in plain[name].shape)
        step, sides = 1e-4, []
        for sign in (1, -1):
            moved = plain | {name: plain[name].copy()}
            moved[name][at] += sign * step
            sides.append(reference_loss(config, moved, lesson, places, tables, decay, soft))
        slope = (sides[0] - sides[1]) / (2 * step)
        assert abs(gradients[name][at] - slope) <= 1e-4 + 1e-3 * abs(slope), (
            f"{name}{at}: {gradients[name][at]} against {slope}"
        )


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": True},
        SLIDING,
        {"is_causal": False, **SLIDING},
        {"final_logit_softcapping": 2.0},
        {"attention_value_scale": 0.5},
    ],
    ids=["full", "causal", "sliding", "sliding both ways", "softcap", "value scale"],
)
def test_training_pass_equals_inference_block_by_block(structure, changes, checkpointed):
    draft, lesson = make_draft(draft_config(**changes)), make_lesson(structure)

    def drafter():
        return Drafter(draft, structure.embed, structure.unembed, Dice())

    places = [1, 2, 5, 9, LENGTH - 1]
    anchors = mx.array(places)
    together = block_logits(drafter(), lesson.features, anchors, lesson.tokens[anchors], checkpointed)
    for i, place in enumerate(places):
        alone = drafter()
        alone.extend_context(lesson.features[None, :place])
        wanted = alone.draft_logits(lesson.tokens[place].item())
        error = mx.abs(together[i] - wanted).max().item()
        assert error <= 1e-5, f"anchor {place}: off by {error}"


def test_training_pass_equals_inference_with_sinks_and_a_row_for_the_anchor(structure):
    sinks = {f"layers.{i}.self_attn.attention_sink_bias": mx.array([0.5, -1.0, 2.0, 0.1]) for i in range(2)}
    draft = make_draft(draft_config(attention_sink_bias=True, sample_from_anchor=True), extra=sinks)
    lesson = make_lesson(structure)
    drafter = Drafter(draft, structure.embed, structure.unembed, Dice())
    together = block_logits(drafter, lesson.features, mx.array([4, 7]), lesson.tokens[mx.array([4, 7])])
    assert together.shape == (2, 6, 97)
    drafter.extend_context(lesson.features[None, :4])
    error = mx.abs(together[0] - drafter.draft_logits(lesson.tokens[4].item())).max().item()
    assert error <= 1e-5, f"off by {error}"


def test_no_block_sees_what_follows_its_anchor(structure):
    draft, lesson = make_draft(draft_config()), make_lesson(structure)
    drafter = Drafter(draft, structure.embed, structure.unembed, Dice())
    anchors = mx.array([4, 9])
    before = block_logits(drafter, lesson.features, anchors, lesson.tokens[anchors])
    changed = mx.concatenate([lesson.features[:4], lesson.features[4:] + 1.0])
    after = block_logits(drafter, changed, anchors, lesson.tokens[anchors])
    assert mx.array_equal(before[0], after[0]).item(), "the first block sees features at or behind its anchor"
    assert not mx.allclose(before[1], after[1]).item(), "the second block does not see the features before its anchor"


def test_anchors_are_followed_by_something_to_learn(structure):
    trainer = Trainer(make_draft(draft_config()), head_of(structure), Recipe(5, anchors=100), Weighting())
    lesson = make_lesson(structure)
    assert trainer.anchors(0, 0, lesson).tolist() == list(range(PROMPT, LENGTH - 1))
    few = Trainer(make_draft(draft_config()), head_of(structure), Recipe(5, anchors=4), Weighting())
    chosen = [tuple(few.anchors(step, 0, lesson).tolist()) for step in range(5)]
    assert len(set(chosen)) > 1 and chosen == [tuple(few.anchors(step, 0, lesson).tolist()) for step in range(5)]


def test_slots_behind_the_text_and_outside_the_head_weigh_nothing(structure):
    lesson = make_lesson(structure)
    slots = mx.array([1.0, 0.5, 0.25])
    last = slot_weights(lesson, mx.array([LENGTH - 2]), Columns(None, 97), slots)
    assert last.tolist() == [[1.0, 0.0, 0.0]]
    missing = lesson.tokens[5].item()
    ids = np.array([i for i in range(97) if i != missing])
    weights = slot_weights(lesson, mx.array([4]), Columns(ids, 97), slots)[0].tolist()
    tokens = lesson.tokens.tolist()
    assert weights == [0.0 if tokens[5 + k] == missing else w for k, w in enumerate([1.0, 0.5, 0.25])]


def test_loss_over_some_columns_counts_the_known_part_of_the_soft_targets(structure):
    lesson = make_lesson(structure)
    ids = np.sort(np.random.default_rng(0).permutation(97)[:60])
    logits = mx.array(np.random.default_rng(1).standard_normal((2, 3, 60)).astype(np.float32))
    anchors, slots = mx.array([4, 8]), mx.array([1.0, 0.5, 0.25])
    columns = Columns(ids, 97)
    weights = slot_weights(lesson, anchors, columns, slots)
    got = block_loss(logits, lesson, anchors, columns, (weights, 0.4)).item()
    wanted, place_of = 0.0, {int(t): i for i, t in enumerate(ids)}
    for a, rows in zip([4, 8], np.array(logits, np.float64)):
        for k, row in enumerate(rows):
            token = int(lesson.tokens[a + 1 + k].item())
            if token not in place_of:
                continue
            logp = row - np.log(np.exp(row).sum())
            known = [
                (place_of[t], x)
                for t, x in zip(lesson.top_ids[a + k].tolist(), lesson.top_logits[a + k].tolist())
                if t in place_of
            ]
            hard, soft = -logp[place_of[token]], 0.4 if known else 0.0
            chances = np.exp([x for _, x in known])
            likely = -(chances / chances.sum() * logp[[c for c, _ in known]]).sum() if known else 0.0
            wanted += [1.0, 0.5, 0.25][k] * ((1 - soft) * hard + soft * likely)
    assert abs(got - wanted) <= 1e-4, f"{got} against {wanted}"


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"steps": 1, "anchors": 0},
        {"steps": 1, "learning_rate": 0.0},
        {"steps": 1, "warmup": -1},
        {"steps": 4, "warmup": 4},
    ],
)
def test_senseless_recipes_are_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        Recipe(**wrong)


def test_two_machines_with_the_same_lessons_make_the_update_of_one(structure, monkeypatch):
    def trained(group):
        trainer = Trainer(
            make_draft(draft_config()), head_of(structure), Recipe(3, anchors=4, warmup=0, clip=1e9), Weighting(), group
        )
        losses = [trainer.step(i, [make_lesson(structure, 0), make_lesson(structure, 1)]) for i in range(3)]
        return losses, trainer.state()  # with the optimizer's moments, which tell the size of the gradients

    class Two:
        def size(self):
            return 2

    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, group: 2 * x)
    (losses, alone), (others, together) = trained(None), trained(Two())
    assert np.allclose(losses, others, atol=1e-5), f"{losses} against {others}"
    for name, value in alone.items():
        assert mx.allclose(value, together[name], atol=1e-5).item(), name


def test_update_with_a_gradient_that_is_not_finite_is_refused_before_it_spoils_the_weights(structure, monkeypatch):
    trainer = Trainer(make_draft(draft_config()), head_of(structure), Recipe(3, anchors=4), Weighting())
    gradients = trainer._sum_of_gradients

    def overflowing(work, total):
        loss, slopes = gradients(work, total)
        return loss, slopes | {"norm": {"weight": slopes["norm"]["weight"] * mx.inf}}

    monkeypatch.setattr(trainer, "_sum_of_gradients", overflowing)
    with pytest.raises(ValueError, match="gradient of norm"):
        trainer.step(0, [make_lesson(structure)])
    assert all(mx.isfinite(value).all().item() for value in trainer.state().values())


def test_text_without_any_token_of_the_head_teaches_nothing(structure):
    lesson = make_lesson(structure)
    ids = np.setdiff1d(np.arange(97), np.array(lesson.tokens))
    head = Head(structure.embed, lambda hidden: structure.unembed(hidden)[..., mx.array(ids)], Columns(ids, 97))
    trainer = Trainer(make_draft(draft_config()), head, Recipe(3, anchors=4), Weighting())
    assert trainer.step(0, [lesson]) == 0.0
