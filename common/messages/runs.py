"""Runs: which workers made the tokens of a request that has a receipt, as Redis notes them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """A stay of a request on a worker.

    Attributes:
        base: index of the first token that it made; the next run's base ends it.
        worker: the incarnation.
        build: what the worker said of itself when the run began, as JSON; empty if it said nothing.
    """

    base: int
    worker: str
    build: bytes


def read_runs(runs: bytes, builds: bytes) -> Sequence[Run]:
    """The runs of a request's hash, in order; its fields are those that `publish_plan` writes."""
    known = builds.split(b"\n")
    lines = [line.split() for line in runs.splitlines()]
    return [Run(int(base), worker.decode(), known[int(number) - 1]) for base, worker, number in lines]
