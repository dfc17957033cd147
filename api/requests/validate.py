"""Validation: generation parameters, which the routes of each API make of their bodies, become requests, or
are refused by the name of the field at fault. What cannot stand beside a beam search is here, too.
"""

import contextlib
import itertools
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

from api.answers.answer import Rendering
from api.errors import ApiError, invalid, quoted, refuse, too_long, unavailable
from api.event_loop import offload
from api.grammar.compile import Grammar, compile_grammar
from api.prompts.chat_template import Rendered
from api.prompts.pictures import PicturePrompts, PictureSource, ShownPictures
from api.prompts.tokenizer import NUM_BEYOND, ModelTokenizer
from common import tracing
from common.messages.records import group_room, pack_ids
from common.messages.request import BeamParams, Generate, LogitsParams, SamplingParams, StoppingParams
from common.settings.settings import Settings

MAX_BEAM_WIDTH = 8

GREEDY_BELOW = 1e-5
"""A temperature this low is greedy: logits divided by it would leave float32."""
GREEDY = SamplingParams()
NEUTRAL = SamplingParams(temperature=1.0)
SWITCHES = ("temperature", "top_k", "top_p", "top_p_decay", "min_p", "typical_p")
"""Parameters that ask for sampling on their own, where they are not neutral."""
SWITCH_NAMES = ", ".join(f"`{name}`" for name in SWITCHES)
BESIDE_BEAMS: Mapping[str, tuple[object, str]] = {
    "do_sample": (False, "it draws no token"),
    "n": (1, "it finds several texts itself"),
    "watermark": (False, "it would decide between sequences"),
    **dict.fromkeys(
        ("return_context_logits", "return_generation_logits"), (False, "logits of its sequences are not kept")
    ),
    "top_n_tokens": (0, "only the log-probabilities of its own tokens are returned"),
    "prompt_logprobs": (None, "only the log-probabilities of its own tokens are returned"),
}
"""What cannot stand beside a beam search, as SWITCHES cannot → the value that asks for nothing, and why."""
DRAW_ONLY = (*SWITCHES, "top_p_min", "top_p_reset_ids", "seed")
"""Parameters that mean nothing where no token is drawn."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of each request.

    Attributes:
        max_total_tokens: of prompt and new tokens together.
        vocab_size, dtype: of the logits that workers return; 0 if they return none.
        pictures: whether a worker computes pictures.
        model_kind: what people call a model that pools; empty for one that generates.
        num_blocks, block_size: of the smallest KV cache of a worker; 0 if that is not known.
    """

    max_input_tokens: int
    max_total_tokens: int
    settings: Settings
    vocab_size: int = 0
    dtype: str = "float32"
    num_blocks: int = 0
    block_size: int = 0
    pictures: bool = False
    model_kind: str = ""

    @property
    def max_client_batch_size(self) -> int:
        """Prompts of one request."""
        return self.settings.max_client_batch_size or self.settings.max_concurrent_requests

    @property
    def max_beam_width(self) -> int:
        """Sequences that a beam search extends at once: each is a row."""
        return min(MAX_BEAM_WIDTH, self.settings.max_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """One prompt and how to continue it, not yet validated. Defaults change nothing.

    Four parameters stand here because only validation can complete them and move them into `sampling`: `seed`
    (by default random), `bad_words` (words that become token ids), `grammar` (which is compiled) and
    `watermark` (whose strength is the fleet's).

    Attributes:
        prompt, prompt_ids: the prompt, as text or as ids; one of the two is given.
        pictures: those for which `prompt` has markers, in their order.
        has_inline_pictures: whether `![](URL)` in `prompt` is a picture.
        add_special_tokens: whether `prompt` gets the special tokens that the model expects around a prompt; a
            chat template adds them itself.
        truncate: only the last tokens of the prompt are used, this many; TO_FIT: as many as fit.
        cuts_to_room: a `max_new_tokens` beyond the model's context means all that is left of it.
        do_sample: whether tokens are sampled; each of SWITCHES also turns sampling on.
        stopping: 0 of its `max_new_tokens` is all that the context leaves.
        sampling: without `seed`, `choice`, `bad_words`, `grammar` and watermark; its temperature is 1 by
            default.
        top_n_tokens: number of likeliest tokens that are reported with each token.
        prompt_logprobs: number of likeliest tokens that are reported at each place of the prompt, beside the
            prompt's own tokens, with the model's own log-probabilities; None reports nothing of the prompt.
        return_context_logits, return_generation_logits: whether the logits of the prompt, and of the
            generated tokens, are returned.
        logits_dtype: "float32", the default, or "model".
        n: answers to this prompt, each by a request of its own.
        ranks: only the likeliest of them is returned, so each has a seed of its own: that of the response
            samples it again alone.
        beams: how a beam search is done; None samples.
        cache_salt: only requests with the same salt share KV blocks.
        adapter: the key of its adapter, where that is another one than its answer's.
        rendering: how its answer is rendered.
        prefix: the text that its answers begin with; None is the prompt, as it is after `truncate`.
        names: patterns of names that errors have here → names in this API, where these are others.
    """

    prompt: Rendered | None = None
    pictures: Sequence[PictureSource] = ()
    has_inline_pictures: bool = False
    prompt_ids: list[int] | None = None
    add_special_tokens: bool = True
    truncate: int | None = None
    cuts_to_room: bool = False
    stopping: StoppingParams
    do_sample: bool = False
    sampling: SamplingParams
    seed: int | None = None
    bad_words: list[str] = field(default_factory=list)
    grammar: Grammar | None = None
    watermark: bool = False
    top_n_tokens: int = 0
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    logits_dtype: str | None = None
    n: int = 1
    ranks: bool = False
    beams: BeamParams | None = None
    cache_salt: str = ""
    adapter: str = ""
    rendering: Rendering = field(default_factory=Rendering)
    prefix: str | None = ""
    names: Mapping[str, str] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """A parameter's value, here or in `stopping` or `sampling`; None where it is not given."""
        part = next(part for part in (self, self.stopping, self.sampling) if hasattr(part, name))
        return getattr(part, name)

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Errors name parameters as the client wrote them."""
        try:
            yield
        except ApiError as error:
            error.rename(self.names)
            raise


# --- sampling -----------------------------------------------------------------------------------------------


def draws(params: GenerationParams) -> bool:
    """Whether tokens are drawn: `do_sample` says so, or a parameter makes no sense otherwise."""
    if params.sampling.temperature < GREEDY_BELOW or params.beams is not None:
        return False
    return params.do_sample or bool(switched_on(params))


def switched_on(params: GenerationParams) -> list[str]:
    """The names of SWITCHES that are not neutral."""
    sampling = replace(params.sampling, top_k=max(params.sampling.top_k, 0))
    return [name for name in SWITCHES if getattr(sampling, name) != getattr(NEUTRAL, name)]


def sampling_params(params: GenerationParams, tokenizer: ModelTokenizer) -> SamplingParams | None:
    """Complete sampling parameters; None for plain greedy. A seed is chosen where none is given."""
    sampling = replace(
        params.sampling,
        top_k=min(max(params.sampling.top_k, 0), tokenizer.size),
        logit_bias=[(token_id, value) for token_id, value in params.sampling.logit_bias if value],
        bad_words=[ids for word in params.bad_words for ids in tokenizer.spellings(word)],
        seed=secrets.randbits(63) if params.seed is None else params.seed,
    )
    if draws(params):
        return sampling
    greedy = replace(sampling, **{name: getattr(GREEDY, name) for name in DRAW_ONLY})
    return None if replace(greedy, raw_logprobs=False) == GREEDY else greedy


MAX_LOGITS_BYTES = 64 * 2**20
"""Of one answer: the broker and the gateway hold them until it is sent."""
LOGITS_FIELDS = ("return_context_logits", "return_generation_logits")
LISTS_OF_IDS = ("stop_ids", "top_p_reset_ids", "allowed_token_ids")


async def validate(
    params: GenerationParams,
    limits: Limits,
    tokenizer: ModelTokenizer,
    pictures: PicturePrompts,
    seed: int | None = None,
) -> list[Generate]:
    """One request for each of the `n` answers, without what admission adds: id, digest, deadline, channel.
    Its pictures are kept in the broker.

    Raises ApiError (422) naming the field at fault and its limit; 429 or 503 if pictures cannot be kept.

    Args:
        seed: of parameters without one; None draws one.
    """
    with tracing.span("validate"), params.naming():
        check_generates(limits)
        check(params, limits, tokenizer)
        params = replace(params, seed=seed) if params.seed is None else params
        params, shown = await show_pictures(params, limits, pictures)
        requests = await make_requests(params, limits, tokenizer, shown)
        if shown is not None:
            await pictures.keep(shown.loaded)
        return requests


async def show_pictures(
    params: GenerationParams, limits: Limits, pictures: PicturePrompts
) -> tuple[GenerationParams, ShownPictures | None]:
    """The parameters with the placeholders of pictures in the text, and the pictures; None for a prompt
    without any. Raises ApiError.
    """
    prompt, sources = params.prompt, params.pictures
    if prompt is not None and params.has_inline_pictures:
        text, sources = pictures.inline(prompt.text)
        prompt = Rendered(text)
    if prompt is None or not sources:
        return params, None
    shown = await pictures.show(prompt, sources, limits.pictures)
    return replace(params, prompt=shown.prompt), shown


async def make_requests(
    params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer, shown: ShownPictures | None
) -> list[Generate]:
    with tracing.span("tokenize"):
        prompt_ids = await encode_prompt(params, limits, tokenizer)
    own: dict[str, Any] = {"grammar": ""}
    if (grammar := params.grammar) is not None:
        if limits.settings.disable_grammar_support:
            raise invalid(f"`{grammar.field}` is turned off here (DISABLE_GRAMMAR_SUPPORT)")
        if not tokenizer.takes_grammars:
            raise invalid(f"`{grammar.field}` is not served with this model, whose tokens are not bytes")
        own["grammar"] = await compile_grammar(grammar, tokenizer)
    if params.watermark:
        settings = limits.settings
        own |= {"watermark_gamma": settings.watermark_gamma, "watermark_delta": settings.watermark_delta}
    params = replace(params, sampling=replace(params.sampling, **own))
    num_new = max_new_tokens(params, len(prompt_ids), limits)
    sampling = await offload(sum(map(len, params.bad_words)), lambda: sampling_params(params, tokenizer))
    beams = searched_beams(params, len(prompt_ids), num_new, limits)
    request = Generate(
        request_id="",
        digest="",
        prompt_ids=pack_ids(prompt_ids),
        stopping=replace(params.stopping, max_new_tokens=num_new),
        sampling=sampling,
        top_n_tokens=params.top_n_tokens,
        prompt_logprobs=params.prompt_logprobs,
        cache_salt=params.cache_salt,
        num_choices=params.n,
        beams=beams,
        pictures=shown.place(prompt_ids) if shown is not None else [],
        adapter=params.adapter,
    )
    requests = [request] * params.n
    if sampling is not None:  # each draws other numbers
        numbers: list[dict[str, Any]] = [
            {"seed": sampling.seed ^ i} if params.ranks else {"choice": i} for i in range(params.n)
        ]
        requests = [replace(request, sampling=replace(sampling, **one)) for one in numbers]
    return with_logits(requests, params, limits)


def check_generates(limits: Limits) -> None:
    """Raises ApiError (422) if the model makes vectors or scores."""
    if limits.model_kind:
        name = limits.settings.model_name
        raise invalid(f"`{name}` is {limits.model_kind}: it generates no text", "model")


def check(params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer) -> None:
    """Raises ApiError (422) for parameters that are wrong with any prompt."""
    settings, stops = limits.settings, params.stopping.stop
    ids, least = params.sampling.allowed_token_ids, params.stopping.min_new_tokens
    ends = {*params.stopping.stop_ids, *(() if params.stopping.ignore_eos else tokenizer.ending_ids)}
    most = settings.max_stop_sequences
    refuse((len(stops) > most, f"`stop` supports up to {most} stop sequences. Given: {len(stops)}"))
    for name in LISTS_OF_IDS:
        check_ids(name, params.value(name), tokenizer.size)
    check_ids("logit_bias", dict(params.sampling.logit_bias), tokenizer.size)
    no_grammar = "`allowed_token_ids` and a structured output or forced calls exclude each other"
    no_token = "`allowed_token_ids` has no token that may come before `min_new_tokens`"
    refuse(
        (ids and params.grammar is not None, no_grammar),
        (ids and least and ends.issuperset(ids), no_token),
    )
    for name in ("prompt_logprobs", "return_context_logits") if tokenizer.starting_ids else ():
        if params.value(name) is not None and params.value(name) is not False:  # its encoder predicts none
            raise invalid(f"`{name}` is not served with an encoder-decoder model")
    most = settings.max_top_n_tokens
    for name in ("top_n_tokens", "prompt_logprobs"):
        check_most(name, params.value(name) or 0, most)
    check_beams(params, limits)
    check_ranks(params, limits)


# --- prompt and lengths -------------------------------------------------------------------------------------


TO_FIT = -1


def with_truncate(params: GenerationParams, limits: Limits) -> GenerationParams:
    """The parameters with a number for TO_FIT: what `max_new_tokens` leaves of the context."""
    if params.truncate != TO_FIT:
        return params
    room = limits.max_total_tokens - (params.stopping.max_new_tokens or 1)
    return replace(params, truncate=max(1, min(limits.max_input_tokens, room)))


def num_added_first(params: GenerationParams, ids: Sequence[int], tokenizer: ModelTokenizer) -> int:
    """How many of a prompt's first ids are special tokens that its tokenizer has put before its text."""
    if params.prompt is None:
        return 0
    added = tokenizer.encode("", params.add_special_tokens)
    return len([*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, added, strict=False))])


async def encode_prompt(params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer) -> list[int]:
    """The prompt's token ids; where `truncate` is given, so many: its last ones after the special tokens that
    the tokenizer has put before its text. Raises ApiError.
    """
    field = "prompt" if params.prompt_ids is None else "prompt_ids"
    check_most("truncate", params.truncate or 0, limits.max_input_tokens)
    if params.prompt_ids is not None:
        ids = params.prompt_ids
    elif params.prompt is not None and params.prompt.guarded:
        most = limits.max_input_tokens if params.truncate is None else None
        ids = await tokenizer.encode_prompt(params.prompt, params.add_special_tokens, most)
    else:
        raise invalid(f"`{field}` cannot be empty")
    if params.truncate is not None and len(ids) > params.truncate:
        num_first = min(params.truncate, num_added_first(params, ids, tokenizer))
        ids = [*ids[:num_first], *ids[len(ids) - params.truncate + num_first :]]
    if not ids:
        raise invalid(f"`{field}` has no tokens")
    ids = [*ids, *tokenizer.starting_ids]
    if len(ids) > limits.max_input_tokens:
        least = "at least " * (len(ids) > limits.max_input_tokens + NUM_BEYOND)
        words = f"`{field}` must have at most {limits.max_input_tokens} tokens. Given: {least}{len(ids)}"
        raise too_long(words, field, limits.max_total_tokens, (len(ids), limits.max_input_tokens))
    if params.prompt_ids is not None:
        check_ids(field, ids, tokenizer.size)
    check_ids(field, ids, tokenizer.num_embedded)
    return ids


def max_new_tokens(params: GenerationParams, num_prompt_tokens: int, limits: Limits) -> int:
    """How many tokens are generated at most: as many as are asked for; by default, as many as fit after the
    prompt. Raises ApiError.
    """
    room = limits.max_total_tokens - num_prompt_tokens
    least, most = params.stopping.min_new_tokens, params.stopping.max_new_tokens
    if most > room and params.cuts_to_room:
        most = max(1, room)
    if most > room:
        prompt = "prompt" if params.prompt_ids is None else "prompt_ids"
        raise too_long(
            f"`{prompt}` tokens + `max_new_tokens` must be at most {limits.max_total_tokens}. "
            f"Given: {num_prompt_tokens} `{prompt}` tokens and {quoted(most)} `max_new_tokens`",
            "max_new_tokens",
            limits.max_total_tokens,
            (num_prompt_tokens + most, limits.max_total_tokens),
        )
    most = most or min(room, max(1, most_of_beams(params, num_prompt_tokens, limits)))
    check_most("min_new_tokens", least, most)
    return most


def check_most(field: str, given: int, most: int) -> None:
    """Raises ApiError (422) for a number beyond its limit."""
    if given > most:
        raise invalid(f"`{field}` must be at most {most}. Given: {quoted(given)}")


def check_ids(field: str, ids: Collection[int], size: int) -> None:
    """Raises ApiError (422) for ids beyond a vocabulary of this size."""
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < size:
            words = f"must have token ids of at least 0 and below {size}"
            raise invalid(f"`{field}` {words}. Given: {quoted(token_id)}")


# --- logits -------------------------------------------------------------------------------------------------


def streamed_logits(body: BaseModel, streamed: bool | None) -> list[tuple[object, str, str]]:
    """Cases for `refuse`: a stream with logits, which are megabytes, and come with the whole answer."""
    words = "must be false when tokens are streamed"
    return [(streamed and getattr(body, name), f"`{name}` {words}", name) for name in LOGITS_FIELDS]


def check_no_logits(params: GenerationParams) -> None:
    """Raises ApiError (422) for logits at a route whose answers have no place for them."""
    refuse(*((params.value(one), f"`{one}` is not a field of this route") for one in LOGITS_FIELDS))


def with_logits(requests: Sequence[Generate], params: GenerationParams, limits: Limits) -> list[Generate]:
    """The requests of one prompt, with the logits that their answers return: those of the prompt with the
    first one. Raises ApiError (422, 503).
    """
    context, generation = params.return_context_logits, params.return_generation_logits
    if not (context or generation):
        if params.logits_dtype is not None:
            raise invalid(f"`logits_dtype` needs `{LOGITS_FIELDS[0]}` or `{LOGITS_FIELDS[1]}`")
        return [*requests]
    if not limits.vocab_size:
        raise unavailable("no worker that is ready returns logits")
    dtype = limits.dtype if params.logits_dtype == "model" else "float32"
    first = LogitsParams(context, generation, dtype, limits.vocab_size)
    others = replace(first, context=False) if generation else None
    return [replace(request, logits=others if i else first) for i, request in enumerate(requests)]


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


def check_beams(params: GenerationParams, limits: Limits) -> None:
    """Raises ApiError (422) for a beam search that is out of range, or beside which something stands."""
    beams = params.beams
    if beams is None:
        return
    most = limits.max_beam_width
    setting = "" if most == MAX_BEAM_WIDTH else " (MAX_BATCH_SIZE)"
    numbers = (
        ("beam_width", beams.width, most, setting),
        ("num_returned", beams.num_returned, beams.width, " (the beam width)"),
    )
    for name, value, top, why in numbers:
        words = f"must be at least 1 and at most {top}{why}. Given: {quoted(value)}"
        refuse((not 1 <= value <= top, f"`{name}` {words}"))
    refuse((beams.early_stopping < 0, f"`early_stopping` must be at least 0. Given: {beams.early_stopping}"))
    is_greedy = params.sampling.temperature < GREEDY_BELOW
    drawn = [name for name in switched_on(params) if name != "temperature" or not is_greedy]
    given = [name for name, (neutral, _) in BESIDE_BEAMS.items() if params.value(name) != neutral]
    for name in given + drawn:
        _, why = BESIDE_BEAMS.get(name, BESIDE_BEAMS["do_sample"])
        raise invalid(f"`{name}` and a beam search exclude each other: {why}")


def check_ranks(params: GenerationParams, limits: Limits) -> None:
    """Raises ApiError (422) if several texts cannot be ranked, or would all be the same."""
    if not params.ranks or params.n == 1:
        return
    most, given = limits.settings.max_best_of, f"Given: {params.n}"
    logits = params.return_context_logits or params.return_generation_logits
    needs_logprobs = "`n` above 1 compares log-probabilities: `logprobs_mode` must not be logits"
    needs_sampling = f"`n` above 1 needs sampling: set one of `do_sample`, {SWITCH_NAMES}"
    check_most("n", params.n, most)
    refuse(
        (not draws(params), needs_sampling, "n"),
        (params.seed is not None, "`seed` must not be set when `n` is above 1"),
        (params.sampling.report_logits, needs_logprobs, "n"),
        (logits, f"`n` must be 1 when logits are returned. {given}"),
    )


def most_of_beams(params: GenerationParams, num_prompt: int, limits: Limits) -> int:
    """How many new tokens of each sequence a worker's KV cache holds; below 1 if it holds too few sequences
    of this prompt.
    """
    if params.beams is None or not limits.num_blocks:
        return limits.max_total_tokens
    room = group_room(num_prompt, limits.num_blocks, params.beams.width, limits.block_size)
    return room - num_prompt + 1  # the last token is never computed


def searched_beams(
    params: GenerationParams, num_prompt: int, num_new: int, limits: Limits
) -> BeamParams | None:
    """The beam search of a request; None for greedy decoding, which a search of one sequence is. Raises
    ApiError (422) if no KV cache of a worker holds it.

    Args:
        num_prompt, num_new: tokens of the prompt, and the most new ones.
    """
    beams, most = params.beams, most_of_beams(params, num_prompt, limits)
    if beams is None or beams.width == 1:
        return None
    why = "a worker's KV cache holds the prompt once, and the new tokens of each sequence"
    if most < 1:
        widest = limits.num_blocks - num_prompt // limits.block_size
        words = f"must be at most {widest} with this prompt: {why}. Given: {beams.width}"
        raise invalid(f"`beam_width` {words}")
    if num_new > most:
        words = f"must be at most {most} with this prompt and `beam_width`: {why}. Given: {num_new}"
        raise invalid(f"`max_new_tokens` {words}")
    return beams
