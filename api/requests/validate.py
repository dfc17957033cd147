"""Validation: makes requests of generation parameters, or refuses them by the name of the field at fault."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from api.errors import ApiError, invalid, quoted, too_long, unavailable
from api.event_loop import offload
from api.grammar.compile import CompiledGrammar, compile_grammar
from api.prompts.control_texts import Rendered
from api.prompts.pictures import PicturePrompts, ShownPictures
from api.prompts.tokenizer import ModelTokenizer
from api.requests.beams import check_beams, most_of_beams, searched_beams
from api.requests.params import GenerationParams, Limits, sampling_params
from common import tracing
from common.messages.records import pack_ids
from common.messages.request import Generate, LogitsParams
from common.settings.ranges import BIASES, MAX_STOP_CHARS

MAX_LOGITS_BYTES = 64 * 2**20
"""Of one answer: the broker and the gateway hold them until it is sent."""
LOGITS_FIELDS = ("return_context_logits", "return_generation_logits")
LISTS_OF_IDS = ("stop_ids", "top_p_reset_ids", "allowed_token_ids")
MAX_LISTED_IDS = 128
MAX_BIASES = 1024
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 128, 200


async def validate(
    params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer, pictures: PicturePrompts
) -> list[Generate]:
    """One request for each of the `n` answers, without what admission adds: id, digest, deadline, channel.
    Its pictures are kept in the broker.

    Raises ApiError (422) naming the field at fault and its limit; 429 or 503 if pictures cannot be kept.
    """
    with tracing.span("validate"):
        check_generates(limits)
        params = with_truncate(params, limits)
        check(params, limits, tokenizer)
        params, shown = await show_pictures(params, limits, pictures)
        requests = await make_requests(params, limits, tokenizer, shown)
        if shown is not None:
            await pictures.keeper.keep(shown.loaded)
        return requests


async def show_pictures(
    params: GenerationParams, limits: Limits, pictures: PicturePrompts
) -> tuple[GenerationParams, ShownPictures | None]:
    """The parameters with the placeholders of pictures in the text, and the pictures; None for a prompt
    without any. Raises ApiError.
    """
    text, sources, field = params.text or "", params.pictures, params.name("text")
    if params.has_inline_pictures:
        text, sources = pictures.inline(text, field)
    if not sources:
        return params, None
    shown = await pictures.show(Rendered(text, params.guarded), sources, field, limits.pictures)
    return replace(params, text=shown.prompt.text, guarded=shown.prompt.guarded), shown


async def make_requests(
    params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer, shown: ShownPictures | None
) -> list[Generate]:
    with tracing.span("tokenize"):
        prompt_ids = await encode_prompt(params, limits, tokenizer)
    own: dict[str, Any] = {"grammar": ""}
    if (grammar := params.grammar) is not None:
        if limits.settings.disable_grammar_support:
            raise invalid(f"`{grammar.field}` is turned off here (DISABLE_GRAMMAR_SUPPORT)", grammar.field)
        if isinstance(grammar, CompiledGrammar):
            own["grammar"] = grammar.source
        else:
            own["grammar"] = await compile_grammar(grammar, tokenizer)
    if params.watermark:
        settings = limits.settings
        own |= {"watermark_gamma": settings.watermark_gamma, "watermark_delta": settings.watermark_delta}
    params = replace(params, sampling=replace(params.sampling, **own))
    num_new = max_new_tokens(params, len(prompt_ids), limits)
    request = Generate(
        request_id="",
        digest="",
        prompt_ids=pack_ids(prompt_ids),
        stopping=replace(params.stopping, max_new_tokens=num_new),
        sampling=await offload(sum(map(len, params.bad_words)), lambda: sampling_params(params, tokenizer)),
        top_n_tokens=params.top_n_tokens,
        prompt_logprobs=params.prompt_logprobs,
        cache_salt=params.cache_salt,
        num_choices=params.n,
        beams=searched_beams(params, len(prompt_ids), num_new, limits),
        pictures=shown.place(prompt_ids) if shown is not None else [],
    )
    if request.sampling is None:
        return with_logits([request] * params.n, params, limits)
    samplings = [replace(request.sampling, choice=i) for i in range(params.n)]  # each draws other numbers
    requests = [replace(request, sampling=sampling) for sampling in samplings]
    return with_logits(requests, params, limits)


def check_generates(limits: Limits) -> None:
    """Raises ApiError (422) if the model makes vectors or scores."""
    if limits.model_kind:
        name = limits.settings.model_name
        raise invalid(f"`{name}` is {limits.model_kind}: it generates no text", "model")


def check(params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer) -> None:
    """Raises ApiError (422) for parameters that are wrong with any prompt."""
    check_lists(params, limits, tokenizer)
    check_items(params)
    ids, least = params.sampling.allowed_token_ids, params.stopping.min_new_tokens
    if ids and params.grammar is not None:
        words = "and a structured output or forced calls exclude each other"
        raise invalid_field(params, "allowed_token_ids", words)
    ends = {*params.stopping.stop_ids, *(() if params.stopping.ignore_eos else tokenizer.ending_ids)}
    if ids and least and ends.issuperset(ids):
        words = f"has no token that may come before `{params.name('min_new_tokens')}`"
        raise invalid_field(params, "allowed_token_ids", words)
    for field in ("prompt_logprobs", "context_logits"):
        given = params.value(field)
        if tokenizer.starting_ids and given is not None and given is not False:  # its encoder predicts none
            raise invalid_field(params, field, "is not served with an encoder-decoder model")
    most = limits.settings.max_top_n_tokens
    for field in ("top_n_tokens", "prompt_logprobs"):
        if (number := params.value(field) or 0) > most:
            raise invalid_field(params, field, f"must be at most {most}. Given: {quoted(number)}")
    check_beams(params, limits)


# --- parameters ---------------------------------------------------------------------------------------------


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


# --- prompt and lengths -------------------------------------------------------------------------------------


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
        if params.truncate is None and tokenizer.bound is not None:  # one that cannot fit is not tokenized
            num_tokens = tokenizer.bound.least_tokens(params.text)
            if num_tokens > limits.max_input_tokens:
                raise too_many_tokens(params, "text", f"at least {num_tokens}", limits)
        ids = await tokenizer.encode_prompt(Rendered(params.text, params.guarded), params.add_special_tokens)
    else:
        raise invalid_field(params, field, "cannot be empty")
    ids = ids[-(params.truncate or 0) :]
    if not ids:
        raise invalid_field(params, field, "has no tokens")
    ids = [*ids, *tokenizer.starting_ids]
    if len(ids) > limits.max_input_tokens:
        raise too_many_tokens(params, field, str(len(ids)), limits)
    if params.prompt_ids is not None:
        check_ids(params, field, ids, tokenizer)
    return ids


def too_many_tokens(params: GenerationParams, field: str, given: str, limits: Limits) -> ApiError:
    name, most = params.name(field), limits.max_input_tokens
    return too_long(
        f"`{name}` must have at most {most} tokens. Given: {given}", name, limits.max_total_tokens
    )


def max_new_tokens(params: GenerationParams, num_prompt_tokens: int, limits: Limits) -> int:
    """How many tokens are generated at most: as many as are asked for; by default, as many as fit after the
    prompt. Raises ApiError.
    """
    room = limits.max_total_tokens - num_prompt_tokens
    least, most = params.stopping.min_new_tokens, params.max_new_tokens
    if most is not None and most > room and params.cuts_to_room:
        most = max(1, room)
    if most is not None and most > room:
        name = params.name("max_new_tokens")
        prompt_name = params.name("text" if params.prompt_ids is None else "prompt_ids")
        raise too_long(
            f"`{prompt_name}` tokens + `{name}` must be at most {limits.max_total_tokens}. "
            f"Given: {num_prompt_tokens} `{prompt_name}` tokens and {quoted(most)} `{name}`",
            name,
            limits.max_total_tokens,
        )
    most = min(room, max(1, most_of_beams(params, num_prompt_tokens, limits))) if most is None else most
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


# --- errors -------------------------------------------------------------------------------------------------


def invalid_field(params: GenerationParams, field: str, words: str) -> ApiError:
    """`words` continue a sentence that begins with the field's name."""
    return invalid(f"`{params.name(field)}` {words}", params.name(field))


# --- logits -------------------------------------------------------------------------------------------------


def check_not_streamed(body: BaseModel, streamed: bool | None) -> None:
    """Raises ApiError (422) for a stream with logits: they are megabytes, and come with the whole answer."""
    for name in LOGITS_FIELDS:
        if streamed and getattr(body, name):
            raise invalid(f"`{name}` must be false when tokens are streamed", name)


def check_no_logits(params: GenerationParams) -> None:
    """Raises ApiError (422) for logits at a route whose answers have no place for them."""
    for name, given in zip(LOGITS_FIELDS, (params.context_logits, params.generation_logits), strict=True):
        if given:
            raise invalid(f"`{name}` is not a field of this route", name)


def with_logits(requests: Sequence[Generate], params: GenerationParams, limits: Limits) -> list[Generate]:
    """The requests of one prompt, with the logits that their answers return: those of the prompt with the
    first one. Raises ApiError (422, 503).
    """
    if not (params.context_logits or params.generation_logits):
        if params.logits_dtype is not None:
            raise invalid(
                f"`logits_dtype` needs `{LOGITS_FIELDS[0]}` or `{LOGITS_FIELDS[1]}`", "logits_dtype"
            )
        return [*requests]
    if any(request.beams for request in requests):
        name = LOGITS_FIELDS[0] if params.context_logits else LOGITS_FIELDS[1]
        raise invalid(f"`{name}` and a beam search exclude each other", name)
    if not limits.vocab_size:
        raise unavailable("no worker that is ready returns logits")
    dtype = limits.dtype if params.logits_dtype == "model" else "float32"
    first = LogitsParams(params.context_logits, params.generation_logits, dtype, limits.vocab_size)
    others = replace(first, context=False) if params.generation_logits else None
    found = [replace(request, logits=others if i else first) for i, request in enumerate(requests)]
    check_size(found)
    return found


def check_size(requests: Sequence[Generate]) -> None:
    """Raises ApiError (422) if the requests of one answer may return more logits than MAX_LOGITS_BYTES."""
    need = sum(request.logits_bytes for request in requests)
    if need <= MAX_LOGITS_BYTES:
        return
    logits = next(request.logits for request in requests if request.logits)
    names = [
        name for name, given in zip(LOGITS_FIELDS, (logits.context, logits.generation), strict=True) if given
    ]
    rows = need // logits.row_bytes
    raise invalid(
        f"`{'` and `'.join(names)}` may take at most {MAX_LOGITS_BYTES} bytes. "
        f"Given: {need} bytes, for {rows} tokens with {logits.vocab_size} logits of {logits.dtype} each",
        names[0],
    )
