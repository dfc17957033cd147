"""What a client may ask for: parameters and lengths within their limits, and nothing that would be silently
ignored.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from api.errors import Refusal, invalid
from api.inference.params import Asked
from api.inference.ranges import BIASES, MAX_STOP_CHARS, RANGES
from api.inference.tokenizer import Vocabulary
from api.offload import aside
from common.messages.messages import TOP_P_MIN, SamplingParams
from common.messages.packing import pack_ids

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
    prompt_logprobs: int | None = None
    sampling: SamplingParams | None = None


async def validate(asked: Asked, limits: Limits, vocabulary: Vocabulary) -> list[Wanted]:
    """One Wanted for each of the `n` answers. Raises Refusal (422) naming the field at fault and its limit."""
    check(asked, limits, vocabulary)
    prompt_ids = await prompt(asked, limits, vocabulary)
    wanted = Wanted(
        prompt_ids=prompt_ids,
        num_chars=len(asked.text or ""),
        max_new_tokens=num_new_tokens(asked, len(prompt_ids), limits),
        stop=asked.stop,
        ignore_eos=asked.ignore_eos,
        min_new_tokens=asked.min_new_tokens,
        stop_ids=asked.stop_ids,
        top_n_tokens=asked.top_n_tokens,
        prompt_logprobs=asked.prompt_logprobs,
        sampling=await aside(sum(map(len, asked.bad_words)), lambda: sampling(asked, vocabulary)),
    )
    return [choice(wanted, i) for i in range(asked.n)]


def check(asked: Asked, limits: Limits, vocabulary: Vocabulary) -> None:
    """Raises Refusal (422) for what is wrong whatever the prompt."""
    check_ranges(asked)
    check_stops(asked, limits, vocabulary)
    check_logits(asked, vocabulary)
    check_top_n(asked, limits)


def choice(wanted: Wanted, i: int) -> Wanted:
    return replace(wanted, sampling=replace(wanted.sampling, choice=i)) if wanted.sampling else wanted


def refuse(asked: Asked, field: str, words: str) -> Refusal:
    """`words` go on from the field's name."""
    return invalid(f"`{asked.name(field)}` {words}", asked.name(field))


# --- parameters ---------------------------------------------------------------------------------------------


def check_ranges(asked: Asked) -> None:
    for name, allowed in RANGES.items():
        value = getattr(asked, name)
        if value is not None and not allowed.holds(value):
            raise refuse(asked, name, f"must be {allowed}. Given: {value}")


def check_stops(asked: Asked, limits: Limits, vocabulary: Vocabulary) -> None:
    if len(asked.stop) > limits.max_stop_sequences:
        raise refuse(
            asked,
            "stop",
            f"supports up to {limits.max_stop_sequences} stop sequences. Given: {len(asked.stop)}",
        )
    if "" in asked.stop:
        raise refuse(asked, "stop", "must not have an empty stop sequence")
    if (longest := max(map(len, asked.stop), default=0)) > MAX_STOP_CHARS:
        raise refuse(
            asked,
            "stop",
            f"must have stop sequences of at most {MAX_STOP_CHARS} characters. Given: {longest}",
        )
    check_id_list(asked, "stop_ids", asked.stop_ids, vocabulary)


def check_logits(asked: Asked, vocabulary: Vocabulary) -> None:
    check_id_list(asked, "top_p_reset_ids", asked.top_p_reset_ids, vocabulary)
    if len(asked.logit_bias) > MAX_BIASES:
        raise refuse(
            asked, "logit_bias", f"supports up to {MAX_BIASES} token ids. Given: {len(asked.logit_bias)}"
        )
    check_ids(asked, "logit_bias", list(asked.logit_bias), vocabulary)
    for value in asked.logit_bias.values():
        if not BIASES.holds(value):
            raise refuse(asked, "logit_bias", f"must have values of {BIASES}. Given: {value}")
    if len(asked.bad_words) > MAX_BAD_WORDS:
        raise refuse(
            asked, "bad_words", f"supports up to {MAX_BAD_WORDS} words. Given: {len(asked.bad_words)}"
        )
    for word in asked.bad_words:
        if not 0 < len(word.strip()) <= len(word) <= MAX_BAD_WORD_CHARS:
            raise refuse(
                asked,
                "bad_words",
                f"must have words of 1 to {MAX_BAD_WORD_CHARS} characters. Given: {len(word.strip())}",
            )


def check_id_list(asked: Asked, field: str, ids: Sequence[int], vocabulary: Vocabulary) -> None:
    if len(ids) > MAX_LISTED_IDS:
        raise refuse(asked, field, f"supports up to {MAX_LISTED_IDS} token ids. Given: {len(ids)}")
    check_ids(asked, field, ids, vocabulary)


def check_ids(asked: Asked, field: str, ids: Sequence[int], vocabulary: Vocabulary) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocabulary.size:
            raise refuse(
                asked,
                field,
                f"must have token ids of at least 0 and below {vocabulary.size}. Given: {token_id}",
            )


def check_top_n(asked: Asked, limits: Limits) -> None:
    if asked.top_n_tokens > limits.max_top_n_tokens:
        raise refuse(
            asked, "top_n_tokens", f"must be at most {limits.max_top_n_tokens}. Given: {asked.top_n_tokens}"
        )


# --- sampling -----------------------------------------------------------------------------------------------


def draws(asked: Asked) -> bool:
    """Whether tokens are drawn: where that is said, or where something is given that makes no sense
    otherwise.
    """
    if asked.temperature is not None and asked.temperature < GREEDY_BELOW:
        return False
    parts = (asked.temperature, asked.top_p, asked.top_p_decay, asked.typical_p)
    return bool(
        asked.do_sample
        or (asked.top_k or 0) > 0
        or asked.min_p
        or any(part not in (None, 1.0) for part in parts)
    )


def sampling(asked: Asked, vocabulary: Vocabulary) -> SamplingParams | None:
    """None for what is greedy, with nothing to change. A seed is found here where none is given."""
    changed = SamplingParams(
        repetition_penalty=given(asked.repetition_penalty, 1.0),
        frequency_penalty=given(asked.frequency_penalty, 0.0),
        presence_penalty=given(asked.presence_penalty, 0.0),
        relative_frequency_penalty=given(asked.relative_frequency_penalty, 0.0),
        logit_bias=[(token_id, float(value)) for token_id, value in asked.logit_bias.items() if value],
        bad_words=[pack_ids(ids) for word in asked.bad_words for ids in vocabulary.spellings(word)],
    )
    if not draws(asked):
        return None if changed == SamplingParams() else replace(changed, raw_logprobs=asked.raw_logprobs)
    return replace(
        changed,
        temperature=given(asked.temperature, 1.0),
        top_k=min(max(asked.top_k or 0, 0), vocabulary.size),
        top_p=given(asked.top_p, 1.0),
        top_p_decay=given(asked.top_p_decay, 1.0),
        top_p_min=given(asked.top_p_min, TOP_P_MIN),
        top_p_reset_ids=pack_ids(asked.top_p_reset_ids),
        min_p=given(asked.min_p, 0.0),
        typical_p=given(asked.typical_p, 1.0),
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
        raw_logprobs=asked.raw_logprobs,
    )


def given(value: float | None, default: float) -> float:
    return default if value is None else float(value)


# --- lengths ------------------------------------------------------------------------------------------------


async def prompt(asked: Asked, limits: Limits, vocabulary: Vocabulary) -> list[int]:
    """The prompt's ids; its last `truncate` ones."""
    field = "text" if asked.prompt_ids is None else "prompt_ids"
    if asked.truncate is not None and asked.truncate > limits.max_input_tokens:
        raise refuse(asked, "truncate", f"must be at most {limits.max_input_tokens}. Given: {asked.truncate}")
    if asked.prompt_ids is not None:
        ids = asked.prompt_ids
    elif asked.text:
        ids = await vocabulary.ids(asked.text, asked.add_special_tokens)
    else:
        raise refuse(asked, field, "cannot be empty")
    ids = ids[-(asked.truncate or 0) :]
    if not ids:
        raise refuse(asked, field, "has no tokens")
    if len(ids) > limits.max_input_tokens:
        raise refuse(asked, field, f"must have at most {limits.max_input_tokens} tokens. Given: {len(ids)}")
    if asked.prompt_ids is not None:
        check_ids(asked, field, ids, vocabulary)
    return ids


def num_new_tokens(asked: Asked, num_prompt_tokens: int, limits: Limits) -> int:
    rest, most = limits.max_total_tokens - num_prompt_tokens, asked.max_new_tokens
    if most is not None and most > rest:
        name, prompt_name = (
            asked.name("max_new_tokens"),
            asked.name("text" if asked.prompt_ids is None else "prompt_ids"),
        )
        raise invalid(
            f"`{prompt_name}` tokens + `{name}` must be at most {limits.max_total_tokens}. "
            f"Given: {num_prompt_tokens} `{prompt_name}` tokens and {most} `{name}`",
            name,
        )
    most = rest if most is None else most
    if asked.min_new_tokens > most:
        raise refuse(asked, "min_new_tokens", f"must be at most {most}. Given: {asked.min_new_tokens}")
    return most
