"""The beginning and the end of a command: flags in, and one line and an exit status, whatever went wrong.

Exit status 2 is a mistake that the user can mend, 1 a fault of ours, 130 Ctrl-C, 141 a reader of stdout that left.
Knows kinds of errors; knows nothing of what the command does.
"""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

USER_ERRORS = (ValueError, TypeError, OSError, ModuleNotFoundError)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which knows --debug."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.add_argument("--debug", action="store_true", help="show where in the code an error comes from")

    def error(self, message: str) -> NoReturn:
        """End the program with exit status 2 and one line on stderr."""
        self.exit(2, f"error: {message}; {self.prog} --help lists the flags\n")


def run_command(
    make_parser: Callable[[], argparse.ArgumentParser],
    work: Callable[[argparse.Namespace], int | None],
    argv: list[str] | None = None,
) -> None:
    """Parse the command line, do the work, and end the program with the exit status that it returns if that is not 0.

    argv: the arguments, or None for those of the process.
    """
    with user_errors():
        args = make_parser().parse_args(argv)
    with user_errors(args.debug):
        if status := work(args):
            sys.exit(status)


@contextmanager
def user_errors(is_debugging: bool = False) -> Iterator[None]:
    """End the program with one line on stderr if the body raises. is_debugging: print the traceback before it."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Whatever is still buffered has no reader either; the interpreter flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:  # the end of the program: the one place where anything may have been raised
        if is_debugging:
            traceback.print_exc()
        is_mendable = isinstance(error, USER_ERRORS)
        text = " ".join(str(error).split()) or type(error).__name__
        said = text if is_mendable else f"{type(error).__name__}: {text} (--debug shows where)"
        print(f"error: {said}", file=sys.stderr)
        sys.exit(2 if is_mendable else 1)
