"""Fit a draft to training text; goes on where it was interrupted."""

import argparse
import sys
import time
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from .new_draft import SIZES
from .options import FitOptions
from .text.corpus import read_header

if TYPE_CHECKING:
    from .fitting import Fit


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this step."""
    add = parser.add_argument
    add("--data", required=True, nargs="+", metavar="FILE", help="training text, as written by: train data")
    add("--out", required=True, help="folder of the run: checkpoint, log, and the drafts in best/ and last/")
    _add_shape_flags(parser.add_argument_group("the draft"))
    _add_recipe_flags(parser.add_argument_group("the recipe"))
    add = parser.add_argument_group("lessons and validation").add_argument
    add(
        "--features",
        choices=("disk", "recompute"),
        help="keep the target's features on disk, or compute them at each visit",
    )
    add(
        "--feature-dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of the features on disk (default: bfloat16)",
    )
    add("--max-length", type=int, help="tokens of a sample (default: %(default)s)")
    add(
        "--valid-data",
        metavar="FILE",
        help="text to measure acceptance on (default: some of --data, which are then not learned)",
    )
    add("--valid-count", type=int, help="greedy samples of it (default: %(default)s)")
    add("--valid-tokens", type=int, help="tokens of each (default: %(default)s)")
    add("--valid-every", type=int, help="updates (default: %(default)s)")
    add("--save-every", type=int, help="updates between checkpoints (default: %(default)s)")
    parser.set_defaults(**{f.name: f.default for f in fields(FitOptions) if f.default is not MISSING})


def _add_shape_flags(group: Any) -> None:
    add = group.add_argument
    add("--init-draft", help="go on training this draft: a folder or hub repository, or demo")
    add(
        "--size",
        choices=SIZES,
        help="of a new draft: "
        + ", ".join(f"{k} {s.layers} layers, {s.taps} taps, block {s.block_size}" for k, s in SIZES.items())
        + " (default: small)",
    )
    add("--block-size", type=int, help="anchor and drafts (default: the size's, or the given draft's)")
    add(
        "--draft-vocab",
        type=int,
        help="give the draft a reduced head with this many tokens, the most frequent of the data",
    )
    add(
        "--save-dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of the drafts that are written (default: %(default)s)",
    )


def _add_recipe_flags(group: Any) -> None:
    add = group.add_argument
    length = group.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="updates (default: as many as --visits makes)")
    length.add_argument("--visits", type=float, help="how often each sample is visited (default: %(default)s)")
    add("--batch-size", type=int, help="samples of an update (default: %(default)s)")
    add("--anchors", type=int, help="blocks of a sample at a visit (default: %(default)s)")
    add(
        "--block-sizes",
        type=int,
        nargs="+",
        metavar="N",
        help="block sizes that the updates take in turn, so that the draft is also good at shorter blocks "
        "(default: the block size of the draft)",
    )
    add("--learning-rate", type=float, help="greatest (default: %(default)s)")
    add("--warmup", type=int, help="updates in which it rises (default: a tenth of them, at most 100)")
    add("--weight-decay", type=float, help="of AdamW (default: %(default)s)")
    add("--clip", type=float, help="greatest norm of a gradient (default: %(default)s)")
    add(
        "--decay",
        type=float,
        help="slots in which a slot's weight falls by a factor e (default: %(default)s)",
    )
    add(
        "--soft",
        type=float,
        help="share of the target's own distribution in the loss (default: %(default)s)",
    )
    add("--loss-vocab", type=int, help="compute the loss over this many tokens only, the most frequent of the data")
    add("--dtype", choices=("float32", "bfloat16"), help="of the computation (default: %(default)s)")
    add("--grad-checkpoint", action="store_true", help="compute layers twice, which saves memory")
    add("--seed", type=int, help="of weights, order and anchors (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Prepare everything, train, and report."""
    from .fitting import Fit

    options = FitOptions(**{field.name: getattr(args, field.name) for field in fields(FitOptions)})
    began = time.perf_counter()
    with Fit(options) as fit:
        is_first = fit.group.rank() == 0
        if is_first:
            print(plan(fit), file=sys.stderr)
        try:
            fit.train(progress_bar)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
            sys.exit(130)
    if is_first:
        print(report(fit, time.perf_counter() - began))


def plan(fit: "Fit") -> str:
    """What will be done, in a few lines."""
    config, material, recipe = fit.draft.config, fit.material, fit.trainer.recipe
    lines = [
        f"draft: {config.num_layers} layers, block {config.block_size}, taps {list(config.target_layer_ids)}, "
        f"from {fit.origin}",
        f"data: {fit.num_learned} samples, {len(material.measured)} held out, "
        f"{material.num_left_out} left out: too short, or also held out",
        f"updates: {fit.step} of {recipe.steps} done, {recipe.batch_size} samples x {recipe.anchors} blocks each, "
        f"on {fit.group.size()} machines",
    ]
    # A name is all that a file tells: the same target may have another one on another machine.
    others = {str(read_header(path).get("target", fit.options.model)) for path in fit.options.data} - {
        fit.options.model
    }
    lines += [
        f"text: made with {other}, not {fit.options.model}; a draft learns best from the answers of its own target"
        for other in sorted(others)
    ]
    _, known = map(np.array, fit.trainer.head.columns.of(mx.arange(config.vocab_size)))
    if not known.all():
        share = fit.counts[known].sum() / max(1, fit.num_tokens)
        lines.append(f"head: {known.sum()} of {config.vocab_size} tokens, {100 * share:.1f} % of the text")
    return "\n".join(lines)


def report(fit: "Fit", seconds: float) -> str:
    """What came of it, in a few lines."""
    log = fit.run.log()
    losses = [line["loss"] for line in log if "loss" in line]
    reached = [(line["step"], line["acceptance_length"]) for line in log if "acceptance_length" in line]
    speeds = [line for line in log if "blocks_per_second" in line]
    lines = [
        f"{fit.step} updates, {seconds:.0f} s; loss "
        + " -> ".join(f"{loss:.3f}" for loss in losses[:1] + losses[1:][-1:])
    ]
    if speeds:
        blocks, tokens = (np.median([line[f"{what}_per_second"] for line in speeds]) for what in ("blocks", "tokens"))
        lines.append(f"speed: {blocks:.1f} blocks/s, {tokens:.1f} tokens/s")
    if reached:
        lines.append(
            "tokens a round, by update: " + ", ".join(f"{step}: {length:.2f}" for step, length in reached[-8:])
        )
    lines.append("drafts: " + " and ".join(str(path) for path in fit.run.drafts()))
    return "\n".join(lines)


def progress_bar(total: int, description: str, unit: str) -> Any:
    """A bar on stderr, if somebody watches."""
    from tqdm import tqdm

    return tqdm(total=total, desc=description, unit=unit, disable=None)
