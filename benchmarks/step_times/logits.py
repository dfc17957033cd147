"""Prints what raw logits cost a step of the engine: `python -m benchmarks.step_times.logits [--rows 32]`.

The engine runs in this process. Rows decode in turns: none of them returns logits, one does, all do; and each
way once more, so that the two figures of a way show how far the machine moves by itself.
"""

import argparse
import statistics
from collections.abc import Sequence

from benchmarks.engine import IN_TOKENS, OUT_TOKENS, UNLIMITED_STEPS, packed
from common.messages.request import StoppingParams
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.protocol import Grant, StartRow

TURNS = 5


class Decoding:
    """Rows that decode beside each other, some of which return logits."""

    def __init__(self, engine: Engine, num_rows: int) -> None:
        self.engine = engine
        self.num_rows = num_rows
        self.num_started = 0

    def step_ms(self, num_returning: int) -> float:
        """The median duration of a step."""
        starts = [self.row(index, index < num_returning) for index in range(self.num_rows)]
        self.engine.apply(Grant(UNLIMITED_STEPS, self.num_rows * IN_TOKENS, starts))
        self.num_started += self.num_rows
        steps = list(iter(self.engine.step, None))
        decoded = [step for step in steps if step.samples and not step.prefilled]
        assert all(len(step.logits) == num_returning for step in decoded)
        return statistics.median(step.duration_ms for step in decoded)

    def row(self, index: int, returns_logits: bool) -> StartRow:
        blocks = -(-(IN_TOKENS + OUT_TOKENS) // self.engine.block_size)
        return StartRow(
            self.num_started + index,
            packed([100 + (7 * index + i) % 1000 for i in range(IN_TOKENS)]),
            0,
            packed(range(1 + index * blocks, 1 + (index + 1) * blocks)),
            StoppingParams(OUT_TOKENS, ignore_eos=True),
            logits=(IN_TOKENS - 1, IN_TOKENS + OUT_TOKENS, "float32") if returns_logits else None,
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    flags, others = parser.parse_known_args(argv)
    engine = Engine(Settings.read(others))
    decoding = Decoding(engine, flags.rows)
    decoding.step_ms(0)  # warms up
    ways = {"none": 0, "none, again": 0, "one": 1, "all": flags.rows}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, num_returning in ways.items():
            found[name].append(decoding.step_ms(num_returning))
    base = statistics.median(found["none"])
    for name, steps_ms in found.items():
        step_ms = statistics.median(steps_ms)
        print(f"{flags.rows} rows, {name}: step {step_ms:6.2f} ms, {step_ms / base:.3f} of none", flush=True)


if __name__ == "__main__":
    main()
