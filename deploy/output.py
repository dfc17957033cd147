"""Output: what commands print for people and for other programs."""

import sys

from rich.console import Console, RenderableType

WIDE = 240


def print_lines(*parts: RenderableType) -> None:
    """Print texts and tables. Where the output is no terminal, lines are as long as what they say: none is
    folded, and none ends with spaces.
    """
    if sys.stdout.isatty():
        Console(highlight=False).print(*parts, sep="\n")
        return
    console = Console(highlight=False, width=WIDE)
    with console.capture() as capture:
        console.print(*parts, sep="\n")
    for line in capture.get().splitlines():
        print(line.rstrip())
