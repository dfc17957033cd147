"""Log-probabilities in responses: their schemas for /docs, and their shapes in chats and responses, in
completions, and for the prompt (vLLM).

Logits in responses: base64, beside their shape and dtype.
"""

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from tokenizers import Tokenizer

from api.prompts.tokenizer import BYTE_LEVEL
from api.streams.stream import Stream
from common.messages.records import TopTokens

LEAST_LOGPROB = -9999.0
"""OpenAI's value for an impossible token, because JSON has no minus infinity."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
LogprobLists = dict[str, list[Any]]
"""The four lists of COMPLETION_LOGPROBS."""


TOKEN_LOGPROB = {"token": " blue", "logprob": (-0.25, None), "bytes": [32, 98, 108, 117, 101]}
CHAT_LOGPROBS = ({"content": [{**TOKEN_LOGPROB, "top_logprobs": [TOKEN_LOGPROB]}]}, None)
COMPLETION_LOGPROBS = (
    {
        "tokens": [" Paris"],
        "token_logprobs": [-0.25, None],
        "top_logprobs": [{...: ...}, None],
        "text_offset": [24],
    },
    None,
)
PROMPT_LOGPROBS = [{...: ...}, None]
"""Tokens of the prompt, for /docs: by id `logprob`, `rank`, `decoded_token`; null for the first one."""


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of a token; empty for an unknown id. Decoding cannot tell them where a character consists of
    several tokens.
    """
    piece: str = tokenizer.id_to_token(token_id) or ""
    if "ByteLevel(" in repr(tokenizer.decoder) and BYTE_LEVEL.keys() >= set(piece):
        return bytes(BYTE_LEVEL[character] for character in piece)
    if match := BYTE.fullmatch(piece):
        return bytes.fromhex(match[1])
    return piece.replace("▁", " ").encode()


def chat_logprobs(stream: Stream, tokens: Iterable[int], by_id: bool = False) -> list[dict[str, Any]]:
    """An object for each of the tokens with these indices; `by_id` as in `token_name`."""
    return [
        token_logprob(stream, stream.ids[i], stream.logprobs[i], by_id)
        | {
            "top_logprobs": [
                token_logprob(stream, token_id, logprob, by_id)
                for token_id, logprob in (stream.tops[i] if stream.tops else [])
            ]
        }
        for i in tokens
    ]


def token_logprob(stream: Stream, token_id: int, logprob: float, by_id: bool) -> dict[str, Any]:
    shown, name = token_bytes(stream.tokenizer.backend, token_id), token_name(stream, token_id, by_id)
    return {"token": name, "logprob": finite(logprob), "bytes": [*shown]}


def completion_logprobs(
    stream: Stream,
    tokens: Sequence[tuple[int, float | None, TopTokens]],
    offsets: list[int],
    by_id: bool = False,
) -> LogprobLists:
    """The four lists for tokens, each with its id, log-probability and most likely alternatives. The token
    itself is always among the latter; the first token of a prompt has neither. `by_id` as in `token_name`.
    """
    return {
        "tokens": [token_name(stream, token_id, by_id) for token_id, _, _ in tokens],
        "token_logprobs": [None if logprob is None else finite(logprob) for _, logprob, _ in tokens],
        "top_logprobs": [
            None if logprob is None else by_name(stream, [*top, (token_id, logprob)], by_id)
            for token_id, logprob, top in tokens
        ],
        "text_offset": offsets,
    }


def by_name(stream: Stream, tokens: TopTokens, by_id: bool) -> dict[str, float]:
    """The log-probabilities of tokens, the likeliest first: of those with the same name, as parts of
    characters have, the highest.
    """
    found: dict[str, float] = {}
    for token_id, logprob in tokens:
        found.setdefault(token_name(stream, token_id, by_id), finite(logprob))
    return found


def join_logprobs(first: LogprobLists | None, second: LogprobLists) -> LogprobLists:
    return second if first is None else {name: first[name] + second[name] for name in second}


def prompt_logprobs(stream: Stream, num_tops: int) -> list[dict[str, dict[str, Any]] | None]:
    """The log-probabilities of each token of the prompt and of the `num_tops` likeliest tokens in its place;
    null for the first one. A token's rank is known where it is among these.
    """
    found: list[dict[str, dict[str, Any]] | None] = []
    for token_id, logprob, top in stream.prompt.tokens():
        if logprob is None:
            found.append(None)
            continue
        ranked = [(other, value, rank) for rank, (other, value) in enumerate(top[:num_tops], 1)]
        rank = next((rank for other, _, rank in ranked if other == token_id), None)
        found.append(
            {
                str(other): {
                    "logprob": finite(value),
                    "rank": place,
                    "decoded_token": token_name(stream, other),
                }
                for other, value, place in [(token_id, logprob, rank), *ranked]
            }
        )
    return found


def token_name(stream: Stream, token_id: int, by_id: bool = False) -> str:
    """A token's text; with `by_id` its id, as vLLM writes it for tokens whose bytes are no text."""
    if by_id:
        return f"token_id:{token_id}"
    return token_bytes(stream.tokenizer.backend, token_id).decode(errors="replace")


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


# --- beam search --------------------------------------------------------------------------------------------


def sequence_scores(stream: Stream) -> dict[str, float]:
    """The fields of a sequence of a beam search: the sum of its log-probabilities, and its score; none for
    other streams.
    """
    if stream.request.beams is None:
        return {}
    return {"cumulative_logprob": sum(stream.logprobs), "beam_score": stream.score}


ENCODED_AT_ONCE = 3 * 2**16
"""Bytes encoded in one call, a multiple of 3: other threads wait for no longer."""
LOGITS = {"dtype": "float32", "shape": [2, 49152], "data": "AACAPw=="}
"""For /docs: little-endian values, a row for each token, a column for each id."""


def logits_fields(stream: Stream, num_tokens: int) -> dict[str, Any]:
    """The fields `context_logits` and `generation_logits` of a finished stream, those that were requested.

    Args:
        num_tokens: generated tokens that the response has.
    """
    logits, num_prompt = stream.request.logits, len(stream.prompt_ids)
    if logits is None:
        return {}
    rows = [("context_logits", 0, num_prompt)] if logits.context else []
    rows += [("generation_logits", num_prompt - 1, num_tokens)] if logits.generation else []
    values, fields = memoryview(stream.logits or b""), {}
    for name, position, count in rows:
        begin = (position - logits.first_position(num_prompt)) * logits.row_bytes
        own = values[begin : begin + count * logits.row_bytes]
        encoded = (b64encode(own[i : i + ENCODED_AT_ONCE]) for i in range(0, len(own), ENCODED_AT_ONCE))
        data = orjson.Fragment(b'"%b"' % b"".join(encoded))
        fields[name] = {"dtype": logits.dtype, "shape": (count, logits.vocab_size), "data": data}
    return fields
