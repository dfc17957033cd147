"""The command `tokenfleet`. Ctrl-C ends it in silence, also during its imports, which take a while."""

INTERRUPTED = 130
"""The exit code that shells give a command that SIGINT ended."""


def main() -> int:
    try:
        from deploy.cli import command_line  # while Ctrl-C is waited for

        return command_line.main()
    except KeyboardInterrupt:
        return INTERRUPTED
