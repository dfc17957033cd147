"""Request bodies of the routes of vectors and scores."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from api.errors import invalid
from api.http.body import reject_unsupported
from api.pooling.inputs import RIGHT, InputOptions
from api.protocols.openai_bodies import Prompt
from api.requests.fields import Listed, Strict, Whole, least, with_one_error
from common.messages.request import SERVICE_CLASSES

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "messages": (),
    "mm_processor_kwargs": (),
    "chat_template": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "bytes_only": (False,),
    "stream": (False,),
    "input_type": (),
    "embedding_types": (["float"],),
    "images": ([],),
    "inputs": (),
    "task": ("embed",),
}
"""Fields of vLLM and Cohere that are not served → values that are accepted."""

TEXTS_SCHEMA: dict[str, Any] = {
    "minLength": 1,
    "minItems": 1,
    "items": {"minLength": 1, "minItems": 1, "minimum": 0, "items": {"minimum": 0}},
}
OneOrMore = Annotated[str | Listed[str], with_one_error("Input should be a text or a list of texts")]
ONE_OR_MORE_SCHEMA: dict[str, Any] = {"minLength": 1, "minItems": 1, "items": {"minLength": 1}}
DOCUMENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["text"],
    "properties": {"text": {"type": "string", "minLength": 1}},
}
DOCUMENTS_SCHEMA: dict[str, Any] = {
    "minItems": 1,
    "items": {"anyOf": [{"type": "string", "minLength": 1}, DOCUMENT_SCHEMA]},
}


class PoolingFields(Strict):
    """Fields of all routes of OpenAI's and vLLM's APIs that bring vectors or scores. `user` and other labels
    are accepted and have no effect.
    """

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(
        default=None,
        description="A model that /v1/models lists. Default: this server's model; empty, `tgi` and `dummy` "
        "mean the same.",
    )
    truncate_prompt_tokens: Whole | None = least(
        -1,
        "The most tokens of an input: longer ones are cut. -1: as many as the model takes. Default: longer "
        "ones are refused.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="From which side tokens are cut. Default: right."
    )
    add_special_tokens: bool | None = Field(
        default=None, description="Add the tokens that the model expects around a text. Default: true."
    )
    cache_salt: str | None = Field(
        default=None,
        description="Only requests with the same salt share what is computed of their prompts (vLLM).",
        json_schema_extra={"minLength": 1},
    )
    priority: Whole | str | None = Field(
        default=None,
        description="vLLM's: the lower, the sooner; or the name of a class. The header `x-priority` comes "
        "before it.",
        json_schema_extra={"anyOf": [{"type": "integer"}, {"enum": [*SERVICE_CLASSES, None]}]},
    )

    def check(self) -> None:
        """Raises ApiError for unsupported fields."""
        reject_unsupported(self.model_extra or {}, UNSUPPORTED, ())
        if self.cache_salt == "":
            raise invalid("`cache_salt` cannot be empty", "cache_salt")
        given, name = self.truncate_prompt_tokens, "truncate_prompt_tokens"
        if given is not None and (given < -1 or given == 0):
            raise invalid(f"`{name}` must be -1 or at least 1. Given: {given}", name)

    def options(self, prompt: str = "") -> InputOptions:
        """How inputs become token ids."""
        cut_to = self.truncate_prompt_tokens
        return InputOptions(
            truncate=None if cut_to is None else max(cut_to, 0),
            side=self.truncation_side or RIGHT,
            prompt=prompt,
            adds_special=self.add_special_tokens is not False,
            cache_salt=self.cache_salt or "",
        )


class EmbeddingRequest(PoolingFields):
    """The body of /v1/embeddings."""

    input: Prompt = Field(
        description="A text, a list of texts, a list of token ids, or a list of such lists.",
        json_schema_extra=TEXTS_SCHEMA,
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None,
        description="`base64`: of the little-endian float32 values; OpenAI's clients ask for it. "
        "Default: float.",
    )
    dimensions: Whole | None = least(
        1, "Keep only the first values of each vector, as models trained for it allow (matryoshka)."
    )
    normalize: bool | None = Field(
        default=None, description="Give vectors the length 1. Default: true (vLLM's field)."
    )
    prompt_name: str | None = Field(
        default=None,
        description="Which of the model's prompts is put before each text (sentence-transformers). Default: "
        "its default one.",
    )
    user: str | None = Field(default=None, description="Accepted, without effect.")


class ScoreRequest(PoolingFields):
    """The body of vLLM's /v1/score."""

    text_1: OneOrMore = Field(
        description="One text for all of `text_2`, or as many.", json_schema_extra=ONE_OR_MORE_SCHEMA
    )
    text_2: OneOrMore = Field(description="The texts that are scored.", json_schema_extra=ONE_OR_MORE_SCHEMA)


class Document(Strict):
    """A document of Cohere's older form."""

    text: str


class RerankFields(PoolingFields):
    """The body of /rerank (Cohere, Jina, vLLM)."""

    query: str = Field(description="What documents are compared with.", json_schema_extra={"minLength": 1})
    documents: Listed[str | Document] = Field(
        description="Texts, or objects with a `text`.", json_schema_extra=DOCUMENTS_SCHEMA
    )
    top_n: Whole | None = least(0, "The best documents to return; 0 and the default return all.")
    return_documents: bool | None = Field(
        default=None, description="Return the texts, too. Default: true, as in vLLM and Jina."
    )

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]
