"""`tokenfleet drain WORKER`: makes a worker hand its requests to others, and waits until it has left."""

import argparse
import asyncio
from collections.abc import Sequence

from common.broker import worker_scripts
from common.broker.client import ERRORS, describe_error
from common.broker.pool_client import PoolClient
from common.process.logs import first_incarnation, plural
from common.settings.flags import FlagParser
from common.settings.settings import Settings
from deploy.cli.client import ServerError, print_error
from deploy.cli.target import add_redis_url, find_broker

POLL_S = 0.5
DESCRIPTION = """
Make a worker leave, as SIGTERM does: it gets no new requests, and its requests go on elsewhere from their
last token. If no other worker is ready, it finishes the requests of clients first. The command ends when the
worker is gone, and prints its last known state, since it may also die meanwhile. Ctrl-C only ends the
waiting. The worker's supervisor starts it again, so draining one worker after the other restarts them all.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 1 for an unknown worker, and for one that came back. Raises SettingError."""
    parser = FlagParser(
        prog="tokenfleet drain",
        allow_abbrev=False,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("worker", help="its id in `tokenfleet status`, or its name, if only one has it")
    add_redis_url(parser)
    parser.add_argument("--pool", help="the worker's pool (default: POOL, else the fleet's)")
    flags = parser.parse_args(list(argv))
    settings = find_broker("tokenfleet drain", True, flags.redis_url, flags.pool)
    try:
        asyncio.run(drain(settings, flags.worker))
    except ServerError as error:
        return print_error(error)
    return 0


async def drain(settings: Settings, word: str) -> None:
    """Raises ServerError."""
    async with PoolClient.connect(settings) as pool:
        try:
            worker = choose_worker(await pool.workers(), word, settings.pool)
        except ERRORS as error:
            raise ServerError(describe_error(error)) from error
        await wait_until_gone(pool, worker)


def choose_worker(workers: Sequence[str], word: str, pool: str) -> str:
    """Return the worker with this id, or the only one with this name. Raises ServerError."""
    if word in workers:
        return word
    named = [worker for worker in workers if worker.rpartition("-")[0] == word]
    if len(named) == 1:
        return named[0]
    found = ", ".join(sorted(named or workers)) or "none"
    problem = f"{len(named)} workers are named {word!r}" if named else f"there is no worker {word!r}"
    raise ServerError(f"{problem}; those of the pool {pool!r}: {found}")


def check_return(worker: str, workers: Sequence[str]) -> None:
    """Raises ServerError if the worker's process is among the workers again, under a new incarnation: its
    heartbeat had only expired.
    """
    first = first_incarnation(worker)
    if back := [other for other in workers if other != worker and first_incarnation(other) == first]:
        raise ServerError(f"{worker} was cut off, and is back as {back[0]}, which is not drained")


async def wait_until_gone(pool: PoolClient, worker: str) -> None:
    """Ask a worker to drain until it is gone, and print each change. Raises ServerError if it came back."""
    shown, seen = "", "seen by nobody"
    while True:
        try:
            found = await pool.run(worker_scripts.drain(pool.keys, worker))
            if found is None:
                check_return(worker, await pool.workers())
                print(f"{worker} is gone; it was last {seen}", flush=True)
                return
            state, num_rows = found
            seen = f"{state}, with {plural(num_rows, 'request')}"
            line = f"{worker} is {seen}"
        except ERRORS as error:
            line = f"{worker}: {describe_error(error)}"
        if line != shown:
            print(line, flush=True)
        shown = line
        await asyncio.sleep(POLL_S)
