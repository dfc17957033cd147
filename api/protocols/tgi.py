"""TGI's API: POST /generate, /generate_stream and / make text of a prompt; GET /info shows the model and its
limits. With `best_of`, several texts are sampled, and the most likely one is returned.

Cloud platforms send to TGI, too: SageMaker POST /invocations, Vertex AI POST /vertex with several prompts or
chats.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, SkipValidation, WithJsonSchema
from starlette.responses import Response

from api.answers.answer import HttpAnswer, Rendering
from api.answers.logprobs import LOGITS, logits_fields, sequence_scores
from api.errors import ApiError, quoted, refuse, tgi, unavailable
from api.event_loop import Pace
from api.grammar.compile import RESPONSE_FORMATS, read_response_format
from api.http.auth import key_of
from api.http.body import parse, reject_unsupported, warn_of_unknown
from api.http.openapi import (
    TGI,
    TGI_ERRORS,
    ErrorResponse,
    OpenAIError,
    Responses,
    Shape,
    answer,
    error_responses,
    event_stream,
    only,
)
from api.http.sse import Feed
from api.json import json_response, to_json
from api.prompts.chat_template import Rendered
from api.protocols.chat import ChatRequest, read_chat
from api.protocols.choices import Choice, ChunkFeed, ChunkRenderer
from api.protocols.openai import CHAT_COMPLETION_CHUNK, CHAT_COMPLETIONS, COMPLETION_CHUNK, COMPLETIONS
from api.protocols.openai_bodies import openai_fields
from api.protocols.protocol import Context, Protocol, Renderer, WholeBody
from api.requests.fields import (
    DETACHED,
    MAX_CHOICES,
    PENALTY,
    RESUME_S,
    BeamFields,
    Listed,
    StopText,
    Strict,
    object_schema,
    optional,
)
from api.requests.pool import Pool
from api.requests.service_terms import own_pool, pools_of, read_terms
from api.requests.validate import SWITCH_NAMES, GenerationParams, check_no_logits, streamed_logits
from api.streams.stream import Stream, all_outputs, is_absent
from api.webhooks import WebhookField
from common.messages.request import EMBED
from common.settings.ranges import least

# --- responses, for /docs -----------------------------------------------------------------------------------

GENERATE_ERRORS: Responses = only(TGI_ERRORS, 400, 401, 403, 408, 413, 415, 422, 424, 429, 500, 503)
TOKEN = {"id": 7042, "text": " Paris", "logprob": (-0.25, None), "special": False}
PREFILL_TOKEN = {"id": 504, "text": "The", "logprob": (-2.5, None)}
GENERATION_END = {
    "finish_reason": ("length", "eos_token", "stop_sequence"),
    "generated_tokens": 20,
    "seed": (None, 42),
    "cumulative_logprob?": -2.5,
    "beam_score?": -0.5,
}
GENERATION_DETAILS = {
    **GENERATION_END,
    "prefill": [PREFILL_TOKEN],
    "tokens": [TOKEN],
    "top_tokens?": [[TOKEN]],
}
GENERATE_ANSWER = Shape(
    "GenerateResponse",
    {
        "generated_text": " Paris.",
        "details?": {
            **GENERATION_DETAILS,
            "best_of_sequences?": [{**GENERATION_DETAILS, "generated_text": " Paris."}],
        },
        "context_logits?": LOGITS,
        "generation_logits?": LOGITS,
    },
)
GENERATE_EVENT = Shape(
    "StreamResponse",
    {
        "index": 1,
        "token": TOKEN,
        "top_tokens?": [TOKEN],
        "generated_text": (None, " Paris."),
        "details": (
            None,
            {
                **GENERATION_END,
                "input_length": 5,
                "prefill?": [PREFILL_TOKEN],
                "tokens?": [TOKEN],
                "top_tokens?": [[TOKEN]],
            },
        ),
    },
)
INFO = Shape(
    "Info",
    {
        "model_id": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "model_sha": (None, "12fd25f77366fa6b3b4b768ec3050bf629380bac"),
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": 128,
        "max_best_of": 2,
        "max_beam_width": 16,
        "max_stop_sequences": 4,
        "max_input_tokens": 4095,
        "max_total_tokens": 4096,
        "validation_workers": 2,
        "max_client_batch_size": 4,
        "router": "tokenfleet",
        "version": "1.0.0",
        "sha": None,
        "docker_label": (None, "1.0.0"),
        "adapters": ["sql"],
    },
)

TGI_NAMES = {
    "prompt": "inputs",
    "stop_ids": "stop_token_ids",
    "relative_frequency_penalty": "frequency_penalty",
    "frequency_penalty": "",
    "n": "best_of",
    "prompt_logprobs": "decoder_input_details",
}
"""`GenerationParams` → the names of TGI's parameters, where they differ; empty where there is none."""
GrammarObject = Annotated[dict[str, Any], WithJsonSchema(object_schema(RESPONSE_FORMATS, "value"))]


class GenerateParameters(BeamFields):
    """Generation parameters. Null and absent mean the default."""

    max_new_tokens: int | None = least(
        1, "The most tokens to generate. Default: what is left of the model's context."
    )
    min_new_tokens: int | None = least(
        0, "The fewest tokens to generate: before them only `max_new_tokens` ends the text."
    )
    stop: Listed[StopText] | None = optional(
        "Stop strings: the text ends with the first of them that appears, and includes it."
    )
    truncate: int | None = least(1, "The most tokens of the prompt to use: its last ones.")

    do_sample: bool | None = optional(
        f"Sample tokens. Default: true if any of {SWITCH_NAMES} has an effect; else the most "
        "likely token is taken."
    )
    frequency_penalty: float | None = optional(
        "Penalty for tokens in proportion to their share of prompt and text, as TGI defines it.", **PENALTY
    )

    best_of: int | None = least(
        0,
        "The number of texts to generate; the one of highest mean log-probability is returned.",
        MAX_CHOICES,
    )
    details: bool | None = optional(
        "Return the tokens with their log-probabilities, the seed and the finish reason."
    )
    decoder_input_details: bool | None = optional(
        "Return `details`, and in `prefill` the prompt's tokens with their log-probabilities. "
        "Not for streams."
    )
    top_n_tokens: int | None = least(0, "The number of most likely tokens to return at each position.")
    return_full_text: bool | None = optional(
        "Begin the text with the prompt. Default: false; on `POST /` true, unless the model sees pictures."
    )
    stream: bool | None = optional(
        "What the path, or the body's `stream`, says: whether tokens are streamed. Another value is refused."
    )

    grammar: GrammarObject | None = optional(
        'What the text must look like: `{"type": "json", "value": …}` with a JSON schema, or '
        '`{"type": "regex", "value": …}`.'
    )

    watermark: bool | None = optional(
        "Favour tokens that follow from those before them, so that the text can be recognised as "
        "generated (arXiv:2301.10226); WATERMARK_GAMMA and WATERMARK_DELTA say how much. Default: false."
    )
    adapter_id: str | None = optional("The LoRA adapter to use: one that `GET /v1/models` lists.")

    def of_prompt(
        self, text: str, streamed: bool, full_text: bool | None, names: Mapping[str, str] = TGI_NAMES
    ) -> GenerationParams:
        """The parameters of a prompt. Raises ApiError (422) for contradictions.

        Args:
            full_text: whether the text begins with the prompt.
            names: `GenerationParams` → the names of these parameters, where they differ.
        """
        name, asked, number = "decoder_input_details", self.decoder_input_details, self.best_of or 1
        at_once, grammar = "when tokens are streamed", self.grammar
        word, other = ("true", "generate") if streamed else ("false", "generate_stream")
        refuse(
            (self.stream not in (None, streamed), f"`stream` must be {word} on this path: see …/{other}"),
            (asked and streamed, f"`{name}` must be false {at_once}"),
            (streamed and number > 1, f"`best_of` must be 1 {at_once}. Given: {number}"),
            (grammar and grammar.get("value") is None, "`grammar.value` is required"),
            *streamed_logits(self, streamed),
        )
        return self.generation_params(
            names,
            prompt=Rendered(text),
            has_inline_pictures=True,
            grammar=read_response_format(grammar, "grammar") if grammar else None,
            n=number,
            ranks=True,
            beams=self.beam_params(self.beam_width),
            prompt_logprobs=0 if asked else None,
            rendering=Rendering(details=bool(self.details or asked)),
            prefix=text if full_text else "",
        )


class GenerateBody(Strict, extra="allow"):
    """Fields of all bodies with TGI's parameters."""

    parameters: GenerateParameters | None = None
    webhook: WebhookField | None = None

    def check(self) -> None:
        warn_of_unknown(self.model_extra or {})
        if self.parameters:
            reject_unsupported(self.parameters.model_extra or {}, {}, openai_fields())

    @property
    def adapter_id(self) -> str | None:
        """The adapter that its parameters name."""
        return self.parameters.adapter_id if self.parameters else None


class GenerateRequest(GenerateBody):
    """The body of /generate and /generate_stream."""

    inputs: str = Field(description="The prompt.", json_schema_extra={"minLength": 1})
    resume_s: float | None = RESUME_S
    detached: bool | None = DETACHED


class TokenizeRequest(Strict):
    """The body of /tokenize."""

    inputs: str = Field(description="The text to tokenize.")


class CompatGenerateRequest(GenerateRequest):
    """The body of POST /."""

    stream: bool | None = optional("Stream the tokens. Default: false.")


# --- answers ------------------------------------------------------------------------------------------------


class TextRenderer(ChunkRenderer):
    """A chunk for each token; the last one has the end of the text, and all of it. A beam search has one for
    each sequence, the best first: its last token and its text.
    """

    error = staticmethod(tgi)
    last_chunks = ()
    is_listed = False

    def whole(self) -> WholeBody:
        """The response with the best text; each text begins with the prefix. Its details have the others;
        those of a beam search are shown unasked, and the tokens of all are counted.
        """
        best, *others = rank(self.streams)
        prefix, beams = self.answer.prefix(0), best.request.beams
        response = {"generated_text": prefix + best.text} | logits_fields(best, best.num_tokens)
        if self.answer.rendering.details or (beams and others):
            losers = [{"generated_text": prefix + one.text, **render_details(one)} for one in others]
            details = render_details(best)
            tops = {"top_tokens": details.pop("top_tokens")} if best.tops else {}
            response["details"] = details | ({"best_of_sequences": losers} if losers else {}) | tops
        num_tokens = sum(one.num_tokens for one in ((best, *others) if beams else (best,)))
        return to_json([response] if self.is_listed else response), num_tokens

    def chunks(self) -> Feed | None:
        """None with `best_of`, whose best text is known at the end."""
        return ChunkFeed(self, bytes) if len(self.streams) == 1 else None

    def render_next_chunks(self, choice: Choice) -> list[bytes]:
        stream = choice.stream
        if choice.num_tokens < stream.num_ready and not stream.request.beams:
            choice.num_tokens += 1  # each token has its own text here: none is held back
            return [self.render(choice, choice.num_tokens - 1)]
        tokens = choice.take_piece().tokens
        if is_absent(choice.stream):
            return []
        if not tokens:  # no token is sent twice
            error = ApiError(500, "incomplete_generation_stream", "Incomplete generation stream")
            return [to_json(self.error(error)[1])]
        details = render_details(stream) if stream.request.beams else render_end(stream)
        return [self.render(choice, tokens[-1], details | {"input_length": len(stream.prompt_ids)})]

    def render(self, choice: Choice, i: int, end: dict[str, Any] | None = None) -> bytes:
        """The chunk of token `i`; that of the last one has the `end`."""
        stream = choice.stream
        is_sequence = stream.request.beams is not None
        frame = {"index": choice.index + 1 if is_sequence else i + 1, "token": render_token(stream, i)}
        if stream.tops:
            frame["top_tokens"] = render_top_tokens(stream, i)
        frame["generated_text"] = None if end is None else self.answer.prefix(0) + stream.text
        frame["details"] = end if self.answer.rendering.details else None
        return to_json(frame)


def render_end(stream: Stream) -> dict[str, Any]:
    """The first fields of all `details`."""
    assert stream.terminal is not None
    sampling = stream.request.sampling
    return {
        "finish_reason": stream.terminal.known_reason,
        "generated_tokens": stream.num_tokens,
        "seed": sampling.seed if sampling and sampling.temperature else None,  # null for greedy decoding
        **sequence_scores(stream),
    }


# --- whole texts --------------------------------------------------------------------------------------------


class ListedTextRenderer(TextRenderer):
    """The whole response is the only item of a list."""

    is_listed = True


def render_details(stream: Stream) -> dict[str, Any]:
    """The `details` of a finished text."""
    tokens = range(stream.num_tokens)
    tops = {"top_tokens": [render_top_tokens(stream, i) for i in tokens]} if stream.tops else {}
    prefill: list[dict[str, Any]] = []
    if stream.prompt.records is not None:  # the prompt's tokens, the text of each decoded alone
        scored, decode = stream.prompt.tokens(), stream.tokenizer.backend.decode_batch
        texts = decode([[token_id] for token_id, _, _ in scored], skip_special_tokens=False)
        prefill = [
            {"id": token_id, "text": text, "logprob": logprob}
            for (token_id, logprob, _), text in zip(scored, texts, strict=True)
        ]
    all_tokens = {"prefill": prefill, "tokens": [render_token(stream, i) for i in tokens]}
    return render_end(stream) | all_tokens | tops


def render_token(stream: Stream, i: int) -> dict[str, Any]:
    return describe_token(stream, stream.ids[i], stream.texts[i], stream.logprobs[i])


def render_top_tokens(stream: Stream, i: int) -> list[dict[str, Any]]:
    """The most likely tokens at position `i`; the text of each is decoded alone."""
    text_of = stream.tokenizer.text_of
    return [
        describe_token(stream, token_id, text_of([token_id]), logprob) for token_id, logprob in stream.tops[i]
    ]


def describe_token(stream: Stream, token_id: int, text: str, logprob: float) -> dict[str, Any]:
    special = token_id in stream.tokenizer.special_ids
    return {"id": token_id, "text": text, "logprob": logprob, "special": special}


# --- best_of ------------------------------------------------------------------------------------------------


def rank(streams: Sequence[Stream]) -> list[Stream]:
    """The streams of all texts, the best first: by mean log-probability, or as a beam search ranks them."""
    if streams[0].request.beams:
        return [output for output in all_outputs(streams) if not is_absent(output)]
    return sorted(streams, key=lambda stream: sum(stream.logprobs) / max(1, stream.num_tokens), reverse=True)


# --- routes -------------------------------------------------------------------------------------------------


async def read_generate(body: GenerateRequest, context: Context) -> HttpAnswer:
    """What a body asks for. The text begins with the prompt if `return_full_text` says so; on the route `/`
    that is the default of a model that sees no pictures. Raises ApiError.
    """
    parameters = body.parameters or GenerateParameters()
    full_text = parameters.return_full_text
    if full_text is None:
        full_text = isinstance(body, CompatGenerateRequest) and not context.pool.shows_pictures
    return await context.ask([parameters.of_prompt(body.inputs, context.streamed, full_text)])


EXAMPLE = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 20}}
EVENTS = event_stream([GENERATE_EVENT, ErrorResponse])
GENERATE = Protocol(
    path="/generate",
    name="generate",
    body=GenerateRequest,
    read=read_generate,
    renderer=TextRenderer,
    error=tgi,
    prompt=["inputs"],
    streams=False,
    in_jobs=True,
    tag=TGI,
    errors=GENERATE_ERRORS,
    example=EXAMPLE,
    summary="Generate text",
    description=(
        "Returns the whole text when generation has finished. With `details`, the response has the tokens "
        "with their log-probabilities, the seed and the finish reason."
    ),
    whole=GENERATE_ANSWER,
)
GENERATE_STREAM = GENERATE._replace(
    path="/generate_stream",
    name="generate_stream",
    span="generate_stream",
    streams=True,
    resumable=True,
    prompt=(),
    in_jobs=False,
    summary="Generate a stream of tokens",
    description=(
        "Sends each token as a server-sent event (`data: {…}`) as soon as it is generated. The last "
        "event has the "
        "whole text in `generated_text`. A request that fails midway ends with an event that has `error`."
    ),
    whole=None,
    events=EVENTS,
)
COMPAT_GENERATE = GENERATE._replace(
    path="/",
    name="compat_generate",
    span="compat_generate",
    body=CompatGenerateRequest,
    renderer=ListedTextRenderer,
    streams=None,
    resumable=True,
    prompt=(),
    in_jobs=False,
    summary="Generate text, or a stream of tokens",
    description=(
        "Does what /generate_stream does if `stream` is true, else what /generate does, with the response "
        "in an array of one. The text begins with the prompt unless `return_full_text` is false, or the "
        "model sees pictures."
    ),
    whole=[GENERATE_ANSWER],
    events=EVENTS,
)

info_router = APIRouter(
    responses=error_responses(ErrorResponse, {503: "No worker has been ready yet"}), tags=[TGI]
)


@info_router.get("/info", summary="Model and limits", responses=answer(INFO))
async def info(request: Request) -> Response:
    """Returns the limits of the smallest worker. Once known, they stay when the workers stop."""
    pool = own_pool(request)
    settings, workers = pool.settings, pool.workers
    if not workers.max_total_tokens:
        await workers.refresh_unless_fresh()
    if not workers.max_total_tokens:
        raise unavailable(workers.last_error or "no worker is ready yet")
    limits, tag = workers.limits, "image-text-to-text" if pool.shows_pictures else "text-generation"
    if pool.pooling is not None:
        tag = "feature-extraction" if pool.pooling.kind == EMBED else "text-ranking"
    known = {
        "model_id": settings.model_name,
        "model_sha": settings.revision,
        "model_pipeline_tag": tag,
        "max_concurrent_requests": settings.max_concurrent_requests,
        "max_best_of": settings.max_best_of,
        "max_beam_width": limits.max_beam_width,
        "max_stop_sequences": settings.max_stop_sequences,
        "max_input_tokens": limits.max_input_tokens,
        "max_total_tokens": limits.max_total_tokens,
        "validation_workers": pool.tokenizer.budget.num_threads,
        "max_client_batch_size": limits.max_client_batch_size,
        "router": "tokenfleet",
        "version": version("tokenfleet"),
        "sha": None,
        "docker_label": os.environ.get("DOCKER_LABEL"),
        "adapters": [one.name for one in pool.adapters.registry.ready],
    }
    return json_response(known)


# --- clouds -------------------------------------------------------------------------------------------------


PREDICTIONS = Shape("Predictions", {"predictions": [" Paris."]})
VERTEX_EXAMPLE = {"instances": [{"inputs": "The capital of France is", "parameters": {"max_new_tokens": 20}}]}


class VertexRequest(Strict):
    """The body of /vertex."""  # its instances are read one by one, once their number is checked

    instances: list[SkipValidation[GenerateRequest | ChatRequest]] = Field(
        description="Each is a body of `/generate`, or of `/v1/chat/completions`.",
        json_schema_extra={"minItems": 1},
    )
    webhook: WebhookField | None = None


async def read_vertex(body: VertexRequest, context: Context) -> HttpAnswer:
    """What the instances ask for. Prompts are sampled, unless `do_sample` is false, as in TGI. Raises
    ApiError.
    """
    request = context.request
    assert request is not None
    context.check_number(len(body.instances), "instances")
    prompts, pace = [], Pace()
    for i, one in enumerate(body.instances):
        prompts.append(await read_instance(request, context.pool, one, i))
        await pace.step()
    return await context.ask(prompts)


class PredictionsRenderer(Renderer):
    def whole(self) -> WholeBody:
        outputs = all_outputs(self.streams)
        body = to_json({"predictions": [output.text for output in outputs]})
        return body, sum(output.num_tokens for output in outputs)


async def read_instance(request: Request, pool: Pool, given: Any, i: int) -> GenerationParams:
    """The parameters of one instance. Raises ApiError that names the instance."""
    where = f"instances[{i}]"
    is_chat = isinstance(given, Mapping) and "messages" in given
    kind: Any = ChatRequest if is_chat else GenerateRequest
    try:
        instance: ChatRequest | GenerateRequest = await parse(kind, to_json(given))
        read_terms(request, "", False, instance.resume_s, instance.detached)  # refuses both fields
        pools = pools_of(request)
        named = (instance.model, None) if isinstance(instance, ChatRequest) else (None, instance.adapter_id)
        target = await pools.target(*named)
        adapter = await pool.adapter_of(target, key_of(request))
        one_event = "`webhook` stands beside `instances`: one event tells the end of all"
        not_own = f"`model` must be this fleet's own. Given: {quoted(target.shown)}"
        refuse(
            (instance.webhook, one_event, "webhook"),
            (is_chat and given.get("stream"), "`stream` must be false: the answer has all predictions"),
            (pools.own.settings.pool not in target.pools, not_own, "model"),
        )
        if isinstance(instance, ChatRequest):
            params, num_texts = await read_chat(instance, pool), instance.n or 1
        else:
            parameters = instance.parameters or GenerateParameters()
            params = parameters.of_prompt(instance.inputs, streamed=False, full_text=False)
            if not params.beams:
                params = replace(params, do_sample=parameters.do_sample is not False)
            num_texts = params.n
        check_no_logits(params)
        words = f"`n` must be 1: each instance has one prediction. Given: {quoted(num_texts)}"
        with params.naming():
            refuse((num_texts > 1, words, "n"))
    except ApiError as error:
        text = f"`{where}`: {error.text}"
        raise ApiError(error.status, error.error_type, text, where, error.code) from error
    beams = params.beams and replace(params.beams, num_returned=1)
    return replace(params, beams=beams, adapter=adapter)


VERTEX = Protocol(
    path="/vertex",
    name="vertex",
    span="vertex_compatibility",
    body=VertexRequest,
    read=read_vertex,
    renderer=PredictionsRenderer,
    error=tgi,
    streams=False,
    tag=TGI,
    errors=GENERATE_ERRORS | only(TGI_ERRORS, 404),
    example=VERTEX_EXAMPLE,
    summary="Generate several texts",
    description=(
        "Returns a text for each instance. Prompts are sampled, unless `do_sample` is false, as in TGI."
    ),
    whole=PREDICTIONS,
)
INVOCATIONS = COMPAT_GENERATE._replace(
    path="/invocations",
    name="invocations",
    span="generate",
    resumable=False,
    by_field={"inputs": COMPAT_GENERATE, "messages": CHAT_COMPLETIONS, "prompt": COMPLETIONS},
    summary="Generate as another route does",
    description=(
        "A body with `inputs` is answered as by `/`, one with `messages` as by `/v1/chat/completions`, one "
        "with `prompt` as by `/v1/completions`. Errors are TGI's."
    ),
    whole=([GENERATE_ANSWER], CHAT_COMPLETIONS.whole, COMPLETIONS.whole),
    events=event_stream(
        [GENERATE_EVENT, CHAT_COMPLETION_CHUNK, COMPLETION_CHUNK, ErrorResponse, OpenAIError], "[DONE]"
    ),
)
