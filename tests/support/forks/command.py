"""The command `tokenfleet`, forked: it starts no fleet, and so needs nothing of what an engine imports."""

import subprocess
import sys
from collections.abc import Mapping

from deploy.cli.main import main
from tests.support.forks.client import ForkedProcess

MODULE = "tests.support.forks.command"
TIMEOUT_S = 90.0


def tokenfleet(
    *argv: str, environ: Mapping[str, str], content: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run the command with `content` on its stdin. Returns what it prints, and its exit code."""
    words = [sys.executable, "-m", MODULE, *argv]
    pipe = subprocess.PIPE
    process = ForkedProcess(words, env=environ, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        said, errors = process.communicate(content, TIMEOUT_S)
    finally:
        process.kill()
    return subprocess.CompletedProcess(words, process.returncode, said, errors)


if __name__ == "__main__":
    sys.exit(main())
