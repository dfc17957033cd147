"""`tokenfleet adapters list|load|unload`: the LoRA adapters of a running fleet."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from common.settings.flags import FlagParser
from common.settings.lora import AdapterSource, read_adapter
from common.settings.settings import SettingError
from deploy.cli.client import (
    fetch_json,
    frame_errors,
    new_table,
    post,
    print_lines,
    printable,
)
from deploy.cli.target import add_url, run_for

DESCRIPTION = """
LoRA adapters of a fleet. A request names one as its model, or as adapter_id. Loading one answers once every
worker has it; workers that start later load it, too. If the fleet has API keys, API_KEY must be an admin's.
"""
READ_TIMEOUT_S = 660.0
"""A gateway waits for ten minutes until all workers have an adapter."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 1 for a change that is refused. Raises SettingError."""
    return run_for(new_parser().parse_args(list(argv)), READ_TIMEOUT_S)


def show_all(client: httpx.Client, flags: argparse.Namespace) -> None:
    content = fetch_json(client, "/admin/adapters")
    with frame_errors(content):
        if not content["adapters"]:
            print("there are no adapters")
            return
        print_lines(table(content))


def load(client: httpx.Client, flags: argparse.Namespace) -> None:
    source = read_source(flags.adapter)
    body = {"lora_name": source.name, "lora_path": source.path, "load_inplace": flags.replace}
    print(printable(post(client, "/v1/load_lora_adapter", json=body).text))


def unload(client: httpx.Client, flags: argparse.Namespace) -> None:
    answer = post(client, "/v1/unload_lora_adapter", json={"lora_name": flags.name})
    print(printable(answer.text))


def read_source(word: str) -> AdapterSource:
    """An adapter as `name=path` or a hub id; a folder that is here is named by its whole path. Raises
    SettingError.
    """
    try:
        source = read_adapter(word)
    except SettingError as error:
        raise SettingError("adapter", error.cause) from error
    folder = Path(source.path).expanduser()
    return source._replace(path=str(folder.resolve())) if folder.is_dir() else source


def table(content: Mapping[str, Any]) -> Table:
    """A line for each adapter."""
    shown = new_table()
    for title in ("adapter", "state", "workers", "rank", "base model", "path"):
        shown.add_column(title, justify="right" if title == "rank" else "left", no_wrap=True)
    for one in content["adapters"]:
        causes = "".join(f"; {worker}: {why}" for worker, why in one["refused"].items())
        workers = f"{one['num_workers']} of {content['num_workers']}{causes}"
        cells = (one["name"], one["state"], workers, str(one["rank"]), one["base_model"], one["path"])
        shown.add_row(*map(printable, cells))
    return shown


def new_parser() -> argparse.ArgumentParser:
    parser = FlagParser(prog="tokenfleet adapters", allow_abbrev=False, description=DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="list|load|unload", parser_class=FlagParser)
    shared = FlagParser(add_help=False, allow_abbrev=False)
    add_url(shared)
    listing = commands.add_parser("list", parents=[shared], help="show all adapters")
    listing.set_defaults(run=show_all)
    loading = commands.add_parser("load", parents=[shared], help="load an adapter on all workers")
    loading.set_defaults(run=load, changes=True)
    loading.add_argument(
        "adapter", metavar="NAME=PATH", help="its folder, which all workers can read, or its hub id"
    )
    loading.add_argument("--replace", action="store_true", help="take the place of one of this name")
    unloading = commands.add_parser("unload", parents=[shared], help="give requests an adapter no more")
    unloading.set_defaults(run=unload, changes=True)
    unloading.add_argument("name", metavar="NAME", help="as `tokenfleet adapters list` shows it")
    return parser
