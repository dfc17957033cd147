"""Pool: all that a gateway needs to reach the workers of one pool."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TypeVar

from api.answers.call_formats import (
    CALL_FORMAT_ALIASES,
    CALL_FORMATS,
    REASONING_FORMATS,
    CallFormat,
    ReasoningFormat,
    find_call_format,
    find_reasoning_format,
)
from api.errors import ApiError, unavailable
from api.event_loop import background_task
from api.http.key_ring import KeyRing
from api.prompts.pictures import PicturePrompts
from api.prompts.tokenizer import ModelTokenizer, TextBudget
from api.requests.admission import Admission
from api.requests.monitors import AdapterMonitor, BatcherMonitor, WorkerMonitor
from api.requests.validate import load_sampling_defaults
from api.streams.relay import Relay
from common import model_files
from common.adapters import AdapterFault, PoolAdapter, find_adapter
from common.broker.client import CONNECT_TIMEOUT_S
from common.broker.pool_client import PoolClient
from common.model_files import context_length
from common.pooling import read_pooling
from common.settings.settings import SettingError, Settings

log = logging.getLogger(__name__)

Format = TypeVar("Format")

PICTURE_PAYLOAD_LIMIT = 24_000_000
"""Bytes of a request body where the model sees pictures, which are sent in it as base64."""

PLAIN_FORMAT = "llama3_json"
"""The format that a model is asked for if its template has none: `{"name": …, "parameters": …}`."""
NO_REASONING = "none"


class Pool:
    """Connection, tokenizer, relay, monitors and admission of one pool.

    Attributes:
        gateway: incarnation of this gateway; new at every start.
        keys: API keys of this gateway, shared by all its pools.
        adapters: LoRA adapters that requests may name.
        pooling: how the model pools; None if it generates.
        call_format, reasoning_format: how the model writes calls of tools, and reasoning, if it does.
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
            num_streams=lambda: sum(not stream.left for stream in self.relay.streams.values()),
            max_total_tokens=longest,
            pooling=self.pooling,
        )
        self.adapters = AdapterMonitor(self.client, adapters_of(settings), settings.heartbeat_s)
        self.batcher = BatcherMonitor(self.client, settings)
        self.pictures = PicturePrompts(self.client, settings, tokenizer.pictures)
        self.admission = Admission(
            self.client,
            gateway=gateway,
            settings=settings,
            tokenizer=tokenizer,
            keys=keys,
            relay=self.relay,
            workers=self.workers,
            batcher=self.batcher,
            pictures=self.pictures.keeper,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Pool"]:
        """Serve requests while the context is open. The broker may be unreachable at first and come later."""
        await asyncio.gather(self.workers.refresh(), self.adapters.refresh())
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.client.redis.aclose)
            stack.push_async_callback(self.workers.heartbeat.remove_in_time)
            for loop in (self.relay.run(), self.workers.run(), self.batcher.run(), self.adapters.run()):
                await stack.enter_async_context(background_task(loop))
            stack.push_async_callback(self.admission.close)
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
        """Whether a request may have pictures."""
        return self.tokenizer.pictures is not None and self.workers.pictures

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

    async def check(self) -> None:
        """Raises ApiError (503) if a request would not be served now."""
        await self.admission.check()
        await self.batcher.check()
        if len(silent := self.batcher.silent) >= self.workers.num_ready > 0:
            raise unavailable(f"no worker answers the batcher: {', '.join(silent)}")


def load_tokenizer(settings: Settings, budget: TextBudget | None = None) -> ModelTokenizer:
    """The tokenizer of the settings' model; with `budget`, it shares that of others. Raises SettingError."""
    # A gateway tokenises one prompt at a time: a thread pool would only cost.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = model_files.resolve(settings.model_id, settings.revision, dtype=settings.dtype)
    return ModelTokenizer.load(
        path,
        model_files.find_tokenizer(settings.tokenizer_name, path, dtype=settings.dtype),
        settings.tokenizer_config_path,
        settings.chat_template,
        load_sampling_defaults(path, settings),
        budget or TextBudget(num_threads=settings.validation_workers),
        settings.control_tokens_in_messages,
    )


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
        try:
            found.append(find_adapter(source))
        except AdapterFault as fault:
            raise SettingError("lora_adapters", f"{source.name}: {fault}") from fault
    return found
