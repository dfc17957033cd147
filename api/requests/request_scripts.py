"""Requests in Redis: one function for each Lua script that gateways run for requests and stored responses,
and what a request there says of its reader and its life.

A function of a script returns the call; a client sends it, as `PoolClient.run` does, and returns what the
reply means.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from api.answers.answer import HttpAnswer
from api.errors import asking_broker
from common.api_keys import ApiKey
from common.broker.keys import TOKENS_TTL_MS, Keys
from common.broker.lua import Args, ScriptCall, call_script, decode_all
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.request import Cancel, Generate, Resume, prompt_hashes
from common.settings.settings import Settings


class KeyCharge(NamedTuple):
    """What a request takes of the rates of its API key.

    Attributes:
        key: its record.
        num_requests: 1, or 0 for a further choice of a request that was counted.
        num_asked, num_answer: tokens of its prompt, unless another choice has counted them, and of its answer
            at most.
    """

    key: ApiKey
    num_requests: int
    num_asked: int
    num_answer: int


class LeftOfRates(NamedTuple):
    """What is left of the rates of an API key in this minute."""

    requests: float
    tokens: float


class AdmitReply(NamedTuple):
    """What became of a request.

    Attributes:
        outcome: `admitted`, `attached`, `conflict`; or what there is no room for: `requests`, `tokens`,
            `bytes`, `tenant`; and of its API key `key_live`, `key_requests`, `key_tokens`, `budget`.
        entry_id: of one that was admitted.
        num_counted, wait_ms: of one without room: what was counted, and when there may be room.
        left: None without an API key.
    """

    outcome: str
    entry_id: str = ""
    num_counted: int = 0
    wait_ms: int = 0
    left: LeftOfRates | None = None


def admit(
    keys: Keys,
    request: Generate,
    *,
    payload: bytes,
    answer: bytes,
    weight: float,
    max_requests: int,
    max_bytes: int,
    charge: KeyCharge | None = None,
) -> ScriptCall[AdmitReply]:
    """Admit a request if its class, its tenant and its API key have room.

    Args:
        payload: the request as its entry has it.
        answer: the answer that it begins, or b"".
        weight: of its tenant.
        charge: None without an API key.
    """
    charged: Sequence[int] = ()
    if charge is not None:
        key = charge.key
        limits = (key.max_concurrent, key.requests_per_minute, key.tokens_per_minute)
        charged = (*limits, charge.num_requests, charge.num_asked, charge.num_answer)
    args: Args = {
        "payload": payload,
        "max_requests": max_requests,
        "max_bytes": max_bytes,
        "answer": answer,
        "weight": weight,
        **request_args(keys, request),
    }
    return call_script(
        "admit",
        read_admit_reply,
        keys,
        request.request_id,
        args=args,
        more_keys=[keys.tenants(request.service_class)],
        more_args=charged,
    )


def request_args(keys: Keys, request: Generate) -> Args:
    """What both `admit` and `offer` store of a request."""
    return {
        "key": keys.key_use(request.key_id) if request.key_id else "",
        "digest": request.digest,
        "channel": request.channel,
        "gateway": request.gateway,
        "width": request.width,
        "service_class": request.service_class,
        "tenant": request.tenant,
        "num_prompt": request.num_prompt,
        "logits_bytes": request.logits_bytes,
        "account": request.account_text,
        "webhook": request.webhook,
    }


def entry_of(request: Generate) -> bytes:
    """A request as batcher and workers get it: secrets of webhooks are none of theirs."""
    return encode(replace(request, webhook=b"") if request.webhook else request)


def read_admit_reply(reply: list[Any]) -> AdmitReply:
    outcome, *rest = reply
    if not rest:
        return AdmitReply(outcome.decode())
    *found, requests, tokens = rest
    left = LeftOfRates(float(requests), float(tokens)) if requests else None
    if outcome == b"admitted":
        return AdmitReply("admitted", found[0].decode(), left=left)
    num_counted, wait_ms = found
    return AdmitReply(outcome.decode(), "", num_counted, wait_ms, left)


class OfferReply(NamedTuple):
    """What became of a request that its gateway offered.

    Attributes:
        outcome: `kept`, `ended`, `superseded`, `foreign`, `queued` or `void`.
        attempt: where it is queued or its run is void: tokens of earlier attempts no longer count. Else 0.
    """

    outcome: str
    attempt: int = 0


def offer(
    keys: Keys,
    request: Generate,
    *,
    made_by: str,
    made_in: int,
    records: bytes,
    prompt_records: bytes,
    num_cached: int | None,
    reopen: bool,
    answer: bytes,
    reader: int,
    connection: int,
) -> ScriptCall[OfferReply]:
    """Offer a request as its gateway knows it, with the `request.num_shown` tokens that its client has.

    Args:
        made_by, made_in: worker and attempt that made the last of these tokens.
        records: of these tokens.
        prompt_records: of the prompt's tokens, or b"".
        num_cached: tokens of the prompt that were cached, where known.
        reopen: whether to queue it again though it has ended, as that was with other tokens.
        answer: the answer that it begins, or b"".
        reader, connection: numbers of its reader, and of the one on whose connection the answer is written.
    """
    args: Args = {
        "payload": entry_of(request),
        "made_by": made_by,
        "made_in": made_in,
        "num_tokens": request.num_shown,
        "records": records,
        "prompt_records": prompt_records,
        "num_cached": "" if num_cached is None else num_cached,
        "ttl_ms": TOKENS_TTL_MS,
        "resume": encode(Resume(request.request_id)),
        "reopen": int(reopen),
        "answer": answer,
        "reader": reader,
        "connection": connection,
        **request_args(keys, request),
    }
    return call_script(
        "offer", lambda reply: OfferReply(reply[0].decode(), *reply[1:]), keys, request.request_id, args=args
    )


async def cancel_request(
    pool: PoolClient, request_id: str, reader: int | None = None, digest: str = ""
) -> bool:
    """Cancel a request; with `reader` and `digest`, only if they are its own. Return False if they are not,
    or if it has ended or is not known.
    """
    payload, number = encode(Cancel(request_id, "client")), "" if reader is None else reader
    args: Args = {"payload": payload, "reader": number, "digest": digest}
    return await pool.run(call_script("cancel", bool, pool.keys, request_id, args=args))


class AttachReply(NamedTuple):
    """Whether requests have another reader now.

    Attributes:
        outcome: `attached`, `cancelled`, `gone` or `superseded`.
        reader: its number.
        digests: of the requests.
    """

    outcome: str
    reader: int = 0
    digests: Sequence[str] = ()


def attach(
    keys: Keys, request_ids: Iterable[str], *, gateway: str, inherited: int | None
) -> ScriptCall[AttachReply]:
    """Give all requests of an answer another reader.

    Args:
        inherited: number of the reader whose connection it has; None for a connection of its own.
    """
    return call_script(
        "attach",
        read_attach_reply,
        keys,
        args={"gateway": gateway, "inherited": "" if inherited is None else inherited},
        more_keys=[keys.request(name) for name in request_ids],
    )


def read_attach_reply(reply: list[Any]) -> AttachReply:
    if reply[0] != b"attached":
        return AttachReply(reply[0].decode())
    return AttachReply("attached", reply[1], decode_all(reply[2]))


def forget(keys: Keys, request: Generate, *, reader: int) -> ScriptCall[bool]:
    """Delete a request that was answered. False if it has another reader, or its id is another request's."""
    args: Args = {"reader": reader, "digest": request.digest}
    return call_script("forget", bool, keys, request.request_id, args=args)


# --- address ------------------------------------------------------------------------------------------------


MAX_STORED = 10_000
"""Stored responses of a pool, and answers kept for an Idempotency-Key; each choice is one."""
GATEWAY_GRACE_S = 30.0
"""How long a request lives on after its gateway died."""

REQUEST_KEY_MARGIN_S = 60.0


def address(settings: Settings, gateway: str, request: Generate, answer: HttpAnswer) -> Generate:
    """A choice's request with its digest, the gateway that is its reader, and how long its answer
    lives. One that goes on up to its deadline belongs to no gateway.
    """
    terms = answer.terms
    kept_s = max(settings.request_timeout_s, terms.kept_s)  # for slow clients of a gateway that has died
    if len(answer.requests) > 1:  # the first choice that ends must outlive the last one
        kept_s = max(kept_s, request.ttl_ms / 1000 + REQUEST_KEY_MARGIN_S)
    is_free = terms.goes_on_s == math.inf
    goes_on_s = GATEWAY_GRACE_S if terms.goes_on_s is None else terms.goes_on_s
    content = replace(
        request,
        channel=Keys(settings.pool).events(gateway),
        gateway="" if is_free else gateway,
        goes_on_ms=0 if is_free else round(1000 * goes_on_s),
        kept_ms=round(1000 * kept_s),
    )
    digest = hashlib.blake2b(encode(replace(content, account=None, webhook=b"")), digest_size=16).hexdigest()
    logits = request.logits and (request.pooling is None or request.logits.context)
    whole = request.prompt_logprobs is not None or logits or not settings.prefix_caching
    hashes = b"" if whole else prompt_hashes(request)
    return replace(content, digest=digest, block_hashes=hashes)


# --- kept answers -------------------------------------------------------------------------------------------


async def count_stored(
    client: PoolClient, settings: Settings, request_ids: Iterable[str], kept_s: float
) -> None:
    """Count admitted requests whose answer will be kept for `kept_s` after its end, and delete the oldest
    ones beyond MAX_STORED. One that has not ended stays until it expires. Raises ApiError (503).
    """
    ttl_s = round(kept_s + settings.request_timeout_s)
    async with asking_broker():
        for request_id in request_ids:
            args: Args = {"request_id": request_id, "ttl_s": ttl_s, "max_kept": MAX_STORED}
            for other in await client.run(call_script("keep_response", decode_all, client.keys, args=args)):
                await delete_ended(client, other)


async def delete_ended(client: PoolClient, request_id: str) -> bool:
    """Delete a kept request that has ended. Returns False if it has not."""
    args = {"request_id": request_id}
    return await client.run(call_script("delete_response", bool, client.keys, request_id, args=args))
