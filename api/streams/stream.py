"""Stream: one live request in its gateway, with the tokens that events or fills have brought so far."""

import asyncio
import math
import time
from collections.abc import Sequence

from api.event_loop.feed import Change
from api.streams.late_text import LateText
from api.streams.lineage import Lineage
from api.streams.scored_prompt import ScoredPrompt
from api.streams.times import StreamTimes
from api.tokenizer import ModelTokenizer
from common.broker.committed import Committed
from common.detokenize import StopMatcher, generated_text
from common.messages.events import Terminal, Tokens
from common.messages.finish_reasons import FINISHED
from common.messages.packing import unpack_ids
from common.messages.records import TopTokens, unpack_tokens
from common.messages.request import Generate

MAX_AHEAD = 64
"""Events that a stream keeps until those before them have come; further ones are read from Redis."""


class Stream:
    """Tokens 0, 1, 2, … of a request, each once, then its terminal. One reader waits on `changed`; any number
    of tasks wait on `ended`.

    Attributes:
        answer: the packed answer that the request begins, if any: Redis keeps it with the request.
        admitted: whether Redis is known to have the request.
        deadline_s: monotonic time by which the fleet must have ended it.
        ended_here: whether it ended here alone, so that its request must be cancelled.
        tops: parallel to `ids` if the request asks for the likeliest tokens, else empty.
        source: the process that sent the last event; empty before the first one.
        worker, worker_attempt: the worker that held the request when Redis was last asked, and its attempt.
        attempt: the newest attempt known; events of older ones are dropped.
        lineage: which run made its tokens.
        left, released: its client has left and may come back; nobody reads it any more.
        reader, connection: numbers of its reader, and of the one on whose connection it is written.
        ahead: index → source and tokens that came before those in front of them.
        awaited_end: the end, if it came before the last tokens.
    """

    def __init__(self, request: Generate, tokenizer: ModelTokenizer, answer: bytes = b"") -> None:
        self.request = request
        self.answer = answer
        self.tokenizer = tokenizer
        self.prompt_ids = unpack_ids(request.prompt_ids)
        stopping = request.stopping
        eos_ids = frozenset() if stopping.ignore_eos else tokenizer.ending_ids
        self.ending_ids = eos_ids.union(stopping.stop_ids)
        self.matcher = StopMatcher(stopping.stop) if stopping.stop else None
        self.admitted = False
        self.left = False
        self.released = False
        self.ended_here = False
        self.source = ""
        self.worker = ""
        self.attempt = 0
        self.worker_attempt = 0
        self.reader = 0
        self.connection = 0
        self.lineage = Lineage()
        self.ahead: dict[int, tuple[str, Tokens]] = {}
        self.awaited_end: Terminal | None = None
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.texts: list[str] = []
        self.tops: list[TopTokens] = []
        self.prompt = ScoredPrompt(request, self.prompt_ids)
        self.terminal: Terminal | None = None
        self.times = StreamTimes(request.service_class)
        self.deadline_s = math.inf
        self.changed = Change()
        self.ended = asyncio.Event()
        self.late_text = LateText(tokenizer.backend, self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_records(self) -> int:
        """Number of log-probabilities that a response may have, of tokens and of the likeliest."""
        return self.num_tokens * self.request.width + self.prompt.num_records

    @property
    def finished(self) -> bool:
        return self.terminal is not None and self.terminal.reason in FINISHED

    @property
    def num_ready(self) -> int:
        """Number of tokens that may be shown now. The last one is shown together with the end, so a token
        that may be the last one waits.
        """
        waits = self.finished if self.terminal else self.may_be_last
        return self.num_tokens - waits

    @property
    def may_be_last(self) -> bool:
        stopped = self.matcher is not None and self.matcher.matched
        has_all = self.num_tokens == self.request.stopping.max_new_tokens
        return bool(self.ids) and (stopped or has_all or self.ids[-1] in self.ending_ids)

    @property
    def text(self) -> str:
        """The whole answer of a finished stream."""
        assert self.terminal is not None
        stopping, reason = self.request.stopping, self.terminal.reason
        args = stopping.stop, reason, stopping.min_new_tokens
        return generated_text(self.tokenizer.backend, self.prompt_ids, self.ids, *args)

    @property
    def has_gap(self) -> bool:
        """Whether it is known that tokens are missing, or that they may be others than Redis has."""
        return bool(self.ahead) or self.awaited_end is not None or self.lineage.rewound

    def add_event(self, tokens: Tokens, source: str = "") -> bool:
        """Add the new ones of `tokens`. Returns False if tokens before them are missing: then they are kept
        until those have come. Raises WireError.
        """
        self.times.note_event()
        self.source = source
        if self.terminal or tokens.attempt < self.attempt:
            return True
        self.attempt = tokens.attempt
        return self.add_tokens(tokens, source)

    def add_logged(self, tokens: Tokens, worker: str) -> None:
        """Add the new ones of `tokens`, which a worker's log has."""
        if not self.terminal:
            self.add_tokens(tokens, worker)

    def add_tokens(self, tokens: Tokens, source: str) -> bool:
        if not tokens.index and not self.ids:
            self.times.note_start(tokens.since_start_ms / 1000)
            self.prompt.num_cached = tokens.num_cached
        ids, logprobs, tops = unpack_tokens(tokens, self.request.top_n_tokens)
        if not self.lineage.check(source, tokens.attempt, tokens.index, self.num_tokens):
            return False
        if tokens.index > self.num_tokens or self.prompt.is_missing:
            if len(self.ahead) < MAX_AHEAD:
                self.ahead[tokens.index] = source, tokens
            return False
        self.add_committed(tokens.index, ids, logprobs, tops, tokens.texts, (source, tokens.attempt))
        return True

    def end(self, terminal: Terminal) -> bool:
        """End the stream. Returns False if tokens before the end are missing, or the answer has fewer than
        the stream: then Redis has the answer.
        """
        self.times.note_event()
        if self.terminal:
            return True
        is_answer = terminal.reason in FINISHED
        if self.num_tokens < terminal.num_tokens or (is_answer and self.num_tokens > terminal.num_tokens):
            self.awaited_end = terminal
            return False
        self.terminal = terminal
        self.awaited_end = None
        self.ahead.clear()
        self.times.ended_s = self.times.last_event_s
        self.changed.set()
        self.ended.set()
        return True

    def note_state(self, state: Committed) -> None:
        """Note what Redis says of the request."""
        self.times.last_event_s = time.monotonic()
        self.worker = state.worker
        self.worker_attempt = state.attempt
        self.attempt = max(self.attempt, state.attempt)
        self.prompt.store(state)
        self.add_ahead()

    def fail(self, why: str, error_type: str = "") -> None:
        """End the stream although nobody has said that its request ended."""
        self.ended_here = True
        self.end(Terminal(self.request.request_id, "error", 0, why, error_type))

    def fail_prompt(self) -> None:
        """End the stream: its prompt is committed with its first token, so somebody wrote to the key."""
        self.fail("the log-probabilities of its prompt cannot be read")

    def offered(self, attempt: int = 0) -> None:
        """Note that Redis has all tokens of the stream. With an attempt, those of earlier ones are void."""
        self.lineage.rewound = False
        if attempt:
            self.attempt = max(self.attempt, attempt)
            self.ahead.clear()
            self.awaited_end = None

    def add_committed(
        self,
        index: int,
        ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[TopTokens],
        texts: Sequence[str] = (),
        run: tuple[str, int] | None = None,
    ) -> None:
        """Add the new ones of tokens from `index` on, then what waited for them.

        Args:
            texts: empty if the tokens came without.
            run: worker and attempt that made them; None for the one that Redis named last.
        """
        seen = self.num_tokens - index
        if self.terminal or not 0 <= seen < len(ids):
            return
        if self.prompt.is_missing:
            self.fail_prompt()
            return
        new_texts = texts[seen:] or self.late_text.texts(self.ids, ids[seen:])
        self.add(ids[seen:], logprobs[seen:], new_texts, tops[seen:])
        self.lineage.note(*run or (self.worker, self.worker_attempt))
        self.add_ahead()

    def add_ahead(self) -> None:
        """Add what came too early and fits by now, and the end."""
        while self.ahead and (index := min(self.ahead)) <= self.num_tokens and not self.prompt.is_missing:
            source, waiting = self.ahead.pop(index)
            self.add_tokens(waiting, source)
        if self.awaited_end and self.num_tokens >= self.awaited_end.num_tokens:
            self.end(self.awaited_end)

    def add(
        self, ids: Sequence[int], logprobs: Sequence[float], texts: Sequence[str], tops: Sequence[TopTokens]
    ) -> None:
        self.times.note_tokens(len(ids))
        self.ids += ids
        self.logprobs += logprobs
        self.texts += texts
        self.tops += tops
        if self.matcher is not None:
            unmatched = max(0, self.request.stopping.min_new_tokens - self.num_tokens + len(ids))
            self.matcher.step("".join(texts[unmatched:]))
        self.changed.set()
