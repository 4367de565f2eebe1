"""What a command says of an error that its user can mend. Knows exit statuses; knows nothing of what the command does."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn errors of the user's into one line on stderr and exit status 2, Ctrl-C into status 130."""
    try:
        yield
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
