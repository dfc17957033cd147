"""Response bodies of KServe's routes, described for /docs. `api/protocols/kserve.py` makes them."""

from typing import Any

from api.http.openapi import Absent, ApiObject, ErrorResponses
from api.tgi.response_schemas import ERROR_RESPONSES, GenerationDetails, Token


class LiveResponse(ApiObject):
    live: bool


class ModelReady(ApiObject):
    name: str
    ready: bool


class ServerMetadata(ApiObject):
    """The server, or a version of a model, as TGI describes them."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(ApiObject):
    name: str
    datatype: str
    shape: list[int]
    """-1: any number of texts."""


class ModelMetadata(ApiObject):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class OutputTensor(ApiObject):
    name: str
    shape: list[int]
    datatype: str
    data: list[int] | list[str]
    """The bytes of one text, or texts: as the input was given."""


class InferResponse(ApiObject):
    model_name: str = Absent
    model_version: str = Absent
    id: str = Absent
    outputs: list[OutputTensor]


class TextDetails(GenerationDetails):
    """How the text was generated; its tokens are in `logprobs`."""

    tokens: Any = Absent
    logprobs: list[Token]


class TextResponse(ApiObject):
    model_name: str
    model_version: str
    text_output: str
    details: TextDetails = Absent
    """Absent unless requested."""


class TextChunkDetails(ApiObject):
    finish_reason: str | None
    """Null before the last event."""
    token: Token
    top_tokens: list[Token] = Absent
    generated_tokens: int = Absent
    seed: int | None = Absent
    input_length: int = Absent


class TextChunk(ApiObject):
    """One event, `data: {…}`, with the text that a token adds."""

    model_name: str
    model_version: str
    text_output: str
    details: TextChunkDetails = Absent
    """Absent unless requested."""


class KServeError(ApiObject):
    error: str
    """What is wrong."""


ERRORS: ErrorResponses = {
    status: response | {"model": KServeError} for status, response in ERROR_RESPONSES.items()
}
"""All error responses by status."""
