"""A toy protocol, as CONTRIBUTING.md says to add one: a text, a whole answer and a stream, in one row."""

from api.answers.answer import HttpAnswer
from api.errors import tgi
from api.http.openapi import TGI, TGI_ERRORS, ErrorResponse, Shape, event_stream
from api.json import to_json
from api.prompts.chat_template import Rendered
from api.protocols.choices import Choice, ChunkRenderer
from api.protocols.protocol import Context, Protocol, WholeBody
from api.requests.fields import Strict
from api.requests.validate import GenerationParams
from api.webhooks import WebhookField
from common.messages.request import SamplingParams, StoppingParams

TEXT = Shape("ToyText", {"text": " Paris."})


class ToyRequest(Strict):
    ask: str
    stream: bool | None = None
    webhook: WebhookField | None = None


async def read(body: ToyRequest, context: Context) -> HttpAnswer:
    params = GenerationParams(prompt=Rendered(body.ask), stopping=StoppingParams(), sampling=SamplingParams())
    return await context.ask([params])


class ToyRenderer(ChunkRenderer):
    error = staticmethod(tgi)
    last_chunks = ()

    def whole(self) -> WholeBody:
        [stream] = self.streams
        return to_json({"text": stream.text}), stream.num_tokens

    def render_next_chunks(self, choice: Choice) -> list[bytes]:
        return [to_json({"text": choice.take_piece().text})]


TOY = Protocol(
    path="/toy",
    name="toy",
    body=ToyRequest,
    read=read,
    renderer=ToyRenderer,
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
