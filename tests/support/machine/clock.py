"""A clock that a test moves."""


class Clock:
    """Stands for the module `time`."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s
