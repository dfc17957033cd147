"""Broker client: connections to Redis (7 or later) or Valkey, its errors in one line each, and what is logged
of an outage.

`FastConnection` is a connection for what passes with every token: redis-py opens it (address, TLS, password),
then hiredis packs commands and parses replies on asyncio's transport. This takes 6 µs of CPU a command where
redis-py takes 20 (XADD in a loop); beside an engine, which keeps the caches cold, it saved a quarter of the
agent's CPU a token (benchmarks/RESULTS.md).
"""

import asyncio
import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, urlencode, urlsplit
from weakref import WeakSet, ref

import hiredis
import redis.asyncio
from redis.asyncio import Redis
from redis.asyncio.connection import (
    AbstractConnection,
    DefaultParser,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    InvalidResponse,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)

from common.broker.lua import Argument, Reply, ScriptCall
from common.process.event_loop import until_beat
from common.process.logs import plural
from common.settings.fields import hide_users
from common.settings.settings import SettingError, Settings

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
ANSWER_S = 15.0
"""The longest wait for a reply; then the connection is given up. Reads that wait at the broker wait less."""
NUM_LOOKS = 3
"""A broker that owes a reply is given up after so many looks, within ANSWER_S, at which it was silent. With a
single one, a process that was stopped would give up a broker whose replies it has not read yet.
"""
DEMOTED = (ReadOnlyError, MasterDownError)
"""What a server answers that was the primary and is a replica now."""
ERRORS = (RedisError, OSError)
"""What a command may raise while the broker is away or refuses; `describe_error` puts each into words."""
SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
SENTINEL_PORT = 26379
SENTINEL_TIMEOUTS = {"socket_connect_timeout": 1.0, "socket_timeout": 1.0}
"""Of one sentinel, so that the next one is asked while the caller still waits."""
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
PASSWORD_FILE = "password_file"
"""Option of a URL: a file with the password of its user, such as a mounted secret."""


class SentinelPool(SentinelConnectionPool):
    """Closes the connections to the sentinels with its own."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:  # else it only leaves a former primary
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.aclose()


def connect_to_primary(url: str, **options: Any) -> redis.asyncio.Redis:
    """Return a client of the primary that Redis Sentinel names; after a failover, of the new one.

    `url` is `redis+sentinel://[user:password@]host[:port],host[:port]/service[/db][?options]`. With
    `rediss+sentinel` brokers and sentinels have TLS. Options are those of redis-py's other URLs, and
    `sentinel_username` and `sentinel_password`. Raises ValueError if the URL cannot be read.
    """
    scheme, _, rest = url.partition("+sentinel://")
    address, _, query = rest.partition("?")
    authority, _, path = address.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    service, _, database = path.partition("/")
    if not hosts or not service:
        raise ValueError("no sentinel, or no name of what it watches")
    given: dict[str, Any] = options | dict(parse_url(f"{scheme}://{credentials}@sentinel/{database}?{query}"))
    del given["host"]
    has_tls = given.pop("connection_class", None) is SSLConnection
    own = {name: given.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    shared = {name: value for name, value in given.items() if name.startswith(("socket_", "ssl_"))}
    watchers = Sentinel(  # type: ignore[no-untyped-call]
        [read_address(host) for host in hosts.split(",")],
        sentinel_kwargs=shared | SENTINEL_TIMEOUTS | own | ({"ssl": True} if has_tls else {}),
    )
    for watcher in watchers.sentinels:
        watcher.connection_pool.connection_class = for_one_client(watcher.connection_pool.connection_class)
    primary: redis.asyncio.Redis = watchers.master_for(
        service, connection_pool_class=SentinelPool, ssl=has_tls, **given
    )
    return primary


def read_address(text: str) -> tuple[str, int]:
    """Return host and port of `host`, `host:port`, `[::1]` or `[::1]:port`."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a sentinel without a host")
    return parts.hostname, parts.port or SENTINEL_PORT


def connect(url: str, **options: Any) -> redis.asyncio.Redis:
    """Return a client with its own connection pool; it connects with its first command. Replies are bytes.

    A command that has no reply within ANSWER_S raises TimeoutError; a vanished peer is noticed by TCP
    keep-alive within about 11 s. The client never repeats a command: callers retry, and scripts are safe to
    repeat. With TLS the broker's certificate must be trusted and name its host. Each new connection reads the
    files of the password and of TLS again, as they may have been replaced. Raises SettingError if that of the
    password cannot be read now.
    """
    # a user needs no right to say which library this is
    defaults: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "lib_name": None,
        "lib_version": None,
    }
    if not url.startswith("unix:"):
        defaults |= {"socket_keepalive": True, "socket_keepalive_options": keepalive_options()}
    if url.startswith("rediss"):
        defaults["ssl_check_hostname"] = True
    url, password_file = take_password_file(url)
    if password_file:
        read_password(password_file)
    is_watched = url.partition("://")[0].lower() in SENTINEL_SCHEMES
    make_client = connect_to_primary if is_watched else redis.asyncio.Redis.from_url
    client: redis.asyncio.Redis = make_client(url, **(defaults | options))
    pool = client.connection_pool
    is_unix = pool.connection_class is UnixDomainSocketConnection
    pool.connection_class = for_one_client(
        UnixConnection if is_unix else pool.connection_class, password_file
    )
    return client


def take_password_file(url: str) -> tuple[str, str]:
    """Return a URL without its option `password_file`, and the path that this gives, or ""."""
    address, _, query = url.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    path = given.pop(PASSWORD_FILE, "")
    return (f"{address}?{urlencode(given)}" if path else url), path


def read_password(path: str) -> str:
    """Raises SettingError if the file cannot be read."""
    try:
        password = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingError("redis_url", f"cannot read {PASSWORD_FILE} {path}: {cause}") from error
    if not password:
        raise SettingError("redis_url", f"{PASSWORD_FILE} {path} is empty")
    return password


class UnixConnection(UnixDomainSocketConnection):
    """A connection over a Unix socket. redis-py's own greets the broker twice, and makes a ConnectionError of
    what the broker refuses the first time.
    """

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):
            self._reader, self._writer = await asyncio.open_unix_connection(self.path)


class BrokerConnection(AbstractConnection):
    """What every connection to a broker does beside what redis-py's does; `for_one_client` joins both.

    It packs commands in C, which redis-py does in its synchronous client only; gives up a broker that does
    not answer; raises ConnectionError for a closed connection, where uvloop raises RuntimeError; and leaves a
    server that is no primary any more.

    Attributes:
        opened: the connections of its client.
        password_file: path of the file that has the user's password, or "".
        num_due: replies that are still to come, or 1 for any number of them.
        num_silent: looks in a row at which one was to come, and nothing had come since the look before.
        gave_up: whether it was closed for that.
        before_look: called before each look.
    """

    opened: WeakSet["BrokerConnection"]
    password_file: str
    num_due = 0
    num_silent = 0
    gave_up = False
    before_look: Callable[[], None] | None = None
    next_look: asyncio.TimerHandle | None = None

    async def connect(self) -> None:
        if isinstance(self, SSLConnection):
            self.ssl_context.context = None  # redis-py keeps that of the first attempt
        await super().connect()  # type: ignore[no-untyped-call]

    async def on_connect(self) -> None:
        if self.password_file:
            try:
                self.password = read_password(self.password_file)
            except SettingError as error:
                raise redis.exceptions.ConnectionError(str(error)) from error
        self.opened.add(self)
        self.gave_up = False
        if self.next_look is not None:
            self.next_look.cancel()
        look_later(self)
        await super().on_connect()

    def pack_command(self, *command: Any) -> list[bytes]:
        # redis-py passes names of two words, such as "XGROUP CREATE", as one argument
        return [hiredis.pack_command((*command[0].split(), *command[1:]))]

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        self.num_due = 1
        try:
            await super().send_packed_command(*args, **options)
        except RuntimeError as error:
            raise redis.exceptions.ConnectionError("Connection closed by server.") from error

    async def read_response(self, *args: Any, **options: Any) -> Any:
        self.num_due = not options.get("push_request")  # a subscription waits for messages
        try:
            # not that of Sentinel's connections, which would close this one alone
            return await AbstractConnection.read_response(self, *args, **options)
        except DEMOTED:
            self.leave_replica()
            raise
        except redis.exceptions.ConnectionError:
            if self.gave_up:
                raise TimeoutError from None
            raise
        finally:
            self.num_due = self.num_silent = 0

    def look(self) -> None:
        """Close the connection if the broker owes a reply and has been silent for long."""
        if self.before_look is not None:
            self.before_look()
        transport = cast(asyncio.Transport, cast(asyncio.StreamWriter, self._writer).transport)
        self.num_silent += self.num_due > 0 and transport.is_reading()
        if self.num_silent >= NUM_LOOKS:
            self.gave_up = True
            transport.abort()

    def leave_replica(self) -> None:
        """Close all connections of this client: others may lead to the replica, too, and one that only reads
        would never learn it.
        """
        for one in [*self.opened]:
            one._close()  # type: ignore[no-untyped-call]

    @property
    def has_spoken(self) -> bool:
        """Whether the broker has ended the connection, or has sent something, since the last reply."""
        assert self._reader is not None
        is_over = self._reader.at_eof() or self._reader.exception() is not None
        return is_over or not self._socket_is_empty()  # type: ignore[no-untyped-call]


def look_later(connection: BrokerConnection) -> None:
    """Look at a connection again and again while it is open."""
    connection.next_look = asyncio.get_running_loop().call_later(
        until_beat(ANSWER_S / NUM_LOOKS), look_again, ref(connection)
    )


def look_again(found: ref[BrokerConnection]) -> None:
    if (connection := found()) is not None and connection.is_connected:
        connection.look()
        look_later(connection)


def for_one_client(kind: type[AbstractConnection], password_file: str = "") -> type[BrokerConnection]:
    """Return the class of one client's connections."""
    own = {"opened": WeakSet(), "password_file": password_file}
    return cast(type[BrokerConnection], type(kind.__name__, (BrokerConnection, kind), own))


def keepalive_options() -> dict[int, int]:
    options = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}
    return {getattr(socket, name): value for name, value in options.items() if hasattr(socket, name)}


def describe_error(error: BaseException) -> str:
    """Describe an error of the broker, or of the connection to it, in one line without passwords."""
    text = hide_users(" ".join(str(error).split()))[:200]
    if tls := re.search(r"Error 1 connecting to (\S+)\. .*(\[SSL: .*)", text):
        return f"no TLS with the broker, whose certificate ssl_ca_certs must trust ({tls[1]}: {tls[2]})"
    text = re.sub(
        r"Error (\d+) connecting to (\S+)\. .*",
        lambda match: f"{match[2]}: {os.strerror(int(match[1]))}",
        text,
    )
    match error:
        case AuthenticationError():
            return f"the broker refused user name or password ({text})"
        case RedisError() if is_denied(error):
            return f"the broker's user lacks a right (NOPERM: {text}); `tokenfleet doctor --acl` prints them"
        case OutOfMemoryError():
            return f"the broker is out of memory ({text})"
        case BusyLoadingError():
            return "the broker is loading its data (LOADING)"
        case ReadOnlyError():
            return "the broker is a read-only replica (READONLY)"
        case TimeoutError() | redis.exceptions.TimeoutError():
            return f"the broker did not answer in time{f' ({text})' if text else ''}"
        case InvalidResponse():
            return f"what answers is not a broker ({text})"
        case OSError() | redis.exceptions.ConnectionError():
            return f"no connection to the broker ({text or type(error).__name__})"
        case _:
            return f"the broker refused ({text or type(error).__name__})"


DENIED = ("ACL failure in script", "The user executing the script can't")
"""What Redis says of a script whose caller may not do what it does: since 7.2 (and Valkey), and before."""


def is_denied(error: BaseException) -> bool:
    """Whether the user of the broker lacks a right."""
    return isinstance(error, NoPermissionError) or any(words in str(error) for words in DENIED)


def broker_url(settings: Settings) -> str:
    """The broker's URL from the settings. Raises SettingError when it is not set."""
    if settings.redis_url is None:
        raise SettingError(
            "redis_url", "is not set: processes of a fleet meet at a broker, as in redis://127.0.0.1:6379"
        )
    return settings.redis_url


def connect_setting(name: str, url: str) -> redis.asyncio.Redis:
    """A client of the broker that the setting `name` leads to. Raises SettingError if it is no URL, or names
    a file that cannot be read.
    """
    for option, path in parse_qsl(url.partition("?")[2]):
        if option in TLS_FILES:
            try:
                Path(path).open("rb").close()
            except OSError as error:
                raise SettingError(name, f"cannot read {option} {path}: {error.strerror}") from error
    try:
        return connect(url)
    except ValueError as error:  # its text may hold the password
        raise SettingError(
            name,
            "is not a URL like redis://[user:password@]host:port/db (rediss://, unix://, redis+sentinel://)",
        ) from error


def is_outage(error: BaseException) -> bool:
    """Whether an error means that no step of this process can use the broker now."""
    away = (OSError, redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)
    return isinstance(error, (*away, BusyLoadingError, ReadOnlyError))


REPEAT_S = 60.0
"""Time between two log lines about the same failure, or the same outage. A step that never returns has
succeeded when it has not failed for this time.
"""
SETTLED_S = 1.0
"""Time without a failure after which a success ends an outage. In a partial outage some steps succeed."""


class FailureLog:
    """What is logged about a step that the broker refuses again and again: each new cause at once, repeated
    ones every minute, and the end. While the broker is away, the failures of all steps are those of one,
    `OUTAGE`.

    Attributes:
        step: what fails, as in "reading plans".
        settled_s: how long it must not have failed until a success counts.
        causes: cause → monotonic time at which it was logged last, since the step last succeeded.
        count: failures since then.
        since_s, last_s: monotonic times of the first and the last of them.
    """

    def __init__(self, log: logging.Logger, step: str, settled_s: float = 0.0) -> None:
        self.log = log
        self.step = step
        self.settled_s = settled_s
        self.since_s = self.last_s = 0.0
        self.forget()

    def forget(self) -> None:
        self.causes: dict[str, float] = {}
        self.count = 0

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """The context of one attempt. An error of the broker is logged and suppressed, and so is the first
        success after it. If the attempt ends with `return` or `continue`, code after the context runs only
        after a failure.
        """
        try:
            yield
        except ERRORS as error:
            self.failed(error)
        else:
            self.succeeded()

    def failed(self, error: Exception) -> None:
        """Count a failure."""
        text = describe_error(error)
        if is_outage(error):
            OUTAGE.count_failure("away", f"{self.step}: {text}")
        else:
            self.count_failure(text, text)

    def count_failure(self, cause: str, text: str) -> None:
        """`text`: the cause in words."""
        now_s = time.monotonic()
        if self.count and now_s - self.last_s > REPEAT_S:
            self.forget()
        if not self.count:
            self.since_s = now_s
        self.last_s = now_s
        self.count += 1
        if now_s - self.causes.get(cause, -REPEAT_S) >= REPEAT_S:
            self.causes[cause] = now_s
            self.log.warning("%s failed, trying again: %s", self.step, text)

    def succeeded(self) -> None:
        """Log that the step has succeeded, if it had failed."""
        if self is not OUTAGE:
            OUTAGE.succeeded()
        now_s = time.monotonic()
        if self.count and now_s - self.last_s >= self.settled_s:
            count, age_s = plural(self.count, "failure"), now_s - self.since_s
            self.log.info("%s has succeeded again, after %s in %.1f s", self.step, count, age_s)
            self.forget()


OUTAGE = FailureLog(log, "the broker", SETTLED_S)
"""One for all steps of a process, while the broker is away."""


INCOMPLETE = object()
"""What the parser returns when the next reply has not arrived in full."""
HELD_BYTES = 1024
"""Bytes of held replies that wake the process all the same."""
RECEIVE_BYTES = 2**16


class FastConnection(asyncio.Protocol):
    """Sends commands without waiting for their replies. A broker that owes a reply and sends nothing is given
    up within ANSWER_S.

    `on_reply` is called with each reply: bytes, numbers, lists; an error of the broker is an exception.

    Attributes:
        closed: a future that ends with an error when the connection does.
        socket: socket of a TCP connection without TLS, whose replies can be held.
        is_held: whether replies wait in the kernel until `poll`.
    """

    def __init__(self, connection: BrokerConnection, on_reply: Callable[[Any], None]) -> None:
        self.connection = connection
        self.on_reply = on_reply
        self.parser = hiredis.Reader(
            protocolError=InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=INCOMPLETE
        )
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        assert connection._writer is not None
        self.transport = connection._writer.transport
        self.transport.set_protocol(self)
        self.socket = own_tcp_socket(self.transport)
        self.is_held = False
        connection.before_look = self.poll

    @classmethod
    async def connect(cls, redis: Redis, on_reply: Callable[[Any], None]) -> "FastConnection":
        """Open a connection beside those of `redis`, to the same broker.

        Raises what connecting raises (`common.broker.client.ERRORS`).
        """
        connection: BrokerConnection = redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        await connection.connect()
        if connection.has_spoken:  # unasked, as with too many clients; redis-py's reader has it, or the end
            reply = await connection.read_response()
            connection._close()  # type: ignore[no-untyped-call]
            raise InvalidResponse(f"it spoke first: {reply!r}")
        return cls(connection, on_reply)

    def send(self, *command: Argument) -> None:
        """Send a command, unless the connection is lost, as `closed` tells."""
        self.send_all([command])

    def send_all(self, commands: Sequence[Sequence[Argument]]) -> None:
        """Send commands with one write."""
        if self.transport.is_closing():  # maybe since before this was its protocol
            self.connection_lost(None)
            return
        self.connection.num_due += len(commands)
        # hiredis' type hints know commands of one argument only
        self.transport.write(b"".join([hiredis.pack_command(tuple(one)) for one in commands]))  # type: ignore[arg-type]

    def set_reading(self, reads: bool) -> None:
        """Read replies or, without `reads`, leave them with the broker."""
        transport = cast(asyncio.Transport, self.transport)
        if not transport.is_closing() and transport.is_reading() != reads:
            (transport.resume_reading if reads else transport.pause_reading)()

    def hold(self) -> None:
        """Have replies wait in the kernel until `poll`: waking for each would take longer than its work. The
        end of the connection wakes all the same, and so do replies over TLS or a Unix socket.
        """
        if self.socket is not None and not self.is_held:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, HELD_BYTES)
            self.is_held = True

    def poll(self) -> None:
        """Take the held replies that have come."""
        if self.socket is None or not self.is_held:
            return
        with contextlib.suppress(OSError):  # nothing has come, or nothing will: the transport finds out
            if data := self.socket.recv(RECEIVE_BYTES):
                self.data_received(data)

    def release(self) -> None:
        """Hold replies no more."""
        if self.socket is not None and self.is_held:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self.is_held = False

    def close(self) -> None:
        self.connection._close()  # type: ignore[no-untyped-call]
        self.close_socket()

    def close_socket(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def fail(self, error: Exception) -> None:
        """Close the connection; `closed` raises `error`."""
        self.close()
        self.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        connection = self.connection
        connection.num_silent = 0
        self.parser.feed(data)
        while (reply := self.parser.gets()) is not INCOMPLETE:
            connection.num_due = max(0, connection.num_due - 1)  # a message comes without a command
            if isinstance(reply, DEMOTED):
                connection.leave_replica()
                self.connection_lost(reply)
            self.on_reply(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self.close_socket()
        if not self.closed.done():
            gave_up = TimeoutError() if self.connection.gave_up else None
            self.closed.set_exception(gave_up or error or ConnectionError("Connection closed by server."))
            self.closed.exception()  # marks it as retrieved: not every user awaits it


def own_tcp_socket(transport: asyncio.BaseTransport) -> socket.socket | None:
    """Return a duplicate of a transport's socket, to be closed, too; None unless it is TCP without TLS."""
    if transport.is_closing():
        return None
    shared = transport.get_extra_info("socket")
    if transport.get_extra_info("ssl_object") or shared.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    own = socket.socket(shared.family, shared.type, shared.proto, os.dup(shared.fileno()))
    own.setblocking(False)
    return own


class SerialClient:
    """Sends a command once the last one has its reply, and reconnects after a lost connection.

    Attributes:
        on_answer: takes the reply to the last command, or the error in its place, once.
    """

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.connection: FastConnection | None = None
        self.on_answer: Callable[[Any], None] | None = None

    async def execute(self, *command: Argument) -> Any:
        """Return the broker's reply.

        Raises the broker's error, or that of a lost connection; then the command may have run all the same.
        """
        connection = self.connection or await self.connect()
        connection.release()
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.on_answer = lambda answer: None if reply.done() else reply.set_result(answer)
        connection.send(*command)
        try:
            answer = await reply
        except asyncio.CancelledError:
            self.close()  # a reply still to come must not be taken for that of the next command
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def is_connected(self) -> bool:
        return self.connection is not None

    def start(self, on_answer: Callable[[Any], None], *command: Argument) -> None:
        """Send a command on the open connection. `on_answer` takes the reply, or the error that `execute`
        raises; either may wait for `poll`.
        """
        assert self.connection is not None
        self.on_answer = on_answer
        self.connection.hold()
        self.connection.send(*command)

    def poll(self) -> None:
        """Take the reply to the command that was started, if it has come; else hold it no longer."""
        if (connection := self.connection) is not None:
            connection.poll()
            if self.on_answer is not None:
                connection.release()

    async def connect(self) -> FastConnection:
        self.connection = connection = await FastConnection.connect(self.redis, self.deliver)
        connection.closed.add_done_callback(lambda _: self.on_lost(connection))
        return connection

    def on_lost(self, connection: FastConnection) -> None:
        if connection is self.connection:
            self.connection = None
            self.deliver(connection.closed.exception() or ConnectionError())

    def deliver(self, answer: Any) -> None:
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is not None:
            on_answer(answer)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    async def run(self, call: ScriptCall[Reply]) -> Reply:
        """Return what a script's reply means, as `PoolClient.run` does."""
        try:
            reply = await self.execute(*call.command)
        except NoScriptError:
            reply = await self.execute(*call.command_with_text)
        return call.read(reply)
