"""Completions: the prompts of a body of /v1/completions, validated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from api.answers.answer import Rendering
from api.errors import invalid
from api.event_loop import Pace
from api.grammar.compile import describes_json
from api.openai.params import from_completion, read_prompts
from api.openai.render import echoed_prompt
from api.openai.request_schemas import CompletionRequest
from api.requests.logits import check_size
from api.requests.params import Limits
from api.requests.pool import Pool
from api.requests.validate import validate, with_truncate
from common.messages.request import Generate


@dataclass(frozen=True, slots=True)
class CompletionParams:
    """Validated prompts.

    Attributes:
        requests: one for each choice of each prompt; they have no ids yet.
        prefixes: for each prompt, the text that its choices begin with.
        num_chars: characters of all prompts.
    """

    requests: list[Generate]
    prefixes: list[str]
    rendering: Rendering
    num_chars: int


async def read_completion(
    completion: CompletionRequest, pool: Pool, seed: int | None = None
) -> CompletionParams:
    """Validate the prompts. `seed` is that of a body without one. Raises ApiError."""
    limits, tokenizer = pool.workers.limits, pool.tokenizer
    prompts = read_prompts(completion.prompt)
    check_num_prompts(prompts, limits)
    all_params = from_completion(completion.with_defaults(tokenizer.sampling_defaults), prompts)
    requests, prefixes, pace = [], [], Pace()
    for params in (with_truncate(params, limits) for params in all_params):
        seeded = replace(params, seed=seed) if params.seed is None and seed is not None else params
        choices = await validate(seeded, limits, tokenizer, pool.pictures)
        requests += choices
        prefixes.append(echoed_prompt(completion, params, choices[0], tokenizer))
        await pace.step()
    check_size(requests, limits.settings)
    num_chars = sum(len(params.text or "") for params in all_params)
    rendering = replace(completion.rendering, is_json=describes_json(completion.grammar()))
    return CompletionParams(requests, prefixes, rendering, num_chars)


def check_num_prompts(prompts: Sequence[object], limits: Limits) -> None:
    if len(prompts) > limits.max_client_batch_size:
        raise invalid(
            f"`prompt` supports up to {limits.max_client_batch_size} prompts. Given: {len(prompts)}", "prompt"
        )
