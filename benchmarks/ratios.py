"""Ours over a peer's: `python -m benchmarks.ratios PEER_FILE OUR_FILE`, of figures as `benchmarks/gpu.sh`
prints them.

For each load and figure that both files have: theirs, ours, and how many times better ours is (tokens/s: ours
over theirs; times: theirs over ours).
"""

import re
import sys
from pathlib import Path

LINE = re.compile(r"^(streams=\d+ in=\d+ out=\d+) *\| *(.+?): +([\d.]+)\s*$")


def read(path: Path) -> dict[tuple[str, str], float]:
    """By load and figure; other lines are left out."""
    found = map(LINE.match, path.read_text().splitlines())
    return {(line[1], line[2]): float(line[3]) for line in found if line}


def main(theirs: dict[tuple[str, str], float], ours: dict[tuple[str, str], float]) -> None:
    both = [key for key in theirs if key in ours]
    if not both:
        sys.exit("the two files have no figure in common")
    for key in both:
        a, b = theirs[key], ours[key]
        better = b / a if "tok/s" in key[1] else a / b
        print(f"{key[0]:26} {key[1]:34} {a:10.2f} {b:10.2f}  {better:5.2f} times better")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*(read(Path(name)) for name in sys.argv[1:]))
