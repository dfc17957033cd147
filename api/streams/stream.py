"""A stream: the tokens of a request as they come, its times, and the latencies that follow from them. A beam
search has one of its request, which has no text, and one of each sequence that is returned.
"""

import asyncio
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from api.http.sse import Change
from api.prompts.tokenizer import ModelTokenizer
from common.broker.committed import Committed
from common.detokenize import CONTEXT_TOKENS, INCOMPLETE, Detokenizer, StopMatcher
from common.messages.codec import WireError
from common.messages.events import FINISHED, Terminal, Tokens, pack_tokens
from common.messages.records import REASONS, RECORD, TopTokens, unpack_floats, unpack_ids, unpack_records
from common.messages.request import Generate
from common.metrics import catalogue

UNCOUNTED: defaultdict[str, list[float]] = defaultdict(list)
"""Service class → latencies of tokens that `count_latencies` has yet to count: those of a message are counted
together, which takes half the time.
"""


def count_latencies() -> None:
    """Count the latencies that `StreamTimes.note_next` has noted."""
    for service_class, latencies_s in UNCOUNTED.items():
        if latencies_s:
            catalogue.TOKEN_LATENCY.observe_all(latencies_s, service_class)
            latencies_s.clear()


class StreamTimes:
    """Monotonic times of one stream, which begins when this is made, and the latencies that follow from them.

    Attributes:
        service_class: of its request.
        heard_s, last_event_s: the last event; the last event or fill.
        placed_s: its start on a worker; if that event was lost, the first token.
        first_token_s, token_s, ended_s: first token, last token, end. These and `placed_s` are 0 until then.
        is_resumed: an earlier reader has counted what is read from Redis; only events are counted.
    """

    def __init__(self, service_class: str) -> None:
        self.service_class = service_class
        self.uncounted = UNCOUNTED[service_class]
        self.started_s = time.monotonic()
        self.heard_s = self.started_s
        self.last_event_s = self.started_s
        self.placed_s = 0.0
        self.first_token_s = 0.0
        self.token_s = 0.0
        self.ended_s = 0.0
        self.is_resumed = False

    def note_event(self) -> None:
        self.heard_s = self.last_event_s = time.monotonic()

    def note_next(self, now_s: float) -> None:
        """Note an event with one token, which is not the first."""
        self.heard_s = self.last_event_s = now_s
        self.uncounted.append(now_s - self.token_s)
        self.token_s = now_s

    def note_start(self, since_start_s: float) -> None:
        """Note that a worker started the request `since_start_s` ago."""
        self.placed_s = max(self.started_s, time.monotonic() - since_start_s)

    def note_tokens(self, num_new: int) -> None:
        """Observe the latency of new tokens; tokens that come together share the time since the last one."""
        if not self.first_token_s:
            self.placed_s = self.placed_s or self.last_event_s
            self.first_token_s = self.last_event_s
            if not self.is_resumed:
                catalogue.FIRST_TOKEN.observe(self.last_event_s - self.started_s, self.service_class)
        elif not self.is_resumed or self.last_event_s == self.heard_s:
            latency_s = (self.last_event_s - self.token_s) / num_new
            catalogue.TOKEN_LATENCY.observe(latency_s, self.service_class, times=num_new)
        self.token_s = self.last_event_s


# --- stream -------------------------------------------------------------------------------------------------


MAX_AHEAD = 64
"""Events that a stream keeps until those before them have come; further ones are read from Redis."""


class LateText:
    """Detokenizes tokens that came without their texts: these are the texts that the worker would have sent.
    Without a tokenizer there are none, as of records that stand for several sequences.

    Attributes:
        num_seen: number of the stream's tokens that the detokenizer has seen.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.prompt_ids = prompt_ids
        self.detokenizer: Detokenizer | None = None
        self.num_seen = 0

    def see(self, ids: Sequence[int], num_tokens: int) -> bool:
        """Show the detokenizer `num_tokens` more of the stream's `ids`. Returns whether some are left."""
        if self.tokenizer is None:
            return False
        self.detokenizer = self.detokenizer or Detokenizer(self.tokenizer, self.prompt_ids)
        for token_id in ids[self.num_seen : self.num_seen + num_tokens]:
            self.detokenizer.step(token_id)
            self.num_seen += 1
        return self.num_seen < len(ids)

    def texts(self, ids: Sequence[int], new_ids: Sequence[int]) -> list[str]:
        """The texts of `new_ids`, which come after `ids`."""
        self.see(ids, len(ids))
        if self.detokenizer is None:
            return [""] * len(new_ids)
        self.num_seen += len(new_ids)
        return [self.detokenizer.step(token_id) for token_id in new_ids]


@dataclass(slots=True)
class Lineage:
    """The run (worker and attempt) that made the last token of a stream.

    A run begins after all committed tokens. If a newer run begins before the last token of the stream, the
    broker has lost what was written last. The run's tokens may differ from those that the client has seen,
    and these count.

    Attributes:
        rewound: whether such a run was seen, and the stream's tokens were not offered since.
    """

    worker: str = ""
    attempt: int = 0
    rewound: bool = False

    def note(self, worker: str, attempt: int) -> None:
        """Note the run that made the last token."""
        self.worker = worker
        self.attempt = attempt

    def check(self, worker: str, attempt: int, begin: int, num_tokens: int) -> bool:
        """Return whether tokens from `begin` on of a run continue the `num_tokens` of the stream."""
        is_newer = attempt > self.attempt or (attempt == self.attempt and worker != self.worker)
        if begin < num_tokens and is_newer:
            self.rewound = True
        return not self.rewound


class ScoredPrompt:
    """The prompt's tokens with their log-probabilities, if the request asks for these.

    No event carries them: they are read from Redis, and no token is shown before them.

    Attributes:
        records: packed records of the prompt's tokens but the first; None until they have come.
        is_missing: whether the request asks for them and they have not come.
        num_cached: number of the prompt's tokens whose KV was in the worker's prefix cache; known with the
            first generated token.
    """

    def __init__(self, request: Generate, ids: Sequence[int]) -> None:
        self.ids = ids
        self.width = 1 + (request.prompt_logprobs or 0)
        self.is_missing = request.prompt_logprobs is not None
        self.records: bytes | None = None
        self.num_cached = 0

    @property
    def num_records(self) -> int:
        return len(self.records or b"") // RECORD.size

    def store(self, state: Committed) -> None:
        """Keep `num_cached`, and the records if the request asks for them and they are complete."""
        if state.num_cached is not None:
            self.num_cached = state.num_cached
        records = state.prompt
        num_bytes = (len(self.ids) - 1) * self.width * RECORD.size
        if self.is_missing and records is not None and len(records) == num_bytes:
            self.records = records
            self.is_missing = False

    def tokens(self) -> list[tuple[int, float | None, TopTokens]]:
        """(id, log-probability, likeliest tokens) of each token; the first one has only its id."""
        ids, logprobs, tops = unpack_records(self.records or b"", self.width)
        return [(self.ids[0], None, []), *zip(ids, logprobs, tops or [[]] * len(ids), strict=True)]


class Stream:
    """Tokens 0, 1, 2, … of a request, each once, then its terminal. One reader waits on `changed`; any number
    of tasks wait on `ended`.

    Attributes:
        answer: the packed answer, if this is its first request: Redis keeps it with the request.
        num_ready: number of tokens that may be shown now. The last one is shown together with the end, so a
            token that may be the last one waits.
        has_budget: whether its API key has one, at which any token may become the last one.
        is_plain: whether the request asks for no likeliest tokens and no log-probabilities of its prompt.
        admitted: whether Redis is known to have the request.
        deadline_s: monotonic time by which the fleet must have ended it.
        ended_here: whether only this gateway ended it, so that its request must be cancelled.
        tops: parallel to `ids` if the request asks for the likeliest tokens, else empty.
        source: the process that sent the last event; empty before the first one.
        worker, worker_attempt: the worker that held the request when Redis was last read, and its attempt.
        attempt: the newest known attempt; events of older ones are dropped.
        left, released: its client has left and may come back; nobody reads it any more.
        reader, connection: numbers of its reader, and of the one on whose connection it is written.
        limit_headers: what its API key has left of its rates.
        logits: those that the request returns. They are read once it has finished; only then the stream ends.
        ahead: index → (source, tokens) of events that came too early.
        awaited_end: the terminal, if it came before the last tokens.
        score: of a beam search's sequence that has ended, the sum of its log-probabilities, divided by its
            length to the power of the length penalty.
    """

    score = 0.0

    def __init__(self, request: Generate, tokenizer: ModelTokenizer, answer: bytes = b"") -> None:
        self.request = request
        self.answer = answer
        self.tokenizer = tokenizer
        self.prompt_ids = unpack_ids(request.prompt_ids)
        stopping = request.stopping
        eos_ids = frozenset() if stopping.ignore_eos else tokenizer.ending_ids
        self.ending_ids = eos_ids.union(stopping.stop_ids)
        self.max_new_tokens = stopping.max_new_tokens
        self.num_ready = 0
        self.has_budget = request.account is not None and request.account.has_budget
        self.is_plain = not request.top_n_tokens and request.prompt_logprobs is None
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
        self.limit_headers: dict[str, str] = {}
        self.lineage = Lineage()
        self.ahead: dict[int, tuple[str, Tokens]] = {}
        self.awaited_end: Terminal | None = None
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.texts: list[str] = []
        self.tops: list[TopTokens] = []
        self.prompt = ScoredPrompt(request, self.prompt_ids)
        self.logits: bytes | None = None
        self.terminal: Terminal | None = None
        self.times = StreamTimes(request.service_class)
        self.deadline_s = math.inf
        self.changed = Change()
        self.ended = asyncio.Event()
        self.late_text = LateText(tokenizer.backend, self.prompt_ids)

    @property
    def outputs(self) -> "Sequence[Stream]":
        """The streams of its texts: itself, or the sequences of a beam search."""
        return (self,)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that were cached; 0 before the first token."""
        return self.prompt.num_cached if self.ids else 0

    @property
    def num_records(self) -> int:
        """Number of log-probabilities that a response may have, of tokens and of the likeliest."""
        num_tokens = self.num_tokens * self.request.width
        return num_tokens + self.prompt.num_records + len(self.logits or b"") // RECORD.size

    @property
    def finished(self) -> bool:
        return self.terminal is not None and self.terminal.reason in FINISHED

    @property
    def text(self) -> str:
        """The whole answer of a finished stream, without special tokens. With reason `stop_sequence` it ends
        with the first stop string after the first `min_new_tokens` tokens.
        """
        args, stopping = (self.tokenizer.backend, self.prompt_ids), self.request.stopping
        text = clean_text(*args, self.ids)
        if self.terminal is None or self.terminal.reason != "stop_sequence":
            return text
        first = self.ids[: stopping.min_new_tokens]
        begin = len(clean_text(*args, first)) if first else 0
        ends = [at + len(stop) for stop in stopping.stop if (at := text.find(stop, begin)) >= 0]
        return text[: min(ends)] if ends else text

    @property
    def has_gap(self) -> bool:
        """Whether tokens are known to be missing, or may differ from those in Redis."""
        return bool(self.ahead) or self.awaited_end is not None or self.lineage.rewound

    def add_event(self, tokens: Tokens, source: str = "") -> bool:
        """Add the new ones of `tokens`. Returns False if tokens before them are missing: these are kept until
        those have come. Raises WireError.
        """
        self.times.note_event()
        self.source = source
        if self.terminal or tokens.attempt < self.attempt:
            return True
        self.attempt = tokens.attempt
        return self.add_tokens(tokens, source)

    def add_next(
        self, source: str, attempt: int, index: int, record: tuple[int, float], text: str, now_s: float
    ) -> bool:
        """Add one token of an event if it is the next one of the run that made the last one, and nothing else
        waits, as is nearly always so. Else return False: `add_event` says what becomes of it.
        """
        lineage = self.lineage
        if (
            index != len(self.ids)
            or attempt != lineage.attempt
            or attempt != self.attempt
            or source != lineage.worker
            or lineage.rewound
            or self.ahead
            or self.awaited_end
            or self.terminal
            or not self.is_plain
        ):
            return False
        self.source = source
        self.times.note_next(now_s)
        token_id, logprob = record
        self.ids.append(token_id)
        self.logprobs.append(logprob)
        self.texts.append(text)
        if self.matcher is not None and index >= self.request.stopping.min_new_tokens:
            self.matcher.step(text)
        self.note_last(token_id)
        self.changed.set()
        return True

    def note_last(self, token_id: int) -> None:
        """Note the last token so far, which may be the last one of all."""
        num_tokens = len(self.ids)
        waits = (
            self.has_budget
            or token_id in self.ending_ids
            or num_tokens == self.max_new_tokens
            or (self.matcher is not None and self.matcher.matched)
        )
        self.num_ready = num_tokens - waits

    def add_tokens(self, tokens: Tokens, source: str) -> bool:
        """Add the new ones of `tokens`, from an event or from a worker's log, as `add_event` does."""
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
        """End the stream. Returns False if tokens before the end or logits are missing, or if the
        answer has fewer tokens than the stream: then Redis must be read.
        """
        self.times.note_event()
        if self.terminal:
            return True
        is_answer = terminal.reason in FINISHED
        lacks_logits = is_answer and self.request.logits is not None and self.logits is None
        differs = is_answer and self.num_tokens > terminal.num_tokens
        if self.num_tokens < terminal.num_tokens or differs or lacks_logits:
            self.awaited_end = terminal
            return False
        self.terminal = terminal
        self.num_ready = self.num_tokens - is_answer
        self.awaited_end = None
        self.ahead.clear()
        self.times.ended_s = self.times.last_event_s
        self.changed.set()
        self.ended.set()
        return True

    def note_state(self, state: Committed) -> None:
        """Note the committed state of the request."""
        self.times.last_event_s = time.monotonic()
        self.worker = state.worker
        self.worker_attempt = state.attempt
        self.attempt = max(self.attempt, state.attempt)
        self.prompt.store(state)
        self.add_ahead()

    def fail(self, why: str, error_type: str = "") -> None:
        """End the stream with an error, although its request may go on."""
        self.ended_here = True
        self.end(Terminal(self.request.request_id, "error", 0, why, error_type))

    def fail_prompt(self) -> None:
        """End the stream: the prompt's records are committed with the first token, so the key was changed."""
        self.fail("the log-probabilities of its prompt cannot be read")

    def note_offered(self, attempt: int = 0) -> None:
        """Note that Redis has all tokens of the stream. If `attempt` is given, events of earlier ones are
        void.
        """
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
        """Add the new ones of tokens from `index` on, then the events that waited for them.

        Args:
            texts: empty if the tokens came without texts.
            run: worker and attempt that made them; None for those that Redis named last.
        """
        seen = self.num_tokens - index
        if self.terminal or not 0 <= seen < len(ids):
            return
        if self.prompt.is_missing:
            self.fail_prompt()
            return
        new_texts = texts[seen:] or self.late_text.texts(self.ids, ids[seen:])
        self.append(ids[seen:], logprobs[seen:], new_texts, tops[seen:])
        self.lineage.note(*run or (self.worker, self.worker_attempt))
        self.add_ahead()

    def add_ahead(self) -> None:
        """Add events that came too early and fit now, and the end."""
        while self.ahead and (index := min(self.ahead)) <= self.num_tokens and not self.prompt.is_missing:
            source, waiting = self.ahead.pop(index)
            self.add_tokens(waiting, source)
        if self.awaited_end and self.num_tokens >= self.awaited_end.num_tokens:
            self.end(self.awaited_end)

    def append(
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
        self.note_last(ids[-1])
        self.changed.set()


def unpack_tokens(tokens: Tokens, num_tops: int) -> tuple[list[int], list[float], list[TopTokens]]:
    """Return ids, log-probabilities and likeliest tokens of an event, or of a log's. Raises WireError."""
    ids, logprobs = unpack_ids(tokens.ids), unpack_floats(tokens.logprobs)
    if (
        len(ids) != len(logprobs)
        or len(tokens.texts) not in (0, len(ids))
        or not len(tokens.top_ids) == len(tokens.top_logprobs) == 4 * len(ids) * num_tops
    ):
        raise WireError(
            f"Tokens: {len(ids)} ids do not agree with log-probabilities, texts, or likeliest tokens"
        )
    return ids, logprobs, unpack_records(pack_tokens(tokens), 1 + num_tops)[2] if tokens.top_ids else []


def clean_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """Return the whole text of an ended request, without special tokens."""
    context = list(prompt_ids[-CONTEXT_TOKENS:])
    before: str = tokenizer.decode(context, skip_special_tokens=True)
    whole: str = tokenizer.decode(context + list(ids), skip_special_tokens=True)
    return whole[len(before) :].rstrip(INCOMPLETE)


# --- beams --------------------------------------------------------------------------------------------------
# The records of all sequences come at the end of the request. They are read in slices, as those of any other
# stream, and each sequence ends when its last record has come.


def new_stream(request: Generate, tokenizer: ModelTokenizer, answer: bytes = b"") -> Stream:
    """The stream of a request, as it needs it: a beam search has another kind."""
    return (BeamSearchStream if request.beams else Stream)(request, tokenizer, answer)


def all_outputs(streams: Sequence[Stream]) -> list[Stream]:
    """The streams of all texts of an answer, in order, from those of its requests."""
    return [output for stream in streams for output in stream.outputs]


def is_absent(stream: Stream) -> bool:
    """Whether a sequence does not exist, as its search has ended without it: a grammar may allow fewer than
    were asked for.
    """
    return stream.request.beams is not None and stream.finished and not stream.ids


class EndTimes(StreamTimes):
    """Times of a beam search: its tokens come together, so they have no latencies."""

    def note_tokens(self, num_new: int) -> None:
        self.placed_s = self.placed_s or self.started_s
        self.first_token_s = self.first_token_s or self.last_event_s
        self.token_s = self.last_event_s


class BeamSearchStream(Stream):
    """Stream of a beam search: its records are those of all sequences (common/messages/records.py).

    Attributes:
        sequences: streams of the sequences that are returned, the best first, as if each were an answer of
            its own. They have no events.
    """

    def __init__(self, request: Generate, tokenizer: ModelTokenizer, answer: bytes = b"") -> None:
        super().__init__(request, tokenizer, answer)
        assert request.beams is not None
        self.times = EndTimes(request.service_class)
        self.late_text = LateText(None, self.prompt_ids)
        self.matcher = None
        self.sequences = [Stream(request, tokenizer) for _ in range(request.beams.num_returned)]
        for sequence in self.sequences:
            sequence.prompt, sequence.times = self.prompt, self.times

    @property
    def outputs(self) -> Sequence[Stream]:
        return self.sequences

    def append(
        self, ids: Sequence[int], logprobs: Sequence[float], texts: Sequence[str], tops: Sequence[TopTokens]
    ) -> None:
        """Append records, and give each sequence its own."""
        super().append(ids, logprobs, texts, tops)
        ends = [i for i, token_id in enumerate(ids) if token_id in REASONS]
        for last, end in itertools.pairwise((-1, *ends, len(ids))):
            if (sequence := self.open_sequence) is None:
                return
            sequence.add_committed(sequence.num_tokens, ids[last + 1 : end], logprobs[last + 1 : end], [])
            if end < len(ids):
                sequence.score = logprobs[end]
                sequence.end(Terminal(self.request.request_id, REASONS[ids[end]], sequence.num_tokens))

    @property
    def open_sequence(self) -> Stream | None:
        """The sequence to which the next record belongs; None if it is not returned."""
        return next((one for one in self.sequences if one.terminal is None), None)

    def end(self, terminal: Terminal) -> bool:
        """End the search. The sequences that it has not found end without tokens, or fail with it."""
        if self.terminal or not super().end(terminal):
            return self.terminal is not None
        if terminal.reason in FINISHED and not self.has_whole_sequences:
            why = "the sequences of its beam search cannot be read"
            self.terminal = terminal = Terminal(terminal.request_id, "error", 0, why)
        while (sequence := self.open_sequence) is not None:
            sequence.end(replace(terminal, num_tokens=0))
        return True

    @property
    def has_whole_sequences(self) -> bool:
        """Whether it has found one, and the record after the last one has come."""
        cut = self.open_sequence
        return self.sequences[0].terminal is not None and (cut is None or not cut.ids)
