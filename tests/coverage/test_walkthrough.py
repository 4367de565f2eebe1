"""The walk-through of the algorithm, moment by moment: what is confirmed, what each cache covers, where the block sits.

Prompt of 5, three drafts a block; the first draft of the first block is kept, the second refused.
"""

import mlx.core as mx
import pytest
from support.drafts import draft_config
from support.runs import PROMPT, Watch, assert_same_caches, fresh_caches, make_draft
from support.targets import plain_tokens, tiny_target

from mlx_dflash.draft.model import DraftModel


@pytest.fixture
def walk(monkeypatch):
    """The session of the walk-through, and what happens in it: a list of moments, each a dict."""
    model = tiny_target()
    draft = make_draft(draft_config(dict(block_size=4)))
    watch = Watch(model, PROMPT, accepts=[1, 3], num_tokens=20, draft=draft)
    moments = []

    def note(what, **more):
        offsets = {c.offset for c in watch.target.caches}, {c.offset for c in watch.inner.caches}
        moments.append(dict(what=what, target_covers=offsets[0], context_covers=offsets[1], **more))

    def wrap(owner, name, before=None, after=None):
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            if before:
                note(*before(*args)[:1], **before(*args)[1])
            result = original(*args, **kwargs)
            if after:
                note(after)
            return result

        monkeypatch.setattr(owner, name, wrapped)

    def draft_pass(self, block, caches, original=DraftModel.__call__):
        first = caches[0].offset
        note("draft", positions=list(range(first, first + block.shape[1])))
        hidden = original(self, block, caches)
        note("drafted")
        return hidden

    monkeypatch.setattr(DraftModel, "__call__", draft_pass)
    wrap(
        watch.target,
        "verify",
        lambda anchor, drafts: ("verify", dict(block=[int(anchor), *drafts.tolist()])),
        "verified",
    )
    wrap(watch.target, "commit", after="committed")
    wrap(watch.drafter, "extend_context", after="extended")
    return watch, moments


def test_the_walk_through_happens_as_described(walk):
    watch, moments = walk
    a0, b1, c2 = watch.text[:3]
    rounds = watch.rounds()

    assert next(rounds).verdict.tokens == (a0,)
    assert watch.covered == {5}, f"after the prefill the caches cover {watch.covered}; expected P = 5"

    del moments[:]
    first = next(rounds)
    drafts = watch.drafter.proposals[0][1]
    assert (drafts[0], drafts[1] != c2) == (b1, True)
    assert first.verdict.tokens == (b1, c2)
    expected = [
        dict(what="draft", target_covers={5}, context_covers={5}, positions=[5, 6, 7, 8]),
        dict(what="drafted", target_covers={5}, context_covers={5}),
        dict(what="verify", target_covers={5}, context_covers={5}, block=[a0, *drafts]),
        dict(what="verified", target_covers={9}, context_covers={5}),
        dict(what="committed", target_covers={7}, context_covers={5}),
        dict(what="extended", target_covers={7}, context_covers={7}),
    ]
    assert moments == expected, f"moments of the first round: {moments}"

    del moments[:]
    next(rounds)
    assert moments[0] == dict(what="draft", target_covers={7}, context_covers={7}, positions=[7, 8, 9, 10])
    assert moments[2]["block"][0] == c2


def test_the_prompt_never_passes_through_the_draft_network(walk):
    watch, moments = walk
    rounds = watch.rounds()
    next(rounds)
    assert [m["what"] for m in moments if m["what"] == "draft"] == []
    assert watch.covered == {5}


def test_context_kv_come_from_the_features_of_the_verify(walk):
    watch, _ = walk
    rounds = watch.rounds()
    next(rounds), next(rounds)
    confirmed = PROMPT + watch.text[:2]
    target, context = fresh_caches(watch.model, confirmed, watch.draft)
    assert_same_caches(watch.target.caches, target, case="target KV of P + a0 + b1")
    assert_same_caches(watch.inner.caches, context, case="context KV of P + a0 + b1")


def test_the_walk_ends_with_the_targets_own_text(walk):
    watch, _ = walk
    tokens = [e.token for e in watch.emit()]
    assert tokens == plain_tokens(watch.model, PROMPT, 20)
    assert mx.array(tokens).size == 20
