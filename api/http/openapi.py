"""OpenAPI: the document at /api-doc/openapi.json, which /docs shows, and what routes say for it.

Each route names the model of its body (`openapi_extra=json_body(…)`), but reads and validates the body itself
(api/http/body.py): FastAPI would read a body of any size, and before the key is checked.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple

from fastapi import FastAPI, Path
from pydantic import TypeAdapter

from common.settings.settings import Settings

SCHEMA_REFERENCE = "#/components/schemas/{model}"

TGI = "TGI API"
KSERVE = "KServe API"
OPENAI = "OpenAI API"
ANTHROPIC = "Anthropic API"
POOLING = "Embeddings and scores"
RESUME = "Resuming"
FLEET = "Fleet"
HEALTH = "Health"
TAGS = [
    {"name": OPENAI, "description": "Chats, completions and responses, as OpenAI's API and vLLM have them."},
    {"name": ANTHROPIC, "description": "Anthropic's Messages API."},
    {"name": TGI, "description": "The API of text-generation-inference."},
    {
        "name": POOLING,
        "description": "Vectors and scores of texts, as OpenAI, Cohere and vLLM "
        "have them, for models that make them.",
    },
    {
        "name": KSERVE,
        "description": "The open inference protocol of KServe and Triton, version 2. Each path may have "
        "`/versions/{version}` after the model's name.",
    },
    {
        "name": RESUME,
        "description": "Requests and streams after a lost connection or a gateway's death, for clients that "
        "asked to come back (`resume_s`, `detached`).",
    },
    {
        "name": HEALTH,
        "description": "Health and metrics, for load balancers and Prometheus. No API key is needed.",
    },
    {"name": FLEET, "description": "The processes of the fleet, and the timeline of a request."},
]


class Shape(NamedTuple):
    """An answer as /docs shows it, and the name of its schema there.

    Attributes:
        example: with all that an answer may have. A key that ends with `?` may be absent, and `...` in an
            object stands for more keys. A tuple has what may stand in one place: the words of an enumeration,
            or an example of each type.
    """

    name: str
    example: Any


RequestId = Annotated[str, Path(description="It is in the header `x-request-id` of the answer.")]
ResponseId = Annotated[str, Path(description="The `id` of a response that was stored.")]
Responses = dict[int | str, dict[str, Any]]
"""A route's `responses`, by status."""
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"} | {
    type(None): "null"
}


def introduction(settings: Settings) -> str:
    """The first paragraphs of /docs, in Markdown."""
    key = ' -H "Authorization: Bearer $API_KEY"' if settings.api_key else ""
    curl = f"curl http://localhost:{settings.port}"
    return f"""
This server generates text with the model `{settings.model_name}`. Try it:

```shell
{curl}/generate{key} -H 'Content-Type: application/json' \\
  -d '{{"inputs": "The capital of France is", "parameters": {{"max_new_tokens": 20}}}}'
```

With a chat model, token by token:

```shell
{curl}/v1/chat/completions{key} -H 'Content-Type: application/json' -N \\
  -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "stream": true}}'
```

Clients for OpenAI's API use the base URL `http://localhost:{settings.port}/v1`; clients for
text-generation-inference use `http://localhost:{settings.port}`.
"""


def json_body(model: Any, example: dict[str, Any]) -> dict[str, Any]:
    """A route's `openapi_extra`: its body is JSON of this model or union; /docs proposes the example."""
    content = {"schema": json_schema(model, "validation"), "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def header(name: str, description: str, **schema: Any) -> dict[str, Any]:
    """A parameter of a route in a header."""
    return {"name": name, "in": "header", "description": description, "schema": schema}


def schema_of(shape: Any) -> dict[str, Any]:
    """The JSON schema of an example (see `Shape`)."""
    match shape:
        case Shape(name, example):
            return {"$ref": SCHEMA_REFERENCE.format(model=name), "$defs": {name: schema_of(example)}}
        case dict() if shape:
            fields = {
                key.removesuffix("?"): schema_of(value) for key, value in shape.items() if key is not ...
            }
            required = [key for key in shape if key is not ... and not key.endswith("?")]
            closed = {} if ... in shape else {"additionalProperties": False}
            return {"type": "object", "properties": fields, "required": required, **closed}
        case list() if shape:
            return {"type": "array", "items": schema_of(tuple(shape))}
        case (one,):
            return schema_of(one)
        case tuple() if sum(isinstance(one, str) for one in shape) > 1:
            return {"enum": [*shape]}
        case tuple():
            return {"anyOf": [schema_of(one) for one in shape]}
    return {"type": TYPES[type(shape)]}


def example_of(shape: Any) -> Any:
    """What /docs shows of a shape."""
    match shape:
        case Shape(_, example):
            return example_of(example)
        case dict():
            return {key.removesuffix("?"): example_of(one) for key, one in shape.items() if key is not ...}
        case list():
            return [example_of(one) for one in shape]
        case (one, *_):
            return example_of(one)
    return shape


def json_answer(shape: Any) -> dict[str, Any]:
    """The content of a response that is JSON of this shape."""
    return {"application/json": {"schema": schema_of(shape), "example": example_of(shape)}}


def answer(shape: Any) -> Responses:
    """A route's `responses` where it succeeds."""
    return {200: {"content": json_answer(shape)}}


def event_stream(shapes: Sequence[Shape], *texts: str) -> dict[str, Any]:
    """The content of a response that is a stream of server-sent events: their data is an object of one of
    these shapes, or one of these texts.
    """
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [schema_of(shape) for shape in shapes]},
    }
    if texts:
        data = {"anyOf": [{"enum": list(texts)}, data]}
    return {
        "text/event-stream": {
            "schema": {"type": "object", "required": ["data"], "properties": {"data": data}}
        }
    }


def error_responses(shape: Shape, descriptions: Mapping[Any, str]) -> Responses:
    """A route's error responses by status; their bodies are of this shape."""
    content = {"application/json": {"schema": schema_of(shape)}}
    return {
        status: {"content": content, "description": description}
        for status, description in descriptions.items()
    }


def only(responses: Responses, *statuses: int) -> Responses:
    """The error responses of a route that has these statuses alone."""
    return {status: responses[status] for status in statuses}


@cache
def json_schema(model: Any, mode: Any) -> dict[str, Any]:
    """The JSON schema of a model or union; what it refers to is under `$defs` (see `hoist_definitions`)."""
    return TypeAdapter(model).json_schema(ref_template=SCHEMA_REFERENCE, mode=mode)


KEY_SCHEMES = {
    "HTTPBearer": {"type": "http", "scheme": "bearer"},
    "APIKeyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""Where a request may have its key."""


def build_document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of an application; it is computed once. Without API_KEY a key is optional: there
    may be others, now or later.
    """
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        security: list[Any] = [{name: []} for name in KEY_SCHEMES]
        if not app.state.settings.api_key:
            security.append({})
        document["components"]["securitySchemes"] = KEY_SCHEMES
        # FastAPI adds a response 422 to each route with parameters: our routes name their errors themselves
        schemas = document["components"]["schemas"]
        del schemas["HTTPValidationError"], schemas["ValidationError"]
        for operation in (one for methods in document["paths"].values() for one in methods.values()):
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
            if "401" in operation["responses"]:
                operation["security"] = security
        definitions: dict[str, Any] = {}
        document["paths"] = hoist_definitions(document["paths"], definitions)
        schemas |= definitions
    return FastAPI.openapi(app)


def hoist_definitions(node: Any, definitions: dict[str, Any]) -> Any:
    """A copy of a JSON value without `$defs`; their content is moved into `definitions`."""
    if isinstance(node, list):
        return [hoist_definitions(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    for name, one in node.get("$defs", {}).items():
        definitions[name] = hoist_definitions(one, definitions)
    return {key: hoist_definitions(value, definitions) for key, value in node.items() if key != "$defs"}


# --- errors -------------------------------------------------------------------------------------------------


OpenAIError = Shape(
    "OpenAIError",
    {
        "error": {
            "message": "`temperature` must be at least 0. Given: -1",
            "type": "invalid_request_error",
            "param": ("temperature", None),
            "code": (None, "context_length_exceeded"),
        }
    },
)
ErrorResponse = Shape("ErrorResponse", {"error": "Input validation error: …", "error_type": "validation"})

CAUSES = {
    401: "The API key is missing or wrong",
    403: "A page of another origin has sent the request",
    404: "There is no such model",
    408: "The deadline passed before the request was finished",
    413: "The body is too large",
    415: "The Content-Type is not application/json",
    429: "Too many requests",
    503: "No worker is ready, or the broker does not answer",
}
"""Causes of errors that mean the same in all APIs, by status."""

OPENAI_ERRORS = error_responses(
    OpenAIError,
    CAUSES
    | {
        400: "The body is not JSON, or the field `param` is wrong or not supported",
        500: "Internal error, or the request failed during generation",
    },
)
"""All error responses by status."""

TGI_ERRORS = error_responses(
    ErrorResponse,
    CAUSES
    | {
        400: "The body is not JSON",
        422: "A field is wrong or not supported",
        424: "The request failed during generation",
        500: "Internal error",
    },
)
"""All error responses by status."""
