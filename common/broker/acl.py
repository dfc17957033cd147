"""ACL: what each kind of process may do at the broker, as rules of a Redis user.

The rules follow from two tables: `Keys` says who uses which key, `RIGHTS` what a kind calls and sends. It may
call the commands of its scripts, because Redis checks what a script does against the rights of its caller. An
embedded broker gives each process the user of its kind; `tokenfleet doctor --acl` prints the rules for
another broker.
"""

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.broker.keys import KeyPattern, Keys, table
from common.broker.lua import load_script

CALL = re.compile(r"redis\.p?call\('(\w+)'(?:, '([A-Z]+)')?")
CONTAINERS = ("xgroup", "xinfo")
"""Commands whose first argument is a command of its own to an ACL."""
EVERY_POOL = "*"
ARQ, SENTINEL = "~arq:*", "&__sentinel__:*"
"""Keys of arq, and a channel of Sentinel, which are in no table of ours."""


@dataclass(frozen=True, slots=True)
class Rights:
    """What users of one kind may do.

    Attributes:
        who: who such a user is.
        scripts: those that it calls; it may do all that they do.
        commands: what it sends itself.
        others: rules of what is in no table of keys.
        in_all_pools: whether it uses every pool of the broker.
    """

    who: str
    scripts: str = ""
    commands: str = ""
    others: str = ""
    in_all_pools: bool = False


CONNECT = "ping info select"
CLIENT = f"{CONNECT} multi exec watch unwatch"
PROCESS = f"{CLIENT} eval evalsha time exists get hget hmget zrange zcard xlen del zrem hincrbyfloat pexpire"
"""Commands of every process and of what supervises it: heartbeats, counts, and waiting for others."""

RIGHTS = {
    "gateway": Rights(
        "gateways",
        scripts="admit offer cancel attach forget read_requests delete_response keep_response"
        " register_job begin_validation claim_jobs cancel_job reply release_jobs retry_job"
        " change_key change_adapters heartbeat"
        " keep_picture hold_pictures let_go_pictures"
        " create_batch claim_batch write_batch cancel_batch"
        " claim_webhooks settle_webhook retry_webhook",
        commands=f"{PROCESS} hgetall hexists hset expire set zscore zcount zrank zrevrank lrange xadd xack"
        " xdel xrange xrevrange xpending xclaim xreadgroup xgroup|create xinfo|consumers publish subscribe"
        " unsubscribe"
        " incrby mget psetex setex type zincrby zrangebyscore zremrangebyscore",  # arq
        others=ARQ,
        in_all_pools=True,
    ),
    "batcher": Rights(
        "batchers",
        scripts="lease publish_plan dequeue finish save_committed publish_state publish_pool seal"
        " read_requests change_adapters heartbeat",
        commands=f"{PROCESS} hgetall smembers srem xread xrange xrevrange xadd publish script|load",
    ),
    "worker": Rights(
        "workers",
        scripts="create_logs worker_heartbeat flush write_logits seal change_adapters heartbeat",
        commands=f"{PROCESS} hgetall set xread xadd publish mget",
    ),
    "service": Rights(
        "services that submit jobs (docs/jobs.md)",
        commands="ping select xadd xread get subscribe unsubscribe",
    ),
    "arq": Rights(
        "services that enqueue arq jobs",
        commands=f"{CLIENT} exists get psetex zadd zrem zscore dbsize",
        others=ARQ,
    ),
    "dashboard": Rights(
        "scrapers and dashboards: counts, no prompts and no answers",
        commands=f"{CONNECT} time hgetall zrange xlen",
    ),
    "operator": Rights(
        "`tokenfleet drain` and `tokenfleet keys`",
        scripts="drain change_key",
        commands=f"{CONNECT} eval evalsha zrange hget hgetall",
    ),
    "replica": Rights("replicas of the broker", commands="psync replconf ping"),
    "sentinel": Rights(
        "Redis Sentinel",
        commands="multi exec slaveof replicaof ping subscribe publish role info config|rewrite"
        " client|setname client|kill script|kill",
        others=SENTINEL,
    ),
}
PROCESSES = ("gateway", "batcher", "worker")
FLEET = "fleet"
USERS = {kind: rights.who for kind, rights in RIGHTS.items()} | {
    FLEET: "`tokenfleet serve`, whose processes share one REDIS_URL: the three kinds of processes together"
}
"""Kinds of users, and who they are."""


def rules(kind: str, pools: Sequence[str]) -> list[str]:
    """Return the rules of a user in some pools, as words of ACL SETUSER or of an ACL file; no password."""
    kinds = PROCESSES if kind == FLEET else (kind,)
    found = [rule for pool in pools for one in kinds for rule in rules_of(one, pool)]
    return ["resetkeys", "resetchannels", "-@all", *dict.fromkeys(found)]


def rules_of(kind: str, pool: str) -> Iterable[str]:
    rights = RIGHTS[kind]
    commands = {
        *rights.commands.split(),
        *(c for name in rights.scripts.split() for c in script_commands(name)),
    }
    yield from (f"+{command}" for command in sorted(commands))
    keys = Keys(EVERY_POOL if rights.in_all_pools else escape(pool))
    found: dict[str, list[str]] = {"~": [], "%R~": [], "%W~": [], "&": []}
    for _, row in table():
        for sign, kinds in (("~", row.uses), ("%R~", row.reads), ("%W~", row.adds)):
            if kind in kinds.split():
                found["&" if row.kind == "channel" else sign] += patterns(row, keys)
    for sign, names in found.items():
        wide = tuple(name[:-1] for name in names if name.endswith("*"))
        yield from (
            f"{sign}{one}" for one in names if not any(one[:-1] != w and one.startswith(w) for w in wide)
        )
    yield from rights.others.split()


def patterns(row: KeyPattern, keys: Keys) -> list[str]:
    """Return the patterns of a row's keys; of a prefix also those of the names that begin with it."""
    name = row.name(keys, "*")
    return [name, f"{name}:*"] if row.kind == "prefix" else [name]


def escape(pool: str) -> str:
    """Return a pool's name as part of a pattern: what a pattern cannot have stands for any one character. The
    name `*` stands for every pool.
    """
    if pool == EVERY_POOL:
        return pool
    return re.sub(r"[\s*?\[\]\\\"']", "?", pool)


@functools.cache
def script_commands(name: str) -> frozenset[str]:
    """Return the commands that a script calls by name."""
    found = set()
    for command, argument in CALL.findall(load_script(name)):
        word = command.lower()
        found.add(f"{word}|{argument.lower()}" if word in CONTAINERS else word)
    return frozenset(found)
