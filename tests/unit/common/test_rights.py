"""Users of the broker: each has the rights of its kind, and no other.
Scripts: their names agree with the functions that call them.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis

from common.broker import acl
from common.broker import client as access
from common.broker.keys import table
from common.broker.lua import SCRIPTS, call_script, load_script, run_script, script_names
from common.settings.settings import SettingError
from deploy.launcher.embedded_broker import USERS_FILE, Broker, embedded
from deploy.launcher.prepare import ask_broker
from tests.support import brokers
from tests.support.broker_state import KEYS
from tests.support.source_tree import FILES

SPOILT_POOL = "a [b]*? \\\"c'"
TEXTS = ("requests", "request:a", "tokens:a", "log:w", "submit", "result:j", "reply:j", "job:j", "responses")
"""Keys that have prompts or answers."""


@pytest.fixture(scope="module", params=["", "/usr/bin/redis-server"], ids=["embedded", "redis-server"])
def users(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker with a user of each kind, none of whom needs a password."""
    if request.param and not Path(request.param).exists():
        pytest.skip(f"there is no {request.param}")
    with pytest.MonkeyPatch.context() as patch, embedded() as broker:
        patch.setenv("TEST_BROKER", request.param)
        lines = [f"user {kind} on nopass {' '.join(acl.rules(kind, ['default']))}" for kind in acl.USERS]
        (broker.directory / USERS_FILE).write_text("\n".join(lines))
        process = brokers.start(broker)
        yield broker
        process.kill()
        process.wait()


def may(broker: Broker, kind: str, *command: str) -> bool:
    """Whether a user of a kind may send a command."""
    with redis.Redis.from_url(broker.url) as client:
        return bool(client.execute_command("ACL", "DRYRUN", kind, *command) == b"OK")


def key(name: str, pool: str = "default") -> str:
    return f"tf:{{{pool}}}:{name}"


@pytest.mark.parametrize("kind", acl.USERS)
def test_every_user_can_connect_and_no_user_can_administer(users: Broker, kind: str) -> None:
    assert may(users, kind, "PING")
    for command in (
        "FLUSHALL",
        "KEYS *",
        "CONFIG GET save",
        "ACL LIST",
        "MONITOR",
        "SCRIPT FLUSH",
        "SHUTDOWN",
    ):
        assert not may(users, kind, *command.split()), command


@pytest.mark.parametrize("kind", acl.USERS)
def test_no_user_reaches_keys_of_others(users: Broker, kind: str) -> None:
    for other in ("session:1", "tf:other", key("requests:places:x")):
        assert not may(users, kind, "GET", other)


@pytest.mark.parametrize("kind", ["batcher", "worker", "service", "arq", "operator"])
def test_all_but_gateways_are_confined_to_their_pool(users: Broker, kind: str) -> None:
    for name in ("requests", "submit", "worker:w", "metrics", "log:w", "arq:queue"):
        for command in (["GET"], ["XLEN"], ["XADD", "*", "a", "b"], ["HGETALL"]):
            assert not may(users, kind, command[0], key(name, "other"), *command[1:])
    assert may(users, "gateway", "XLEN", key("requests", "other"))


def test_a_worker_sees_neither_api_keys_nor_jobs_nor_the_lease(users: Broker) -> None:
    for name in ("tf:keys", key("submit"), key("job:a"), key("result:a"), key("responses")):
        assert not may(users, "worker", "GET", name)
        assert not may(users, "worker", "DEL", name)
    assert not may(users, "worker", "SET", key("batcher"), "me")
    assert not may(users, "worker", "SET", key("epoch"), "9")
    assert may(users, "worker", "HINCRBYFLOAT", "tf:keys:a", "tokens", "1"), "what is not used comes back"
    for kind in ("gateway", "operator"):
        assert may(users, kind, "HSET", "tf:keys", "a", "b"), "admins add keys over HTTP, too"


def test_a_service_submits_and_reads_answers_and_sees_no_other_job(users: Broker) -> None:
    assert may(users, "service", "XADD", key("submit"), "*", "job", "{}")
    assert may(users, "service", "GET", key("result:a"))
    assert may(users, "service", "XREAD", "STREAMS", key("reply:a"), "0")
    assert may(users, "service", "SUBSCRIBE", key("ext:me"))
    assert not may(users, "service", "XREAD", "STREAMS", key("submit"), "0")
    assert not may(users, "service", "XADD", key("reply:a"), "*", "frame", "x")
    assert not may(users, "service", "SUBSCRIBE", key("events:g"))


def test_a_dashboard_sees_counts_and_no_text(users: Broker) -> None:
    assert may(users, "dashboard", "HGETALL", key("metrics"))
    assert not may(users, "dashboard", "HSET", key("metrics"), "a", "1")
    for name in TEXTS:
        assert not may(users, "dashboard", "XRANGE", key(name), "-", "+")
        assert not may(users, "dashboard", "GET", key(name))
        assert not may(users, "dashboard", "HGETALL", key(name))


@pytest.mark.parametrize("kind", sorted(acl.USERS.keys() - {"replica", "sentinel"}))
def test_any_name_of_a_pool_makes_rules_that_the_broker_takes(users: Broker, kind: str) -> None:
    with redis.Redis.from_url(users.url) as client:
        client.execute_command("ACL", "SETUSER", "spoilt", "reset", *acl.rules(kind, [SPOILT_POOL]))
    name = {"arq": "arq:queue", "service": "result:a"}.get(kind, "workers")
    command = ["GET"] if kind == "service" else ["EXISTS"] if kind == "arq" else ["ZRANGE"]
    rest = ["0", "-1"] if command == ["ZRANGE"] else []
    assert may(users, "spoilt", *command, key(name, SPOILT_POOL), *rest)


def test_every_script_is_called_by_somebody() -> None:
    called = {name for rights in acl.RIGHTS.values() for name in rights.scripts.split()}
    assert called == {name for name in SCRIPTS if not name.startswith("lib/")}


@pytest.mark.parametrize("kind", acl.RIGHTS)
def test_who_calls_a_script_may_use_its_keys(kind: str) -> None:
    users = {name: row.uses.split() for name, row in table()}
    called = acl.RIGHTS[kind].scripts.split()
    needed = {(key, name) for name in called for key in script_names(name)[0].given if key != "process"}
    assert sorted((key, name) for key, name in needed if kind not in users[key]) == []


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("gateway", "~tf:{*}:webhooks:*"),
        ("batcher", "~tf:{default}:webhooks:*"),
        ("worker", "&tf:{default}:events:*"),
        ("gateway", "+psetex"),
        (acl.FLEET, "~tf:{*}:jobs:*"),
    ],
)
async def test_a_process_that_lacks_a_right_is_told_its_name_at_the_start(
    users: Broker, kind: str, lost: str
) -> None:
    """As after an update of Tokenfleet, if the ACL file is an older one."""
    kinds = acl.PROCESSES if kind == acl.FLEET else (kind,)
    await ask_broker(users.url_of(kind), kinds, ["default"])
    await ask_broker(users.url, acl.PROCESSES, ["default", "other"])
    rules = [rule for rule in acl.rules(kind, ["default"]) if rule != lost]
    with redis.Redis.from_url(users.url) as client:
        client.execute_command("ACL", "SETUSER", "old", "reset", "on", "nopass", *rules)
    with pytest.raises(SettingError) as refused:
        await ask_broker(users.url_of("old"), kinds, ["default"])
    assert f"REDIS_URL: the broker's user lacks rights of this version: {lost};" in str(refused.value)


async def test_who_lacks_a_right_is_told_which_in_one_line(users: Broker) -> None:
    with pytest.raises(SettingError, match=r"REDIS_URL: .*lacks a right \(NOPERM: .*info.*--acl"):
        await ask_broker(users.url_of("service"))
    async with access.connect(users.url_of("operator")) as client:
        foreign = call_script("cancel", bool, KEYS, "a", args={"payload": b"", "reader": ""})
        with pytest.raises(access.ERRORS) as refused:
            await run_script(client, foreign)
        line = access.describe_error(refused.value)
        assert "lacks a right (NOPERM: " in line
        assert f"script cancel, keys {KEYS.request('a')} {KEYS.control}" in line
        with pytest.raises(access.ERRORS) as refused:
            await client.eval("return redis.call('SET', KEYS[1], 1)", 1, KEYS.worker("w"))  # type: ignore[misc]
        assert "lacks a right (NOPERM: " in access.describe_error(refused.value)


# --- lua ----------------------------------------------------------------------------------------------------

SCRIPT_TEXTS = {
    "lib/double": "local function double(x) return 2 * x end\n",
    "lib/inc": "-- needs: lib/double\nlocal function inc(x) return double(x) / 2 + 1 end\n",
    "sum": """-- needs: lib/double, lib/inc
-- Double, increment and add.
-- KEYS log, ...
-- ARGV left,
--      right, ...
-- Returns the key, the sum, and the first of the others.
return {log, inc(double(left)) + right, KEYS[first_key], ARGV[first_arg]}
""",
}


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in SCRIPT_TEXTS.items():
        monkeypatch.setitem(SCRIPTS, name, text)


@pytest.mark.usefixtures("texts")
async def test_a_script_has_what_it_needs_and_its_names_whether_or_not_the_broker_knows_it(
    redis: Redis,
) -> None:
    call = call_script(
        "sum", list, KEYS, "a", args={"right": 1, "left": 20}, more_keys=["b"], more_args=["c"]
    )
    for _ in range(2):
        assert await run_script(redis, call) == [KEYS.log("a").encode(), 42, b"b", b"c"]
        await redis.script_flush()


def called_scripts() -> list[str]:
    """Names of the scripts that functions call."""
    calls = [
        node
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "call_script"
    ]
    return [ast.literal_eval(call.args[0]) for call in calls]


@pytest.mark.parametrize("name", sorted(called_scripts()))
def test_a_script_knows_its_keys_and_arguments_by_name_alone(name: str) -> None:
    keys, args = script_names(name)
    assert max(Counter((*keys.given, *args.given)).values(), default=1) == 1
    assert re.findall(r"(?:KEYS|ARGV)\[\d+\]", SCRIPTS[name]) == []
    assert load_script(name).endswith(SCRIPTS[name])
