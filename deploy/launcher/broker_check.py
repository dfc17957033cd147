"""Broker check: whether the broker of REDIS_URL is one that a fleet can use, and its user has the rights."""

import asyncio
import json
import re
from collections.abc import Iterable, Sequence

from redis.asyncio import Redis

from common.broker.acl import rules
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, connect_setting, describe_error
from common.settings.settings import SettingError

MIN_VERSION = (7, 0)
LOSSES = (
    "the broker has no append-only file, so at its end it loses what no snapshot has: requests, and tokens "
    "that clients have seen already; set `appendonly yes`"
)


NO_EVICTION = "noeviction"
MAY = """
local refused = {}
for i, command in ipairs(ARGV) do
    local words = cjson.decode(command)
    local taken, may
    repeat
        taken, may = pcall(redis.acl_check_cmd, unpack(words))
        table.remove(words)
    until taken or #words == 0
    if not may or not taken then refused[#refused + 1] = i - 1 end
end
return refused
"""
"""Indices of the commands that the caller may not send. ARGV: commands, as JSON arrays of words. Redis 8
takes no more arguments than a command has; other brokers abort on a command that ends before its keys do, so
the longest form is asked about first.
"""
NUM_WORDS = 8
"""Arguments of the longest form of a sample command."""
PUBLISHING = ("publish", "subscribe", "unsubscribe")
"""Commands whose arguments are channels."""


async def check_broker(url: str, kinds: Sequence[str] = (), pools: Sequence[str] = ()) -> str:
    """Raise SettingError, within CONNECT_TIMEOUT_S, unless a supported broker answers at `url` and its user
    has the rights of these kinds of processes in these pools. Returns what the broker would lose at its end;
    empty if that is nothing.
    """
    client = connect_setting("redis_url", url)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            server = await client.info()
            missing = await missing_rights(client, kinds, pools) if kinds else []
    except ERRORS as error:
        raise SettingError("redis_url", describe_error(error)) from error
    finally:
        await client.aclose()
    version = str(server.get("redis_version", "0.0"))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MIN_VERSION:
        raise SettingError(
            "redis_url",
            f"the broker speaks Redis {version}; {MIN_VERSION[0]}.{MIN_VERSION[1]} or later is needed",
        )
    if server.get("cluster_enabled"):
        raise SettingError(
            "redis_url",
            "the broker is a node of a Redis Cluster, which would part keys that change together; let it be "
            "a single primary (Sentinel may watch it), and for more load give pools brokers of their own",
        )
    policy = str(server.get("maxmemory_policy", NO_EVICTION))
    if policy != NO_EVICTION:
        raise SettingError(
            "redis_url", f"the broker's maxmemory-policy is {policy}, which loses keys; set {NO_EVICTION}"
        )
    if missing:
        raise SettingError(
            "redis_url",
            f"the broker's user lacks rights of this version: {' '.join(missing)}; `tokenfleet doctor --acl` "
            "prints all that it needs",
        )
    return "" if server.get("aof_enabled") else LOSSES


async def missing_rights(redis: Redis, kinds: Iterable[str], pools: Sequence[str]) -> list[str]:
    """Return the rights of some kinds of processes that the user of this connection lacks. Nothing is
    changed.
    """
    rights = dict.fromkeys(rule for kind in kinds for rule in rules(kind, pools) if rule[0] in "+~%&")
    names = {rule: rule.removeprefix("%R")[1:].replace("*", "x") for rule in rights}

    async def lacking(samples: dict[str, list[str]]) -> list[str]:
        refused: list[int] = await redis.eval(MAY, 0, *map(json.dumps, samples.values()))  # type: ignore[misc]
        return [list(samples)[i] for i in refused]

    keys = {rule: ["evalsha", "x", "1", name] for rule, name in names.items() if rule[0] == "~"}
    keys |= {rule: ["get", name] for rule, name in names.items() if rule[0] == "%"}
    keys |= {rule: ["publish", name, ""] for rule, name in names.items() if rule[0] == "&"}
    missing = await lacking(keys)
    held = [rule for rule in keys if rule not in missing]
    arguments = {sign: next((names[rule] for rule in held if rule[0] == sign), "") for sign in "~&"}
    commands = {}
    for rule in rights:
        if rule[0] == "+":
            words = names[rule].split("|")
            if argument := arguments["&" if words[0] in PUBLISHING else "~"]:
                commands[rule] = [*words, *[argument] * NUM_WORDS]
    return missing + await lacking(commands)
