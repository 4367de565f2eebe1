"""`python -m mlx_dflash.train data|fit|eval`."""

import argparse
import sys

from ..commands.errors import user_errors
from . import step_data, step_eval, step_fit

STEPS = {"data": step_data, "fit": step_fit, "eval": step_eval}


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and take one step."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash.train", description="Train a DFlash draft for a target, in three steps."
    )
    commands = parser.add_subparsers(dest="step", required=True, metavar="data|fit|eval")
    for name, step in STEPS.items():
        summary = step.__doc__.splitlines()[0]
        command = commands.add_parser(name, help=summary, description=step.__doc__)
        command.add_argument("--model", required=True, help="target: a folder or hub repository, or demo")
        command.add_argument("--trust-remote-code", action="store_true", help="let the tokenizer run its own code")
        step.add_flags(command)
    args = parser.parse_args(argv)
    with user_errors():
        STEPS[args.step].run(args)


if __name__ == "__main__":
    main(sys.argv[1:])
