"""Streams of a beam search: one of its request, which has no text, and one of each sequence that is returned.

The records of all sequences come at the end of the request. They are read in slices, as those of any other
stream, and each sequence ends when its last record has come.
"""

from collections.abc import Sequence
from dataclasses import replace

from api.prompts.tokenizer import ModelTokenizer
from api.streams.stream import LateText, Stream, StreamTimes
from common.messages.events import FINISHED, Terminal
from common.messages.records import REASONS, TopTokens
from common.messages.request import Generate


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


class NoText(LateText):
    """Texts of records that stand for several sequences: none."""

    def see(self, ids: Sequence[int], num_tokens: int) -> bool:
        return False

    def texts(self, ids: Sequence[int], new_ids: Sequence[int]) -> list[str]:
        return [""] * len(new_ids)


class SequenceStream(Stream):
    """Stream of one sequence, as if it were an answer of its own; it has no events.

    Attributes:
        score: the sum of its log-probabilities, divided by its length to the power of the length penalty;
            known when it has ended.
    """

    score = 0.0

    def __init__(self, search: "BeamSearchStream") -> None:
        super().__init__(search.request, search.tokenizer)
        self.prompt_ids = search.prompt_ids
        self.prompt = search.prompt
        self.times = search.times

    @property
    def cumulative_logprob(self) -> float:
        return sum(self.logprobs)


class BeamSearchStream(Stream):
    """Stream of a beam search: its records are those of all sequences (common/messages/records.py).

    Attributes:
        sequences: streams of the sequences that are returned, the best first.
    """

    def __init__(self, request: Generate, tokenizer: ModelTokenizer, answer: bytes = b"") -> None:
        super().__init__(request, tokenizer, answer)
        assert request.beams is not None
        self.times = EndTimes(request.service_class)
        self.late_text = NoText(tokenizer.backend, self.prompt_ids)
        self.matcher = None
        self.sequences = [SequenceStream(self) for _ in range(request.beams.num_returned)]

    @property
    def outputs(self) -> Sequence[Stream]:
        return self.sequences

    def append(
        self, ids: Sequence[int], logprobs: Sequence[float], texts: Sequence[str], tops: Sequence[TopTokens]
    ) -> None:
        """Append records, and give each sequence its own."""
        super().append(ids, logprobs, texts, tops)
        begin = 0
        for end in (i for i, token_id in enumerate(ids) if token_id in REASONS):
            self.extend_sequence(ids[begin:end], logprobs[begin:end])
            self.end_sequence(REASONS[ids[end]], logprobs[end])
            begin = end + 1
        self.extend_sequence(ids[begin:], logprobs[begin:])

    @property
    def open_sequence(self) -> SequenceStream | None:
        """The sequence to which the next record belongs; None if it is not returned."""
        return next((one for one in self.sequences if one.terminal is None), None)

    def extend_sequence(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        if (sequence := self.open_sequence) is not None:
            sequence.add_committed(sequence.num_tokens, ids, logprobs, [])

    def end_sequence(self, reason: str, score: float) -> None:
        if (sequence := self.open_sequence) is not None:
            sequence.score = score
            sequence.end(Terminal(self.request.request_id, reason, sequence.num_tokens))

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
