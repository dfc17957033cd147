"""GenerationParams from the bodies of OpenAI's routes."""

import re
from collections.abc import Mapping
from dataclasses import replace

from api.errors import invalid, quoted
from api.inference.params import GenerationParams
from api.openai.request_schemas import ChatRequest, CompletionRequest
from api.openai.shared_fields import OpenAIRequest
from api.prompt_text.control_texts import Rendered

NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_ids": "stop_token_ids",
    "truncate": "truncate_prompt_tokens",
}
CHAT_NAMES = {**NAMES, "text": "messages", "top_n_tokens": "top_logprobs"}
PROMPT_NAMES = {**NAMES, "text": "prompt", "prompt_ids": "prompt", "top_n_tokens": "logprobs"}
TextsOrIds = list[str] | list[list[int]]
ID = re.compile(r"-?[0-9]{1,10}")


def from_chat(body: ChatRequest, prompt: Rendered) -> GenerationParams:
    """The parameters of a chat whose template rendered `prompt`. Raises ApiError."""
    most, newer = body.max_tokens, body.max_completion_tokens
    if most is not None and newer is not None and most != newer:
        raise invalid(
            "`max_tokens` and `max_completion_tokens` differ: give one of them", "max_completion_tokens"
        )
    if body.top_logprobs and not body.logprobs:
        raise invalid("`top_logprobs` needs `logprobs`: true", "top_logprobs")
    names = CHAT_NAMES if newer is None else CHAT_NAMES | {"max_new_tokens": "max_completion_tokens"}
    return replace(
        common(body, names),
        text=prompt.text,
        guarded=prompt.guarded,
        add_special_tokens=bool(body.add_special_tokens),
        max_new_tokens=most if newer is None else newer,
        top_n_tokens=body.top_logprobs or 0,
        prompt_logprobs=body.rendering.prompt_tops,
    )


def from_completion(body: CompletionRequest, prompts: TextsOrIds) -> list[GenerationParams]:
    """The parameters for each prompt. Raises ApiError."""
    params = replace(
        common(body, PROMPT_NAMES),
        add_special_tokens=body.add_special_tokens is not False,
        max_new_tokens=1 if body.shows_prompt_only else body.max_tokens,
        top_n_tokens=body.logprobs or 0,
        prompt_logprobs=most_prompt_tops(body),
    )
    return [
        replace(params, text=prompt) if isinstance(prompt, str) else replace(params, prompt_ids=prompt)
        for prompt in prompts
    ]


def most_prompt_tops(body: CompletionRequest) -> int | None:
    """The likeliest tokens that are needed at each place of the prompt; None where nothing of it is shown."""
    wanted = [body.rendering.prompt_tops, body.logprobs if body.echo else None]
    return max((number for number in wanted if number is not None), default=None)


def read_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> TextsOrIds:
    """The prompts of a body, each a text or token ids. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("`prompt` cannot be empty", "prompt")
    return [prompt] if isinstance(prompt[0], int) else prompt


def common(body: OpenAIRequest, names: Mapping[str, str]) -> GenerationParams:
    """The parameters that both routes have. The default temperature is 1; `with_defaults` has put the model's
    own values into the body.
    """
    to_fit = body.truncate_prompt_tokens == -1
    return GenerationParams(
        truncate=None if to_fit else body.truncate_prompt_tokens,
        truncates_to_fit=to_fit,
        cache_salt=body.salt(),
        stopping=body.stopping_params(
            body.min_tokens, [body.stop] if isinstance(body.stop, str) else body.stop
        ),
        do_sample=True,
        sampling=body.sampling_params(
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=logit_bias(body.logit_bias or {}),
            raw_logprobs=True,
        ),
        seed=body.seed,
        bad_words=body.bad_words or [],
        grammar=body.grammar(),
        n=1 if body.n is None else body.n,
        names=names,
    )


def logit_bias(biases: Mapping[str, float]) -> list[tuple[int, float]]:
    for key in biases:
        if not ID.fullmatch(key):
            raise invalid(f"`logit_bias` must have token ids as keys. Given: {quoted(key)}", "logit_bias")
    return [*{int(key): value for key, value in biases.items()}.items()]
