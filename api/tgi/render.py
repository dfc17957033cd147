"""TGI's responses: frames of a stream, whole texts with their details, predictions of /vertex. With
`best_of`, several texts are sampled, and the most likely one is returned.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from api.answers.answer import HttpAnswer
from api.answers.logits import LogitsRenderer
from api.answers.logprobs import sequence_scores
from api.errors import ApiError, failed, invalid, quoted, tgi
from api.http.sse import MAX_ITEMS, Change, Feed, sse_frames
from api.json import to_json
from api.requests.params import SWITCH_NAMES, GenerationParams, Limits, draws
from api.requests.respond import AnswerRenderer, time_headers, total_headers
from api.streams.beams import all_outputs, is_absent
from api.streams.http_response import Whole
from api.streams.stream import Stream
from common.messages.request import Generate

VERTEX = "/vertex"
"""Path of the route whose answers are predictions."""


# --- streams ------------------------------------------------------------------------------------------------


def render_frames(answer: HttpAnswer, streams: Sequence[Stream]) -> Feed[bytes]:
    [stream] = streams
    return sse_frames(answer, stream_bodies(answer, stream))


def stream_bodies(answer: HttpAnswer, stream: Stream) -> Feed[bytes]:
    """The JSON bodies of the frames of a stream, or of a beam search."""
    if stream.request.beams:
        return SequenceBodies(stream, answer.prefix(0), answer.rendering.details)
    return StreamBodies(answer, stream)


class StreamBodies(Feed[bytes]):
    """The JSON bodies of a stream's frames. The last one has the last token, and the whole text, which begins
    the answer's prefix.
    """

    def __init__(self, answer: HttpAnswer, stream: Stream) -> None:
        super().__init__(stream.changed)
        self.answer = answer
        self.stream = stream
        self.num_shown = 0

    def take(self) -> list[bytes]:
        stream, num_ready, first = self.stream, self.stream.num_ready, self.num_shown
        new = [render_frame(stream, i) for i in range(first, min(num_ready, first + MAX_ITEMS))]
        self.num_shown += len(new)
        if stream.terminal and self.num_shown >= num_ready:
            self.ended = True
            new.append(render_last_frame(self.answer, stream, self.num_shown))
        return new


class SequenceBodies(Feed[bytes]):
    """The JSON bodies of a beam search's frames, one for each sequence, the best first: its last token and
    its text. A search that fails has the error in one frame.
    """

    def __init__(self, search: Stream, prefix: str, with_details: bool) -> None:
        super().__init__(Change())
        self.left = [*search.outputs]
        self.prefix = prefix
        self.with_details = with_details
        self.num_shown = 0
        for sequence in self.left:
            sequence.changed = self.changed

    def take(self) -> list[bytes]:
        new: list[bytes] = []
        while self.left and (sequence := self.left[0]).terminal:
            self.left = self.left[1:] if sequence.finished else []
            if is_absent(sequence):
                continue
            self.num_shown += 1
            new.append(self.render(sequence))
        self.ended = not self.left
        return new

    def render(self, sequence: Stream) -> bytes:
        if not sequence.finished:
            return render_failure(sequence)
        details = render_details(sequence) | {"input_length": len(sequence.prompt_ids)}
        shown_details = details if self.with_details else None
        text = self.prefix + sequence.text
        return render_frame(sequence, sequence.num_tokens - 1, text, shown_details, self.num_shown)


def render_frame(
    stream: Stream,
    i: int,
    text: str | None = None,
    details: dict[str, Any] | None = None,
    index: int | None = None,
) -> bytes:
    """The body of the frame of token `i`; its `index` is by default the token's number."""
    frame = {"index": i + 1 if index is None else index, "token": render_token(stream, i)}
    if stream.tops:
        frame["top_tokens"] = render_top_tokens(stream, i)
    frame["generated_text"] = text
    frame["details"] = details
    return to_json(frame)


def render_last_frame(answer: HttpAnswer, stream: Stream, num_shown: int) -> bytes:
    """The body of the last frame: the last token with the whole text, or the error."""
    assert stream.terminal is not None
    if not stream.finished:
        return render_failure(stream)
    if num_shown == stream.num_tokens:  # no token is sent twice
        return to_json(tgi(ApiError(500, "incomplete_generation_stream", "Incomplete generation stream"))[1])
    details = None
    if answer.rendering.details:
        details = render_end(stream) | {"input_length": len(stream.prompt_ids)}
    return render_frame(stream, stream.num_tokens - 1, answer.prefix(0) + stream.text, details)


def render_failure(stream: Stream) -> bytes:
    assert stream.terminal is not None
    return to_json(tgi(failed(stream.terminal))[1])


def render_end(stream: Stream) -> dict[str, Any]:
    """The first fields of all `details`."""
    assert stream.terminal is not None
    return {
        "finish_reason": stream.terminal.known_reason,
        "generated_tokens": stream.num_tokens,
        "seed": seed_of(stream),
        **sequence_scores(stream),
    }


# --- whole texts --------------------------------------------------------------------------------------------


def render_whole(answer: HttpAnswer, streams: Sequence[Stream], arrived_s: float) -> Whole:
    if answer.route == VERTEX:
        outputs = all_outputs(streams)
        body = to_json({"predictions": [output.text for output in outputs]})
        num_generated = sum(output.num_tokens for output in outputs)
        return body, total_headers(answer, streams, num_generated, arrived_s)
    logits = LogitsRenderer(answer.rendering.as_file)
    response = render_response(answer, streams, logits)
    body = logits.body(to_json([response] if answer.route == "/" else response))
    return body, logits.headers | text_headers(answer, streams, arrived_s)


def text_headers(answer: HttpAnswer, streams: Sequence[Stream], arrived_s: float) -> dict[str, str]:
    """Headers of the best text; of a beam search, with the tokens of all that are returned."""
    best, *others = rank(streams)
    if best.request.beams is None:
        return time_headers(best, arrived_s)
    return total_headers(answer, streams, sum(one.num_tokens for one in (best, *others)), arrived_s)


def render_response(answer: HttpAnswer, streams: Sequence[Stream], logits: LogitsRenderer) -> dict[str, Any]:
    """The response with the best text; each text begins with the prefix. Its details have the others; those
    of a beam search are shown unasked.
    """
    best, *others = rank(streams)
    prefix = answer.prefix(0)
    response = {"generated_text": prefix + best.text} | logits.fields(best, best.num_tokens)
    if not answer.rendering.details and not (best.request.beams and others):
        return response
    losers = [{"generated_text": prefix + stream.text, **render_details(stream)} for stream in others]
    details = render_details(best)
    tops = {"top_tokens": details.pop("top_tokens")} if best.tops else {}
    return response | {"details": details | ({"best_of_sequences": losers} if losers else {}) | tops}


def render_details(stream: Stream) -> dict[str, Any]:
    """The `details` of a finished text."""
    tokens = range(stream.num_tokens)
    tops = {"top_tokens": [render_top_tokens(stream, i) for i in tokens]} if stream.tops else {}
    all_tokens = {"prefill": render_prefill(stream), "tokens": [render_token(stream, i) for i in tokens]}
    return render_end(stream) | all_tokens | tops


# --- tokens -------------------------------------------------------------------------------------------------


def render_token(stream: Stream, i: int) -> dict[str, Any]:
    token_id = stream.ids[i]
    return {
        "id": token_id,
        "text": stream.texts[i],
        "logprob": stream.logprobs[i],
        "special": token_id in stream.tokenizer.special_ids,
    }


def render_top_tokens(stream: Stream, i: int) -> list[dict[str, Any]]:
    """The most likely tokens at position `i`; the text of each is decoded alone."""
    decode, special_ids = stream.tokenizer.backend.decode, stream.tokenizer.special_ids
    return [
        {
            "id": token_id,
            "text": decode([token_id], skip_special_tokens=False),
            "logprob": logprob,
            "special": token_id in special_ids,
        }
        for token_id, logprob in stream.tops[i]
    ]


def render_prefill(stream: Stream) -> list[dict[str, Any]]:
    """The prompt's tokens, the text of each decoded alone; empty unless they were requested."""
    if stream.prompt.records is None:
        return []
    tokens, decode = stream.prompt.tokens(), stream.tokenizer.backend.decode_batch
    texts = decode([[token_id] for token_id, _, _ in tokens], skip_special_tokens=False)
    return [
        {"id": token_id, "text": text, "logprob": logprob}
        for (token_id, logprob, _), text in zip(tokens, texts, strict=True)
    ]


def seed_of(stream: Stream) -> int | None:
    """The seed of a sampled text; None for greedy decoding."""
    sampling = stream.request.sampling
    return sampling.seed if sampling and sampling.temperature else None


# --- best_of ------------------------------------------------------------------------------------------------


def check_best_of(params: GenerationParams, limits: Limits, streamed: bool) -> None:
    """Raises ApiError (422) if several texts are not possible, or would all be the same."""
    if params.n > limits.settings.max_best_of:
        raise invalid(
            f"`best_of` must be at most {limits.settings.max_best_of}. Given: {quoted(params.n)}", "best_of"
        )
    if params.n > 1 and streamed:
        raise invalid(f"`best_of` must be 1 when tokens are streamed. Given: {quoted(params.n)}", "best_of")
    if params.n > 1 and not draws(params):
        raise invalid(f"`best_of` above 1 needs sampling: set one of `do_sample`, {SWITCH_NAMES}", "best_of")
    if params.n > 1 and params.seed is not None:
        raise invalid("`seed` must not be set when `best_of` is above 1", "seed")
    if params.n > 1 and params.sampling.report_logits:
        raise invalid(
            "`best_of` above 1 compares log-probabilities: `logprobs_mode` must not be logits", "best_of"
        )
    if params.n > 1 and (params.context_logits or params.generation_logits):
        raise invalid(f"`best_of` must be 1 when logits are returned. Given: {params.n}", "best_of")


def with_own_seeds(requests: Sequence[Generate], seed: int | None = None) -> list[Generate]:
    """The requests, each with a seed of its own: a random one, or one that follows from `seed`. The seed in
    the response samples the best text again, without `best_of`.
    """
    seeds = [secrets.randbits(63) if seed is None else seed ^ i for i in range(len(requests))]
    return [
        replace(request, sampling=replace(request.sampling, seed=own, choice=0))
        for request, own in zip(requests, seeds, strict=True)
        if request.sampling
    ]


def rank(streams: Sequence[Stream]) -> list[Stream]:
    """The streams of all texts, the best first: by mean log-probability, or as a beam search ranks them."""
    if streams[0].request.beams:
        return [output for output in all_outputs(streams) if not is_absent(output)]
    return sorted(streams, key=lambda stream: sum(stream.logprobs) / max(1, stream.num_tokens), reverse=True)


RENDERER = AnswerRenderer(render_frames, render_whole)
