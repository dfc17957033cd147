"""What gathers between two flushes: tokens, ends, releases."""

import time
from dataclasses import dataclass, field, replace

from common.messages import Tokens
from common.packing import pack_floats, pack_ids
from common.recover import Top
from gpu_worker.table import RowText


@dataclass(slots=True, eq=False)
class Span:
    """Consecutive tokens of one row that are not published yet."""

    row: RowText
    index: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    top: Top = field(default_factory=list)

    def tokens(self) -> Tokens:
        request = self.row.request
        tokens = Tokens(
            request.request_id,
            self.row.attempt,
            self.index,
            pack_ids(self.ids),
            pack_floats(self.logprobs),
            self.texts,
            since_start_ms=0 if self.index else round(1000 * (time.monotonic() - self.row.started_s)),
        )
        if not self.top:
            return tokens
        top_ids, top_logprobs = zip(*self.top, strict=True)
        return replace(tokens, top_ids=pack_ids(top_ids), top_logprobs=pack_floats(top_logprobs))


@dataclass(slots=True)
class Outbox:
    """One flush in the making.

    Attributes:
        spans: by row number.
        prompts: rows whose prompt is to be told of, all of it; this flush has their first token.
        terminals: (row, why) of rows whose request ends here.
        interrupted: rows that go on elsewhere; what they have must be spilled.
        prefilled, ended, released, takeover: of the next report.
    """

    spans: dict[int, Span] = field(default_factory=dict)
    prompts: list[RowText] = field(default_factory=list)
    terminals: list[tuple[RowText, str]] = field(default_factory=list)
    interrupted: list[RowText] = field(default_factory=list)
    prefilled: list[tuple[int, int, int]] = field(default_factory=list)
    ended: list[tuple[int, str, int]] = field(default_factory=list)
    released: list[tuple[int, int]] = field(default_factory=list)
    takeover: bool = False

    def add(self, row: RowText, index: int, token_id: int, logprob: float, text: str, top: Top | None = None) -> None:
        if (span := self.spans.get(row.row)) is None:
            span = self.spans[row.row] = Span(row, index)
        span.ids.append(token_id)
        span.logprobs.append(logprob)
        span.texts.append(text)
        if top:
            span.top += top

    @property
    def has_news(self) -> bool:
        """Whether the batcher must hear of it."""
        return bool(self.prefilled or self.ended or self.released or self.takeover)

    @property
    def empty(self) -> bool:
        return not (self.spans or self.terminals or self.has_news)
