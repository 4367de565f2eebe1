"""The drafter that knows the text forces the accept counts that a test asks for."""

import mlx.core as mx
import numpy as np
import pytest
from support.oracle import OracleDrafter


@pytest.mark.parametrize("accepts", [None, 0, 3, [0, 5, 2, 4, 1, 3]])
def test_oracle_forces_the_accept_counts(accepts):
    continuation = np.random.RandomState(0).randint(0, 97, 80).tolist()
    oracle = OracleDrafter([1, 2, 3, 4], continuation, accepts)
    wanted = [5] if accepts is None else np.atleast_1d(accepts).tolist()
    oracle.extend_context(mx.zeros((1, 4, 2)))
    at, counts = 0, []
    while at + 6 < len(continuation):
        drafts = oracle.propose(mx.array(continuation[at])).tolist()
        assert len(drafts) == oracle.num_drafts == 5
        agreed = [d == t for d, t in zip(drafts, continuation[at + 1 :], strict=False)]
        counts.append((agreed + [False]).index(False))
        at += counts[-1] + 1
        oracle.extend_context(mx.zeros((1, counts[-1] + 1, 2)))
    assert counts == [wanted[i % len(wanted)] for i in range(len(counts))]
    assert oracle.context_length == 4 + at
    assert len(oracle.proposals) == len(counts)


def test_oracle_refuses_an_anchor_that_its_context_does_not_fit():
    oracle = OracleDrafter([1, 2], [7, 8, 9])
    oracle.extend_context(mx.zeros((1, 3, 2)))
    with pytest.raises(AssertionError, match="anchor 7 behind 3 context rows, but the text has 8"):
        oracle.propose(7)
    oracle.rewind(2)
    assert oracle.propose(7, num_drafts=2).tolist() == [8, 9]


def test_oracle_lets_a_real_drafter_see_everything():
    calls = []

    class Recorder:
        def extend_context(self, features):
            calls.append(("extend", features.shape[1]))

        def propose(self, anchor, num_drafts):
            calls.append(("propose", anchor, num_drafts))

        def can_rewind(self, length):
            return length > 0

        def rewind(self, length):
            calls.append(("rewind", length))

        def settle(self):
            calls.append("settle")

    oracle = OracleDrafter([1, 2], [7, 8, 9], inner=Recorder())
    oracle.extend_context(mx.zeros((1, 1, 2)))
    assert oracle.propose(2, 0).tolist() == []
    oracle.extend_context(mx.zeros((1, 1, 2)))
    assert oracle.propose(mx.array([7]), 2).tolist() == [8, 9]
    assert oracle.can_rewind(1) and not oracle.can_rewind(0)
    oracle.rewind(1)
    oracle.settle()
    assert calls == [("extend", 1), ("propose", 2, 0), ("extend", 1), ("propose", 7, 2), ("rewind", 1), "settle"]
