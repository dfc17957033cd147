"""The text of a worker's rows: what each token adds, and when a stop string ends a row."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from tokenizers import Tokenizer

from common.broker.lua import Argument
from common.detokenize import Detokenizer, StopMatcher
from common.messages.events import TokenColumns, Tokens
from common.messages.plan import HeldRow, NewRow
from common.messages.records import (
    REASONS,
    RECORD,
    pack_ids,
    pack_pairs,
    pack_records,
    unpack_columns,
    unpack_ids,
    unpack_records,
)
from common.messages.request import Generate, extend_hashes
from gpu_worker.worker_scripts import FlushedRow


@dataclass(slots=True, eq=False)
class RowText:
    """One row of the worker, with the text of its tokens. A beam search has no tokens and no text: at its
    end it has the records of its sequences.

    Attributes:
        base: index of the first token of this attempt.
        records: packed records of all tokens of the request, those of earlier attempts included.
        num_tokens: number of records.
        num_spilled: number of tokens in the request's own string in Redis.
        blocks: packed numbers of the row's KV blocks.
        num_cached: tokens whose KV the blocks held when the row started.
        kv_len, at_step: the row held `kv_len` tokens after step `at_step`, by the last report; 0 before its
            prefill is complete.
        prompt: packed records of the prompt's tokens but the first, as far as they are computed; None if
            the request does not ask for them, or an earlier attempt has written them to Redis.
        texts: the text of each token that is not published yet.
        speculated: indices of those of these tokens that needed no step of their own.
        num_speculated: tokens of this attempt that are published and needed none.
        ended: the row has ended for the client; tokens that the engine still samples for it are dropped.
        has_budget: whether its API key has one.
        started_s: monotonic time.
    """

    row: int
    attempt: int
    base: int
    request: Generate
    prompt_ids: list[int]
    detokenizer: Detokenizer
    matcher: StopMatcher | None
    records: bytearray
    num_tokens: int
    num_spilled: int
    blocks: bytes
    num_cached: int = 0
    kv_len: int = 0
    at_step: int = 0
    prompt: bytearray | None = None
    texts: list[str] = field(default_factory=list)
    speculated: list[int] = field(default_factory=list)
    num_speculated: int = 0
    ended: bool = False
    has_budget: bool = False
    started_s: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, start: NewRow, tokenizer: Tokenizer) -> "RowText":
        """A row that starts. Tokens of earlier attempts are published already: they only advance the
        detokenizer and the stop strings.
        """
        request, prompt_ids = start.request, unpack_ids(start.request.prompt_ids)
        committed_ids, _, _ = unpack_records(start.committed, request.width)
        row = cls(
            row=start.row,
            attempt=start.attempt,
            base=start.base,
            request=request,
            prompt_ids=prompt_ids,
            detokenizer=Detokenizer(tokenizer, prompt_ids),
            matcher=StopMatcher(stops) if (stops := request.stopping.stop) and not request.beams else None,
            records=bytearray(start.committed),
            num_tokens=0,
            num_spilled=start.base,
            blocks=start.blocks,
            num_cached=start.num_cached,
            prompt=None if request.prompt_logprobs is None or start.base else bytearray(),
            has_budget=request.account is not None and request.account.has_budget,
        )
        for token_id in committed_ids:
            row.num_tokens += 1
            row.matches_stop_string(row.detokenizer.step(token_id))
        return row

    def add(self, token_id: int, logprob: float, top: Sequence[bytes] | None = None) -> str:
        """Add a token, with packed ids and log-probabilities of the likeliest ones if the request asks for
        them → the text that the token adds.
        """
        self.records += RECORD.pack(token_id, logprob)
        if top:
            self.records += b"".join(pack_pairs(*top))
        self.num_tokens += 1
        text = self.detokenizer.step(token_id)
        self.texts.append(text)
        return text

    def set_sequences(self, records: bytes) -> None:
        """Take the packed sequences of a beam search that ends."""
        self.records = bytearray(records)
        self.num_tokens = len(records) // RECORD.size

    def drop_unpublished(self, number: int) -> None:
        """Drop the last tokens of a row that ends; they are not published yet."""
        del self.texts[len(self.texts) - number :]
        self.num_tokens -= number
        self.speculated = [index for index in self.speculated if index < self.num_tokens]
        del self.records[self.num_tokens * RECORD.size * self.request.width :]

    def new_tokens(self) -> Tokens:
        """Return the tokens that came since the last call."""
        texts, self.texts = self.texts, []
        num_speculated, self.speculated = len(self.speculated), []
        self.num_speculated += num_speculated
        request, index = self.request, self.num_tokens - len(texts)
        ids, logprobs, top_ids, top_logprobs = unpack_columns(
            self.records, index * RECORD.size * request.width, request.width
        )
        since_start_ms = 0 if index else round(1000 * (time.monotonic() - self.started_s))
        return Tokens(
            request_id=request.request_id,
            attempt=self.attempt,
            index=index,
            ids=ids,
            logprobs=logprobs,
            texts=texts,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            since_start_ms=since_start_ms,
            num_cached=0 if index else self.num_cached,
            num_speculated=num_speculated,
        )

    def add_prompt(self, first: int, logprobs: bytes, top_ids: bytes, top_logprobs: bytes) -> None:
        """Add the log-probabilities of the prompt's tokens from position `first` on, which one chunk
        computed.
        """
        if self.prompt is not None:
            ids = pack_ids(self.prompt_ids[first : first + len(logprobs) // 4])
            self.prompt += pack_records(ids, logprobs, top_ids, top_logprobs)

    def matches_stop_string(self, text: str) -> bool:
        """Whether `text`, which the newest token adds, completes a stop string. Called once a token."""
        return (
            self.matcher is not None
            and self.num_tokens > self.request.stopping.min_new_tokens
            and self.matcher.step(text)
        )

    @property
    def num_used(self) -> int:
        """Tokens of the answer: of a beam search, those of the sequences that it returns."""
        if (beams := self.request.beams) is None:
            return self.num_tokens
        ids, *_ = unpack_records(bytes(self.records), 1)
        ends = [place for place, token_id in enumerate(ids) if token_id in REASONS][: beams.num_returned]
        return ends[-1] + 1 - len(ends) if ends else 0

    @property
    def kv_now(self) -> int:
        """Tokens in the cache once the prefill is complete: the KV of the last token is not computed yet."""
        return len(self.prompt_ids) + self.num_tokens - 1

    def slots_left(self, block_size: int) -> float:
        """Free slots in the row's blocks; infinitely many if the row never needs another block."""
        num_slots = len(self.blocks) // 4 * block_size
        return num_slots - self.kv_now if num_slots < self.request.max_kv else inf

    def flushed(self, *fields: Argument) -> FlushedRow:
        """What a flush writes of the row now."""
        return FlushedRow(self.request.request_id, self.attempt, self.base, fields, self.num_speculated)

    @property
    def held(self) -> HeldRow:
        """What a new batcher must know to adopt the row."""
        return HeldRow(
            row=self.row,
            request_id=self.request.request_id,
            attempt=self.attempt,
            base=self.base,
            num_tokens=self.num_tokens,
            blocks=self.blocks,
            kv_len=self.kv_len,
            step=self.at_step,
            ended=self.ended,
            num_cached=self.num_cached,
        )

    def generated_hashes(self, kv_len: int) -> bytes:
        """Return the hashes of the first `kv_len` tokens without those of the prompt
        (common/messages/request.py).
        """
        hashes = self.request.block_hashes
        if not hashes or self.request.beams:
            return b""
        generated, *_ = unpack_columns(self.records, 0, self.request.width)
        ids = (self.request.prompt_ids + generated)[: 4 * kv_len]
        known = extend_hashes(hashes, ids, self.request.pictures)
        return known[len(hashes) :]


def take_columns(rows: Sequence[RowText]) -> TokenColumns | None:
    """Take the new tokens that can be sent in columns; None if there are none."""
    single = [row for row in rows if len(row.texts) == 1 < row.num_tokens and not row.request.top_n_tokens]
    if not single:
        return None
    size = RECORD.size
    return TokenColumns(
        request_ids=[row.request.request_id for row in single],
        attempts=[row.attempt for row in single],
        indices=[row.num_tokens - 1 for row in single],
        records=b"".join([row.records[-size:] for row in single]),
        texts=[row.texts.pop() for row in single],
    )
