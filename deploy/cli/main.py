"""Entry point of `tokenfleet`: it ends without a traceback at Ctrl-C, even during its slow imports, and where
its output cannot be written.
"""

import errno
import os
import sys
from collections.abc import Callable, Sequence

INTERRUPTED = 130
CLOSED_PIPE = 141
"""Exit codes of commands that SIGINT and SIGPIPE ended, as shells give them."""


def main(translate: Callable[[Sequence[str]], Sequence[str]] = list) -> int:
    """Run the command of this process's words, which `translate` makes those of `tokenfleet`."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # up to the end: `>&-` has closed it
    try:
        try:
            from deploy.cli import command_line

            return command_line.main(translate)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the exit
        if isinstance(error, BrokenPipeError):  # the reader of our output closed the pipe
            return CLOSED_PIPE
        print(f"tokenfleet: {error}", file=sys.stderr)
        return 1
