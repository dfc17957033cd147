"""Generation parameters as a route makes them, from one flat set of names."""

from dataclasses import fields
from typing import Any

from api.inference.params import GenerationParams
from common.messages.request import SamplingParams, StoppingParams


def generation_params(**given: Any) -> GenerationParams:
    """Of the prompt "a", unless another is given."""
    own, stopping, sampling = (
        {field.name: given.pop(field.name) for field in fields(cls) if field.name in given}
        for cls in (GenerationParams, StoppingParams, SamplingParams)
    )
    assert not given
    return GenerationParams(
        stopping=StoppingParams(**stopping),
        sampling=SamplingParams(**{"temperature": 1.0} | sampling),
        **{"text": "a"} | own,
    )
