"""What gathers between two flushes: tokens, ends, releases."""

from dataclasses import dataclass, field

from gpu_worker.agent.row_text import RowText


@dataclass(slots=True)
class Outbox:
    """One flush in the making.

    Attributes:
        rows: those that have new tokens.
        prompts: rows whose prompt is to be told of, all of it; this flush has their first token.
        terminals: (row, why) of rows whose request ends here.
        interrupted: rows that go on elsewhere; what they have must be spilled.
        prefilled, ended, released, takeover: of the next report.
    """

    rows: list[RowText] = field(default_factory=list)
    prompts: list[RowText] = field(default_factory=list)
    terminals: list[tuple[RowText, str]] = field(default_factory=list)
    interrupted: list[RowText] = field(default_factory=list)
    prefilled: list[tuple[int, int, int]] = field(default_factory=list)
    ended: list[tuple[int, str, int]] = field(default_factory=list)
    released: list[tuple[int, int]] = field(default_factory=list)
    takeover: bool = False

    @property
    def has_news(self) -> bool:
        """Whether the batcher must hear of it."""
        return bool(self.prefilled or self.ended or self.released or self.takeover)

    @property
    def empty(self) -> bool:
        return not (self.rows or self.terminals or self.has_news)
