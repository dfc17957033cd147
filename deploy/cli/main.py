"""Entry point of `tokenfleet`: Ctrl-C ends it without a traceback, even during its slow imports."""

from collections.abc import Callable, Sequence

INTERRUPTED = 130
"""Exit code of a command that SIGINT ended, as shells give it."""


def main(translate: Callable[[Sequence[str]], Sequence[str]] = list) -> int:
    """Run the command of this process's words, which `translate` makes those of `tokenfleet`."""
    try:
        from deploy.cli import command_line

        return command_line.main(translate)
    except KeyboardInterrupt:
        return INTERRUPTED
