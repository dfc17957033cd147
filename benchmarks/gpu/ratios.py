"""Prints our figures as ratios to a peer's: `python -m benchmarks.gpu.ratios PEERS OURS`.

The files have figures as `benchmarks.serve --load` prints them. For each load and figure that both files
have, it prints the peer's, ours, and the ratio: ours over the peer's for tokens/s, the peer's over ours for
times.
"""

import re
import sys
from pathlib import Path

LINE = re.compile(r"^(streams=\d+ in=\d+ out=\d+(?: sampled)?) *\| *(.+?): +([\d.]+)\s*$")


def read(path: Path) -> dict[tuple[str, str], float]:
    """Reads a file's values by load and figure; skips other lines."""
    found = map(LINE.match, path.read_text().splitlines())
    return {(line[1], line[2]): float(line[3]) for line in found if line}


def main(peers: dict[tuple[str, str], float], ours: dict[tuple[str, str], float]) -> None:
    both = [key for key in peers if key in ours]
    if not both:
        sys.exit("the two files have no figure in common")
    for key in both:
        peer, our = peers[key], ours[key]
        ratio = our / peer if "tok/s" in key[1] else peer / our
        print(f"{key[0]:26} {key[1]:34} {peer:10.2f} {our:10.2f}  {ratio:5.2f} times better")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*(read(Path(name)) for name in sys.argv[1:]))
