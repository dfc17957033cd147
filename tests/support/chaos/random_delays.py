"""Random delays around functions: between a look at something and the wait for it, what was looked at has
time to change. A wake-up that can be lost is lost then.
"""

import functools
import time
from collections.abc import Callable
from random import Random
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class RandomDelays:
    """Makes random delays of up to `most_s`, half of them zero."""

    def __init__(self, random: Random, most_s: float) -> None:
        self.random = random
        self.most_s = most_s

    def next_s(self) -> float:
        return max(0.0, self.random.uniform(-self.most_s, self.most_s))

    def around(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with a delay before and after it."""

        @functools.wraps(function)
        def late(*args: P.args, **kwargs: P.kwargs) -> R:
            time.sleep(self.next_s())
            result = function(*args, **kwargs)
            time.sleep(self.next_s())
            return result

        return late
