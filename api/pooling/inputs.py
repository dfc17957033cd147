"""Inputs: makes requests of texts, pairs of texts and token ids that a model pools, or refuses them by the
name of the field at fault.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Encoding, Tokenizer

from api.errors import invalid, quoted, too_long, unavailable
from api.event_loop import Pace
from api.prompts.control_texts import Rendered
from api.requests.params import Limits
from api.requests.pool import Pool
from common.messages.records import pack_ids
from common.messages.request import EMBED, Generate, PoolingParams, StoppingParams
from common.pooling import PoolingConfig

LEFT, RIGHT = "left", "right"


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """One input.

    Attributes:
        text, ids: the input; one of the two is given.
        pair: the second text, if it is a pair.
        where: its name in errors, by the client's own fields.
    """

    where: str
    text: str = ""
    ids: Sequence[int] | None = None
    pair: str | None = None


@dataclass(frozen=True, slots=True)
class InputOptions:
    """How inputs become token ids.

    Attributes:
        truncate: tokens to which longer inputs are cut; None refuses those that are too long, 0 cuts them to
            the most that the model takes.
        side: from which tokens are cut.
        prompt: what is put before each text.
        adds_special: whether special tokens are put around a text.
        cache_salt: only requests with the same salt share KV blocks.
    """

    truncate: int | None = None
    side: str = RIGHT
    prompt: str = ""
    adds_special: bool = True
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class PooledInputs:
    """The requests of an answer.

    Attributes:
        num_chars: characters of all texts.
    """

    requests: list[Generate] = field(default_factory=list)
    num_chars: int = 0


def embedding_of(pool: Pool, route: str) -> PoolingConfig:
    """How an embedding model pools. Raises ApiError if the pool's model is none."""
    pooling, name = any_pooling(pool, route), pool.settings.model_name
    if pooling.kind != EMBED:
        raise invalid(f"`{name}` is {pooling.label}, and {route} needs an embedding model", "model")
    return pooling


def any_pooling(pool: Pool, route: str) -> PoolingConfig:
    """How the pool's model pools. Raises ApiError if it generates text."""
    if pool.pooling is None:
        name = pool.settings.model_name
        why = "generates text; with RUNNER=pooling it makes vectors"
        raise invalid(f"`{name}` {why}, which {route} needs", "model")
    return pool.pooling


async def read_inputs(
    pool: Pool, inputs: Sequence[PoolingInput], options: InputOptions, name: str
) -> PooledInputs:
    """A request for each input, without what admission adds. Raises ApiError.

    Args:
        name: of the field that has them.
    """
    check_workers(pool)
    check_number(inputs, pool.workers.limits, name)
    requests, num_chars, pace = [], 0, Pace()
    for one in inputs:
        requests.append(await make_request(pool, one, options))
        num_chars += len(one.text) + len(one.pair or "")
        await pace.step()
    need, most = sum(request.logits_bytes for request in requests), pool.settings.max_logits_bytes
    if need > most:
        raise invalid(
            f"`{name}` may have at most {most} bytes of vectors (MAX_LOGITS_BYTES). Given: {need} bytes", name
        )
    return PooledInputs(requests, num_chars)


def check_workers(pool: Pool) -> None:
    """Raises ApiError (503) if ready workers only generate, as those of an earlier version do."""
    assert pool.pooling is not None
    kinds = pool.workers.kinds
    if kinds and pool.pooling.kind not in kinds:
        raise unavailable("no worker that is ready makes vectors or scores")


def check_number(inputs: Sequence[object], limits: Limits, name: str) -> None:
    most = limits.max_client_batch_size
    if not inputs:
        raise invalid(f"`{name}` cannot be empty", name)
    if len(inputs) > most:
        raise invalid(f"`{name}` supports up to {most} inputs. Given: {len(inputs)}", name)


async def make_request(pool: Pool, one: PoolingInput, options: InputOptions) -> Generate:
    """The request for one input. Raises ApiError."""
    pooling, limits = pool.pooling, pool.workers.limits
    assert pooling is not None
    most = limits.max_input_tokens
    if options.truncate is not None and options.truncate > most:
        raise invalid(
            f"`truncate_prompt_tokens` must be at most {most}. Given: {quoted(options.truncate)}",
            "truncate_prompt_tokens",
        )
    cut_to = None if options.truncate is None else options.truncate or most
    ids, pair_start = await encode(pool, pooling, one, options, cut_to)
    if not ids:
        raise invalid(f"`{one.where}` cannot be empty", one.where)
    if len(ids) > most:
        words = f"`{one.where}` must have at most {most} tokens. Given: {len(ids)}"
        raise too_long(words, one.where, most)
    params = PoolingParams(pair_start)
    return Generate(
        request_id="",
        digest="",
        prompt_ids=pack_ids(ids),
        stopping=StoppingParams(max_new_tokens=1),
        logits=params.logits(pooling.size),
        pooling=params,
        cache_salt=options.cache_salt,
    )


# --- token ids ----------------------------------------------------------------------------------------------


async def encode(
    pool: Pool, pooling: PoolingConfig, one: PoolingInput, options: InputOptions, cut_to: int | None
) -> tuple[list[int], int]:
    """Token ids of an input, and where the second text of a pair begins, 0 for none. Raises ApiError."""
    if one.ids is not None:
        num_ids = pool.tokenizer.size
        for token_id in one.ids:
            if not 0 <= token_id < num_ids:
                words = f"must have token ids of at least 0 and below {num_ids}. Given: {quoted(token_id)}"
                raise invalid(f"`{one.where}` {words}", one.where)
        return cut_ids(list(one.ids), cut_to, options.side), 0
    if not one.text and one.pair is None:
        raise invalid(f"`{one.where}` cannot be empty", one.where)
    texts = [options.prompt + one.text, *([] if one.pair is None else [one.pair])]
    texts = [text.lower() for text in texts] if pooling.lowers else texts
    backend = pool.tokenizer.backend
    whole = Rendered("".join(texts), None)  # says only how much work it is
    return await pool.tokenizer.run(whole, lambda: encode_texts(backend, texts, options, cut_to))


def cut_ids(ids: list[int], cut_to: int | None, side: str) -> list[int]:
    if cut_to is None or len(ids) <= cut_to:
        return ids
    return ids[:cut_to] if side == RIGHT else ids[-cut_to:]


def encode_texts(
    backend: Tokenizer, texts: Sequence[str], options: InputOptions, cut_to: int | None
) -> tuple[list[int], int]:
    """Token ids of a text or a pair, with the special tokens around what is left of it when it is cut."""
    encodings: list[Encoding] = backend.encode_batch(texts, add_special_tokens=False)
    if cut_to is not None:
        added = backend.num_special_tokens_to_add(len(texts) > 1) if options.adds_special else 0
        lengths = kept_lengths([len(one.ids) for one in encodings], max(0, cut_to - added))
        for one, length in zip(encodings, lengths, strict=True):
            one.truncate(length, direction=options.side)
    first, second = encodings[0], encodings[1] if len(texts) > 1 else None
    whole = backend.post_process(first, second, add_special_tokens=options.adds_special)
    ids: list[int] = whole.ids
    return ids, next((place for place, kind in enumerate(whole.type_ids) if kind == 1), 0)


def kept_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Lengths to which a text, or a pair, is cut: of a pair the longer one first, as transformers cuts it."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    short, long = min(lengths), max(lengths)
    if short + long > room:
        long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return [short, long] if lengths[0] <= lengths[1] else [long, short]
