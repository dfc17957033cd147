"""What a client may ask for: parameters and lengths within their limits, and nothing that would be silently ignored."""

from dataclasses import dataclass, field

from api.errors import invalid
from api.prompt import Vocabulary
from api.schemas_tgi import GenerateRequest, Parameters
from common.messages import Sampling

NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (0, 1),
    "temperature": (1.0,),
    "repetition_penalty": (1.0,),
    "frequency_penalty": (0.0,),
    "top_k": (0,),
    "top_p": (1.0,),
    "typical_p": (1.0,),
    "do_sample": (False,),
    "return_full_text": (False,),
    "watermark": (False,),
    "decoder_input_details": (False,),
    "seed": (),
    "top_n_tokens": (0,),
    "grammar": (),
    "adapter_id": (),
}
"""Parameters that are not served: the values, besides null, that change nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """In tokens, of one request; `max_total_tokens` is prompt and new tokens together."""

    max_input_tokens: int
    max_total_tokens: int
    max_stop_sequences: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client asks for, found valid; one answer of possibly several."""

    prompt_ids: list[int]
    num_chars: int
    max_new_tokens: int
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    min_new_tokens: int = 0
    stop_ids: list[int] = field(default_factory=list)
    top_n_tokens: int = 0
    sampling: Sampling | None = None


async def validate(body: GenerateRequest, limits: Limits, vocabulary: Vocabulary) -> Wanted:
    """Raises Refusal (422) naming the field at fault and its limit."""
    parameters = body.parameters or Parameters()
    refuse_unserved(parameters)
    stop = parameters.stop or []
    check_stop(stop, limits)
    if parameters.max_new_tokens == 0:
        raise invalid("`max_new_tokens` must be strictly positive. Given: 0")
    if not body.inputs:
        raise invalid("`inputs` cannot be empty")
    prompt_ids = truncated(await vocabulary.ids(body.inputs), parameters.truncate, limits)
    return Wanted(
        prompt_ids=prompt_ids,
        num_chars=len(body.inputs),
        max_new_tokens=num_new_tokens(len(prompt_ids), parameters.max_new_tokens, limits),
        stop=stop,
        ignore_eos=parameters.ignore_eos or False,
    )


def refuse_unserved(parameters: Parameters) -> None:
    for name, neutral in NEUTRAL.items():
        value = getattr(parameters, name)
        if value is not None and value not in neutral:
            served = " or ".join(["null", *(f"{one}".lower() for one in neutral)])
            raise invalid(f"`{name}` is not supported yet: only {served} is accepted")


def check_stop(stop: list[str], limits: Limits) -> None:
    if len(stop) > limits.max_stop_sequences:
        raise invalid(f"`stop` supports up to {limits.max_stop_sequences} stop sequences. Given: {len(stop)}")
    if "" in stop:
        raise invalid("`stop` must not have an empty stop sequence")


def truncated(ids: list[int], truncate: int | None, limits: Limits) -> list[int]:
    """The prompt's last `truncate` ids."""
    if truncate is not None:
        if not 0 < truncate <= limits.max_input_tokens:
            raise invalid(f"`truncate` must be strictly positive and at most {limits.max_input_tokens}. Given: {truncate}")
        ids = ids[-truncate:]
    if not ids:
        raise invalid("`inputs` has no tokens")
    if len(ids) > limits.max_input_tokens:
        raise invalid(f"`inputs` must have at most {limits.max_input_tokens} tokens. Given: {len(ids)}")
    return ids


def num_new_tokens(num_prompt_tokens: int, asked: int | None, limits: Limits) -> int:
    rest = limits.max_total_tokens - num_prompt_tokens
    if asked is not None and asked > rest:
        raise invalid(
            f"`inputs` tokens + `max_new_tokens` must be at most {limits.max_total_tokens}. "
            f"Given: {num_prompt_tokens} `inputs` tokens and {asked} `max_new_tokens`"
        )
    return rest if asked is None else asked
