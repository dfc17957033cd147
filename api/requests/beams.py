"""Beam search in request bodies: its fields, which TGI's and OpenAI's routes share, and what cannot stand
beside them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from api.errors import invalid, quoted
from api.requests.fields import (
    LOGITS_DTYPE,
    RETURN_CONTEXT_LOGITS,
    RETURN_GENERATION_LOGITS,
    LogitsDtype,
    SamplingFields,
    Whole,
    least,
    optional,
    ranged,
    with_one_error,
)
from api.requests.params import GREEDY_BELOW, MAX_BEAM_WIDTH, NEUTRAL, SWITCHES, GenerationParams, Limits
from common.messages.records import group_room
from common.messages.request import BeamParams
from common.settings.ranges import DIVERSITIES, LENGTH_PENALTIES, Range

EarlyStopping = Annotated[
    bool | Literal["never"] | Whole, with_one_error('Input should be true, false, "never" or a whole number')
]
NEVER = 2
"""`BeamParams.early_stopping` for transformers' "never", and for TensorRT-LLM's numbers from 2 on."""
WITHOUT_SEARCH = {"length_penalty": 1.0, "early_stopping": 0, "diversity": 0.0}
"""Fields that mean nothing without a beam search → the value that is accepted all the same."""


class BeamFields(SamplingFields):
    """Sampling parameters, those of a beam search, and which logits are returned."""

    beam_width: Whole | None = least(
        1, "Search for the likeliest sequences, this many at once, in place of sampling."
    )
    length_penalty: float | None = ranged(
        LENGTH_PENALTIES,
        "Of a beam search: the sum of a sequence's log-probabilities is divided by its length to "
        "this power. Default: 1.",
    )
    early_stopping: EarlyStopping | None = optional(
        "Of a beam search: end it with the first `beam_width` sequences that have ended (true, "
        'TensorRT-LLM\'s 1), when no better one is likely (false, 0), or when none is possible ("never", 2). '
        "Default: false.",
        {"enum": [True, False, "never", 0, 1, 2, None]},
    )
    diversity: float | None = ranged(
        DIVERSITIES, "Of a beam search: TensorRT-LLM's `beam_search_diversity_rate`. Default: 0."
    )
    beam_search_diversity_rate: float | None = ranged(DIVERSITIES, "The same as `diversity`.")

    return_context_logits: bool | None = RETURN_CONTEXT_LOGITS
    return_generation_logits: bool | None = RETURN_GENERATION_LOGITS
    logits_dtype: LogitsDtype | None = LOGITS_DTYPE

    def generation_params(self, **others: Any) -> GenerationParams:
        """The parameters that are given, and `others`."""
        return GenerationParams(
            cache_salt=self.cache_salt or "",
            seed=self.seed,
            bad_words=self.bad_words or [],
            context_logits=bool(self.return_context_logits),
            generation_logits=bool(self.return_generation_logits),
            logits_dtype=self.logits_dtype,
            **others,
        )

    def beam_params(self, width: int | None, num_returned: int | None = None) -> BeamParams | None:
        """How a beam search of this width is done; None for no beam search. Raises ApiError (422).

        Args:
            num_returned: sequences that are returned; by default all.
        """
        if None not in (self.diversity, self.beam_search_diversity_rate):
            raise invalid(
                "`diversity` and `beam_search_diversity_rate` exclude each other",
                "beam_search_diversity_rate",
            )
        given = {
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping and stopping_number(self.early_stopping),
            "diversity": self.diversity,
            "beam_search_diversity_rate": self.beam_search_diversity_rate,
        }
        if width is None:
            for name, value in given.items():
                if value is not None and value != WITHOUT_SEARCH.get(name, 0.0):
                    raise invalid(f"`{name}` needs a beam search: set `beam_width`", name)
            return None
        return BeamParams(
            width=width,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=stopping_number(self.early_stopping),
            diversity=self.diversity or self.beam_search_diversity_rate or 0.0,
            num_returned=width if num_returned is None else num_returned,
        )


def stopping_number(early_stopping: bool | str | int | None) -> int:
    """`early_stopping` as `BeamParams` has it."""
    return NEVER if early_stopping == "never" else min(int(early_stopping or 0), NEVER)


# --- validation ---------------------------------------------------------------------------------------------


def check_beams(params: GenerationParams, limits: Limits) -> None:
    """Raises ApiError (422) for a beam search that is out of range, or beside which something stands."""
    beams = params.beams
    if beams is None:
        return
    most = limits.max_beam_width
    setting = "" if most == MAX_BEAM_WIDTH else " (MAX_BATCH_SIZE)"
    check_range(params, "beam_width", Range(1, most), beams.width, setting)
    check_range(params, "num_returned", Range(1, beams.width), beams.num_returned, " (the beam width)")
    check_range(params, "early_stopping", Range(0), beams.early_stopping)
    for name, why in excluded(params):
        text = f"`{params.name(name)}` and a beam search exclude each other: {why}"
        raise invalid(text, params.name(name))


def check_range(
    params: GenerationParams, field: str, allowed: Range, value: float, setting: str = ""
) -> None:
    if not allowed.holds(value):
        name = params.name(field)
        raise invalid(f"`{name}` must be {allowed}{setting}. Given: {quoted(value)}", name)


def excluded(params: GenerationParams) -> Iterator[tuple[str, str]]:
    """Names of parameters that cannot stand beside a beam search, and why."""
    greedy = params.sampling.temperature < GREEDY_BELOW
    sampling = replace(
        params.sampling,
        temperature=NEUTRAL.temperature if greedy else params.sampling.temperature,
        top_k=max(params.sampling.top_k, 0),
    )
    if params.do_sample:
        yield "do_sample", "it draws no token"
    for name in SWITCHES:
        if getattr(sampling, name) != getattr(NEUTRAL, name):
            yield name, "it draws no token"
    if params.n > 1:
        yield "n", "it finds several texts itself"
    if params.watermark:
        yield "watermark", "it would decide between sequences"
    if params.top_n_tokens:
        yield "top_n_tokens", "only the log-probabilities of its own tokens are returned"
    for name in ("context_logits", "generation_logits"):
        if getattr(params, name):
            yield f"return_{name}", "logits of its sequences are not kept"
    if params.prompt_logprobs is not None:
        yield "prompt_logprobs", "only the log-probabilities of its own tokens are returned"


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
        name, widest = params.name("beam_width"), limits.num_blocks - num_prompt // limits.block_size
        raise invalid(
            f"`{name}` must be at most {widest} with this prompt: {why}. Given: {beams.width}", name
        )
    if num_new > most:
        name, width = params.name("max_new_tokens"), params.name("beam_width")
        raise invalid(
            f"`{name}` must be at most {most} with this prompt and `{width}`: {why}. Given: {num_new}", name
        )
    return beams
