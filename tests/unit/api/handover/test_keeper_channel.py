"""A gateway's end of the channel: messages arrive in order, or never; without a keeper nothing is kept."""

import asyncio
import os
import socket

import pytest

from api.handover.keeper_channel import KeeperChannel, inherited_channel
from common.messages.codec import decode
from common.messages.kept_answer import HANDLE_VARIABLE, MAX_DATAGRAM_BYTES, KeeperMessage, KeptAnswer
from tests.support.waiting import wait_until

ANSWER = KeptAnswer("r0", 0, "1", head=bytes(9000))


def pair() -> tuple[KeeperChannel, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return KeeperChannel(ours), theirs


async def test_messages_that_find_no_room_are_sent_later_in_order() -> None:
    channel, keeper = pair()
    futures = [channel.post(KeeperMessage(keep=ANSWER, drop=str(i))) for i in range(100)]
    assert not futures[-1].done()
    assert not channel.send_now(KeeperMessage(drop="now"))
    received = [
        decode(KeeperMessage, await asyncio.to_thread(keeper.recv, MAX_DATAGRAM_BYTES)) for _ in futures
    ]
    assert [message.drop for message in received] == [str(i) for i in range(100)]
    await asyncio.gather(*futures)
    assert channel.send_now(KeeperMessage(drop="now"))
    assert decode(KeeperMessage, keeper.recv(MAX_DATAGRAM_BYTES)).drop == "now"
    channel.close()
    keeper.close()


async def test_without_a_keeper_every_message_fails() -> None:
    channel, keeper = pair()
    keeper.close()
    waiting = KeeperChannel(None)
    for one in (channel, waiting):
        with pytest.raises(OSError):
            await one.post(KeeperMessage(drop="r0"))
        assert not one.is_open and not one.is_kept() and not one.send_now(KeeperMessage(drop="r0"))


async def test_a_keeper_that_ends_is_noticed() -> None:
    channel, keeper = pair()
    channel.listen(lambda answer, connection: None)
    assert decode(KeeperMessage, keeper.recv(MAX_DATAGRAM_BYTES)).takes is True
    keeper.close()
    await wait_until(lambda: not channel.is_open)


async def test_a_message_that_is_too_long_fails_alone() -> None:
    channel, keeper = pair()
    with pytest.raises(OSError, match="too long"):
        await channel.post(KeeperMessage(drop="x" * MAX_DATAGRAM_BYTES))
    await channel.post(KeeperMessage(drop="r0"))
    channel.close()
    keeper.close()


async def test_the_channel_is_found_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, keeper = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setenv(HANDLE_VARIABLE, str(ours.detach()))
    channel = inherited_channel()
    assert channel.is_open and HANDLE_VARIABLE not in os.environ
    channel.close()
    keeper.close()
    assert not inherited_channel().is_open
