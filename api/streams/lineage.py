"""Lineage: which run of a request made the tokens that a stream has."""

from dataclasses import dataclass


@dataclass(slots=True)
class Lineage:
    """The run, an attempt on a worker, that made the last token of a stream.

    A run begins behind all tokens that are committed. One that begins before the last token shown, and is not
    the run that made it, began after the broker lost what was written last: its tokens may differ from those
    shown, which are facts.

    Attributes:
        rewound: whether such a run was seen, and what was shown was not offered since.
    """

    worker: str = ""
    attempt: int = 0
    rewound: bool = False

    def note(self, worker: str, attempt: int) -> None:
        """Note the run that made the last token."""
        self.worker = worker
        self.attempt = attempt

    def is_behind(self, worker: str, attempt: int) -> bool:
        """Whether a run began after the one that made the last token."""
        return attempt > self.attempt or (attempt == self.attempt and worker != self.worker)

    def check(self, worker: str, attempt: int, begin: int, num_tokens: int) -> bool:
        """Return whether tokens of a run from `begin` on fit the `num_tokens` of the stream."""
        if begin < num_tokens and self.is_behind(worker, attempt):
            self.rewound = True
        return not self.rewound
