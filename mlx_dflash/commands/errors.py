"""How a command ends when it fails: one line for a mistake of the user's, and the exit status.

Knows kinds of errors; knows nothing of what the command does.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn an error that the user can mend into one line on stderr and exit status 2, and Ctrl-C into status 130."""
    try:
        yield
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
