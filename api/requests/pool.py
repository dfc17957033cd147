"""Pools: all that a gateway needs to reach the workers of one. A request is put on its queue, or refused, and
cancelled and deleted when nobody reads its stream any more. A client is told of the rates of its API key as
by OpenAI's API: in headers of the answer, and in the error of a request beyond a limit.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from redis.exceptions import AuthenticationError, BusyLoadingError, ConnectionError, ResponseError

from api.answers.answer import AnswerTerms, HttpAnswer
from api.answers.call_formats import (
    CALL_FORMAT_ALIASES,
    CALL_FORMATS,
    REASONING_FORMATS,
    CallFormat,
    ReasoningFormat,
    find_call_format,
    find_reasoning_format,
)
from api.errors import (
    ApiError,
    broker_errors,
    conflict,
    cut,
    insufficient_quota,
    invalid,
    model_not_found,
    overloaded,
    unavailable,
)
from api.event_loop import attempt, background_task, retry_forever
from api.http.auth import KeyRing
from api.http.body import Repeated
from api.prompts.pictures import PicturePrompts
from api.prompts.tokenizer import ModelTokenizer
from api.requests import metrics, request_scripts
from api.requests.metrics import seconds_to_next_month
from api.requests.monitors import AdapterMonitor, BatcherMonitor, WorkerMonitor
from api.requests.request_scripts import AdmitReply, KeyCharge, LeftOfRates, address, cancel_request
from api.streams.relay import Relay
from api.streams.stream import Stream, new_stream
from common import model_files
from common.adapters import AdapterFault, PoolAdapter, find_adapter
from common.api_keys import ApiKey
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, describe_error
from common.broker.pool_client import PoolClient
from common.messages.codec import decode, encode
from common.messages.request import Generate
from common.model_files import context_length
from common.pooling import read_pooling
from common.settings.settings import SettingError, Settings

log = logging.getLogger(__name__)

Format = TypeVar("Format")
Result = TypeVar("Result")

NOT_EXECUTED = (ResponseError, BusyLoadingError, AuthenticationError)
"""Errors of a broker that did not execute the command."""
MAX_COMMANDS = 16
"""How many admissions, and how many other commands, wait for the broker at once."""
MAX_RETRY_AFTER_S = 60
CLEANUP_TIMEOUT_S = 60.0
NUM_READ = 64
"""Entries of the queue in one read."""
CLOSE_TIMEOUT_S = 2.0

PICTURE_PAYLOAD_LIMIT = 24_000_000
"""Bytes of a request body where the model sees pictures, which are sent in it as base64."""

PLAIN_FORMAT = "llama3_json"
"""The format that a model is asked for if its template has none: `{"name": …, "parameters": …}`."""
NO_REASONING = "none"
PLACEHOLDERS = ("tgi", "dummy")
"""Model names of clients that do not care which model answers."""
URL_SCHEMES = ("http://", "https://")


class Target(NamedTuple):
    """What a client means by a name.

    Attributes:
        pools: that serve it, the own one first; none if nothing has this name.
        adapter: the name, if it is that of an adapter; else empty.
        shown: the name of the model that answers show.
    """

    pools: Sequence[str]
    adapter: str
    shown: str


class Pool:
    """Connection, tokenizer, relay and monitors of one pool. It admits the requests of this gateway, cancels
    and deletes them when nobody reads their streams any more.

    Attributes:
        gateway: incarnation of this gateway; new at every start.
        keys: API keys of this gateway, shared by all its pools.
        adapters: LoRA adapters that requests may name.
        pooling: how the model pools; None if it generates.
        call_format, reasoning_format: how the model writes calls of tools, and reasoning, if it does.
        admissions: limits the admissions that are with the broker at once: clients wait for them.
        num_answered: number of admissions that the broker has answered.
        permits: limits the other commands: jobs and cleanups may have hundreds of them.
        cleanups: tasks that cancel and delete requests whose streams were released.
        waits: tasks that hold streams whose clients have left and may come back.
    """

    def __init__(
        self,
        settings: Settings,
        gateway: str,
        tokenizer: ModelTokenizer,
        keys: KeyRing,
        lose: Callable[[], bool] | None = None,
    ) -> None:
        """Raises SettingError."""
        self.settings = settings
        self.gateway = gateway
        self.tokenizer = tokenizer
        self.keys = keys
        path = model_files.resolve(settings.model_id, settings.revision, dtype=settings.dtype)
        self.pooling = read_pooling(path, settings)
        # tokens of a request that is accepted before any worker has said what it holds; 0 accepts none
        longest = settings.max_total_tokens or context_length(path) if settings.scale_to_zero else 0
        self.call_format = call_format_of(settings, tokenizer)
        self.reasoning_format = reasoning_format_of(settings, tokenizer)
        self.client = PoolClient.connect(settings)
        self.relay = Relay(self.client, gateway, lose)
        self.workers = WorkerMonitor(
            self.client,
            gateway,
            settings,
            num_streams=lambda: sum(not (one.left or one.terminal) for one in self.relay.streams.values()),
            longest=longest,
            pooling=self.pooling,
        )
        self.adapters = AdapterMonitor(self.client, adapters_of(settings), settings.heartbeat_s)
        self.batcher = BatcherMonitor(self.client, settings)
        self.pictures = PicturePrompts(self.client, settings, tokenizer.pictures)
        self.weights = settings.weights
        self.admissions = asyncio.Semaphore(MAX_COMMANDS)
        self.num_answered = 0
        self.permits = asyncio.Semaphore(MAX_COMMANDS)
        self.cleanups: set[asyncio.Task[None]] = set()
        self.waits: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Pool"]:
        """Serve requests while the context is open. The broker may be unreachable at first and come later."""
        await asyncio.gather(self.workers.refresh(), self.adapters.refresh())
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.client.redis.aclose)
            stack.push_async_callback(self.workers.heartbeat.remove_in_time)
            for loop in (self.relay.run(), self.workers.run(), self.batcher.run(), self.adapters.run()):
                await stack.enter_async_context(background_task(loop))
            stack.push_async_callback(self.close)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await self.relay.subscribed.wait()
            yield self

    @property
    def max_body_bytes(self) -> int:
        """Largest body of a request that takes a prompt: where the model sees, it may have pictures."""
        own = self.settings.payload_limit
        return max(own, PICTURE_PAYLOAD_LIMIT) if self.shows_pictures else own

    @property
    def shows_pictures(self) -> bool:
        """Whether a request may have pictures, as far as the workers have said."""
        ready = self.workers.ready
        return self.tokenizer.pictures is not None and (not ready or any(one.pictures for one in ready))

    @property
    def task(self) -> str:
        """What the model makes: EMBED or CLASSIFY (common/messages/request.py); empty for text."""
        return self.pooling.kind if self.pooling else ""

    @property
    def is_live(self) -> bool:
        """Whether a request would be admitted, as far as this gateway knows now."""
        with contextlib.suppress(ApiError):
            self.workers.check()
            return not self.relay.last_error and self.batcher.gone_s <= self.settings.worker_grace_s
        return False

    async def find_adapter(self, name: str) -> PoolAdapter | None:
        """The adapter that requests get by this name. Looks again before it says that there is none."""
        if self.adapters.find(name) is None:
            await self.adapters.refresh_unless_fresh()
        return self.adapters.find(name)

    async def adapter_of(self, target: Target, key: ApiKey | None) -> str:
        """The key of the adapter that a target names; empty for none. Raises ApiError: 403 if the client's
        API key may not use the model or the adapter, 404 if there is none, 422 if no worker will serve it.
        """
        check_key_use(key, self.settings, target)
        if not target.adapter:
            return ""
        if (adapter := await self.find_adapter(target.adapter)) is None:
            raise model_not_found(f"The model `{cut(target.adapter)}` does not exist")
        self.workers.check_adapter(adapter)
        return adapter.key

    async def check(self) -> None:
        """Raises ApiError (503) if a request would not be served now."""
        await self.check_admission()
        await self.batcher.check()
        if len(silent := self.batcher.silent) >= self.workers.num_ready > 0:
            raise unavailable(f"no worker answers the batcher: {', '.join(silent)}")

    # --- admission ------------------------------------------------------------------------------------------

    async def check_admission(self) -> None:
        """Raises ApiError (503) if a request would find nobody to serve it. Reads workers and batcher again
        before it refuses a request because of them.
        """
        if self.relay.last_error:
            raise unavailable(self.relay.last_error)
        try:
            self.workers.check()
        except ApiError:
            await self.workers.refresh_unless_fresh()
            self.workers.check()
        await self.batcher.check_grace()

    async def submit_all(self, answer: HttpAnswer, is_stored: bool) -> list[Stream]:
        """Admit the requests of all choices or none; the answer is kept with the first one. Raises ApiError
        as `submit`, and Repeated if there is an answer already.

        Args:
            is_stored: it is a stored response, which counts among MAX_STORED as answers that may be repeated.
        """
        key_id, number = answer.requests[0].key_id, len(answer.requests)
        key = self.keys.named(key_id) if key_id else None
        if key is not None and 0 < key.max_concurrent < number:
            text = (
                f"This request has {number} choices of its prompts. The API key {key_id} may have "
                f"{key.max_concurrent} live requests, and each choice is one"
            )
            raise invalid(text, "max_concurrent")
        streams: list[Stream] = []
        is_repeated, may_repeat = False, bool(answer.terms.body)
        try:
            for place, choice in enumerate(answer.choices()):
                request = address(self.settings, self.gateway, choice, answer)
                stream = new_stream(request, self.tokenizer, b"" if place else encode(answer))
                if await self.submit(stream, self.charge(request, place, answer), may_repeat):
                    streams.append(stream)
                else:  # the others may be missing: a gateway died while it admitted them
                    is_repeated = True
            if is_stored or may_repeat:  # not before: a refused request must not take the place of an answer
                names = [stream.request.request_id for stream in streams]
                await request_scripts.count_stored(self.client, self.settings, names, answer.terms.kept_s)
        except BaseException:
            for stream in streams:
                self.release(stream, 0, AnswerTerms())
            raise
        if is_repeated:
            for stream in streams:
                self.relay.remove(stream)
            raise Repeated(answer.request_id)
        return streams

    def charge(self, request: Generate, place: int, answer: HttpAnswer) -> KeyCharge | None:
        """What a request takes of the rates of its API key; None without one. A client's request counts once,
        and each of its prompts once. Raises ApiError (401) if the key counts no more.

        Args:
            place: of the request among those of its answer.
        """
        if not request.key_id:
            return None
        num_sequences = request.beams.num_returned if request.beams else 1
        return KeyCharge(
            self.keys.named(request.key_id),
            num_requests=int(place == 0),
            num_asked=0 if place % answer.num_per_prompt else request.num_prompt,
            num_answer=0 if request.pooling else request.stopping.max_new_tokens * num_sequences,
        )

    async def submit(self, stream: Stream, charge: KeyCharge | None, may_repeat: bool) -> bool:
        """Admit a stream's request or fail at once; its reader must `release` it. False, with `may_repeat`,
        if a request with its id is there, whatever its content. Raises ApiError: 409, 429, 503.
        """
        await self.check_admission()
        if may_repeat and stream.request.request_id in self.relay.streams:
            return False
        with broker_errors():
            try:
                was_there = await self.admit(stream, charge)
            except (ApiError, *NOT_EXECUTED) as error:
                self.relay.remove(stream)
                if may_repeat and isinstance(error, ApiError) and error.status == 409:
                    return False
                raise
            except BaseException:
                self.release(stream, 0, AnswerTerms())  # it may be on the queue all the same
                raise
        if may_repeat and was_there:
            self.relay.remove(stream)
        return not (may_repeat and was_there)

    async def admit(self, stream: Stream, charge: KeyCharge | None) -> bool:
        """Put a stream's request on the queue. Returns whether it was there, as it is where a reply was lost.
        Raises ApiError: 409 if another request has the id, 429 if the queue is full or its key is at a limit.
        """
        self.relay.add(stream)
        request = stream.request
        call = request_scripts.admit(
            self.client.keys,
            request,
            payload=request_scripts.entry_of(request),
            answer=stream.answer,
            weight=request.weight or self.weights.get(request.tenant, 1.0),
            max_requests=self.settings.max_concurrent_requests,
            max_bytes=self.settings.max_queued_bytes,
            charge=charge,
        )
        async with self.admission_permit(), asyncio.timeout(CONNECT_TIMEOUT_S):
            if request.pictures:
                await self.pictures.hold(request)
            try:
                reply = await self.client.run(call)
            except NOT_EXECUTED:
                raise
            except ConnectionError as error:
                log.info("admission of %s is sent again: %s", request.request_id, describe_error(error))
                await self.client.redis.connection_pool.disconnect(inuse_connections=False)
                reply = await self.client.run(call)
        if reply.outcome not in ("admitted", "attached"):
            if reply.outcome != "conflict":  # the other request with this id holds its pictures
                await self.let_go(request)
            raise not_admitted(reply, request, charge, self.client.clock.now_s())
        self.relay.note_admitted(stream)
        if charge is not None:
            stream.limit_headers = limit_headers(charge.key, reply.left)
        return reply.outcome == "attached"

    @contextlib.asynccontextmanager
    async def admission_permit(self) -> AsyncIterator[None]:
        """Hold one of `admissions`, after CONNECT_TIMEOUT_S at the latest. Raises ApiError (429) if too many
        wait at this gateway; TimeoutError if the broker has answered none meanwhile.
        """
        num_answered = self.num_answered
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self.admissions.acquire()
        except TimeoutError:
            if self.num_answered > num_answered:
                raise overloaded() from None
            raise
        try:
            yield
            self.num_answered += 1
        finally:
            self.admissions.release()

    # --- release --------------------------------------------------------------------------------------------

    def release(self, stream: Stream, reader: int, terms: AnswerTerms) -> None:
        """Release a stream that this reader, a number, does not read any more. In the background its request
        is cancelled after `goes_on_s`, unless it has another reader by then. One that neither goes on nor is
        kept is deleted, too.
        """
        is_kept = bool(terms.goes_on_s or terms.kept_s)
        if stream.terminal or not is_kept:
            metrics.count_stream(stream, self.workers.limits)
        if not is_kept or stream.ended_here:
            tasks, work = self.cleanups, self.cleanup(stream, reader)
        else:
            tasks, work = self.waits, self.wait_for_client(stream, reader, terms.goes_on_s or 0.0)
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def wait_for_client(self, stream: Stream, reader: int, goes_on_s: float) -> None:
        """Hold a stream until it ends: a held stream is offered to a broker that has lost it. Cancel its
        request when nobody has come back in time. Its keys expire.
        """
        stream.left = True
        had_ended = stream.terminal is not None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if goes_on_s == math.inf else goes_on_s):
                    await stream.ended.wait()
            end, request = stream.terminal, stream.request
            if stream.ended_here or not end:
                is_last_reader = await self.cancel(request.request_id, reader, request.digest)
            elif had_ended and not request.pictures:
                return  # it was counted, and holds nothing
            else:
                is_last_reader = await self.is_reader(request.request_id, reader)
            if not had_ended:
                reason = (end.error_type or end.reason) if end else "cancelled"
                log.info("request %s: %s after its client had left", request.request_id, reason)
            if is_last_reader and not had_ended:
                metrics.count_stream(stream, self.workers.limits)
            if is_last_reader:
                await self.let_go(request)
        finally:
            self.relay.release(stream)

    async def cleanup(self, stream: Stream, reader: int) -> None:
        stream.released = True
        request = stream.request
        forget = request_scripts.forget(self.client.keys, request, reader=reader)
        try:
            has_to_end = stream.ended_here or not stream.terminal
            is_cancelled = has_to_end and await self.cancel(request.request_id, reader, request.digest)
            async with asyncio.timeout(CLEANUP_TIMEOUT_S):
                if is_cancelled:
                    self.relay.note_admitted(stream)
                    await stream.ended.wait()
                if await self.retry_forever(lambda: self.client.run(forget)):
                    await self.let_go(request)
        except TimeoutError:
            log.warning(
                "request %s: it did not end within %.0f s of its cancel",
                request.request_id,
                CLEANUP_TIMEOUT_S,
            )
        finally:
            self.relay.release(stream)

    async def let_go(self, request: Generate) -> None:
        """Let go of the pictures of a request that has ended; if the broker is away, they expire."""
        if request.pictures:
            with contextlib.suppress(*ERRORS):
                await self.pictures.let_go(request)

    async def is_reader(self, request_id: str, reader: int) -> bool:
        """Whether a request has no newer reader."""
        redis, key = self.client.redis, self.client.keys.request(request_id)
        return int(await self.retry_forever(lambda: redis.hget(key, "reader")) or 0) == reader  # type: ignore[arg-type, return-value]

    async def cancel(self, request_id: str, reader: int | None = None, digest: str = "") -> bool:
        """Cancel a request, however long the broker is away. Returns False if the request has ended, is not
        known, or has another reader or digest than those that are given.
        """
        return await self.retry_forever(lambda: cancel_request(self.client, request_id, reader, digest))

    def end_requests(self, key_ids: Collection[str]) -> None:
        """End the streams of API keys that count no more, and in the background cancel their live requests at
        all gateways: jobs, too, and those that nobody reads.
        """
        for stream in list(self.relay.streams.values()):
            if stream.request.key_id in key_ids and not stream.terminal:
                stream.fail("its API key was revoked or has expired", "unauthorized")
        task = asyncio.create_task(self.cancel_all(key_ids))
        self.cleanups.add(task)
        task.add_done_callback(self.cleanups.discard)

    async def cancel_all(self, key_ids: Collection[str]) -> None:
        """Cancel the live requests of API keys."""
        names = {self.client.keys.key_use(key_id).encode() for key_id in key_ids}
        after = b"-"
        redis, requests = self.client.redis, self.client.keys.requests
        while entries := await self.retry_forever(partial(redis.xrange, requests, after, count=NUM_READ)):
            for _, fields in entries:
                if fields.get(b"key") in names:
                    await self.cancel(decode(Generate, fields[b"generate"]).request_id)
            after = b"(" + entries[-1][0]

    async def retry_forever(self, command: Callable[[], Awaitable[Result]]) -> Result:
        """The command's answer, however long the broker is away."""

        async def send() -> Result:
            await self.relay.subscribed.wait()
            async with self.permits:
                return await command()

        return await attempt(send, retry_forever)

    async def close(self) -> None:
        """Wait a moment for the cleanups that still run, and for no client."""
        for waiting in self.waits:
            waiting.cancel()
        if self.cleanups:
            _, unfinished = await asyncio.wait(self.cleanups, timeout=CLOSE_TIMEOUT_S)
            for task in unfinished:
                task.cancel()


def not_admitted(reply: AdmitReply, request: Generate, charge: KeyCharge | None, now_s: float) -> ApiError:
    """The error of a request that was not admitted: 409 if another has its id, else 429 with the time until
    there may be room; where a budget is reached, until the next month.
    """
    if reply.outcome == "conflict":
        return conflict("request")
    if reply.outcome == "budget":
        budget = charge.key.budget_tokens if charge else 0
        if 0 < budget <= request.num_prompt:
            return insufficient_quota(
                f": its {budget} tokens are fewer than a prompt of {request.num_prompt} needs"
            )
        return insufficient_quota(
            ": it begins anew with the next (UTC)", math.ceil(seconds_to_next_month(now_s))
        )
    headers = limit_headers(charge.key, reply.left) if charge else {}
    if charge and reply.outcome in LIMITS:
        key, wait_s = charge.key, max(1, math.ceil(reply.wait_ms / 1000))
        field, words = LIMITS[reply.outcome]
        text = (
            f"Rate limit reached for the API key {key.key_id}: {getattr(key, field)} {words}. "
            f"Used: {reply.num_counted}. Try again in {wait_s}s"
        )
        return ApiError(429, "rate_limit", text, field, retry_after_s=wait_s, headers=headers)
    wait_s = min(MAX_RETRY_AFTER_S, max(1, math.ceil(reply.wait_ms / 1000)))
    why = f": tenant {request.tenant!r} has its share of the queue" if reply.outcome == "tenant" else ""
    return overloaded(why, wait_s, headers)


LIMITS = {
    "key_live": ("max_concurrent", "live requests"),
    "key_requests": ("requests_per_minute", "requests a minute"),
    "key_tokens": ("tokens_per_minute", "tokens a minute"),
}
"""Outcomes of an admission → the limit of the key, and its name."""


def limit_headers(key: ApiKey, left: LeftOfRates | None) -> dict[str, str]:
    """OpenAI's headers, for the rates that the key has."""
    if left is None:
        return {}
    rates = (
        ("requests", key.requests_per_minute, left.requests),
        ("tokens", key.tokens_per_minute, left.tokens),
    )
    headers: dict[str, str] = {}
    for what, limit, rest in rates:
        if limit:
            headers |= {
                f"x-ratelimit-limit-{what}": str(limit),
                f"x-ratelimit-remaining-{what}": str(max(0, math.floor(rest))),
                f"x-ratelimit-reset-{what}": render_duration(60 * max(0.0, limit - rest) / limit),
            }
    return headers


def render_duration(seconds: float) -> str:
    """A duration as OpenAI writes it: `120ms`, `1s`, `6m0s`."""
    if seconds < 1:
        return f"{round(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"


# --- names --------------------------------------------------------------------------------------------------


def is_named(model: str, served: list[str] | tuple[str, ...]) -> bool:
    """Whether `model` is one of a model's served names, or what follows the last slash of one. The bundled
    model has its hub id, too.
    """
    names = (*served, *((model_files.BUNDLED_HUB_ID,) if model_files.BUNDLED in served else ()))
    return any(model in (name, name.rpartition("/")[2]) for name in names)


def names_own(model: str, settings: Settings) -> bool:
    """Whether a client that names `model` means the gateway's own pool.

    Its names are the model's served names, its MODEL_ID, and the pool's name. Clients of endpoints with one
    model send a URL, or a placeholder.
    """
    is_any = model in PLACEHOLDERS or model.startswith(URL_SCHEMES)
    return (
        is_any or model == settings.pool or is_named(model, (*settings.served_model_name, settings.model_id))
    )


def check_key_use(key: ApiKey | None, settings: Settings, target: Target) -> None:
    """Raises ApiError (403) if an API key may not use the model of a pool, or a target's adapter."""
    if key is None:
        return
    adapter, shown, models = target.adapter, target.shown, key.models
    may_model = not models or shown in models or any(names_own(name, settings) for name in models)
    may_adapter = not (adapter and key.adapters) or adapter in key.adapters
    for may, what in ((may_model, f"model `{shown}`"), (may_adapter, f"adapter `{adapter}`")):
        if not may:
            text = f"The API key {key.key_id} may not use the {what}"
            raise ApiError(403, "forbidden", text, "model")


# --- formats of answers -------------------------------------------------------------------------------------


def call_format_of(settings: Settings, tokenizer: ModelTokenizer) -> CallFormat:
    """The call format that TOOL_CALL_PARSER names; by default, the one that the model's template shows."""
    template, name = tokenizer.chat_template, settings.tool_call_parser
    source = template.for_tools.source if template else ""
    shown = find_call_format(source, tokenizer.backend.token_to_id) if name is None else None
    found = shown or named_format("tool_call_parser", CALL_FORMATS, name or PLAIN_FORMAT)
    log.info("call format of the model: %s", found.name)
    return found


def reasoning_format_of(settings: Settings, tokenizer: ModelTokenizer) -> ReasoningFormat | None:
    """The reasoning format that REASONING_PARSER names; by default, the one of the model's template."""
    name = settings.reasoning_parser
    if name is None:
        source = tokenizer.chat_template.source if tokenizer.chat_template else ""
        return find_reasoning_format(source)
    return None if name.lower() == NO_REASONING else named_format("reasoning_parser", REASONING_FORMATS, name)


def named_format(setting: str, formats: Mapping[str, Format], name: str) -> Format:
    """The format of this name. Raises SettingError."""
    if found := formats.get(CALL_FORMAT_ALIASES.get(name.lower(), name.lower())):
        return found
    raise SettingError(setting, f"{name!r} is not one of {', '.join(sorted(formats))}")


def adapters_of(settings: Settings) -> list[PoolAdapter]:
    """Return the records of the adapters of LORA_ADAPTERS. Raises SettingError."""
    found = []
    for source in settings.adapters:
        if names_own(source.name, settings) or source.name in settings.other_models:
            raise SettingError("lora_adapters", f"{source.name!r} is the name of a model")
        try:
            found.append(find_adapter(source))
        except AdapterFault as fault:
            raise SettingError("lora_adapters", f"{source.name}: {fault}") from fault
    return found
