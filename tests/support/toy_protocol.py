"""A toy protocol, as CONTRIBUTING.md says to add one: a text, a whole answer and a stream, in one row."""

from collections.abc import Sequence
from functools import partial

from api.answers.answer import HttpAnswer
from api.errors import tgi
from api.http.openapi import TGI, TGI_ERRORS, ErrorResponse, Shape, event_stream
from api.json import to_json
from api.protocols.openai import Choice, ChunkRenderer, render_frames
from api.protocols.protocol import AnswerRenderer, Asked, Context, Protocol, WholeBody
from api.requests.fields import Strict
from api.requests.validate import GenerationParams
from api.streams.stream import Stream
from api.webhooks import WebhookField
from common.messages.request import SamplingParams, StoppingParams

TEXT = Shape("ToyText", {"text": " Paris."})


class ToyRequest(Strict):
    ask: str
    stream: bool | None = None
    webhook: WebhookField | None = None


async def read(body: ToyRequest, context: Context) -> Asked:
    params = GenerationParams(text=body.ask, stopping=StoppingParams(), sampling=SamplingParams())
    return Asked(await context.validate(params), [""], num_chars=len(body.ask))


class ToyRenderer(ChunkRenderer):
    error = staticmethod(tgi)
    last_chunks = ()

    def render_next_chunks(self, choice: Choice) -> list[bytes]:
        return [to_json({"text": choice.take_piece().text})]


def render_whole(answer: HttpAnswer, streams: Sequence[Stream]) -> WholeBody:
    return to_json({"text": streams[0].text}), streams[0].num_tokens


TOY = Protocol(
    path="/toy",
    name="toy",
    body=ToyRequest,
    read=read,
    renderer=AnswerRenderer(partial(render_frames, ToyRenderer), render_whole),
    error=tgi,
    errors=TGI_ERRORS,
    resumable=True,
    tag=TGI,
    summary="Ask",
    description="Answers.",
    example={"ask": "The capital of France is"},
    whole=TEXT,
    events=event_stream([TEXT, ErrorResponse]),
)
