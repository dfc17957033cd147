"""Run delay: how long the threads of a process waited for a core although they could run."""

from pathlib import Path


def run_delay_s(pid: int) -> float:
    """Seconds since the process started, summed over its threads; 0 where the kernel does not count them."""
    return sum(read_delay_ns(path) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def read_delay_ns(path: Path) -> int:
    """The second number of a thread's schedstat; 0 for a thread that has ended."""
    try:
        return int(path.read_text().split()[1])
    except (OSError, IndexError):
        return 0
