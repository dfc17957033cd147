"""Bodies of vLLM's routes, described for /docs: requests and responses."""

from pydantic import Field

from api.http.openapi import ApiObject
from api.inference.fields import Listed, Strict, Whole
from api.openai.request_schemas import ChatRequest


class TokenizePromptRequest(Strict):
    """A body of /tokenize with `prompt`."""

    model: str | None = None
    prompt: str = Field(description="The text to tokenize.")
    add_special_tokens: bool | None = Field(
        default=None, description="Add the special tokens that the model puts around a prompt. Default: true."
    )
    return_token_strs: bool | None = Field(
        default=None, description="Return the tokens as the vocabulary has them, too. Default: false."
    )


class TokenizeChatRequest(ChatRequest):
    """A body of /tokenize with `messages`."""

    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Listed[Whole] = Field(description="Token ids.", json_schema_extra={"items": {"minimum": 0}})


class TokenizeResponse(ApiObject):
    count: int
    max_model_len: int | None
    """Most tokens of prompt and generated text together; null until a worker has been ready."""
    tokens: list[int]
    token_strs: list[str] | None
    """The tokens as the vocabulary has them, if requested."""


class DetokenizeResponse(ApiObject):
    prompt: str


class ServerVersion(ApiObject):
    version: str
    """Of this server."""
