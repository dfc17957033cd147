"""Chats and completions: OpenAI's two routes, with the additions of vLLM and TGI."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from api.answers.answer import HttpAnswer
from api.answers.chat_answer import render_deltas, render_message
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
from api.errors import openai
from api.http.openapi import OPENAI, OPENAI_ERRORS, OpenAIError, Shape, event_stream
from api.http.sse import Feed
from api.json import to_json
from api.protocols.chat import ChatRequest, read_chat_completion
from api.protocols.choices import Choice, ChunkFeed, ChunkRenderer, TextPiece
from api.protocols.openai_bodies import CompletionRequest, read_completion
from api.protocols.protocol import Protocol, WholeBody
from api.streams.stream import Stream, is_absent
from common.detokenize import Detokenizer

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


def of_choices(name: str, kind: str, choice: Mapping[str, Any], more: Mapping[str, Any]) -> Shape:
    """An object of one choice, and with `more` fields beside its choices."""
    return Shape(name, {**OBJECT, "object": kind, "choices": [choice], **more})


CHAT_WHOLE = {**FINISHED, "message": MESSAGE, "logprobs": CHAT_LOGPROBS, **SHOWN_LOGITS}
CHAT_PIECE = {**UNFINISHED, "delta": DELTA, "logprobs": CHAT_LOGPROBS}
WHOLE = {**FINISHED, "text": " Paris.", "logprobs": COMPLETION_LOGPROBS, **SHOWN_PROMPT, **SHOWN_LOGITS}
PIECE = {**UNFINISHED, "text": " Paris", "logprobs": COMPLETION_LOGPROBS, "prompt_token_ids?": [504]}
IN_CHUNKS = {"usage?": (None, USAGE)}
CHAT_COMPLETION = of_choices(
    "ChatCompletion", "chat.completion", CHAT_WHOLE, {"usage": USAGE, **SHOWN_PROMPT}
)
CHAT_COMPLETION_CHUNK = of_choices(
    "ChatCompletionChunk", "chat.completion.chunk", CHAT_PIECE, {**IN_CHUNKS, "prompt_token_ids?": [504]}
)
COMPLETION = of_choices("Completion", "text_completion", WHOLE, {"usage": USAGE})
COMPLETION_CHUNK = of_choices("CompletionChunk", "text_completion", PIECE, IN_CHUNKS)

# --- answers ------------------------------------------------------------------------------------------------


NO_FIELDS: Mapping[str, Any] = {}
NO_ENDING = {"finish_reason": None, "stop_reason": None}
PLACE_OF_TEXT = "\0text\0"
"""Stands for the text in a chunk that is rendered before its text is known."""


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
            if is_absent(choice.stream):
                continue
            fields = self.render_choice(choice, choice.take_all())
            logits = logits_fields(choice.stream, choice.num_tokens)
            choices.append({"index": choice.index, **fields, **logits, **self.render_ending(choice)})
        usage = self.final_usage()
        fields = {"usage": usage, **self.whole_fields()}
        body = render_object(self.render_head(self.whole_kind), choices, fields)
        return body, usage["completion_tokens"]

    def render_next_chunks(self, choice: Choice) -> list[bytes]:
        """The chunk before the first piece of a choice, or those of its next piece."""
        if choice.begun and choice.stream.terminal is None and self.is_plain:
            before, after = self.frame_of(choice)
            return [b"%b%b%b" % (before, to_json(choice.step()), after)]
        if is_absent(choice.stream):
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
        reasons = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
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
        completion = sum(choice.num_tokens for choice in self.choices)
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
    def render_choice(self, choice: Choice, piece: TextPiece) -> dict[str, Any]:
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


# --- /v1/chat/completions -----------------------------------------------------------------------------------


class ChatCompletionRenderer(ChoicesRenderer):
    id_prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def render_choice(self, choice: Choice, piece: TextPiece) -> dict[str, Any]:
        content = choice.prefix + piece.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.parser:
            message |= render_message(choice.parser, piece.deltas, choice.prefix)
        ids = self.token_ids(choice.stream, piece.tokens)
        return {"message": message, "logprobs": self.logprobs(choice.stream, piece.tokens), **ids}

    def whole_fields(self) -> dict[str, Any]:
        return self.prompt_ids(self.choices[0]) | self.prompt_logprobs(self.choices[0])

    def first_fields(self, choice: Choice) -> dict[str, Any]:
        return self.prompt_ids(choice)

    def render_first_delta(self, choice: Choice) -> dict[str, Any]:
        content = choice.prefix or (None if choice.parser else "")
        return {"delta": {"role": "assistant", "content": content}, "logprobs": None}

    def render_deltas(self, choice: Choice, piece: TextPiece) -> list[dict[str, Any]]:
        stream = choice.stream
        logprobs, ids = self.logprobs(stream, piece.tokens), self.token_ids(stream, piece.tokens)
        if choice.parser is None:
            return [{"delta": {"content": piece.text}, "logprobs": logprobs, **ids}]
        found = render_deltas(choice.parser, piece.deltas)
        if choice.ended and not choice.parser.answers:  # its content is empty, as that of the whole is
            found.append({"content": ""})
        if not found and (choice.ended or logprobs is not None or ids):
            found = [{}]
        later = self.token_ids(stream, range(0))
        return [
            {"delta": delta, "logprobs": None if i else logprobs, **(later if i else ids)}
            for i, delta in enumerate(found)
        ]

    def render_ending(self, choice: Choice) -> dict[str, Any]:
        ending = super().render_ending(choice)
        reading = self.answer.rendering.reading
        if (
            reading and ending["finish_reason"] == "tool_calls"
        ):  # of a function that the client chose, it is any
            called = "function_call" if reading.is_older else "tool_calls"
            ending["finish_reason"] = "stop" if reading.is_named else called  # any answer is that call
        return ending

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        parsers = [choice.parser for choice in self.choices if choice.parser]
        if any(parser.reading.reasoning or parser.reasons for parser in parsers):
            num_tokens = sum(parser.num_reasoning_tokens for parser in parsers)
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

    def render_choice(self, choice: Choice, piece: TextPiece) -> dict[str, Any]:
        own = self.logprobs(choice, piece.tokens)
        logprobs = own and join_logprobs(self.echoed_logprobs(choice), own)
        added = (
            self.token_ids(choice.stream, piece.tokens)
            | self.prompt_ids(choice)
            | self.prompt_logprobs(choice)
        )
        return {"text": choice.prefix + piece.text, "logprobs": logprobs, **added}

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
