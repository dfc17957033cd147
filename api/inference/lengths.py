"""Lengths: the prompt's token ids, and how many tokens are generated; refuses what does not fit."""

from collections.abc import Sequence
from dataclasses import replace

from api.errors import ApiError, quoted, too_long
from api.inference.limits import Limits
from api.inference.params import GenerationParams, invalid_field
from api.prompt_text.control_texts import Rendered
from api.tokenizer import ModelTokenizer


def with_truncate(params: GenerationParams, limits: Limits) -> GenerationParams:
    """The parameters with a number for `truncates_to_fit`: what `max_new_tokens` leaves of the context."""
    if not params.truncates_to_fit:
        return params
    room = limits.max_total_tokens - (params.max_new_tokens or 1)
    return replace(params, truncate=max(1, min(limits.max_input_tokens, room)), truncates_to_fit=False)


async def encode_prompt(params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer) -> list[int]:
    """The prompt's token ids; the last `truncate` ones where that is given. Raises ApiError."""
    field = "text" if params.prompt_ids is None else "prompt_ids"
    if params.truncate is not None and params.truncate > limits.max_input_tokens:
        raise invalid_field(
            params, "truncate", f"must be at most {limits.max_input_tokens}. Given: {quoted(params.truncate)}"
        )
    if params.prompt_ids is not None:
        ids = params.prompt_ids
    elif params.text:
        check_text(params, limits, tokenizer)
        ids = await tokenizer.encode_prompt(Rendered(params.text, params.guarded), params.add_special_tokens)
    else:
        raise invalid_field(params, field, "cannot be empty")
    ids = ids[-(params.truncate or 0) :]
    if not ids:
        raise invalid_field(params, field, "has no tokens")
    if len(ids) > limits.max_input_tokens:
        raise too_many_tokens(params, field, str(len(ids)), limits)
    if params.prompt_ids is not None:
        check_ids(params, field, ids, tokenizer)
    return ids


def check_text(params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer) -> None:
    """Refuse a text that cannot fit, before it is tokenized."""
    if params.truncate is None and tokenizer.bound is not None:
        num_tokens = tokenizer.bound.least_tokens(params.text or "")
        if num_tokens > limits.max_input_tokens:
            raise too_many_tokens(params, "text", f"at least {num_tokens}", limits)


def too_many_tokens(params: GenerationParams, field: str, given: str, limits: Limits) -> ApiError:
    name, most = params.name(field), limits.max_input_tokens
    return too_long(
        f"`{name}` must have at most {most} tokens. Given: {given}", name, limits.max_total_tokens
    )


def max_new_tokens(params: GenerationParams, num_prompt_tokens: int, limits: Limits) -> int:
    """How many tokens are generated at most: as many as are asked for; by default, as many as fit behind the
    prompt.
    """
    room = limits.max_total_tokens - num_prompt_tokens
    least, most = params.stopping.min_new_tokens, params.max_new_tokens
    if most is not None and most > room:
        name = params.name("max_new_tokens")
        prompt_name = params.name("text" if params.prompt_ids is None else "prompt_ids")
        raise too_long(
            f"`{prompt_name}` tokens + `{name}` must be at most {limits.max_total_tokens}. "
            f"Given: {num_prompt_tokens} `{prompt_name}` tokens and {quoted(most)} `{name}`",
            name,
            limits.max_total_tokens,
        )
    most = room if most is None else most
    if least > most:
        raise invalid_field(params, "min_new_tokens", f"must be at most {most}. Given: {quoted(least)}")
    return most


def check_ids(params: GenerationParams, field: str, ids: Sequence[int], tokenizer: ModelTokenizer) -> None:
    for token_id in ids:
        if not 0 <= token_id < tokenizer.size:
            raise invalid_field(
                params,
                field,
                f"must have token ids of at least 0 and below {tokenizer.size}. Given: {quoted(token_id)}",
            )
