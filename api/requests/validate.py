"""Validation: makes requests of generation parameters, or refuses them by the name of the field at fault."""

from dataclasses import replace
from typing import Any

from api.errors import invalid, quoted
from api.event_loop import offload
from api.grammar.grammar import CompiledGrammar, compile_grammar
from api.prompts.tokenizer import ModelTokenizer
from api.requests.params import (
    GenerationParams,
    Limits,
    check_ids,
    encode_prompt,
    invalid_field,
    max_new_tokens,
    sampling_params,
    with_truncate,
)
from common.messages.records import pack_ids
from common.messages.request import Generate
from common.settings.ranges import BIASES, MAX_STOP_CHARS, RANGES

LISTS_OF_IDS = ("stop_ids", "top_p_reset_ids", "allowed_token_ids")
MAX_LISTED_IDS = 128
MAX_BIASES = 1024
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 128, 200


async def validate(params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer) -> list[Generate]:
    """One request for each of the `n` answers, without what admission adds: id, digest, deadline, channel.

    Raises ApiError (422) naming the field at fault and its limit.
    """
    params = with_truncate(params, limits)
    check(params, limits, tokenizer)
    prompt_ids = await encode_prompt(params, limits, tokenizer)
    own = {"grammar": await grammar_source(params, limits, tokenizer)} | watermark(params, limits)
    params = replace(params, sampling=replace(params.sampling, **own))
    request = Generate(
        request_id="",
        digest="",
        prompt_ids=pack_ids(prompt_ids),
        stopping=replace(params.stopping, max_new_tokens=max_new_tokens(params, len(prompt_ids), limits)),
        sampling=await offload(sum(map(len, params.bad_words)), lambda: sampling_params(params, tokenizer)),
        top_n_tokens=params.top_n_tokens,
        prompt_logprobs=params.prompt_logprobs,
        cache_salt=params.cache_salt,
        num_choices=params.n,
    )
    return [numbered(request, i) for i in range(params.n)]


def check(params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer) -> None:
    """Raises ApiError (422) for parameters that are wrong with any prompt."""
    check_ranges(params)
    check_lists(params, limits, tokenizer)
    check_items(params)
    check_allowed_ids(params, tokenizer)
    check_top_n(params, limits)


def numbered(request: Generate, i: int) -> Generate:
    """The request for answer `i`: sampling draws other random numbers for each."""
    return replace(request, sampling=replace(request.sampling, choice=i)) if request.sampling else request


# --- parameters ---------------------------------------------------------------------------------------------


def check_ranges(params: GenerationParams) -> None:
    for name, allowed in RANGES.items():
        value = params.value(name)
        if value is not None and not allowed.holds(value):
            raise invalid_field(params, name, f"must be {allowed}. Given: {quoted(value)}")


def check_lists(params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer) -> None:
    """How many items a list may have, and what token ids it may name."""
    most = {
        "stop": (limits.settings.max_stop_sequences, "stop sequences"),
        "stop_ids": (MAX_LISTED_IDS, "token ids"),
        "top_p_reset_ids": (MAX_LISTED_IDS, "token ids"),
        "logit_bias": (MAX_BIASES, "token ids"),
        "bad_words": (MAX_BAD_WORDS, "words"),
        "allowed_token_ids": (tokenizer.size, "token ids"),
    }
    for field, (number, what) in most.items():
        if (given := len(params.value(field))) > number:
            raise invalid_field(params, field, f"supports up to {number} {what}. Given: {given}")
    for field in LISTS_OF_IDS:
        check_ids(params, field, params.value(field), tokenizer)
    check_ids(params, "logit_bias", [token_id for token_id, _ in params.sampling.logit_bias], tokenizer)


def check_items(params: GenerationParams) -> None:
    """Stop strings, biases and bad words, one by one."""
    stops = params.stopping.stop
    if "" in stops:
        raise invalid_field(params, "stop", "must not have an empty stop sequence")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_CHARS:
        words = f"must have stop sequences of at most {MAX_STOP_CHARS} characters. Given: {longest}"
        raise invalid_field(params, "stop", words)
    for _, value in params.sampling.logit_bias:
        if not BIASES.holds(value):
            raise invalid_field(params, "logit_bias", f"must have values of {BIASES}. Given: {quoted(value)}")
    for word in params.bad_words:
        if not 0 < len(word.strip()) <= len(word) <= MAX_BAD_WORD_CHARS:
            words = f"must have words of 1 to {MAX_BAD_WORD_CHARS} characters. Given: {len(word.strip())}"
            raise invalid_field(params, "bad_words", words)


def check_allowed_ids(params: GenerationParams, tokenizer: ModelTokenizer) -> None:
    """What may not stand beside `allowed_token_ids`."""
    field, ids = "allowed_token_ids", params.sampling.allowed_token_ids
    if ids and params.grammar is not None:
        raise invalid_field(params, field, "and a structured output or forced calls exclude each other")
    ends = {*params.stopping.stop_ids, *(() if params.stopping.ignore_eos else tokenizer.ending_ids)}
    if ids and params.stopping.min_new_tokens and ends.issuperset(ids):
        raise invalid_field(
            params, field, f"has no token that may come before `{params.name('min_new_tokens')}`"
        )


def check_top_n(params: GenerationParams, limits: Limits) -> None:
    for field in ("top_n_tokens", "prompt_logprobs"):
        number = params.value(field) or 0
        if number > limits.settings.max_top_n_tokens:
            raise invalid_field(
                params, field, f"must be at most {limits.settings.max_top_n_tokens}. Given: {quoted(number)}"
            )


def watermark(params: GenerationParams, limits: Limits) -> dict[str, Any]:
    """The fields of a watermark; none for an answer without one."""
    if not params.watermark:
        return {}
    return {
        "watermark_gamma": limits.settings.watermark_gamma,
        "watermark_delta": limits.settings.watermark_delta,
    }


async def grammar_source(params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer) -> str:
    """The grammar in llguidance's form; "" for none. Raises ApiError, also where structured output is turned
    off.
    """
    grammar = params.grammar
    if grammar is None:
        return ""
    if limits.settings.disable_grammar_support:
        raise invalid(f"`{grammar.field}` is turned off here (DISABLE_GRAMMAR_SUPPORT)", grammar.field)
    if isinstance(grammar, CompiledGrammar):
        return grammar.source
    return await compile_grammar(grammar, tokenizer)
