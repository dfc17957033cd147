"""Request bodies of KServe's routes: a text (generate), or prompts as tensors of BYTES (infer)."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator

from api.answers.answer import InferOutputs
from api.errors import invalid
from api.requests.fields import DETACHED, RESUME_S, Listed, Strict, Whole, ranged
from api.requests.params import GenerationParams
from api.tgi.request_schemas import TGI_NAMES, GenerateParameters, GenerateRequest
from api.webhooks.field import WebhookField

TEXT_OUTPUT = "text_output"
"""The name of an output that the client does not name."""
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

    max_tokens: Whole | None = ranged("max_new_tokens", "The same as `max_new_tokens`.")
    min_length: Whole | None = ranged("min_new_tokens", "The same as `min_new_tokens`.")
    stop_words: Listed[str] | None = Field(default=None, description="The same as `stop`.")
    random_seed: Whole | None = ranged("seed", "The same as `seed`.")
    stream: bool | None = Field(
        default=None, description="The path says whether tokens are streamed: true on `…/generate_stream`."
    )
    exclude_input_in_output: bool | None = Field(
        default=None, description="False begins the text with the prompt. Default: true."
    )

    def as_tgi(self) -> tuple[GenerateParameters, dict[str, str]]:
        """The parameters under TGI's names, and the names that the client used. Raises ApiError (422)."""
        values: dict[str, Any] = {}
        used: dict[str, str] = {}
        for alias, name in ALIASES.items():
            value = getattr(self, alias)
            if value is not None and getattr(self, name) is not None:
                raise invalid(f"`{alias}` means the same as `{name}`, which is given, too", alias)
            if value is not None:
                values[name], used[name] = value, alias
        return self.model_copy(update=values), used

    @property
    def wants_full_text(self) -> bool:
        return bool(self.return_full_text) or self.exclude_input_in_output is False


def generation_params(text: str, name: str, parameters: KServeParameters, streamed: bool) -> GenerationParams:
    """The parameters of one prompt, which the client gave in the field `name`. Raises ApiError (422)."""
    tgi_parameters, used = parameters.as_tgi()
    params = GenerateRequest(inputs=text, parameters=tgi_parameters).generation_params(streamed)
    return replace(params, names=TGI_NAMES | used | {"text": name})


class KServeGenerateRequest(Strict):
    """The body of …/generate and …/generate_stream. Parameters may also stand beside `text_input`."""

    text_input: str = Field(description="The prompt.", json_schema_extra={"minLength": 1})
    parameters: KServeParameters = Field(default_factory=KServeParameters)
    resume_s: float | None = RESUME_S
    detached: bool | None = DETACHED
    webhook: WebhookField | None = None

    @model_validator(mode="before")
    @classmethod
    def gather_parameters(cls, body: Any) -> Any:
        """Move what is beside `text_input` into `parameters`, as Triton does."""
        if not isinstance(body, dict) or not isinstance(body.get("parameters") or {}, dict):
            return body
        own = {name: value for name, value in body.items() if name in cls.model_fields}
        others = {name: value for name, value in body.items() if name not in cls.model_fields}
        return own | {"parameters": others | (body.get("parameters") or {})}

    def generation_params(self, streamed: bool) -> GenerationParams:
        """Raises ApiError (422)."""
        if self.parameters.stream not in (None, streamed):
            word, other = ("true", "generate") if streamed else ("false", "generate_stream")
            raise invalid(f"`stream` must be {word} on this path: see …/{other}", "stream")
        return generation_params(self.text_input, "text_input", self.parameters, streamed)


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
            raise invalid(f"`{where}.data` must be texts, or the bytes of one text", f"{where}.data")
        if len(items) != math.prod(self.shape):
            size = math.prod(self.shape)
            raise invalid(f"`{where}.shape` means {size} texts. Given: {len(items)}", f"{where}.shape")
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


class InferRequest(Strict):
    """The body of …/infer."""

    id: str | None = Field(default=None, description="It is repeated in the response.")
    parameters: KServeParameters | None = None
    inputs: Listed[InferTensor] = Field(json_schema_extra={"minItems": 1})
    outputs: Listed[InferOutput] | None = Field(
        default=None,
        description="A name for the output of each input. Default: `text_output`, if there is one input.",
    )
    webhook: WebhookField | None = None

    def prompts(self) -> list[tuple[str, str]]:
        """The text of each prompt, and its field. Raises ApiError (422)."""
        self.check()
        return [
            (text, f"inputs[{i}].data")
            for i, tensor in enumerate(self.inputs)
            for text in tensor.texts(f"inputs[{i}]")
        ]

    def check(self) -> None:
        """Raises ApiError (422) for what cannot be answered, or not in tensors of text."""
        parameters = self.parameters or KServeParameters()
        if parameters.stream:
            raise invalid("`stream` must be false on this path: see …/generate_stream", "stream")
        for name in WITHOUT_PLACE:
            if getattr(parameters, name):
                raise invalid(f"`{name}` has no place in an output of text: see …/generate", name)
        for i, output in enumerate(self.outputs or ()):
            if (output.parameters or {}).get("binary_data"):
                field = f"outputs[{i}].parameters.binary_data"
                raise invalid(f"`{field}` must be false: tensors are JSON", field)
        if len(self.output_names) != len(self.inputs):
            raise invalid("Inputs and outputs length mismatch", "outputs")

    @property
    def output_names(self) -> list[str]:
        return [TEXT_OUTPUT] if self.outputs is None else [output.name for output in self.outputs]

    def describe_outputs(self) -> InferOutputs:
        """How the response is written."""
        named = zip(self.output_names, self.inputs, strict=True)
        return InferOutputs(self.id, [(name, tensor.is_bytes, tensor.shape) for name, tensor in named])
