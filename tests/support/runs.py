"""Runs of the same case by mlx-lm and by us, and what a run leaves behind: shared by the tests of the contracts."""

import threading
from dataclasses import dataclass
from functools import cache
from itertools import islice

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

import mlx_dflash
from mlx_dflash.caches.rollback import lengths
from mlx_dflash.dice import Dice
from mlx_dflash.draft.config import DraftConfig
from mlx_dflash.draft.model import DraftModel
from mlx_dflash.drafter import Drafter
from mlx_dflash.emission import emit
from mlx_dflash.models.structure import Structure
from mlx_dflash.session import Session
from mlx_dflash.target import Target
from support.byte_tokenizer import byte_tokenizer
from support.drafts import draft_config, draft_weights
from support.oracle import OracleDrafter
from support.targets import plain_tokens, tiny_target

PROMPT = [5, 17, 3, 40, 8]
# What the order of float32 sums may change behind four layers; the row of another token differs by about one.
ROUNDING = 1e-4


def make_draft(config=None, seed=1, dtype=mx.float32, **changes):
    """A DraftModel of a fixture config, without the way over the disk."""
    config = draft_config(**changes) if config is None else config
    weights = draft_weights(config, seed=seed)
    draft = DraftModel(DraftConfig.from_dict(config))
    draft.load_weights([(name, mx.array(value).astype(dtype)) for name, value in weights.items()])
    draft.eval()
    mx.eval(draft.parameters())
    draft.fuse_context_projection()
    return draft


def small_pair(family="qwen3", vocab_size=6, seed=0, block_size=6, dtype=mx.float32, **draft_changes):
    """A target and a draft with so few tokens that a random draft is often right."""
    model = tiny_target(family, seed=seed, dtype=dtype, vocab_size=vocab_size)
    hidden = model.layers[0].mlp.gate_proj.weight.shape[-1]
    dflash = dict(mask_token_id=vocab_size - 1, block_size=block_size)
    draft = make_draft(draft_config(dflash, vocab_size=vocab_size, hidden_size=hidden, **draft_changes), seed=seed + 1)
    return model, draft


@cache
def tokenizer(stop_tokens=()):
    """The byte tokenizer, whose text ends at these ids."""
    return TokenizerWrapper(byte_tokenizer(eos=False)._tokenizer, BPEStreamingDetokenizer, eos_token_ids=stop_tokens)


@dataclass
class Run:
    """What a run gave and left: tokens, text pieces, logprobs (n, V), finish reason, from_draft, the random state."""

    tokens: list
    texts: list
    logprobs: np.ndarray
    finish_reason: str
    from_draft: list
    random_state: list
    last: object


def run(generator, take=None):
    """Run a generator of responses, or its first `take` of them."""
    responses = list(islice(generator, take))
    generator.close()
    return Run(
        tokens=[r.token for r in responses],
        texts=[r.text for r in responses],
        logprobs=np.array(mx.stack([r.logprobs.astype(mx.float32) for r in responses])),
        finish_reason=responses[-1].finish_reason,
        from_draft=[r.from_draft for r in responses],
        random_state=mx.random.state[0].tolist(),
        last=responses[-1],
    )


def plain_run(model, prompt, stop_tokens=(), seed=0, take=None, **options):
    """mlx-lm's own run."""
    mx.random.seed(seed)
    return run(mlx_lm.stream_generate(model, tokenizer(tuple(stop_tokens)), mx.array(prompt), **options), take)


def draft_run(model, draft, prompt, stop_tokens=(), seed=0, take=None, **options):
    """Our run of the same case."""
    mx.random.seed(seed)
    return run(
        mlx_dflash.stream_generate(
            model, tokenizer(tuple(stop_tokens)), mx.array(prompt), draft_model=draft, **options
        ),
        take,
    )


def assert_same(ours, plain, case=""):
    """Same tokens, text, reason and random stream as mlx-lm; the same logprobs up to rounding."""
    assert ours.tokens == plain.tokens, f"{case}: {ours.tokens} instead of {plain.tokens}"
    assert ours.texts == plain.texts, f"{case}: {ours.texts} instead of {plain.texts}"
    assert ours.finish_reason == plain.finish_reason, f"{case}: {ours.finish_reason}, mlx-lm says {plain.finish_reason}"
    assert ours.random_state == plain.random_state, f"{case}: the random stream stands elsewhere"
    finite = np.isfinite(plain.logprobs)
    assert (finite == np.isfinite(ours.logprobs)).all(), f"{case}: other tokens are excluded"
    error, allowed = np.abs(ours.logprobs[finite] - plain.logprobs[finite]).max(), rounding(plain.logprobs[finite])
    assert error <= allowed, f"{case}: logprobs are off by {error}, more than {allowed}"


def rounding(logprobs):
    """What two orders of the same float32 sums may differ by: 2e-5, or some units of the last place of large values.

    mlx-lm's rotating cache holds its rows in another order than ours, so its sums run in another order.
    """
    return max(2e-5, 3e-6 * np.abs(logprobs).max())


class Watch:
    """A session over an oracle, whose caches can be looked at: the text is mlx-lm's, accept counts are chosen."""

    def __init__(
        self, model, prompt, accepts=None, num_tokens=40, draft=None, stop_tokens=(), prompt_cache=None, **session
    ):
        taps = draft.config.target_layer_ids if draft else (0, 2)
        self.model, self.prompt, self.draft = model, list(prompt), draft
        num_drafts = session.pop("num_drafts", draft.config.block_size - 1 if draft else 5)
        self.text = plain_tokens(model, self.prompt, num_tokens + num_drafts + 1)
        structure = Structure(model)
        self.target = Target(model, taps, prompt_cache, block_size=num_drafts + 1)
        self.inner = Drafter(draft, structure.embed, structure.unembed, Dice(), None, num_drafts + 1) if draft else None
        self.drafter = OracleDrafter(self.prompt, self.text, accepts, num_drafts, self.inner)
        self.session = Session(
            self.target,
            self.drafter,
            Dice(),
            max_tokens=num_tokens,
            stop_tokens=stop_tokens,
            stream=generation_stream,
            **session,
        )

    @property
    def covered(self):
        """The set of lengths that the target's caches and the draft context cover."""
        inner = [c.offset for c in self.inner.caches] if self.inner else []
        return {*lengths(self.target.caches), self.drafter.context_length, *inner}

    def rounds(self, **prefill):
        return self.session.rounds(mx.array(self.prompt), **prefill)

    def emit(self, **prefill):
        return emit(self.session, mx.array(self.prompt), **prefill)


def fresh_caches(model, tokens, draft=None, step=2048):
    """The caches of a target, and of its draft, that have just read these tokens: (target's, draft's)."""
    taps = draft.config.target_layer_ids if draft else (0,)
    target = Target(model, taps, make_prompt_cache(model))
    contexts = draft.make_cache() if draft else []
    on_features = (lambda features: draft.project_context(features, contexts)) if draft else (lambda features: None)
    target.prefill(mx.array(tokens), on_features, step)
    return target.caches, contexts


def last_rows(caches, rows=None):
    """The keys and values that each cache holds, the last `rows` of them: a list of float32 arrays."""
    arrays = []
    for held in caches:
        for part in held.state[:2] if held.offset else ():
            part = np.array(part.astype(mx.float32))
            arrays.append(part[..., -min(rows or part.shape[2], part.shape[2]) :, :])
    return arrays


def assert_same_caches(found, expected, tolerance=ROUNDING, case=""):
    """Caches that cover as many tokens and hold the same rows."""
    assert lengths(found) == lengths(expected), f"{case}: caches cover {lengths(found)}, expected {lengths(expected)}"
    for a, b in zip(last_rows(found), last_rows(expected), strict=True):
        assert a.shape == b.shape, f"{case}: rows {a.shape}, expected {b.shape}"
        error = np.abs(a - b).max() if a.size else 0
        assert error <= tolerance, f"{case}: cache rows are off by {error}"


def forced_drafter(prompt, text, accepts):
    """A Drafter class for the public api: the network runs as ever, but its proposals are the oracle's.

    text: what the target will emit behind prompt. accepts: how many drafts each round keeps, in turn. It lists the
    number of drafts of every round in `made`, and those that will be kept in `kept`.
    """

    class Forced(Drafter):
        made, kept = [], []

        def propose(self, anchor, num_drafts):
            drafts = super().propose(anchor, num_drafts).tolist()
            if not drafts:
                return mx.array(drafts, mx.uint32)
            at = self.context_length - len(prompt) + 1
            known = text[at : at + len(drafts)]
            keep = min(accepts[len(self.made) % len(accepts)], len(drafts))
            drafts = known[:keep] + drafts[len(known[:keep]) :]
            if keep < len(known) and drafts[keep] == known[keep]:
                drafts[keep] = (known[keep] + 1) % 2  # another token than the known one
            self.made.append(len(drafts))
            self.kept.append(keep)
            return mx.array(drafts, mx.uint32)

    return Forced


def in_thread(work):
    """Run work in a thread of its own; return its result or raise its exception."""
    result = []

    def call():
        try:
            result.append((work(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    value, error = result[0]
    if error:
        raise error
    return value
