"""Ranks that meet, or do not; links between those that have met; their model must be the same."""

import json
import queue
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.rank import RankInfo
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.model.load import check_same, describe_model
from gpu_worker.engine.parallel.rendezvous import Member, RankLinks, RankLost, RendezvousFailed, connect_ranks
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync


def infos(world_size: int) -> list[RankInfo]:
    port = free_port()
    return [RankInfo(rank, world_size, rank, world_size, "127.0.0.1", port) for rank in range(world_size)]


def start(call: Callable[[], RankLinks]) -> "Future[RankLinks]":
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def connected(world_size: int) -> list[RankLinks]:
    futures = [start(lambda info=info: connect_ranks(info, 20.0)) for info in infos(world_size)]  # type: ignore[misc]
    return [future.result(20) for future in futures]


def test_ranks_exchange_messages_and_learn_of_the_first_loss() -> None:
    ranks = connected(3)
    futures = [ThreadPoolExecutor(1).submit(links.exchange, {"of": links.rank}) for links in ranks]
    assert [future.result(20) for future in futures] == [[{"of": rank} for rank in range(3)]] * 3
    losses: queue.SimpleQueue[RankLost] = queue.SimpleQueue()
    ranks[0].watch(losses.put)
    ranks[2].peers[0].connection.shutdown(socket.SHUT_RDWR)
    lost = losses.get(timeout=20)
    assert str(lost) == "rank 2 is lost: it has ended" and ranks[0].wait_for_loss(0.0) is lost
    with pytest.raises(RankLost, match="rank 2"):
        ranks[0].exchange("anything")


def test_those_who_are_missing_are_named_at_every_rank() -> None:
    given = infos(4)
    futures = [start(lambda info=info: connect_ranks(info, 1.0)) for info in given[:2]]  # type: ignore[misc]
    lines = [str(future.exception(20)) for future in futures]
    place = f"127.0.0.1:{given[0].port}"
    assert lines[0] == (f"ranks 2, 3 of 4 have not connected to {place} (connected: rank 1) within 1 s")
    assert lines[1].startswith(f"ranks 2, 3 of 4 have not connected to {place}")


def test_a_rank_that_finds_nobody_names_rank_0() -> None:
    info = infos(2)[1]
    with pytest.raises(
        RendezvousFailed, match=f"^rank 0 has not answered at 127.0.0.1:{info.port} within 0.5 s"
    ):
        connect_ranks(info, 0.5)


def test_a_rank_that_has_died_joins_again_and_strangers_disturb_nobody() -> None:
    given = infos(3)
    leader = start(lambda: connect_ranks(given[0], 30.0))

    def say(text: bytes) -> socket.socket:
        def connect() -> socket.socket | None:
            try:
                return socket.create_connection(("127.0.0.1", given[0].port))
            except OSError:
                return None

        connection: socket.socket = wait_until_sync(connect)
        connection.sendall(text)
        return connection

    strangers = [say(b""), say(b"GET / HTTP/1.1\r\n\r\n"), say(b"[]\n")]
    first = say(json.dumps({"rank": 1, "world_size": 3, "host": "here"}).encode() + b"\n")
    assert json.loads(first.recv(1000)) == {"missing": [2]}
    twin = say(json.dumps({"rank": 1, "world_size": 3, "host": "there"}).encode() + b"\n")
    assert json.loads(twin.recv(1000))["refused"] == "rank 1 is connected already"
    first.close()
    others = [start(lambda info=info: connect_ranks(info, 30.0)) for info in given[1:]]  # type: ignore[misc]
    assert [future.result(30).rank for future in [leader, *others]] == [0, 1, 2]
    for stranger in strangers:
        stranger.close()


def test_ranks_of_different_worlds_are_refused() -> None:
    given = infos(2)
    start(lambda: connect_ranks(given[0], 3.0))
    with pytest.raises(SettingError, match="NUM_SHARD: 3 ranks, but 2 at rank 0"):
        connect_ranks(replace(given[1], world_size=3), 3.0)


def test_a_port_that_is_taken_is_named() -> None:
    given = infos(2)
    line = f"MASTER_PORT: {given[0].port} cannot be listened at"
    with socket.create_server(("127.0.0.1", given[0].port)), pytest.raises(SettingError, match=line):
        connect_ranks(given[0], 1.0)


MEMBERS = [Member(0, "node0", "10.0.0.1"), Member(1, "node1", "10.0.0.2")]


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    texts = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights"} | {
        name.replace("_", "."): text for name, text in files.items()
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "settings", "line"),
    [
        (
            {"config_json": "[]"},
            {},
            "MODEL_ID: config.json of tiny at rank 1 on node1 .10.0.0.2. is not that of",
        ),
        ({"model_safetensors": "weighty"}, {}, "MODEL_ID: model.safetensors of tiny at rank 1 on node1"),
        ({"more_safetensors": ""}, {}, "MODEL_ID: more.safetensors of tiny at rank 1 on node1"),
        ({}, {"block_size": 32}, "BLOCK_SIZE: 32 at rank 1 on node1 .10.0.0.2., but None at rank 0 on node0"),
    ],
)
def test_what_differs_is_named_with_its_machine(
    tmp_path: Path, files: dict[str, str], settings: dict[str, Any], line: str
) -> None:
    first = describe_model(write(tmp_path / "0"), Settings(), "float32", "cpu")
    second = describe_model(write(tmp_path / "1", **files), Settings(**settings), "float32", "cpu")
    check_same("tiny", [first, first], MEMBERS)
    with pytest.raises(SettingError, match=line):
        check_same("tiny", [first, second], MEMBERS)
