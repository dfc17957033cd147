"""Jobs: their entries in Redis, the time until which they wait, their validation."""

import asyncio
import contextlib
import hashlib
import logging
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import orjson
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from api.answers.answer import AnswerTerms, HttpAnswer
from api.errors import ApiError, Family, cut, failed, internal_error, invalid, model_not_found, quoted, tgi
from api.http.body import parse, parse_body
from api.json import parse_bytes, to_json
from api.protocols.protocol import Context, Protocol
from api.protocols.table import JOBS, PROTOCOLS, protocol_at
from api.requests.fields import TIERS, Priority, with_one_error
from api.requests.pool import Pool, names_own
from api.requests.registry import PoolRegistry
from api.requests.service_terms import (
    MAX_DEADLINE_MS,
    ServiceTerms,
    TenantName,
    checked_tenant,
    class_of,
    default_class,
)
from api.webhooks import JOB, WebhookField, find_webhook
from common.api_keys import ApiKey
from common.broker.client import ERRORS
from common.broker.keys import RESULT_TTL_MS, Keys
from common.broker.lua import Args, call_script, decode_all
from common.ids import CHANNEL, ENTRY_ID, JOB_ID, is_job_id
from common.messages.events import terminal_for
from common.messages.request import SERVICE_CLASSES
from common.settings.ranges import least
from common.settings.settings import Settings

log = logging.getLogger(__name__)

MAX_WAIT_S = 30 * 86_400


TIME = "must be seconds since 1970, or a time with its offset as 2027-01-31T08:00:00Z"
Time = Annotated[
    AwareDatetime, Field(strict=False, ge=datetime(1970, 1, 1, tzinfo=UTC)), with_one_error(TIME)
]


def read_not_before(value: datetime, submitted_ms: int) -> int:
    """Milliseconds since 1970. Raises ApiError (422)."""
    due_ms = round(1000 * value.timestamp())
    if due_ms > submitted_ms + 1000 * MAX_WAIT_S:
        most = f"{MAX_WAIT_S // 86_400} days ({MAX_WAIT_S} s) after the job was submitted"
        raise invalid(f"`not_before` must be at most {most}. Given: {value.isoformat()}")
    return due_ms


# --- job ----------------------------------------------------------------------------------------------------


ADDRESS = ("id", "reply_to", "reply", "webhook", "traceparent")
"""Fields that are not content: the id, where the answer and the event of the end go, and the trace that the
job is part of.
"""
NOT_PARAMETERS = ("model", "stream", "resume_s", "detached", "webhook", "not_before", "url", *JOBS)
"""Fields of bodies that a job has beside its `parameters`, or does not have."""
TRACEPARENT = r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
"""Pattern of W3C's name of a span."""


class JobBody(BaseModel):
    """The field `job` of an entry. The prompt says of which route it has the parameters, and gets the answer;
    `url` names another route that takes such a prompt. Unknown fields are refused, unlike those of HTTP
    bodies: a service that misspells `reply_to` would wait for ever.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    id: str | None = Field(default=None, pattern=f"^{JOB_ID.pattern}$")
    inputs: Any = None
    messages: Any = None
    prompt: Any = None
    input: Any = None
    query: Any = None
    documents: Any = None
    text_1: Any = None
    text_2: Any = None
    url: str | None = None
    parameters: dict[str, Any] | None = None
    model: str | None = None
    priority: Priority | None = None
    tenant: TenantName | None = None
    deadline_ms: int | None = least(1, "From its admission on.", MAX_DEADLINE_MS)
    not_before: Time | None = None
    reply_to: str | None = Field(default=None, pattern=f"^{CHANNEL.pattern}$")
    reply: Literal["stream"] | None = None
    webhook: WebhookField | None = None
    traceparent: str | None = Field(default=None, pattern=TRACEPARENT)


@dataclass(frozen=True, slots=True)
class Job:
    """A job that can be answered, valid or not.

    Attributes:
        digest: of the content; the same id with another digest is a conflict.
        reply_to: channel for the frames; empty if there is none.
        in_stream: whether frames are kept in a stream.
        protocol: the route of which it has the fields; None if they name none.
        body: None if the job has a `fault`.
        first_entry_id: of the entry that this one replaces, because the broker lost it; empty if there is
            none.
        api_key: that its entry carries; empty without one.
        not_before_ms: until when it waits; 0 for a job that may run at once.
        not_before_field: the same as its entry says it, which is its content; None without one.
        webhook_field: the webhook that it names, also if it has another `fault`.
        webhook: where the event of its end goes, for `register_job`; empty for none.
    """

    id: str
    entry_id: str
    digest: str = ""
    reply_to: str = ""
    in_stream: bool = False
    protocol: Protocol | None = None
    body: JobBody | None = None
    terms: ServiceTerms = field(default_factory=ServiceTerms)
    fault: ApiError | None = None
    first_entry_id: str = ""
    api_key: bytes = b""
    not_before_ms: int = 0
    not_before_field: Any = None
    webhook_field: WebhookField | None = None
    webhook: bytes = b""

    @property
    def kind(self) -> str:
        """What it asks for, in a word."""
        return self.protocol.job if self.protocol else "generate"

    def channel(self, keys: Keys) -> str:
        """That gets the frames, or ""."""
        return keys.key(self.reply_to) if self.reply_to else ""

    @property
    def address(self) -> str:
        """Where the answer to its entry goes, beside `result:{id}`."""
        return f"{'stream' if self.in_stream else ''} {self.reply_to}"

    def describe(self, model: str) -> dict[str, str | int]:
        """The fields of its record; `model` is what it asks for by default."""
        return {
            "first_entry": self.first_entry_id or self.entry_id,
            "not_before_ms": self.not_before_ms,
            "kind": self.kind,
            "model": (self.body.model if self.body else None) or model,
            "service_class": self.terms.service_class,
            "tenant": self.terms.tenant,
            "key_id": self.terms.key.key_id if self.terms.key else "",
        }

    @property
    def family(self) -> Family:
        """The form of the job's errors."""
        return self.protocol.error if self.protocol else tgi

    @property
    def has_listeners(self) -> bool:
        """Whether frames are sent, in addition to the answer."""
        return bool(self.reply_to or self.in_stream)

    @property
    def entry_ms(self) -> int:
        """The broker's time of the job's first entry."""
        return int((self.first_entry_id or self.entry_id).partition("-")[0])

    @property
    def due_ms(self) -> int:
        """From when on it may run: its deadline counts from then."""
        return max(self.entry_ms, self.not_before_ms)

    @property
    def seed(self) -> int:
        """Seed of a job without one: the same at every gateway, so that all sample the same tokens."""
        return int.from_bytes(hashlib.blake2b(self.id.encode(), digest_size=8).digest(), "big") >> 1

    @property
    def created_s(self) -> int:
        """Unix time of the first entry, the same at every gateway."""
        return self.entry_ms // 1000

    def to_fields(self) -> dict[str, bytes | str]:
        """The fields of another entry for this valid job; its time still counts from the first one."""
        assert self.body is not None
        given = self.body.model_dump(exclude_unset=True) | {"id": self.id}
        if self.not_before_field is not None:
            given["not_before"] = self.not_before_field
        key = {"api_key": self.api_key} if self.api_key else {}
        return {"job": orjson.dumps(given), "first_entry": self.first_entry_id or self.entry_id, **key}

    def of_key(self, key: ApiKey | None) -> "Job":
        """The job as it is served for an API key: of its tenant, and in its class if it names none, or
        where there are no keys in that of batches. Raises ApiError (403) if it names another tenant.
        """
        terms = replace(self.terms, service_class=self.terms.service_class or default_class(key, "batch"))
        if key is None:
            return replace(self, terms=terms)
        tenant = checked_tenant(key, terms.tenant, "tenant") or key.tenant
        named = replace(terms, tenant=tenant, key=key)
        digest = hashlib.blake2b(f"{tenant} {self.digest}".encode(), digest_size=16).hexdigest()
        return replace(self, terms=named, digest=digest)


def with_webhook(job: Job, settings: Settings) -> Job:
    """The job with the webhook that it names, or that its API key has; one at fault is the job's fault."""
    try:
        webhook = find_webhook(job.webhook_field, job.terms.key, settings, JOB, job.id)
    except ApiError as error:
        return replace(job, fault=job.fault or error)
    return replace(job, webhook=webhook.text(str(job.entry_ms))) if webhook else job


def read_job(entry_id: str, fields: Mapping[bytes, bytes], max_bytes: int) -> Job:
    """The job of an entry. If its id cannot be read, it has the entry's id."""
    try:
        parsed = read_object(fields, max_bytes)
    except ApiError as error:
        return Job(id=entry_id, entry_id=entry_id, fault=error, api_key=fields.get(b"api_key", b""))
    job_id, reply_to = parsed.get("id"), parsed.get("reply_to")
    first_entry = ENTRY_ID.fullmatch(fields.get(b"first_entry", b""))
    job = Job(
        id=job_id if isinstance(job_id, str) and is_job_id(job_id) else entry_id,
        entry_id=entry_id,
        digest=digest_of(parsed),
        reply_to=reply_to if isinstance(reply_to, str) and CHANNEL.fullmatch(reply_to) else "",
        in_stream=parsed.get("reply") == "stream",
        protocol=find_protocol(parsed),
        first_entry_id=first_entry[0].decode() if first_entry else "",
        api_key=fields.get(b"api_key", b""),
        not_before_field=parsed.get("not_before"),
        webhook_field=read_webhook_field(parsed),
    )
    try:
        body = parse_body(JobBody, orjson.dumps(parsed))
        if body.id is not None and not is_job_id(body.id):
            raise invalid("`id` must not be that of a batch's line, which is the fleet's own")
        check_prompt(body, job.protocol)
        not_before_ms = 0 if body.not_before is None else read_not_before(body.not_before, job.entry_ms)
        return replace(job, body=body, terms=read_job_terms(body), not_before_ms=not_before_ms)
    except ApiError as error:
        return replace(job, fault=error)


def find_protocol(parsed: Mapping[str, Any]) -> Protocol | None:
    """The route that a job names, or else the last one that takes a prompt that it has."""
    url = parsed.get("url")
    if url is not None:
        return protocol_at(url) if isinstance(url, str) else None
    return next((row for prompt, row in reversed(JOBS.items()) if parsed.get(prompt) is not None), None)


def check_prompt(body: JobBody, protocol: Protocol | None) -> None:
    """Raises ApiError (422) for a job that has not one prompt, that of its route."""
    if body.url is not None and (protocol is None or not protocol.prompt):
        known = ", ".join(row.path for row in PROTOCOLS if row.prompt)
        raise invalid(f"`url` must be one of {known}. Given: {quoted(body.url)}")
    given = [name for name in JOBS if getattr(body, name) is not None]
    if len(given) != 1:
        others = "or `prompt`, or for vectors and scores `input`, or `query` with `documents`"
        raise invalid(f"either `inputs` or `messages` must be given, {others}")
    assert protocol is not None
    if given[0] not in protocol.prompt:
        raise invalid(f"`{given[0]}` is no prompt of {protocol.path}: give `{protocol.prompt[0]}`")


def content_of(job: Job) -> dict[str, Any]:
    """The body that the job's route would be sent. Raises ApiError (422) for a parameter that is a field of
    the job, or that jobs do not have.
    """
    assert job.body is not None
    assert job.protocol is not None
    known = job.protocol.body.model_fields
    prompt = {name: getattr(job.body, name) for name in job.protocol.prompt}
    if "parameters" in known:
        return prompt | {"parameters": job.body.parameters}
    given = job.body.parameters or {}
    for name in NOT_PARAMETERS:
        if given.get(name) is not None:
            raise invalid(f"`{name}` is no parameter of a job")
    streamed = {"stream": job.has_listeners or "stream_options" in given} if "stream" in known else {}
    return given | prompt | streamed


def read_webhook_field(parsed: Mapping[str, Any]) -> WebhookField | None:
    """The webhook that a job names; None if it cannot be read, which the job's body says."""
    with contextlib.suppress(ApiError):
        if parsed.get("webhook") is not None:
            return parse_body(WebhookField, orjson.dumps(parsed["webhook"]))
    return None


def read_object(fields: Mapping[bytes, bytes], max_bytes: int) -> dict[str, Any]:
    """The field `job` as an object. Raises ApiError: 413, 400, 422."""
    data = fields.get(b"job")
    if data is not None and b"cancel" in fields:
        raise invalid("an entry has `job` or `cancel`, not both", "cancel")
    if data is None:
        raise invalid("the entry has no field `job`")
    if len(data) > max_bytes:
        raise ApiError(413, "payload_too_large", f"The job is larger than {max_bytes} bytes")
    try:
        parsed = parse_bytes(data)
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"`job` is not JSON that can be read: {error}") from error
    if not isinstance(parsed, dict):
        raise invalid("`job` must be an object")
    return parsed


def read_job_terms(body: JobBody) -> ServiceTerms:
    """The class, tenant and deadline of a job; it may name no class, or name it as a chat or a completion
    does. Raises ApiError (422).
    """
    is_openai = body.url is None and (body.messages is not None or body.prompt is not None)
    given = (body.parameters or {}) if is_openai else {}
    priority, own, tier = body.priority, given.get("priority"), given.get("service_tier")
    if priority is None and (isinstance(own, int) or own in SERVICE_CLASSES):
        priority = own  # another one is refused with the chat's fields, as another tier is
    return ServiceTerms(
        class_of(priority, tier if tier in [*TIERS] else None, ""), body.tenant or "", body.deadline_ms
    )


def digest_of(parsed: Mapping[str, Any]) -> str:
    content = {name: value for name, value in parsed.items() if name not in ADDRESS}
    return hashlib.blake2b(orjson.dumps(content, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


def expired(job: Job) -> ApiError:
    return failed(terminal_for(job.id, "expired", 0))


def left_ms(pool: Pool, job: Job) -> int:
    """Milliseconds to the deadline, by the broker's clock. Raises ApiError if it has passed."""
    if job.terms.deadline_ms is None:
        return MAX_DEADLINE_MS
    left = job.due_ms + job.terms.deadline_ms - round(1000 * pool.client.clock.now_s())
    if left <= 0:
        raise expired(job)
    return left


@contextlib.asynccontextmanager
async def waiting_turn(pool: Pool, job: Job, lock: asyncio.Lock) -> AsyncIterator[None]:
    """Hold the lock. Raises ApiError if the job's deadline passes before it is free."""
    try:
        async with asyncio.timeout(left_ms(pool, job) / 1000):
            await lock.acquire()
    except TimeoutError as error:
        raise expired(job) from error
    try:
        yield
    finally:
        lock.release()


# --- validation ---------------------------------------------------------------------------------------------


JOB_TERMS = AnswerTerms(goes_on_s=math.inf, kept_s=RESULT_TTL_MS / 1000)
MAX_DEATHS = 2
"""Gateways that may end while they validate a job."""


VALIDATES = "validates:"
"""How the name of a field begins in which a gateway notes that it validates a job."""


async def validate_job(pools: PoolRegistry, job: Job) -> HttpAnswer:
    """Read a job as its route would read its body. Raises ApiError, also for the model of another pool, and
    for a job that has ended MAX_DEATHS gateways while they validated it.
    """
    pool, protocol = pools.own, job.protocol
    assert job.body is not None
    assert protocol is not None
    async with noting_deaths(pool, job):
        body = await parse(protocol.body, to_json(content_of(job)))
        name, own = job.body.model, pool.settings
        target = await pools.target(name, getattr(body, "adapter_id", None))
        if own.pool not in target.pools and not (name and names_own(name, own)):
            text = f"The model `{cut(target.shown)}` is not that of the pool {own.pool}, nor an adapter of it"
            raise model_not_found(f"{text}: jobs and batches go to the pool of their model")
        adapter = await pool.adapter_of(target, job.terms.key)
        asked = (job.id, job.has_listeners, target.shown, job.created_s)
        answer = await protocol.read(body, Context(pool, protocol.path, *asked, seed=job.seed))
        return replace(answer, requests=job.terms.apply(answer.requests, own, adapter), terms=JOB_TERMS)


@contextlib.asynccontextmanager
async def noting_deaths(pool: Pool, job: Job) -> AsyncIterator[None]:
    """Note in the job that this gateway validates it, as the work that an input can end a process with. A
    gateway that dies leaves its note; one that stops in order does not. A job that was validated once has no
    notes any more. Raises ApiError (500).
    """
    keys = pool.client.keys
    args: Args = {"validates": VALIDATES, "gateway": pool.gateway, "gateways": keys.gateway("")}
    call = call_script("begin_validation", decode_all, keys, job.id, args=args)
    dead = await pool.retry_forever(lambda: pool.client.run(call))
    try:
        if len(dead) >= MAX_DEATHS:
            why = f"{len(dead)} gateways ended while they validated this request"
            log.error("job %s is not tried again: %s", job.id, why)
            raise internal_error(why)
        yield
    except BaseException:
        await drop_note(pool, job)
        raise


async def drop_note(pool: Pool, job: Job) -> None:
    """Drop the note of this gateway; if the broker is away, it stays."""
    with contextlib.suppress(*ERRORS):
        await pool.client.redis.hdel(pool.client.keys.job(job.id), VALIDATES + pool.gateway)  # type: ignore[misc]
