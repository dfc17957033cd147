"""`tokenfleet models`: shows which pools serve which models, and shares the requests of a model out by
weight.
"""

import argparse
import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

import setproctitle
from rich.table import Table

from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, connect_setting, describe_error
from common.broker.directory import SILENT_S, DirectoryClient, DirectoryContent
from common.settings.flags import FlagParser
from common.settings.settings import SettingError
from deploy.cli.client import ServerError, new_table, print_error, print_lines, printable
from deploy.cli.target import RULE, find_directory

MAX_WEIGHT = 1_000_000
MAX_MODELS = 1000
MAX_NAME = 200
DESCRIPTION = """
Show which pools serve which models, on which brokers, and share the requests of a model out over its pools.
"""
SET = """
Share the requests of a model out: `tokenfleet models set my-model a=90 b=10` sends a tenth of them to pool b.
The name may be a new one, and pools may serve other checkpoints by other names. Weights are relative to their
sum. A pool with weight 0, or without one, gets none. All gateways follow within seconds; requests that run
stay where they are, and one that is sent again with the same x-request-id goes the same way.
"""
UNSET = """
Forget the weights of a model: its requests go to the pools that serve it by that name, by queue depth.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises SettingError."""
    parser = FlagParser(prog="tokenfleet models", allow_abbrev=False, description=DESCRIPTION)
    actions = parser.add_subparsers(required=True, metavar="list|set|unset")
    add_action(actions, "list", "show models, pools and weights", DESCRIPTION, show)
    setting = add_action(actions, "set", "share the requests of a model out by weight", SET, set_weights)
    setting.add_argument("model", metavar="NAME", type=read_name)
    setting.add_argument("weights", metavar="POOL=WEIGHT", nargs="+", type=read_weight)
    unsetting = add_action(actions, "unset", "forget the weights of a model", UNSET, unset_weights)
    unsetting.add_argument("model", metavar="NAME")
    flags = parser.parse_args(list(argv))
    setproctitle.setproctitle("tokenfleet models")  # a password may be in the command line
    try:
        asyncio.run(run(flags))
    except ServerError as error:
        return print_error(error)
    return 0


def add_action(
    actions: "argparse._SubParsersAction[FlagParser]",
    name: str,
    help: str,
    description: str,
    action: Callable[..., object],
) -> FlagParser:
    parser = actions.add_parser(
        name,
        help=help,
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--directory-url",
        metavar="URL",
        help=f"the broker with the directory (default: DIRECTORY_URL, REDIS_URL, {RULE})",
    )
    parser.set_defaults(action=action)
    return parser


async def run(flags: argparse.Namespace) -> None:
    """Run an action with the directory. Raises ServerError, SettingError."""
    url = find_directory(flags.directory_url, flags.action is not show)
    async with connect_setting("directory_url", url) as redis:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await flags.action(DirectoryClient(redis), flags)
        except ERRORS as error:
            raise ServerError(describe_error(error)) from error


async def show(directory: DirectoryClient, flags: argparse.Namespace) -> None:
    print_lines(table(await directory.read()))


async def set_weights(directory: DirectoryClient, flags: argparse.Namespace) -> None:
    """Raises SettingError for weights that give nothing, and for pools that are not there."""
    weights = read_weights(flags.weights)
    content = await directory.read()
    if absent := [name for name in weights if name not in content.pools]:
        known = ", ".join(sorted(content.pools)) or "none"
        raise SettingError("weights", f"there is no pool {absent[0]!r}; those of the directory: {known}")
    if flags.model not in content.weights and len(content.weights) >= MAX_MODELS:
        raise SettingError("model", f"{MAX_MODELS} models have weights already; `models unset` forgets some")
    await directory.set_weights(flags.model, weights)
    print_lines(table(await directory.read()))


async def unset_weights(directory: DirectoryClient, flags: argparse.Namespace) -> None:
    """Raises SettingError if the model has none."""
    if flags.model not in (await directory.read()).weights:
        raise SettingError(
            "model", f"{flags.model!r} has no weights; `tokenfleet models list` shows those that do"
        )
    await directory.set_weights(flags.model, {})
    print_lines(table(await directory.read()))


def read_name(text: str) -> str:
    if not 0 < len(text) <= MAX_NAME:
        raise SettingError("model", f"a name has 1 to {MAX_NAME} characters, not {len(text)}")
    return text


def read_weights(pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Pool → weight. Raises SettingError if a pool is there twice, or none would get a request."""
    weights = dict(pairs)
    if len(weights) < len(pairs):
        raise SettingError("weights", "a pool is named twice")
    if not sum(weights.values()):
        raise SettingError("weights", "all are 0, so no pool would get a request")
    return weights


def read_weight(word: str) -> tuple[str, float]:
    pool, _, text = word.rpartition("=")
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if pool and 0 <= weight <= MAX_WEIGHT:
        return pool, weight
    raise SettingError("weights", f"{word!r} is not a pool and a weight of 0 to {MAX_WEIGHT}, as a=90")


def table(content: DirectoryContent) -> Table:
    """A line for each model and pool."""
    shown = new_table()
    for title in ("model", "pool", "share", "state", "workers", "waiting", "running", "broker"):
        shown.add_column(
            title, justify="right" if title in ("share", "workers", "waiting", "running") else "left"
        )
    for model, pool, share in lines_of(content):
        cells = [model, pool, share, *cells_of(content, pool)]
        shown.add_row(*(printable(cell) for cell in cells))
    return shown


def lines_of(content: DirectoryContent) -> list[tuple[str, str, str]]:
    """Model, pool and share: models with weights first, then each pool's own names."""
    weighted = [
        (model, pool, describe_share(weights, pool))
        for model, weights in sorted(content.weights.items())
        for pool in weights
    ]
    own = [
        (model, pool, "")
        for pool, known in sorted(content.pools.items())
        for model in known.entry.models or [pool]
        if model not in content.weights
    ]
    return weighted + sorted(own)


def describe_share(weights: Mapping[str, float], pool: str) -> str:
    return f"{100 * weights[pool] / (sum(weights.values()) or 1):.4g}%"


def cells_of(content: DirectoryContent, pool: str) -> list[str]:
    """What the directory says of a pool."""
    if (known := content.pools.get(pool)) is None:
        return ["gone", "", "", "", ""]
    entry = known.entry
    state = "live" if known.is_live else "no worker"
    if known.age_s > SILENT_S:
        state = f"silent for {known.age_s:.0f} s"
    return [state, str(entry.num_ready), str(entry.waiting), str(entry.rows), entry.address]
