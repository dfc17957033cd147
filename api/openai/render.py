"""Renderers of chat completions and completions: OpenAI's response objects, whole and in chunks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from api.answers.answer import HttpAnswer
from api.answers.chat_answer import ChoiceParser, finish_reason, render_deltas, render_message
from api.answers.logits import LogitsRenderer
from api.answers.logprobs import (
    LogprobLists,
    chat_logprobs,
    completion_logprobs,
    join_logprobs,
    prompt_logprobs,
    sequence_scores,
)
from api.json import to_json
from api.openai.choice import Choice, TextPiece, new_choices
from api.openai.request_schemas import CompletionRequest
from api.prompts.tokenizer import ModelTokenizer
from api.requests.params import GenerationParams
from api.streams.stream import Stream
from common.detokenize import Detokenizer
from common.messages.records import unpack_ids
from common.messages.request import Generate

NO_FIELDS: Mapping[str, Any] = {}
NO_ENDING = {"finish_reason": None, "stop_reason": None}
PLACE_OF_TEXT = "\0text\0"
"""Stands for the text in a chunk that is rendered before its text is known."""


class ChoicesRenderer(ABC):
    """Renders the choices of one answer, as a whole or in chunks: each chunk once, in order.

    Attributes:
        is_plain: whether a choice's chunks between the first and the last differ in nothing but their text.
        frames: what the plain chunks of a choice have before and after their text, by its index.
    """

    id_prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        self.answer = answer
        self.choices = new_choices(answer, streams)
        self.chunk_head = self.render_head(self.chunk_kind)
        self.logits = LogitsRenderer(answer.rendering.as_file)
        self.frames: dict[int, tuple[bytes, bytes]] = {}
        shown = answer.rendering
        self.is_plain = not (shown.logprobs or shown.token_ids or shown.running_usage or shown.reading)

    def frame_of(self, choice: Choice) -> tuple[bytes, bytes]:
        """What a choice's plain chunks have before and after their text: rendered when it is first needed."""
        if (frame := self.frames.get(choice.index)) is None:
            [delta] = self.render_deltas(choice, TextPiece(PLACE_OF_TEXT, range(0)))
            chunk = self.render_chunk([{"index": choice.index, **delta, **NO_ENDING}])
            before, _, after = chunk.rpartition(to_json(PLACE_OF_TEXT))
            self.frames[choice.index] = frame = before, after
        return frame

    def render_whole(self) -> bytes:
        """The whole response, once all choices have finished."""
        choices = []
        for choice in self.choices:
            if choice.is_absent:
                continue
            pieces = []
            while choice.has_piece:
                pieces.append(choice.take_piece())
            fields = self.render_choice(choice, pieces)
            logits = self.logits.fields(choice.stream, choice.text.num_tokens, f"choices.{choice.index}.")
            choices.append({"index": choice.index, **fields, **logits, **self.render_ending(choice)})
        fields = {"usage": self.final_usage(), **self.whole_fields()}
        return self.logits.body(render_object(self.render_head(self.whole_kind), choices, fields))

    def render_next_chunks(self, choice: Choice) -> list[bytes]:
        """The next chunks of a choice that has a piece: the one before its first piece, or those of the
        piece, which may be none.
        """
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

    def echoed_logprobs(self, choice: Choice) -> dict[str, list[Any]] | None:
        """Log-probabilities of the echoed prompt, if requested. The first call for a choice may be slow."""
        return None

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
        reading = answer.rendering.reading
        names = [f"{answer.request_id}.{choice.index}" for choice in self.choices]
        self.parsers = [ChoiceParser(reading, name) for name in names] if reading else []

    def render_choice(self, choice: Choice, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": join_text(choice, pieces), "refusal": None}
        if self.parsers:
            message |= self.read_whole(choice, pieces)
        tokens = range(choice.stream.num_tokens)
        ids = self.token_ids(choice.stream, tokens)
        return {"message": message, "logprobs": self.logprobs(choice.stream, tokens), **ids}

    def whole_fields(self) -> dict[str, Any]:
        return self.prompt_ids(self.choices[0]) | self.prompt_logprobs(self.choices[0])

    def first_fields(self, choice: Choice) -> dict[str, Any]:
        return self.prompt_ids(choice)

    def read_whole(self, choice: Choice, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        parser = self.parsers[choice.index]
        last = len(pieces) - 1
        deltas = [
            delta
            for i, piece in enumerate(pieces)
            for delta in parser.read(piece.text, len(piece.tokens), i == last)
        ]
        return render_message(parser, deltas, choice.prefix)

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


def echoed_prompt(
    completion: CompletionRequest, params: GenerationParams, request: Generate, tokenizer: ModelTokenizer
) -> str:
    """The text of the prompt, after truncation; empty without `echo`."""
    if not completion.echo:
        return ""
    prompt_ids = unpack_ids(request.prompt_ids)
    may_be_cut = params.truncate is not None and params.truncate == len(prompt_ids)
    if params.text is not None and not may_be_cut:
        return params.text
    return str(tokenizer.backend.decode(prompt_ids, skip_special_tokens=False))


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
