"""Stream: one live request in its gateway, with the tokens that events or fills have brought so far."""

import asyncio
import json
import time
from collections.abc import Sequence

from api.inference.tokenizer import ModelTokenizer
from common.broker.committed import Committed
from common.detokenize import Detokenizer, StopMatcher, generated_text
from common.messages.codec import WireError
from common.messages.events import Terminal, Tokens
from common.messages.finish_reasons import FINISHED
from common.messages.packing import pack_floats, unpack_floats, unpack_ids
from common.messages.records import RECORD, TopTokens, pack_tokens, unpack_records
from common.messages.request import Generate
from common.metrics import catalogue


class Stream:
    """Tokens 0, 1, 2, … of a request, each once, then its terminal. One reader waits on `changed`; any number
    of tasks wait on `ended`.

    Attributes:
        admitted: whether Redis is known to have the request.
        tops: parallel to `ids` if the request asks for the likeliest tokens, else empty.
        prompt: packed records of the prompt's tokens but the first, if the request asks for them. No event
            carries them: they are read from Redis, and tokens are added after them only.
        attempt: the newest attempt known; events of older ones are dropped.
        last_event_s: monotonic time of the last event or fill.
        placed_s, first_token_s, token_s, ended_s: monotonic times of the start on a worker (of the first
            token, if that event was lost), first token, last token and end; 0 before that.
    """

    def __init__(self, request: Generate, tokenizer: ModelTokenizer) -> None:
        self.request = request
        self.tokenizer = tokenizer
        self.prompt_ids = unpack_ids(request.prompt_ids)
        stopping = request.stopping
        eos_ids = frozenset() if stopping.ignore_eos else tokenizer.ending_ids
        self.ending_ids = eos_ids.union(stopping.stop_ids)
        self.matcher = StopMatcher(stopping.stop) if stopping.stop else None
        self.admitted = False
        self.attempt = 0
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.texts: list[str] = []
        self.tops: list[TopTokens] = []
        self.prompt: bytes | None = None
        self.terminal: Terminal | None = None
        self.started_s = self.last_event_s = time.monotonic()
        self.placed_s = self.first_token_s = self.token_s = self.ended_s = 0.0
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()
        self.detokenizer: Detokenizer | None = None
        self.num_detokenized = 0

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_records(self) -> int:
        """Number of log-probabilities that a response may have: of tokens, and of the likeliest beside
        them.
        """
        return self.num_tokens * self.request.width + self.num_prompt_records

    @property
    def num_prompt_records(self) -> int:
        return len(self.prompt or b"") // RECORD.size

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
        if not self.ids:
            return False
        stopped = self.matcher is not None and self.matcher.matched
        has_all = self.num_tokens == self.request.stopping.max_new_tokens
        return stopped or has_all or self.ids[-1] in self.ending_ids

    @property
    def text(self) -> str:
        """The whole answer of a finished stream."""
        assert self.terminal is not None
        stopping, tokenizer = self.request.stopping, self.tokenizer.backend
        return generated_text(
            tokenizer,
            self.prompt_ids,
            self.ids,
            stopping.stop,
            self.terminal.reason,
            stopping.min_new_tokens,
        )

    def add_event(self, tokens: Tokens) -> bool:
        """Add the new ones of `tokens`. Returns False if tokens before them are missing. Raises WireError."""
        self.last_event_s = time.monotonic()
        if self.terminal or tokens.attempt < self.attempt:
            return True
        self.attempt = tokens.attempt
        if not tokens.index and not self.ids:
            self.placed_s = max(self.started_s, self.last_event_s - tokens.since_start_ms / 1000)
        seen = self.num_tokens - tokens.index
        if seen < 0 or self.lacks_prompt:
            return False
        ids, logprobs = unpack_ids(tokens.ids), unpack_floats(tokens.logprobs)
        num_tops = len(ids) * self.request.top_n_tokens
        if (
            not len(ids) == len(logprobs) == len(tokens.texts)
            or not len(tokens.top_ids) == len(tokens.top_logprobs) == 4 * num_tops
        ):
            raise WireError(
                f"Tokens: {len(ids)} ids do not agree with log-probabilities, texts, or likeliest tokens"
            )
        tops = unpack_records(pack_tokens(tokens), self.request.width)[2] if tokens.top_ids else []
        self.add(ids[seen:], logprobs[seen:], tokens.texts[seen:], tops[seen:])
        return True

    def end(self, terminal: Terminal) -> bool:
        """End the stream. Returns False if tokens before the end are missing."""
        self.last_event_s = time.monotonic()
        if self.terminal:
            return True
        if self.num_tokens < terminal.num_tokens:
            return False
        self.terminal = terminal
        self.ended_s = self.last_event_s
        self.changed.set()
        self.ended.set()
        return True

    def fill(self, committed: Committed) -> None:
        """Add the tokens, and the end, that Redis has and this stream does not."""
        self.last_event_s = time.monotonic()
        request_id = self.request.request_id
        if not committed.known:
            self.end(Terminal(request_id, "error", 0, "the request is not known any more"))
            return
        self.attempt = max(self.attempt, committed.attempt)
        self.keep_prompt(committed.prompt)
        if committed.result is None:
            self.add_missing(*unpack_records(committed.records, self.request.width))
            return
        try:
            result = json.loads(committed.result)
            ids, tops = (
                result.get("ids", []),
                [[(token_id, logprob) for token_id, logprob in top] for top in result.get("tops", [])],
            )
            logprobs = unpack_floats(pack_floats(result.get("logprobs", [])))
        except (ValueError, TypeError, AttributeError):  # somebody wrote to the key
            self.end(Terminal(request_id, "error", 0, "its result cannot be read"))
            return
        self.add_missing(ids, logprobs, tops)
        self.end(
            Terminal(
                request_id,
                committed.terminal,
                len(ids),
                str(result.get("error", "")),
                str(result.get("error_type", "")),
            )
        )

    @property
    def lacks_prompt(self) -> bool:
        return self.request.prompt_logprobs is not None and self.prompt is None

    def keep_prompt(self, records: bytes | None) -> None:
        """Keep the prompt's records if the request asks for them and they are complete."""
        num_bytes = (len(self.prompt_ids) - 1) * self.request.prompt_width * RECORD.size
        if self.lacks_prompt and records is not None and len(records) == num_bytes:
            self.prompt = records

    def prompt_tokens(self) -> list[tuple[int, float | None, TopTokens]]:
        """Id, log-probability and likeliest tokens of each token of the prompt; the first one has only its
        id.
        """
        ids, logprobs, tops = unpack_records(self.prompt or b"", self.request.prompt_width)
        return [(self.prompt_ids[0], None, []), *zip(ids, logprobs, tops or [[]] * len(ids), strict=True)]

    def add_missing(self, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopTokens]) -> None:
        """Add tokens that came without their text."""
        seen = self.num_tokens
        if self.terminal or len(ids) <= seen:
            return
        if self.lacks_prompt:  # it is committed with the first token: somebody wrote to the key
            self.end(
                Terminal(
                    self.request.request_id, "error", 0, "the log-probabilities of its prompt cannot be read"
                )
            )
            return
        self.detokenizer = self.detokenizer or Detokenizer(self.tokenizer.backend, self.prompt_ids)
        for token_id in self.ids[self.num_detokenized :]:
            self.detokenizer.step(token_id)
        self.num_detokenized = len(ids)
        self.add(
            ids[seen:],
            logprobs[seen:],
            [self.detokenizer.step(token_id) for token_id in ids[seen:]],
            tops[seen:],
        )

    def add(
        self, ids: Sequence[int], logprobs: Sequence[float], texts: Sequence[str], tops: Sequence[TopTokens]
    ) -> None:
        if not ids:
            return
        self.observe_latency(len(ids))
        self.ids += ids
        self.logprobs += logprobs
        self.texts += texts
        self.tops += tops
        if self.matcher is not None:
            unmatched = max(0, self.request.stopping.min_new_tokens - self.num_tokens + len(ids))
            self.matcher.step("".join(texts[unmatched:]))
        self.changed.set()

    def observe_latency(self, num_new: int) -> None:
        """Observe the latency of new tokens; those that come together share their time."""
        service_class = catalogue.service_class(self.request.priority)
        if self.first_token_s:
            catalogue.TOKEN_LATENCY.observe(
                (self.last_event_s - self.token_s) / num_new, service_class, times=num_new
            )
        else:
            self.placed_s = self.placed_s or self.last_event_s
            self.first_token_s = self.last_event_s
            catalogue.FIRST_TOKEN.observe(self.last_event_s - self.started_s, service_class)
        self.token_s = self.last_event_s
