"""Shapes of the bodies of TGI's routes. Unknown fields are ignored; nothing is converted (`"5"` is no number)."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Parameters(BaseModel):
    """How to generate; a field that is null or absent has its default."""

    model_config = ConfigDict(strict=True)

    max_new_tokens: int | None = Field(default=None, ge=0, description="default: what is left of the context")
    stop: list[str] | None = Field(default=None, description="the answer ends with the first of these, which is part of it")
    truncate: int | None = Field(default=None, ge=0, description="the prompt's last so many tokens are used")
    details: bool | None = None
    ignore_eos: bool | None = None

    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    return_full_text: bool | None = None
    watermark: bool | None = None
    decoder_input_details: bool | None = None
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None


class GenerateRequest(BaseModel):
    """Body of /generate and /generate_stream."""

    model_config = ConfigDict(strict=True)

    inputs: str
    parameters: Parameters | None = None
