"""KServe's responses: a text with the model's name, frames of a stream, or tensors of texts."""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from api.answers.answer import HttpAnswer, InferOutputs
from api.errors import failed, kserve
from api.http.sse import MAX_ITEMS, Feed, sse_frames
from api.json import to_json
from api.requests.respond import AnswerRenderer, total_headers
from api.streams.http_response import Whole
from api.streams.stream import Stream
from api.tgi.render import rank, render_details, render_end, render_token, render_top_tokens

VERSION = "1"
"""The version of every model: a pool serves one."""
MODEL_PATH = re.compile(r"/v2/models/(?P<name>.+?)(/versions/(?P<version>[^/]+))?/(infer|generate(_stream)?)")


def model_fields(answer: HttpAnswer) -> dict[str, str]:
    """Name and version of the model, as the path has them."""
    path = MODEL_PATH.fullmatch(answer.route)
    assert path is not None
    return {"model_name": path["name"], "model_version": path["version"] or VERSION}


# --- streams ------------------------------------------------------------------------------------------------


def render_frames(answer: HttpAnswer, streams: Sequence[Stream]) -> Feed[bytes]:
    [stream] = streams
    return sse_frames(answer, TextOutputs(answer, stream))


class TextOutputs(Feed[bytes]):
    """The JSON bodies of a stream's frames: each has the text that a token adds. Together they are the whole
    text.
    """

    def __init__(self, answer: HttpAnswer, stream: Stream) -> None:
        super().__init__(stream.changed)
        self.stream = stream
        self.prefix = answer.prefix(0)
        self.model = model_fields(answer)
        self.with_details = answer.rendering.details
        self.num_shown = 0

    def take(self) -> list[bytes]:
        stream, num_ready = self.stream, self.stream.num_ready
        new: list[bytes] = []
        while self.num_shown < num_ready and len(new) < MAX_ITEMS:
            new.append(self.render(self.num_shown, self.text_of(self.num_shown)))
            self.num_shown += 1
        if stream.terminal and self.num_shown >= num_ready:
            self.ended = True
            new.append(self.render_last())
        return new

    def text_of(self, i: int) -> str:
        """What a token adds to the text: nothing if it is a control token."""
        text = "" if self.stream.ids[i] in self.stream.tokenizer.special_ids else self.stream.texts[i]
        return text if i else self.prefix + text

    def render(self, i: int, text: str, end: dict[str, Any] | None = None) -> bytes:
        fields: dict[str, Any] = {**self.model, "text_output": text}
        if self.with_details:
            tops = {"top_tokens": render_top_tokens(self.stream, i)} if self.stream.tops else {}
            token = render_token(self.stream, i)
            fields["details"] = {"finish_reason": None, **(end or {}), "token": token, **tops}
        return to_json(fields)

    def render_last(self) -> bytes:
        """The last token with the rest of the text, which may be cut by a stop string; or the error."""
        stream = self.stream
        assert stream.terminal is not None
        if not stream.finished:
            return to_json(kserve(failed(stream.terminal))[1])
        if self.num_shown == stream.num_tokens:  # no token is sent twice
            return to_json({"error": "Incomplete generation stream"})
        last = stream.num_tokens - 1
        shown, text = "".join(map(self.text_of, range(last))), stream.text
        whole = self.prefix + text
        rest = whole.removeprefix(shown) if whole.startswith(shown) else self.text_of(last)
        return self.render(last, rest, render_end(stream) | {"input_length": len(stream.prompt_ids)})


# --- whole texts --------------------------------------------------------------------------------------------


def render_whole(answer: HttpAnswer, streams: Sequence[Stream], arrived_s: float) -> Whole:
    best = [rank(streams[i : i + answer.n])[0] for i in range(0, len(streams), answer.n)]
    texts = [prefix + stream.text for prefix, stream in zip(answer.prefixes, best, strict=True)]
    headers = total_headers(answer, best, sum(stream.num_tokens for stream in best), arrived_s)
    if answer.infer is not None:
        return to_json(render_tensors(answer, answer.infer, texts)), headers
    details: dict[str, Any] = {}
    if answer.rendering.details:
        details = render_details(best[0])
        details["logprobs"] = details.pop("tokens")
        details = {"details": details}
    return to_json({**model_fields(answer), "text_output": texts[0], **details}), headers


def render_tensors(answer: HttpAnswer, outputs: InferOutputs, texts: Sequence[str]) -> dict[str, Any]:
    """The response of …/infer. A prompt that came as bytes is answered with bytes, as in TGI; its response
    does not name the model.
    """
    own_id = {} if outputs.id is None else {"id": outputs.id}
    model = {} if all(as_bytes for _, as_bytes, _ in outputs.outputs) else model_fields(answer)
    return model | own_id | {"outputs": [*render_outputs(outputs, iter(texts))]}


def render_outputs(outputs: InferOutputs, texts: Iterator[str]) -> Iterator[dict[str, Any]]:
    for name, as_bytes, shape in outputs.outputs:
        data: list[int] | list[str] = (
            [*next(texts).encode()] if as_bytes else [*islice(texts, math.prod(shape))]
        )
        own_shape = [1, len(data)] if as_bytes else shape
        yield {"name": name, "shape": own_shape, "datatype": "BYTES", "data": data}


RENDERER = AnswerRenderer(render_frames, render_whole)
