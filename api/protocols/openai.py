"""Chats and completions: OpenAI's two routes, with the additions of vLLM and TGI."""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from api.answers.answer import HttpAnswer, Rendering
from api.answers.chat_answer import (
    ChoiceParser,
    finish_reason,
    is_whole_json,
    marks_of,
    render_deltas,
    render_message,
)
from api.answers.logprobs import (
    CHAT_LOGPROBS,
    COMPLETION_LOGPROBS,
    LOGITS,
    PROMPT_LOGPROBS,
    LogprobLists,
    chat_logprobs,
    completion_logprobs,
    join_logprobs,
    logits_fields,
    prompt_logprobs,
    sequence_scores,
)
from api.answers.stop_holdback import StopHoldback
from api.errors import Family, failed, openai
from api.event_loop import offload
from api.http.openapi import OPENAI, OPENAI_ERRORS, OpenAIError, Shape, event_stream
from api.http.sse import MAX_ITEMS, Change, Feed
from api.json import to_json
from api.protocols.chat import ChatRequest, read_chat_completion
from api.protocols.openai_bodies import CompletionRequest, read_completion
from api.protocols.protocol import Protocol, Renderer, WholeBody
from api.streams.stream import Stream, all_outputs, is_absent
from common.detokenize import Detokenizer
from common.messages.events import Terminal

# --- responses, for /docs -----------------------------------------------------------------------------------

FINISH_REASON = ("stop", "length", "tool_calls", "function_call")
USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 20,
    "total_tokens": 32,
    "completion_tokens_details?": {"reasoning_tokens": 8},
    "prompt_tokens_details?": {"cached_tokens": 0},
}
OBJECT = {
    "id": "cmpl-5f0f8c0e",
    "created": 1764000000,
    "model": "SmolLM2",
    "system_fingerprint": "tokenfleet",
}
CHOICE = {
    "index": 0,
    "token_ids?": [504],
    "cumulative_logprob?": -2.5,
    "beam_score?": -0.5,
}
FINISHED = {**CHOICE, "finish_reason": FINISH_REASON, "stop_reason": (None, "###", 2)}
UNFINISHED = {**CHOICE, "finish_reason": (None, *FINISH_REASON), "stop_reason?": (None, "###", 2)}
SHOWN_LOGITS = {"context_logits?": LOGITS, "generation_logits?": LOGITS}
SHOWN_PROMPT = {"prompt_token_ids?": [504], "prompt_logprobs?": PROMPT_LOGPROBS}
CALL = {"name": "weather", "arguments": '{"city": "Paris"}'}
MESSAGE = {
    "role": "assistant",
    "content": ("Because air scatters blue light most.", None),
    "refusal": None,
    "reasoning_content?": "The user asks about the sky.",
    "reasoning?": "The user asks about the sky.",
    "tool_calls?": [{"id": "call_5f0f8c0e", "type": "function", "function": CALL}],
    "function_call?": CALL,
}
CALL_DELTA = {"name?": "weather", "arguments": '{"city"'}
DELTA = {
    "role?": "assistant",
    "content?": (" blue", None),
    "reasoning_content?": " sky",
    "reasoning?": " sky",
    "tool_calls?": [{"index": 0, "id?": "call_5f0f8c0e", "type?": "function", "function": CALL_DELTA}],
    "function_call?": CALL_DELTA,
}
CHAT_COMPLETION = Shape(
    "ChatCompletion",
    {
        **OBJECT,
        "object": "chat.completion",
        "choices": [{**FINISHED, "message": MESSAGE, "logprobs": CHAT_LOGPROBS, **SHOWN_LOGITS}],
        "usage": USAGE,
        **SHOWN_PROMPT,
    },
)
CHAT_COMPLETION_CHUNK = Shape(
    "ChatCompletionChunk",
    {
        **OBJECT,
        "object": "chat.completion.chunk",
        "choices": [{**UNFINISHED, "delta": DELTA, "logprobs": CHAT_LOGPROBS}],
        "usage?": (None, USAGE),
        "prompt_token_ids?": [504],
    },
)
COMPLETION = Shape(
    "Completion",
    {
        **OBJECT,
        "object": "text_completion",
        "choices": [
            {**FINISHED, "text": " Paris.", "logprobs": COMPLETION_LOGPROBS, **SHOWN_PROMPT, **SHOWN_LOGITS}
        ],
        "usage": USAGE,
    },
)
COMPLETION_CHUNK = Shape(
    "CompletionChunk",
    {
        **OBJECT,
        "object": "text_completion",
        "choices": [
            {**UNFINISHED, "text": " Paris", "logprobs": COMPLETION_LOGPROBS, "prompt_token_ids?": [504]}
        ],
        "usage?": (None, USAGE),
    },
)

FINISH_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


class TextPiece(NamedTuple):
    """A piece of a choice's text, sent in one chunk.

    Attributes:
        text: new text that may be shown; text that may become a stop string waits for a later piece.
        tokens: indices of the tokens that the chunk reports.
    """

    text: str
    tokens: range


class Choice:
    """A choice: a stream, and how much of it was taken.

    Attributes:
        text: the stream's text; text that may become a stop string is held back.
        prefix: text that is sent before the generated text (`echo`).
        offsets: for each token taken, the number of characters before it.
        begun: whether the first piece, or a chunk before it, was taken.
        ended: whether everything was taken.
        is_absent: whether it does not exist (api/streams/stream.py).
    """

    is_absent = False

    def __init__(
        self, index: int, stream: Stream, text: StopHoldback, prefix: str, rendering: Rendering
    ) -> None:
        self.index = index
        self.stream = stream
        self.text = text
        self.prefix = prefix
        self.rendering = rendering
        self.offsets: list[int] = []
        self.begun = False
        self.ended = False

    @property
    def failed(self) -> bool:
        return self.stream.terminal is not None and not self.stream.finished

    @property
    def has_piece(self) -> bool:
        """Whether a token can be taken now, or the end; the last token of a finished choice comes with it."""
        if self.text.num_tokens < self.stream.num_ready and not self.rendering.prompt_only:
            return True
        return not self.ended and self.stream.finished

    def take_piece(self) -> TextPiece:
        """The next piece of a choice that has one: one token, or the end of a finished choice."""
        self.begun = True
        if self.rendering.prompt_only:
            self.ended = True
            return TextPiece("", range(0))
        if self.stream.terminal is None or self.text.num_tokens < self.stream.num_ready:
            return self.piece(1)
        self.ended = True
        return self.piece(self.stream.num_tokens - self.text.num_tokens)

    def piece(self, num_tokens: int) -> TextPiece:
        begin = self.text.num_tokens
        self.offsets += [len(self.prefix) + self.text.num_chars] * num_tokens
        return TextPiece(
            self.text.last() if self.ended else self.text.step(), range(begin, begin + num_tokens)
        )

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word for the end of the text; None until it ends. A complete JSON ends with `stop`, even
        at `max_tokens`.
        """
        if not self.ended or self.stream.terminal is None:
            return None
        reason = FINISH_REASONS[self.stream.terminal.known_reason]
        return "stop" if reason == "length" and self.is_whole_json else reason

    @property
    def is_whole_json(self) -> bool:
        """Whether the client asked for JSON, and the content so far is a complete one."""
        if not self.rendering.is_json:
            return False
        content, reading = self.text.visible_text, self.rendering.reading
        if reading is not None:
            parser = ChoiceParser(reading, "")
            content = render_message(parser, parser.read(content, 0, ended=True))["content"] or ""
        return is_whole_json(content)


class SequenceChoice(Choice):
    """A sequence of a beam search: its whole text is one piece."""

    @property
    def is_absent(self) -> bool:  # type: ignore[override]
        return is_absent(self.stream)

    @property
    def has_piece(self) -> bool:
        return self.stream.finished and not self.ended

    def take_piece(self) -> TextPiece:
        pieces = []
        while not self.ended:
            pieces.append(super().take_piece())
        return TextPiece("".join(piece.text for piece in pieces), range(self.stream.num_tokens))


def new_parser(answer: HttpAnswer, index: int = 0) -> ChoiceParser | None:
    """What finds reasoning and calls in the text of a choice; None if all of it is content."""
    reading = answer.rendering.reading
    return ChoiceParser(reading, f"{answer.request_id}.{index}") if reading else None


def new_choices(answer: HttpAnswer, streams: Sequence[Stream]) -> list[Choice]:
    """The choices of an answer, in order.

    Args:
        streams: of its requests.
    """
    rendering = answer.rendering
    return [
        (SequenceChoice if stream.request.beams else Choice)(
            i,
            stream,
            StopHoldback(stream, hidden_ids(answer, stream), rendering.include_stop),
            answer.prefix(i),
            rendering,
        )
        for i, stream in enumerate(all_outputs(streams))
    ]


def hidden_ids(answer: HttpAnswer, stream: Stream) -> frozenset[int]:
    """Special tokens that the text leaves out: all but those that mark reasoning and calls in it."""
    if not answer.rendering.skip_special:
        return frozenset()
    marks = marks_of(answer.rendering.reading) if answer.rendering.reading else ()
    shown = {stream.tokenizer.backend.token_to_id(mark) for mark in marks}
    return stream.tokenizer.special_ids - shown


# --- answers ------------------------------------------------------------------------------------------------


NO_FIELDS: Mapping[str, Any] = {}
NO_ENDING = {"finish_reason": None, "stop_reason": None}
PLACE_OF_TEXT = "\0text\0"
"""Stands for the text in a chunk that is rendered before its text is known."""


class ChunkRenderer(Renderer):
    """Renders the choices of one answer in chunks: each once, in order.

    Attributes:
        error: the form of a chunk that says why a choice has failed.
        last_chunks: what comes after all of them.
    """

    error: Family = staticmethod(openai)
    last_chunks: Sequence[bytes] = [b"[DONE]"]

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        super().__init__(answer, streams)
        self.choices = new_choices(answer, streams)

    def frames(self) -> Feed:
        """A frame's id is its number, counted from 1."""
        if not self.answer.numbered:
            return ChunkFeed(self, lambda chunk: b"data: %b\n\n" % chunk, self.last_chunks)
        ids = count(1)
        return ChunkFeed(self, lambda one: b"id: %d\ndata: %b\n\n" % (next(ids), one), self.last_chunks)

    @abstractmethod
    def render_next_chunks(self, choice: Choice) -> list[bytes]:
        """The next chunks of a choice that has a piece, which may be none."""

    def render_first_chunks(self) -> list[bytes]:
        """The chunks before the first token."""
        return []

    def render_last_chunks(self) -> list[bytes]:
        """The chunks after all choices have ended."""
        return []

    def render_failure(self, failure: Terminal) -> bytes:
        """The chunk that says why a choice has failed."""
        return to_json(self.error(failed(failure))[1])

    def echoed_logprobs(self, choice: Choice) -> dict[str, list[Any]] | None:
        """Log-probabilities of the echoed prompt, if requested. The first call for a choice may be slow."""
        return None


class ChoicesRenderer(ChunkRenderer):
    """Renders the choices of one answer of OpenAI's API, as a whole or in chunks.

    Attributes:
        is_plain: whether a choice's chunks between the first and the last differ in nothing but their text.
        plain: what the plain chunks of a choice have before and after their text, by its index.
    """

    id_prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        super().__init__(answer, streams)
        self.chunk_head = self.render_head(self.chunk_kind)
        self.plain: dict[int, tuple[bytes, bytes]] = {}
        shown = answer.rendering
        self.is_plain = not (shown.logprobs or shown.token_ids or shown.running_usage or shown.reading)

    def frame_of(self, choice: Choice) -> tuple[bytes, bytes]:
        """What a choice's plain chunks have before and after their text: rendered when it is first needed."""
        if (frame := self.plain.get(choice.index)) is None:
            [delta] = self.render_deltas(choice, TextPiece(PLACE_OF_TEXT, range(0)))
            chunk = self.render_chunk([{"index": choice.index, **delta, **NO_ENDING}])
            before, _, after = chunk.rpartition(to_json(PLACE_OF_TEXT))
            self.plain[choice.index] = frame = before, after
        return frame

    def chunks(self) -> Feed:
        """`[DONE]` is no JSON, and so no frame of a job."""
        return ChunkFeed(self, bytes)

    def whole(self) -> WholeBody:
        choices = []
        for choice in self.choices:
            if choice.is_absent:
                continue
            pieces = []
            while choice.has_piece:
                pieces.append(choice.take_piece())
            fields = self.render_choice(choice, pieces)
            logits = logits_fields(choice.stream, choice.text.num_tokens)
            choices.append({"index": choice.index, **fields, **logits, **self.render_ending(choice)})
        usage = self.final_usage()
        fields = {"usage": usage, **self.whole_fields()}
        body = render_object(self.render_head(self.whole_kind), choices, fields)
        return body, usage["completion_tokens"]

    def render_next_chunks(self, choice: Choice) -> list[bytes]:
        """The chunk before the first piece of a choice, or those of its next piece."""
        if choice.begun and choice.stream.terminal is None and self.is_plain:
            before, after = self.frame_of(choice)
            return [b"%b%b%b" % (before, to_json(choice.text.step()), after)]
        if choice.is_absent:
            choice.ended = True
            return []
        if not choice.begun and (first := self.render_first_delta(choice)):
            choice.begun = True
            fields = {"index": choice.index, **first, "finish_reason": None}
            return [self.render_chunk([fields], self.first_fields(choice))]
        deltas = self.render_deltas(choice, choice.take_piece())
        ending = self.render_ending(choice) if choice.ended else NO_ENDING
        last = len(deltas) - 1
        return [
            self.render_chunk([{"index": choice.index, **delta, **(ending if i == last else NO_ENDING)}])
            for i, delta in enumerate(deltas)
        ]

    def render_ending(self, choice: Choice) -> dict[str, Any]:
        """The fields `finish_reason` and `stop_reason`, null until the choice ends, and a beam search's
        scores.
        """
        reasons = {"finish_reason": choice.finish_reason, "stop_reason": choice.text.stop_reason}
        return reasons | sequence_scores(choice.stream)

    def render_chunk(self, choices: list[dict[str, Any]], fields: Mapping[str, Any] = NO_FIELDS) -> bytes:
        rendering = self.answer.rendering
        if rendering.usage:
            fields = {"usage": self.usage() if rendering.running_usage else None, **fields}
        return render_object(self.chunk_head, choices, fields)

    def render_last_chunks(self) -> list[bytes]:
        """The chunk after all choices have ended, which has none: with the usage, if it was asked for."""
        usage = {"usage": self.final_usage()} if self.answer.rendering.usage else {}
        return [render_object(self.chunk_head, [], usage)] if usage else []

    def render_head(self, kind: str) -> bytes:
        """The first fields of all chunks of an answer, in JSON up to `choices`: encoded once."""
        head = {
            "id": f"{self.id_prefix}-{self.answer.request_id}",
            "object": kind,
            "created": self.answer.created_s,
            "model": self.answer.model,
            "system_fingerprint": self.answer.fingerprint,
        }
        return to_json(head)[:-1] + b',"choices":'

    def usage(self) -> dict[str, Any]:
        """Token counts; of the generated tokens, only those that were taken."""
        completion = sum(choice.text.num_tokens for choice in self.choices)
        prompt = self.answer.num_prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def final_usage(self) -> dict[str, Any]:
        """Token counts, once all choices have ended. Only the first choice of a prompt computes it."""
        num_cached = sum(choice.stream.num_cached for choice in self.choices[:: self.answer.n])
        return {**self.usage(), "prompt_tokens_details": {"cached_tokens": num_cached}}

    def whole_fields(self) -> dict[str, Any]:
        """Fields of a whole response beside its choices."""
        return {}

    def first_fields(self, choice: Choice) -> dict[str, Any]:
        """Fields of the chunk before a choice's first token, beside the choice."""
        return {}

    # --- additions of vLLM ----------------------------------------------------------------------------------

    def prompt_ids(self, choice: Choice) -> dict[str, Any]:
        """The field of the prompt's token ids, if requested."""
        return {"prompt_token_ids": choice.stream.prompt_ids} if self.answer.rendering.token_ids else {}

    def token_ids(self, stream: Stream, tokens: range) -> dict[str, Any]:
        """The field of the ids of generated tokens, if requested."""
        if not self.answer.rendering.token_ids:
            return {}
        return {"token_ids": stream.ids[tokens.start : tokens.stop]}

    def prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """The field of the prompt's log-probabilities, if requested."""
        num_tops = self.answer.rendering.prompt_tops
        return {} if num_tops is None else {"prompt_logprobs": prompt_logprobs(choice.stream, num_tops)}

    # --- of each route --------------------------------------------------------------------------------------

    @abstractmethod
    def render_choice(self, choice: Choice, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        """The fields of a whole choice."""

    @abstractmethod
    def render_first_delta(self, choice: Choice) -> dict[str, Any]:
        """The fields of a chunk before the first token; empty for none."""

    @abstractmethod
    def render_deltas(self, choice: Choice, piece: TextPiece) -> list[dict[str, Any]]:
        """The fields of each chunk of a piece."""


def render_object(head: bytes, choices: list[dict[str, Any]], fields: Mapping[str, Any]) -> bytes:
    """The JSON object of a head, choices, and the fields after them."""
    return b"%b%b%b" % (head, to_json(choices), b"," + to_json(fields)[1:] if fields else b"}")


def join_text(choice: Choice, pieces: Sequence[TextPiece]) -> str:
    return choice.prefix + "".join(piece.text for piece in pieces)


# --- /v1/chat/completions -----------------------------------------------------------------------------------


class ChatCompletionRenderer(ChoicesRenderer):
    """Renders chat completions and their chunks.

    Attributes:
        parsers: of each choice; empty if all text is content.
    """

    id_prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        super().__init__(answer, streams)
        parsers = [new_parser(answer, choice.index) for choice in self.choices]
        self.parsers = [parser for parser in parsers if parser is not None]

    def render_choice(self, choice: Choice, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": join_text(choice, pieces), "refusal": None}
        if self.parsers:
            parser, last = self.parsers[choice.index], len(pieces) - 1
            read = [parser.read(piece.text, len(piece.tokens), i == last) for i, piece in enumerate(pieces)]
            message |= render_message(parser, [delta for deltas in read for delta in deltas], choice.prefix)
        tokens = range(choice.stream.num_tokens)
        ids = self.token_ids(choice.stream, tokens)
        return {"message": message, "logprobs": self.logprobs(choice.stream, tokens), **ids}

    def whole_fields(self) -> dict[str, Any]:
        return self.prompt_ids(self.choices[0]) | self.prompt_logprobs(self.choices[0])

    def first_fields(self, choice: Choice) -> dict[str, Any]:
        return self.prompt_ids(choice)

    def render_first_delta(self, choice: Choice) -> dict[str, Any]:
        content = choice.prefix or (None if self.parsers else "")
        return {"delta": {"role": "assistant", "content": content}, "logprobs": None}

    def render_deltas(self, choice: Choice, piece: TextPiece) -> list[dict[str, Any]]:
        stream = choice.stream
        logprobs, ids = self.logprobs(stream, piece.tokens), self.token_ids(stream, piece.tokens)
        if not self.parsers:
            return [{"delta": {"content": piece.text}, "logprobs": logprobs, **ids}]
        parser = self.parsers[choice.index]
        found = render_deltas(parser, parser.read(piece.text, len(piece.tokens), choice.ended))
        if not found and (choice.ended or logprobs is not None or ids):
            found = [{}]
        later = self.token_ids(stream, range(0))
        return [
            {"delta": delta, "logprobs": None if i else logprobs, **(later if i else ids)}
            for i, delta in enumerate(found)
        ]

    def render_ending(self, choice: Choice) -> dict[str, Any]:
        ending = super().render_ending(choice)
        if self.parsers and choice.finish_reason:
            ending["finish_reason"] = finish_reason(self.parsers[choice.index], choice.finish_reason)
        return ending

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if any(parser.reading.reasoning or parser.reasons for parser in self.parsers):
            num_tokens = sum(parser.num_reasoning_tokens for parser in self.parsers)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return usage

    def logprobs(self, stream: Stream, tokens: range) -> dict[str, Any] | None:
        if not self.answer.rendering.logprobs:
            return None
        return {"content": chat_logprobs(stream, tokens, self.answer.rendering.names_by_id)}


# --- /v1/completions ----------------------------------------------------------------------------------------


class CompletionRenderer(ChoicesRenderer):
    id_prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        super().__init__(answer, streams)
        self.echoed: dict[int, LogprobLists] = {}

    def render_choice(self, choice: Choice, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        tokens = range(choice.text.num_tokens)
        own = self.logprobs(choice, tokens)
        logprobs = own and join_logprobs(self.echoed_logprobs(choice), own)
        added = self.token_ids(choice.stream, tokens) | self.prompt_ids(choice) | self.prompt_logprobs(choice)
        return {"text": join_text(choice, pieces), "logprobs": logprobs, **added}

    def render_first_delta(self, choice: Choice) -> dict[str, Any]:
        ids = self.prompt_ids(choice)
        if not (choice.prefix or ids):
            return {}
        none_yet = self.token_ids(choice.stream, range(0))
        return {"text": choice.prefix, "logprobs": self.echoed_logprobs(choice), **ids, **none_yet}

    def render_deltas(self, choice: Choice, piece: TextPiece) -> list[dict[str, Any]]:
        ids = self.token_ids(choice.stream, piece.tokens)
        return [{"text": piece.text, "logprobs": self.logprobs(choice, piece.tokens), **ids}]

    def logprobs(self, choice: Choice, tokens: Sequence[int]) -> LogprobLists | None:
        rendering, stream = self.answer.rendering, choice.stream
        if not rendering.logprobs:
            return None
        tops = [stream.tops[i] if stream.tops else [] for i in tokens]
        described = [(stream.ids[i], stream.logprobs[i], top) for i, top in zip(tokens, tops, strict=True)]
        return completion_logprobs(
            stream, described, [choice.offsets[i] for i in tokens], rendering.names_by_id
        )

    def echoed_logprobs(self, choice: Choice) -> LogprobLists | None:
        rendering, stream = self.answer.rendering, choice.stream
        is_wanted = rendering.logprobs and choice.prefix and stream.prompt.records is not None
        if is_wanted and choice.index not in self.echoed:
            num_tops = stream.request.top_n_tokens
            tokens = [(one, logprob, top[:num_tops]) for one, logprob, top in stream.prompt.tokens()]
            self.echoed[choice.index] = completion_logprobs(
                stream, tokens, prompt_offsets(stream, choice.prefix), rendering.names_by_id
            )
        return self.echoed.get(choice.index)


def prompt_offsets(stream: Stream, text: str) -> list[int]:
    """The offset in `text` at which each token of the prompt begins. Special tokens that the tokenizer added
    (begin of sequence) have no characters in it.
    """
    tokenizer, special_ids = stream.tokenizer.backend, stream.tokenizer.special_ids
    detokenizer, at, offsets = Detokenizer(tokenizer, []), 0, []
    for token_id in stream.prompt_ids:
        offsets.append(at)
        if token_id not in special_ids or text.startswith(
            tokenizer.decode([token_id], skip_special_tokens=False), at
        ):
            at = min(at + len(detokenizer.step(token_id)), len(text))
    return offsets


# --- frames -------------------------------------------------------------------------------------------------


class ChunkFeed(Feed):
    """Chunks of an answer, until all choices have ended or one has failed, and the `last` ones after them.

    Choices take turns, a piece each: the order of all chunks depends on the tokens alone.

    Args:
        shape: makes a frame of a chunk.
    """

    def __init__(
        self, renderer: ChunkRenderer, shape: Callable[[bytes], bytes], last: Sequence[bytes] = ()
    ) -> None:
        super().__init__(Change())
        self.renderer = renderer
        self.shape = shape
        self.last = last
        self.turns = deque(renderer.choices)
        self.first = [*map(shape, renderer.render_first_chunks())]
        for choice in renderer.choices:
            choice.stream.changed = self.changed

    @property
    def is_prepared(self) -> bool:
        """Whether all log-probabilities of prompts are rendered."""
        return all(choice.begun or choice.stream.request.prompt_logprobs is None for choice in self.turns)

    async def prepare(self) -> None:
        for choice in self.turns:
            if choice.stream.num_tokens and not choice.begun:
                num_records = choice.stream.prompt.num_records
                await offload(num_records, partial(self.renderer.echoed_logprobs, choice))

    def take(self) -> list[bytes]:
        turns, render, shape = self.turns, self.renderer.render_next_chunks, self.shape
        new, self.first = self.first, []
        while turns and (choice := turns[0]).has_piece:
            new += map(shape, render(choice))
            turns.rotate(-1)
            if choice.ended:
                turns.pop()
            if len(new) >= MAX_ITEMS:
                return new
        failure = turns[0].stream.terminal if turns else None  # a finished choice has a piece: it failed
        if turns and failure is None:
            return new
        self.ended = True
        end = [self.renderer.render_failure(failure)] if failure else self.renderer.render_last_chunks()
        return [*new, *map(shape, (*end, *self.last))]


# --- routes -------------------------------------------------------------------------------------------------

CHAT_COMPLETIONS = Protocol(
    path="/v1/chat/completions",
    name="chat_completions",
    span="chat_completions",
    operation="chat",
    body=ChatRequest,
    read=read_chat_completion,
    renderer=ChatCompletionRenderer,
    error=openai,
    resumable=True,
    job="chat",
    prompt=["messages"],
    in_jobs=True,
    in_batches=True,
    tag=OPENAI,
    errors=OPENAI_ERRORS,
    example={"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 100},
    summary="Create a chat completion",
    description=(
        "Generates the assistant's next message. With `stream`, it comes as server-sent events, a chunk for "
        "each token, and ends with `data: [DONE]`."
    ),
    whole=CHAT_COMPLETION,
    events=event_stream([CHAT_COMPLETION_CHUNK, OpenAIError], "[DONE]"),
)
COMPLETIONS = CHAT_COMPLETIONS._replace(
    path="/v1/completions",
    name="completions",
    span="completions",
    operation="text_completion",
    body=CompletionRequest,
    read=read_completion,
    renderer=CompletionRenderer,
    job="completion",
    prompt=["prompt"],
    example={"prompt": "The capital of France is", "max_tokens": 20},
    summary="Create a completion",
    description=(
        "Continues one prompt or several. `choices` has the `n` choices of the first prompt, then those of "
        "the next. With `stream`, they come as server-sent events, a chunk for each token, and end with "
        "`data: [DONE]`."
    ),
    whole=COMPLETION,
    events=event_stream([COMPLETION_CHUNK, OpenAIError], "[DONE]"),
)
