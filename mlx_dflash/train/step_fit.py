"""Fit a draft to training text; an interrupted fit goes on where it was."""

import argparse
import sys
import time
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from .new_draft import SIZES
from .options import COMPUTED_IN, FEATURES, FLOATS, FitOptions
from .text.corpus import read_header

if TYPE_CHECKING:
    from .fitting import Fit


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this step; their names and defaults are those of FitOptions."""
    add = parser.add_argument
    add("--data", required=True, nargs="+", metavar="FILE", help="training text, as written by: train data")
    add("--out", required=True, help="folder of the run: checkpoint, log, and the drafts in best/ and last/")
    _add_shape_flags(parser.add_argument_group("the draft"))
    _add_recipe_flags(parser.add_argument_group("the recipe"))
    _add_lesson_flags(parser.add_argument_group("lessons and validation"))
    parser.set_defaults(**{f.name: f.default for f in fields(FitOptions) if f.default is not MISSING})


def _add_shape_flags(group: Any) -> None:
    sizes = [f"{name} {s.layers} layers, {s.taps} taps, block {s.block_size}" for name, s in SIZES.items()]
    add = group.add_argument
    add("--init-draft", metavar="DRAFT", help="go on training this draft: a folder or hub repository, or demo")
    add("--size", choices=SIZES, help=f"size of a new draft: {', '.join(sizes)} (default: small)")
    help = "tokens of a block, the anchor and the drafts (default: the size's, or the given draft's)"
    add("--block-size", type=int, metavar="N", help=help)
    help = "give the draft a reduced head with this many tokens, the most frequent of the data"
    add("--draft-vocab", type=int, metavar="N", help=help)
    help = "number format of the drafts that are written (default: %(default)s)"
    add("--save-dtype", choices=FLOATS, help=help)


def _add_recipe_flags(group: Any) -> None:
    add = group.add_argument
    length = group.add_mutually_exclusive_group()
    help = "number of updates (default: as many as --visits makes)"
    length.add_argument("--steps", type=int, metavar="N", help=help)
    help = "how often each sample is visited (default: %(default)s)"
    length.add_argument("--visits", type=float, metavar="X", help=help)
    add("--batch-size", type=int, metavar="N", help="samples of an update, on each machine (default: %(default)s)")
    add("--anchors", type=int, metavar="N", help="blocks of a sample that a visit trains (default: %(default)s)")
    help = (
        "block sizes that the updates take in turn, for a draft that is also good at shorter blocks (default: its own)"
    )
    add("--block-sizes", type=int, nargs="+", metavar="N", help=help)
    add("--learning-rate", type=float, metavar="X", help="peak learning rate (default: %(default)s)")
    help = "updates of linear warm-up of the learning rate (default: a tenth of all updates, at most 100)"
    add("--warmup", type=int, metavar="N", help=help)
    add("--weight-decay", type=float, metavar="X", help="AdamW weight decay (default: %(default)s)")
    add("--clip", type=float, metavar="X", help="greatest norm of the gradient of an update (default: %(default)s)")
    help = "number of slots after which a slot's weight in the loss has fallen by a factor e (default: %(default)s)"
    add("--decay", type=float, metavar="X", help=help)
    help = "share of the loss, 0 to 1, that follows the target's distribution, not its token (default: %(default)s)"
    add("--soft", type=float, metavar="X", help=help)
    help = "compute the loss over this many tokens only, the most frequent of the data (default: over all)"
    add("--loss-vocab", type=int, metavar="N", help=help)
    add("--dtype", choices=COMPUTED_IN, help="number format of the computation (default: %(default)s)")
    help = "compute each layer again for its gradient, which saves memory and costs time"
    add("--grad-checkpoint", action="store_true", help=help)
    help = "random seed of the first weights, the order of the samples and the anchors (default: %(default)s)"
    add("--seed", type=int, metavar="N", help=help)


def _add_lesson_flags(group: Any) -> None:
    add = group.add_argument
    help = "keep the target's features on disk, or compute them again at each visit (default: %(default)s)"
    add("--features", choices=FEATURES, help=help)
    add("--feature-dtype", choices=FLOATS, help="number format of the features on disk (default: bfloat16)")
    help = "cut samples to this many tokens, the prompt's included (default: %(default)s)"
    add("--max-length", type=int, metavar="N", help=help)
    help = "training text to measure acceptance on (default: some samples of --data, which are then not learned)"
    add("--valid-data", metavar="FILE", help=help)
    help = "number of greedy samples that are held out to measure acceptance on (default: %(default)s)"
    add("--valid-count", type=int, metavar="N", help=help)
    add("--valid-tokens", type=int, metavar="N", help="tokens measured per held-out sample (default: %(default)s)")
    help = "number of updates between two measurements of acceptance (default: %(default)s)"
    add("--valid-every", type=int, metavar="N", help=help)
    help = "number of updates between two checkpoints (default: %(default)s)"
    add("--save-every", type=int, metavar="N", help=help)


def run(args: argparse.Namespace) -> None:
    """Prepare everything, train, and report."""
    from .fitting import Fit

    options = FitOptions(**{field.name: getattr(args, field.name) for field in fields(FitOptions)})
    began = time.perf_counter()
    with Fit(options) as fit:
        is_first = fit.group.rank() == 0
        if is_first:
            print(plan(fit), file=sys.stderr)
        fit.train(progress_bar)
    if is_first:
        print(report(fit, time.perf_counter() - began))


def plan(fit: "Fit") -> str:
    """Say what will be done, in a few lines."""
    config, material, recipe = fit.draft.config, fit.material, fit.trainer.recipe
    lines = [
        f"draft: {config.num_layers} layers, block {config.block_size}, taps {list(config.target_layer_ids)}, "
        f"from {fit.starting.origin}",
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
    """Say what came of a run, in a few lines."""
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
