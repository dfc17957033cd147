"""What a client may ask for: parameters and lengths within their limits, and nothing that would be silently
ignored.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from api.errors import ApiError, invalid
from api.inference.params import GenerationParams
from api.inference.ranges import BIASES, MAX_STOP_CHARS, RANGES
from api.inference.tokenizer import ModelTokenizer
from api.offload import offload
from common.messages.packing import pack_ids
from common.messages.request import TOP_P_MIN, Generate, SamplingParams, StoppingParams

GREEDY_BELOW = 1e-5
"""A temperature this low is greedy: logits divided by it would leave float32."""
MAX_LISTED_IDS = 128
MAX_BIASES = 1024
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 128, 200


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one request; in tokens, but for the last four. `max_total_tokens` is prompt and new tokens together."""

    max_input_tokens: int
    max_total_tokens: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_best_of: int
    max_client_batch_size: int


async def validate(params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer) -> list[Generate]:
    """One request for each of the `n` answers, without what admission adds: ids, deadline, reader.

    Raises ApiError (422) naming the field at fault and its limit.
    """
    check(params, limits, tokenizer)
    prompt_ids = await prompt(params, limits, tokenizer)
    request = Generate(
        request_id="",
        digest="",
        prompt_ids=pack_ids(prompt_ids),
        stopping=StoppingParams(
            max_new_tokens=num_new_tokens(params, len(prompt_ids), limits),
            min_new_tokens=params.min_new_tokens,
            stop=params.stop,
            stop_ids=params.stop_ids,
            ignore_eos=params.ignore_eos,
        ),
        top_n_tokens=params.top_n_tokens,
        prompt_logprobs=params.prompt_logprobs,
        sampling=await offload(sum(map(len, params.bad_words)), lambda: sampling(params, tokenizer)),
    )
    return [choice(request, i) for i in range(params.n)]


def check(params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer) -> None:
    """Raises ApiError (422) for what is wrong whatever the prompt."""
    check_ranges(params)
    check_stops(params, limits, tokenizer)
    check_logits(params, tokenizer)
    check_top_n(params, limits)


def choice(request: Generate, i: int) -> Generate:
    return replace(request, sampling=replace(request.sampling, choice=i)) if request.sampling else request


def refuse(params: GenerationParams, field: str, words: str) -> ApiError:
    """`words` go on from the field's name."""
    return invalid(f"`{params.name(field)}` {words}", params.name(field))


# --- parameters ---------------------------------------------------------------------------------------------


def check_ranges(params: GenerationParams) -> None:
    for name, allowed in RANGES.items():
        value = getattr(params, name)
        if value is not None and not allowed.holds(value):
            raise refuse(params, name, f"must be {allowed}. Given: {value}")


def check_stops(params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer) -> None:
    if len(params.stop) > limits.max_stop_sequences:
        raise refuse(
            params,
            "stop",
            f"supports up to {limits.max_stop_sequences} stop sequences. Given: {len(params.stop)}",
        )
    if "" in params.stop:
        raise refuse(params, "stop", "must not have an empty stop sequence")
    if (longest := max(map(len, params.stop), default=0)) > MAX_STOP_CHARS:
        raise refuse(
            params,
            "stop",
            f"must have stop sequences of at most {MAX_STOP_CHARS} characters. Given: {longest}",
        )
    check_id_list(params, "stop_ids", params.stop_ids, tokenizer)


def check_logits(params: GenerationParams, tokenizer: ModelTokenizer) -> None:
    check_id_list(params, "top_p_reset_ids", params.top_p_reset_ids, tokenizer)
    if len(params.logit_bias) > MAX_BIASES:
        raise refuse(
            params, "logit_bias", f"supports up to {MAX_BIASES} token ids. Given: {len(params.logit_bias)}"
        )
    check_ids(params, "logit_bias", list(params.logit_bias), tokenizer)
    for value in params.logit_bias.values():
        if not BIASES.holds(value):
            raise refuse(params, "logit_bias", f"must have values of {BIASES}. Given: {value}")
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise refuse(
            params, "bad_words", f"supports up to {MAX_BAD_WORDS} words. Given: {len(params.bad_words)}"
        )
    for word in params.bad_words:
        if not 0 < len(word.strip()) <= len(word) <= MAX_BAD_WORD_CHARS:
            raise refuse(
                params,
                "bad_words",
                f"must have words of 1 to {MAX_BAD_WORD_CHARS} characters. Given: {len(word.strip())}",
            )


def check_id_list(
    params: GenerationParams, field: str, ids: Sequence[int], tokenizer: ModelTokenizer
) -> None:
    if len(ids) > MAX_LISTED_IDS:
        raise refuse(params, field, f"supports up to {MAX_LISTED_IDS} token ids. Given: {len(ids)}")
    check_ids(params, field, ids, tokenizer)


def check_ids(params: GenerationParams, field: str, ids: Sequence[int], tokenizer: ModelTokenizer) -> None:
    for token_id in ids:
        if not 0 <= token_id < tokenizer.size:
            raise refuse(
                params,
                field,
                f"must have token ids of at least 0 and below {tokenizer.size}. Given: {token_id}",
            )


def check_top_n(params: GenerationParams, limits: Limits) -> None:
    if params.top_n_tokens > limits.max_top_n_tokens:
        raise refuse(
            params, "top_n_tokens", f"must be at most {limits.max_top_n_tokens}. Given: {params.top_n_tokens}"
        )


# --- sampling -----------------------------------------------------------------------------------------------


def draws(params: GenerationParams) -> bool:
    """Whether tokens are drawn: where that is said, or where something is given that makes no sense
    otherwise.
    """
    if params.temperature is not None and params.temperature < GREEDY_BELOW:
        return False
    parts = (params.temperature, params.top_p, params.top_p_decay, params.typical_p)
    return bool(
        params.do_sample
        or (params.top_k or 0) > 0
        or params.min_p
        or any(part not in (None, 1.0) for part in parts)
    )


def sampling(params: GenerationParams, tokenizer: ModelTokenizer) -> SamplingParams | None:
    """None for what is greedy, with nothing to change. A seed is found here where none is given."""
    changed = SamplingParams(
        repetition_penalty=given(params.repetition_penalty, 1.0),
        frequency_penalty=given(params.frequency_penalty, 0.0),
        presence_penalty=given(params.presence_penalty, 0.0),
        relative_frequency_penalty=given(params.relative_frequency_penalty, 0.0),
        logit_bias=[(token_id, float(value)) for token_id, value in params.logit_bias.items() if value],
        bad_words=[ids for word in params.bad_words for ids in tokenizer.spellings(word)],
    )
    if not draws(params):
        return None if changed == SamplingParams() else replace(changed, raw_logprobs=params.raw_logprobs)
    return replace(
        changed,
        temperature=given(params.temperature, 1.0),
        top_k=min(max(params.top_k or 0, 0), tokenizer.size),
        top_p=given(params.top_p, 1.0),
        top_p_decay=given(params.top_p_decay, 1.0),
        top_p_min=given(params.top_p_min, TOP_P_MIN),
        top_p_reset_ids=params.top_p_reset_ids,
        min_p=given(params.min_p, 0.0),
        typical_p=given(params.typical_p, 1.0),
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        raw_logprobs=params.raw_logprobs,
    )


def given(value: float | None, default: float) -> float:
    return default if value is None else float(value)


# --- lengths ------------------------------------------------------------------------------------------------


async def prompt(params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer) -> list[int]:
    """The prompt's ids; its last `truncate` ones."""
    field = "text" if params.prompt_ids is None else "prompt_ids"
    if params.truncate is not None and params.truncate > limits.max_input_tokens:
        raise refuse(
            params, "truncate", f"must be at most {limits.max_input_tokens}. Given: {params.truncate}"
        )
    if params.prompt_ids is not None:
        ids = params.prompt_ids
    elif params.text:
        ids = await tokenizer.ids(params.text, params.add_special_tokens)
    else:
        raise refuse(params, field, "cannot be empty")
    ids = ids[-(params.truncate or 0) :]
    if not ids:
        raise refuse(params, field, "has no tokens")
    if len(ids) > limits.max_input_tokens:
        raise refuse(params, field, f"must have at most {limits.max_input_tokens} tokens. Given: {len(ids)}")
    if params.prompt_ids is not None:
        check_ids(params, field, ids, tokenizer)
    return ids


def num_new_tokens(params: GenerationParams, num_prompt_tokens: int, limits: Limits) -> int:
    rest, most = limits.max_total_tokens - num_prompt_tokens, params.max_new_tokens
    if most is not None and most > rest:
        name, prompt_name = (
            params.name("max_new_tokens"),
            params.name("text" if params.prompt_ids is None else "prompt_ids"),
        )
        raise invalid(
            f"`{prompt_name}` tokens + `{name}` must be at most {limits.max_total_tokens}. "
            f"Given: {num_prompt_tokens} `{prompt_name}` tokens and {most} `{name}`",
            name,
        )
    most = rest if most is None else most
    if params.min_new_tokens > most:
        raise refuse(params, "min_new_tokens", f"must be at most {most}. Given: {params.min_new_tokens}")
    return most
