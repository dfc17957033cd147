"""Outbox: the tokens, ends and releases that the next flush publishes."""

from dataclasses import dataclass, field

from gpu_worker.agent.row_text import RowText


@dataclass(slots=True)
class Outbox:
    """What the next flush publishes.

    Attributes:
        rows: those that have new tokens.
        num_steps: steps that these tokens come from.
        prompts: rows whose prompt's log-probabilities are published, all of them; this flush has the rows'
            first token.
        terminals: (row, why) of rows whose request ends here.
        interrupted: rows that go on elsewhere; their tokens must be spilled.
        prefilled, ended, released, hashes, takeover: fields of the next report.
    """

    rows: list[RowText] = field(default_factory=list)
    num_steps: int = 0
    prompts: list[RowText] = field(default_factory=list)
    terminals: list[tuple[RowText, str]] = field(default_factory=list)
    interrupted: list[RowText] = field(default_factory=list)
    prefilled: list[tuple[int, int, int]] = field(default_factory=list)
    ended: list[tuple[int, str, int]] = field(default_factory=list)
    released: list[tuple[int, int]] = field(default_factory=list)
    hashes: list[tuple[int, bytes]] = field(default_factory=list)
    takeover: bool = False

    @property
    def needs_report(self) -> bool:
        """Whether the batcher must learn of it."""
        return bool(self.prefilled or self.ended or self.released or self.takeover)

    @property
    def is_empty(self) -> bool:
        return not (self.rows or self.terminals or self.needs_report)
