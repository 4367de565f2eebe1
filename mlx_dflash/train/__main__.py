"""`python -m mlx_dflash.train data|fit`."""

import argparse
import sys

from ..commands.errors import Parser, run_command, user_errors
from . import step_data, step_fit

STEPS = {"data": step_data, "fit": step_fit}
_INSTEAD_OF_EVAL = (
    "to measure drafts, use python -m mlx_dflash.benchmark --model TARGET --prompts FILE --draft-model DRAFT ..."
)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and take one step."""
    with user_errors():
        if (sys.argv[1:] if argv is None else argv)[:1] == ["eval"]:
            raise ValueError(_INSTEAD_OF_EVAL)
    run_command(make_parser, _run, argv)


def make_parser() -> Parser:
    """Return a parser of the steps and their flags."""
    parser = Parser(prog="mlx_dflash.train", description="Train a DFlash draft for a target, in two steps.")
    commands = parser.add_subparsers(dest="step", required=True, metavar="data|fit")
    for name, step in STEPS.items():
        summary = step.__doc__.splitlines()[0]
        command = commands.add_parser(name, help=summary, description=step.__doc__)
        command.add_argument("--model", required=True, help="target: a folder or hub repository, or demo")
        command.add_argument("--trust-remote-code", action="store_true", help="let the tokenizer run its own code")
        step.add_flags(command)
    return parser


def _run(args: argparse.Namespace) -> None:
    try:
        STEPS[args.step].run(args)
    except KeyboardInterrupt:
        print("\nthe same command goes on where this one ends", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
