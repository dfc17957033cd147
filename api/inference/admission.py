"""The desk: where requests are admitted, and where their gateway takes leave of them."""

import asyncio
import hashlib
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, BusyLoadingError, ConnectionError, ResponseError

from api.errors import ApiError, conflict, overloaded, unavailable
from api.inference import metrics
from api.inference.capacity import WorkerMonitor
from api.inference.relay import Relay
from api.inference.stream import Stream
from api.inference.tokenizer import ModelTokenizer
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, describe_error, script
from common.broker.keys import Keys
from common.messages.codec import encode
from common.messages.request import Cancel, Generate
from common.settings.settings import Settings

log = logging.getLogger(__name__)

NOT_EXECUTED = (ResponseError, BusyLoadingError, AuthenticationError)
"""Answers of a broker that did not do what it was asked to."""
MAX_COMMANDS = 16
HOME_MARGIN_MS = 60_000
FAREWELL_S, LAST_FAREWELLS_S = 60.0, 2.0
PAUSE_S = 0.2


class Admission:
    """Admits requests of one gateway, and leaves nothing of them behind."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        gateway: str,
        settings: Settings,
        tokenizer: ModelTokenizer,
        relay: Relay,
        workers: WorkerMonitor,
    ) -> None:
        self.redis, self.keys, self.gateway, self.settings = redis, keys, gateway, settings
        self.tokenizer, self.relay, self.workers = tokenizer, relay, workers
        self.admit_script = script(redis, "admit")
        self.cancel_script = script(redis, "cancel")
        self.permits = asyncio.Semaphore(MAX_COMMANDS)
        self.cleanups: set[asyncio.Task[None]] = set()

    async def check(self) -> None:
        """Raises ApiError (503) when nothing can be served now. Nobody is refused for what a fresh look at the
        workers disproves.
        """
        if self.relay.last_error:
            raise unavailable(self.relay.last_error)
        try:
            self.workers.check()
        except ApiError:
            await self.workers.look_again()
            self.workers.check()

    async def submit_all(self, requests: list[Generate], request_id: str | None = None) -> list[Stream]:
        """Admits all or none, as `{request_id}`, or as `{request_id}.{i}` where there are several. As
        `submit` otherwise.
        """
        request_id = request_id or uuid.uuid4().hex
        streams: list[Stream] = []
        try:
            for i, request in enumerate(requests):
                streams.append(
                    await self.submit(request, request_id if len(requests) == 1 else f"{request_id}.{i}")
                )
        except BaseException:
            for stream in streams:
                self.release(stream)
            raise
        return streams

    async def submit(self, request: Generate, request_id: str) -> Stream:
        """Admits a request; its reader must `leave` the stream. Raises ApiError: 429, 503."""
        await self.check()
        stream = Stream(self.address(request, request_id), self.tokenizer)
        self.relay.add(stream)
        try:
            answer = await self.admit_command(stream.request)
        except NOT_EXECUTED as error:
            self.relay.remove(stream)
            raise unavailable(describe_error(error)) from error
        except BaseException as error:
            self.release(stream)  # it may have been admitted all the same
            if isinstance(error, ERRORS):
                raise unavailable(describe_error(error)) from error
            raise
        if answer not in (b"admitted", b"attached"):
            self.relay.remove(stream)
            raise error_of(answer)
        self.relay.admitted(stream)
        return stream

    def address(self, request: Generate, request_id: str) -> Generate:
        """A validated request with its id, its digest, its deadline and this gateway as its reader."""
        content = replace(
            request,
            ttl_ms=round(self.settings.request_timeout_s * 1000),
            channel=self.relay.channel,
            gateway=self.gateway,
            grace_ms=round(self.settings.gateway_grace_s * 1000),
        )
        digest = hashlib.blake2b(encode(content), digest_size=16).hexdigest()
        return replace(content, request_id=request_id, digest=digest)

    async def admit_command(self, request: Generate) -> bytes:
        """The broker's word on a request; where an answer was lost, the second one is `attached`."""
        keys = [self.keys.requests, self.keys.requests_bytes, self.keys.request(request.request_id)]
        limits = [self.settings.max_concurrent_requests, self.settings.max_queued_bytes]
        args: list[bytes | str | int | float] = [
            encode(request),
            *limits,
            request.digest,
            request.channel,
            request.gateway,
            request.ttl_ms + HOME_MARGIN_MS,
            request.width,
        ]
        async with asyncio.timeout(CONNECT_TIMEOUT_S), self.permits:
            try:
                answer = await self.admit_script(keys=keys, args=args)
            except NOT_EXECUTED:
                raise
            except ConnectionError as error:
                log.info("admission of %s is sent again: %s", request.request_id, describe_error(error))
                answer = await self.admit_script(keys=keys, args=args)
            return bytes(answer[0])

    # --- leaving --------------------------------------------------------------------------------------------

    def release(self, stream: Stream) -> None:
        """Nobody reads the stream any more: in the background it is cancelled if it has not ended, and
        forgotten everywhere.
        """
        metrics.count_stream(stream, self.workers.limits)
        task = asyncio.create_task(self.cleanup(stream))
        self.cleanups.add(task)
        task.add_done_callback(self.cleanups.discard)

    async def cleanup(self, stream: Stream) -> None:
        request_id = stream.request.request_id
        home, result = self.keys.request(request_id), self.keys.result(request_id)
        try:
            async with asyncio.timeout(FAREWELL_S):
                if not stream.terminal and await self.cancel(request_id):
                    self.relay.admitted(stream)
                    await stream.ended.wait()
                await self.retry_forever(lambda: self.redis.delete(home, result))
        except TimeoutError:
            log.warning(
                "request %s: no end within %.0f s of its cancel; Redis will expire it", request_id, FAREWELL_S
            )
        finally:
            self.relay.remove(stream)

    async def cancel(self, request_id: str) -> bool:
        """Cancels a request, whenever the broker takes that in. Returns False where it had ended or never
        was.
        """
        keys, word = [self.keys.request(request_id), self.keys.control], encode(Cancel(request_id, "client"))
        return bool(await self.retry_forever(lambda: self.cancel_script(keys=keys, args=[word])))

    async def retry_forever(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """The command's answer, whenever the broker gives it."""
        while True:
            await self.relay.subscribed.wait()
            try:
                async with self.permits:
                    return await command()
            except ERRORS as error:
                log.debug("once more: %s", describe_error(error))
                await asyncio.sleep(PAUSE_S)

    async def close(self) -> None:
        """Gives what is still being said a moment."""
        if self.cleanups:
            _, unheard = await asyncio.wait(self.cleanups, timeout=LAST_FAREWELLS_S)
            for task in unheard:
                task.cancel()


def error_of(answer: bytes) -> ApiError:
    if answer in (b"count", b"bytes"):
        return overloaded()
    return conflict("request")
