"""Finding: the result of one check of `tokenfleet doctor`."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `level` is ok, warn (it works, but not well) or fail (it cannot work); `fix` is
    empty where nothing needs fixing.
    """

    level: str
    found: str
    fix: str = ""


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
