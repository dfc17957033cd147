"""KServe's API, the open inference protocol: texts, streams and tensors of texts, health and metadata."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from api.answers.answer import HttpAnswer, InferOutputs
from api.errors import invalid, kserve, refuse
from api.http.openapi import KSERVE, TGI_ERRORS, Shape, answer, error_responses, event_stream, only
from api.json import json_response, to_json
from api.protocols.choices import Choice
from api.protocols.protocol import Context, Protocol, WholeBody
from api.protocols.tgi import (
    GENERATION_END,
    PREFILL_TOKEN,
    TGI_NAMES,
    TOKEN,
    GenerateBody,
    GenerateParameters,
    TextRenderer,
    rank,
    render_details,
    render_token,
    render_top_tokens,
)
from api.requests.fields import DETACHED, RESUME_S, SEED, Listed, StopText, Strict, Whole, optional
from api.requests.service_terms import pools_of
from api.requests.validate import GenerationParams, check_no_logits
from common.settings.ranges import least

# --- responses, for /docs -----------------------------------------------------------------------------------


LIVE = Shape("LiveResponse", {"live": True})
MODEL_READY = Shape("ModelReady", {"name": "SmolLM2", "ready": True})
SERVER = {
    "name": "tokenfleet",
    "version": version("tokenfleet"),
    "extensions": ["health", "models", "metrics", "generate"],
}
TEXT_OUTPUT = "text_output"
"""The name of an output that the client does not name."""
VERSION = "1"
"""The version of every model: a pool serves one."""


def describe_model(name: str) -> dict[str, Any]:
    """The model's tensors: texts in, texts out."""
    fields = {"name": name, "versions": [VERSION], "platform": "pytorch_transformers"}
    ends = {"inputs": "text_input", "outputs": TEXT_OUTPUT}
    return fields | {end: [{"name": one, "datatype": "BYTES", "shape": [-1]}] for end, one in ends.items()}


INFER_ANSWER = Shape(
    "InferResponse",
    {
        "model_name?": "SmolLM2",
        "model_version?": "1",
        "id?": "1",
        "outputs": [{"name": "text_output", "shape": [1], "datatype": "BYTES", "data": [" Paris.", 32]}],
    },
)
TEXT = {"model_name": "SmolLM2", "model_version": "1", "text_output": " Paris."}
TEXT_DETAILS = {**GENERATION_END, "prefill": [PREFILL_TOKEN], "logprobs": [TOKEN], "top_tokens?": [[TOKEN]]}
TEXT_ANSWER = Shape("TextResponse", {**TEXT, "details?": TEXT_DETAILS})
CHUNK_DETAILS = {
    "finish_reason": (None, "length"),
    "token": TOKEN,
    "top_tokens?": [TOKEN],
    "generated_tokens?": 20,
    "seed?": (None, 42),
    "input_length?": 5,
}
TEXT_CHUNK = Shape("TextChunk", {**TEXT, "details?": CHUNK_DETAILS})
KSERVE_ERROR = Shape("KServeError", {"error": "Input validation error: …"})
ERRORS = error_responses(KSERVE_ERROR, {code: one["description"] for code, one in TGI_ERRORS.items()})
"""All error responses by status."""

ALIASES = {
    "max_tokens": "max_new_tokens",
    "min_length": "min_new_tokens",
    "stop_words": "stop",
    "random_seed": "seed",
}
"""Parameters of the open inference protocol, and of Triton's backends → TGI's names."""
WITHOUT_PLACE = ("details", "decoder_input_details", "top_n_tokens")
"""Parameters that ask for what tensors of text have no place for."""
DATA_SCHEMA: dict[str, Any] = {
    "items": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 255}]}
}


class KServeParameters(GenerateParameters):
    """TGI's parameters, some also under the names of the open inference protocol and of Triton."""

    max_tokens: int | None = least(1, "The same as `max_new_tokens`.")
    min_length: int | None = least(0, "The same as `min_new_tokens`.")
    stop_words: Listed[StopText] | None = optional("The same as `stop`.")
    random_seed: int | None = least(SEED[0], "The same as `seed`.", SEED[1])
    exclude_input_in_output: bool | None = optional("False begins the text with the prompt. Default: true.")


def params_of(text: str, name: str, parameters: KServeParameters, streamed: bool) -> GenerationParams:
    """The parameters of one prompt, which the client gave in the field `name`; a beam search returns its best
    text. Raises ApiError (422).
    """
    used = {own: alias for alias, own in ALIASES.items() if getattr(parameters, alias) is not None}
    for own, alias in used.items():
        if getattr(parameters, own) is not None:
            raise invalid(f"`{alias}` means the same as `{own}`, which is given, too")
    full_text = parameters.return_full_text or parameters.exclude_input_in_output is False
    params = parameters.of_prompt(text, streamed, full_text, TGI_NAMES | used | {"prompt": name})
    check_no_logits(params)
    if params.beams is None:
        return params
    if streamed:
        words = "is served whole on …/generate: its texts come at the end"
        raise invalid(f"`beam_width` {words}")
    return replace(params, beams=replace(params.beams, num_returned=1))


class KServeGenerateRequest(GenerateBody):
    """The body of …/generate and …/generate_stream. Parameters may also stand beside `text_input`."""

    text_input: str = Field(description="The prompt.", json_schema_extra={"minLength": 1})
    parameters: KServeParameters = Field(default_factory=KServeParameters)
    resume_s: float | None = RESUME_S
    detached: bool | None = DETACHED

    @model_validator(mode="before")
    @classmethod
    def gather_parameters(cls, body: Any) -> Any:
        """Move what is beside `text_input` into `parameters`, as Triton does."""
        if not isinstance(body, dict) or not isinstance(body.get("parameters") or {}, dict):
            return body
        own = {name: value for name, value in body.items() if name in cls.model_fields}
        others = {name: value for name, value in body.items() if name not in cls.model_fields}
        return own | {"parameters": others | (body.get("parameters") or {})}


class InferTensor(Strict):
    """An input: one prompt as its bytes (TGI), or a tensor of prompts (KServe)."""

    name: str
    shape: Listed[Whole] = Field(json_schema_extra={"items": {"minimum": 0}})
    datatype: Literal["BYTES"]
    data: list[Any] = Field(
        description="The bytes of one prompt in UTF-8, as numbers; or prompts, as texts.",
        json_schema_extra=DATA_SCHEMA,
    )
    parameters: dict[str, Any] | None = None

    def texts(self, where: str) -> list[str]:
        """The prompts. Raises ApiError (422)."""
        items = [*flatten(self.data)]
        if self.is_bytes:
            try:
                return [bytes(items).decode()]
            except (TypeError, ValueError) as error:
                why = f"`{where}.data` must be texts, or the bytes of one text in UTF-8: {error}"
                raise invalid(why, f"{where}.data") from error
        if not all(isinstance(item, str) for item in items):
            raise invalid(f"`{where}.data` must be texts, or the bytes of one text")
        if len(items) != math.prod(self.shape):
            size = math.prod(self.shape)
            raise invalid(f"`{where}.shape` means {size} texts. Given: {len(items)}")
        return items

    @property
    def is_bytes(self) -> bool:
        """Whether `data` is TGI's: the bytes of one prompt."""
        return bool(self.data) and type(self.data[0]) is int


def flatten(data: list[Any]) -> Iterator[Any]:
    """The elements of a tensor in row-major order."""
    for item in data:
        if isinstance(item, list):
            yield from flatten(item)
        else:
            yield item


class InferOutput(Strict):
    """An output that the client asks for."""

    name: str
    parameters: dict[str, Any] | None = None


class InferRequest(GenerateBody):
    """The body of …/infer."""

    id: str | None = optional("It is repeated in the response.")
    parameters: KServeParameters | None = None
    inputs: Listed[InferTensor] = Field(json_schema_extra={"minItems": 1})
    outputs: Listed[InferOutput] | None = optional(
        "A name for the output of each input. Default: `text_output`, if there is one input."
    )

    def prompts(self) -> list[tuple[str, str]]:
        """The text of each prompt, and its field. Raises ApiError (422)."""
        return [
            (text, f"inputs[{i}].data")
            for i, tensor in enumerate(self.inputs)
            for text in tensor.texts(f"inputs[{i}]")
        ]

    def check(self) -> None:
        """Raises ApiError (422) for what cannot be answered, or not in tensors of text."""
        super().check()
        parameters = self.parameters or KServeParameters()
        binary = [
            (f"outputs[{i}].parameters.binary_data", (output.parameters or {}).get("binary_data"))
            for i, output in enumerate(self.outputs or ())
        ]
        refuse(
            *(
                (getattr(parameters, name), f"`{name}` has no place in an output of text: see …/generate")
                for name in WITHOUT_PLACE
            ),
            *((given, f"`{field}` must be false: tensors are JSON") for field, given in binary),
            (len(self.output_names) != len(self.inputs), "Inputs and outputs length mismatch", "outputs"),
        )

    @property
    def output_names(self) -> list[str]:
        return [TEXT_OUTPUT] if self.outputs is None else [output.name for output in self.outputs]


# --- answers ------------------------------------------------------------------------------------------------


MODEL_PATH = re.compile(r"/v2/models/(?P<name>.*?)(/versions/(?P<version>[^/]+))?/(infer|generate(_stream)?)")


class OutputRenderer(TextRenderer):
    """Each chunk has the text that its token adds: together they are the whole text."""

    error = staticmethod(kserve)

    def whole(self) -> WholeBody:
        answer, streams = self.answer, self.streams
        best = [rank(streams[i : i + answer.n])[0] for i in range(0, len(streams), answer.n)]
        texts = [prefix + stream.text for prefix, stream in zip(answer.prefixes, best, strict=True)]
        num_tokens = sum(stream.num_tokens for stream in best)
        if answer.infer is not None:
            return to_json(self.render_tensors(answer.infer, iter(texts))), num_tokens
        details: dict[str, Any] = {}
        if answer.rendering.details:
            details = render_details(best[0])
            details["logprobs"] = details.pop("tokens")
            details = {"details": details}
        return to_json({**self.model, "text_output": texts[0], **details}), num_tokens

    def render_tensors(self, infer: InferOutputs, texts: Iterator[str]) -> dict[str, Any]:
        """The response of …/infer. A prompt that came as bytes is answered with bytes, as in TGI; its
        response does not name the model.
        """
        outputs = []
        for name, as_bytes, shape in infer.outputs:
            data = [*next(texts).encode()] if as_bytes else [*islice(texts, math.prod(shape))]
            own_shape = [1, len(data)] if as_bytes else shape
            outputs.append({"name": name, "shape": own_shape, "datatype": "BYTES", "data": data})
        own_id = {} if infer.id is None else {"id": infer.id}
        model = {} if all(as_bytes for _, as_bytes, _ in infer.outputs) else self.model
        return model | own_id | {"outputs": outputs}

    def text_of(self, choice: Choice, i: int) -> str:
        """What a token adds to the text: nothing if it is a control token."""
        stream = choice.stream
        text = "" if stream.ids[i] in stream.tokenizer.special_ids else stream.texts[i]
        return text if i else self.answer.prefix(0) + text

    def render(self, choice: Choice, i: int, end: dict[str, Any] | None = None) -> bytes:
        """The chunk of token `i`; that of the last one has the rest of the text, which may be cut by a stop
        string.
        """
        stream, text = choice.stream, self.text_of(choice, i)
        if end is not None:
            shown = "".join(self.text_of(choice, j) for j in range(i))
            whole = self.answer.prefix(0) + stream.text
            text = whole.removeprefix(shown) if whole.startswith(shown) else text
        fields: dict[str, Any] = {**self.model, "text_output": text}
        if self.answer.rendering.details:
            tops = {"top_tokens": render_top_tokens(stream, i)} if stream.tops else {}
            token = render_token(stream, i)
            fields["details"] = {"finish_reason": None, **(end or {}), "token": token, **tops}
        return to_json(fields)

    @cached_property
    def model(self) -> dict[str, str]:
        """Name and version of the model, as the path has them."""
        path = MODEL_PATH.fullmatch(self.answer.route)
        assert path is not None
        return {"model_name": path["name"], "model_version": path["version"] or VERSION}


# --- routes -------------------------------------------------------------------------------------------------


GENERATE_ERRORS = only(ERRORS, 400, 401, 403, 404, 408, 413, 415, 422, 424, 429, 500, 503)
info_router = APIRouter(responses=only(ERRORS, 404, 503), tags=[KSERVE])
ready_router = APIRouter(responses=only(ERRORS, 404, 503), tags=[KSERVE])

MODEL = "/v2/models/{model:path}"
VERSIONED = f"{MODEL}/versions/{{model_version}}"
"""Served alike, and not described. Its routes come before those of MODEL, and `ready_router` before
`info_router`: names may have slashes.
"""
OF_MODELS = "One that `GET /v1/models` lists."
ModelName = Annotated[str, Path(description=OF_MODELS)]
EXAMPLE = {"text_input": "The capital of France is", "parameters": {"max_tokens": 20}}
INFER_EXAMPLE: dict[str, Any] = {
    "id": "1",
    "inputs": [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["The capital of France is"]}
    ],
    "outputs": [{"name": TEXT_OUTPUT}],
    "parameters": {"max_new_tokens": 20},
}

# --- health and metadata ------------------------------------------------------------------------------------


@info_router.get("/v2/health/live", summary="Whether this gateway runs", responses=answer(LIVE))
async def kserve_live() -> Response:
    """Returns 200 as long as the gateway answers."""
    return json_response({"live": True})


@ready_router.get(f"{VERSIONED}/ready", include_in_schema=False)
@ready_router.get("/v2/health/ready", summary="Whether requests would be served", responses=answer(LIVE))
async def kserve_ready(request: Request) -> Response:
    """Returns 200 if a worker, a batcher and the broker are live, of this gateway's pool or of another one
    that serves its model; else 503.
    """
    await (await pools_of(request).find(request.path_params.get("model"))).check()
    return json_response({"live": True})


@info_router.get("/v2", summary="Server metadata", responses=answer(Shape("ServerMetadata", SERVER)))
async def kserve_server() -> Response:
    """Returns the server's name, its version, and what it offers besides inference."""
    return json_response(SERVER)


@info_router.get(VERSIONED, include_in_schema=False)
async def kserve_version(request: Request, model: str, model_version: str) -> Response:
    """Returns the model's name and version, and what can be asked of it."""
    await pools_of(request).find(model)
    return json_response(
        {"name": model, "version": model_version, "extensions": ["infer", "ready", "generate"]}
    )


@ready_router.get(f"{MODEL}/ready", summary="Whether a model is ready", responses=answer(MODEL_READY))
async def kserve_model_ready(request: Request, model: ModelName) -> Response:
    """Returns 200 if a request for the model would be served now, else 503."""
    await (await pools_of(request).find(model)).check()
    return json_response({"name": model, "ready": True})


@info_router.get(
    MODEL, summary="Metadata of a model", responses=answer(Shape("ModelMetadata", describe_model("SmolLM2")))
)
async def kserve_model(request: Request, model: ModelName) -> Response:
    """Returns the model's tensors: texts in, texts out."""
    await pools_of(request).find(model)
    return json_response(describe_model(model))


# --- generation ---------------------------------------------------------------------------------------------


async def read_infer(body: InferRequest, context: Context) -> HttpAnswer:
    """What the tensors of prompts ask for. Raises ApiError."""
    parameters = body.parameters or KServeParameters()
    prompts = body.prompts()
    context.check_number(len(prompts), "inputs")
    all_params = [params_of(text, field, parameters, streamed=False) for text, field in prompts]
    named = zip(body.output_names, body.inputs, strict=True)
    outputs = InferOutputs(body.id, [(name, tensor.is_bytes, tensor.shape) for name, tensor in named])
    return await context.ask(all_params, infer=outputs)


async def read_generate(body: KServeGenerateRequest, context: Context) -> HttpAnswer:
    """What a text asks for. Raises ApiError."""
    return await context.ask([params_of(body.text_input, "text_input", body.parameters, context.streamed)])


MODEL_PARAMETER = {
    "name": "model",
    "in": "path",
    "required": True,
    "description": OF_MODELS,
    "schema": {"type": "string", "title": "Model", "description": OF_MODELS},
}
KSERVE_GENERATE = Protocol(
    path=f"{MODEL}/generate",
    name="kserve_generate",
    aliases=[f"{VERSIONED}/generate"],
    body=KServeGenerateRequest,
    read=read_generate,
    renderer=OutputRenderer,
    error=kserve,
    streams=False,
    tag=KSERVE,
    errors=GENERATE_ERRORS,
    example=EXAMPLE,
    summary="Generate text for KServe",
    description="Returns the whole text when generation has finished.",
    whole=TEXT_ANSWER,
    parameters=[MODEL_PARAMETER],
)
KSERVE_GENERATE_STREAM = KSERVE_GENERATE._replace(
    path=f"{MODEL}/generate_stream",
    name="kserve_generate_stream",
    aliases=[f"{VERSIONED}/generate_stream"],
    streams=True,
    resumable=True,
    summary="Generate a stream of texts for KServe",
    description=(
        "Sends the text that each token adds as a server-sent event. A request that fails midway ends with "
        "an event that has `error`."
    ),
    whole=None,
    events=event_stream([TEXT_CHUNK, KSERVE_ERROR]),
)
KSERVE_INFER = KSERVE_GENERATE._replace(
    path=f"{MODEL}/infer",
    name="kserve_infer",
    aliases=[f"{VERSIONED}/infer"],
    body=InferRequest,
    read=read_infer,
    example=INFER_EXAMPLE,
    summary="Generate texts for tensors of prompts",
    description="Returns an output for each input, in their order.",
    whole=INFER_ANSWER,
)
