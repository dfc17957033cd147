"""Generation parameters as a route makes them, from one flat set of names."""

from dataclasses import fields
from typing import Any

from api.requests.params import GenerationParams
from common.messages.request import SamplingParams, StoppingParams


def generation_params(**params: Any) -> GenerationParams:
    """Make parameters of the prompt `text`."""
    own, stopping, sampling = (
        {field.name: params.pop(field.name) for field in fields(cls) if field.name in params}
        for cls in (GenerationParams, StoppingParams, SamplingParams)
    )
    assert not params
    return GenerationParams(
        stopping=StoppingParams(**stopping),
        sampling=SamplingParams(**{"temperature": 1.0} | sampling),
        **{"text": "a"} | own,
    )
