"""Entry point of `tokenfleet`: Ctrl-C ends it without a traceback, even during its slow imports."""

INTERRUPTED = 130
"""Exit code of a command that SIGINT ended, as shells give it."""


def main() -> int:
    try:
        from deploy.cli import command_line  # here, so that Ctrl-C is handled

        return command_line.main()
    except KeyboardInterrupt:
        return INTERRUPTED
