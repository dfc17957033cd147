"""Step costs: what a worker's steps take, learnt from what a running fleet has counted."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import orjson

from common.settings.settings import SettingError

LEAST_STEP_MS = 1e-3
LEAST_PIVOT = 1e-9
"""A smaller one means that the intervals do not tell two costs apart."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What all workers together have counted in one interval: steps, tokens sampled, prompt tokens computed,
    and the time of the steps.
    """

    steps: float
    tokens: float
    prompt_tokens: float
    ms: float


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step of one worker takes, and how much the worker holds.

    Attributes:
        step_ms, row_ms, prompt_token_ms: time of a step, of each row that gets a token in it, and of each
            prompt token.
        hop_ms: mean time of a first token outside of queue and worker: gateway, broker, agent.
        source: which fleet this was learnt from.
        num_steps: steps that it was learnt from.
    """

    step_ms: float
    row_ms: float
    prompt_token_ms: float
    hop_ms: float
    block_size: int
    num_blocks: int
    max_batch_prefill_tokens: int
    max_batch_size: int
    source: str
    num_steps: int

    def ms(self, num_rows: int, num_prompt_tokens: int) -> float:
        """Return the time of a step with so many rows that get a token."""
        return self.step_ms + self.row_ms * num_rows + self.prompt_token_ms * num_prompt_tokens

    def write(self, path: Path) -> None:
        path.write_bytes(orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2) + b"\n")

    @classmethod
    def read(cls, path: Path) -> "StepCosts":
        """Read a file that `--save` wrote. Raises SettingError."""
        try:
            found = orjson.loads(path.read_bytes())
            costs = cls(**{field.name: field.type(found[field.name]) for field in fields(cls)})  # type: ignore[operator]
        except OSError as error:
            raise SettingError("--step-times", f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, LookupError) as error:
            raise SettingError("--step-times", f"{path} is no file of `--save`: {error}") from error
        if not (costs.step_ms > 0 and min(costs.block_size, costs.num_blocks, costs.max_batch_size) > 0):
            raise SettingError("--step-times", f"{path} has a step, a block or a batch of size 0")
        return costs


def fit(intervals: Iterable[StepCounts]) -> tuple[float, float, float]:
    """Return the ms of a step, of a row, and of a prompt token that explain the intervals best (least
    squares).

    None of them is negative: a cost that would be is 0, and the others are fitted again. A step takes some
    time of its own. Intervals that do not tell rows from steps (always as many rows) give the time to steps.
    """
    rows = [((one.steps, one.tokens, one.prompt_tokens), one.ms) for one in intervals if one.steps > 0]
    kept = [0, 1, 2]
    while True:
        found = solve([([values[i] for i in kept], ms) for values, ms in rows])
        least = (LEAST_STEP_MS, 0.0, 0.0)
        bad = [i for i, cost in zip(kept, found, strict=True) if cost is None or cost < least[i]]
        if not bad or kept == [0]:
            costs = dict(zip(kept, found, strict=True))
            step, row, prompt_token = (max(0.0, costs.get(i) or 0.0) for i in range(3))
            return step, row, prompt_token
        kept.remove(max(bad) or kept[-1])


def solve(rows: Sequence[tuple[Sequence[float], float]]) -> list[float | None]:
    """Return the least-squares solution by normal equations; None for a variable that is not determined."""
    size = len(rows[0][0]) if rows else 0
    scale = [max((abs(values[i]) for values, _ in rows), default=0.0) or 1.0 for i in range(size)]
    matrix = [
        [sum(v[i] * v[j] / scale[i] / scale[j] for v, _ in rows) for j in range(size)]
        + [sum(v[i] * ms / scale[i] for v, ms in rows)]
        for i in range(size)
    ]
    free = set()
    for i in range(size):
        if matrix[i][i] < LEAST_PIVOT * len(rows):
            free.add(i)
            continue
        for other in range(size):
            if other != i:
                factor = matrix[other][i] / matrix[i][i]
                matrix[other] = [a - factor * b for a, b in zip(matrix[other], matrix[i], strict=True)]
    return [None if i in free else matrix[i][size] / matrix[i][i] / scale[i] for i in range(size)]
