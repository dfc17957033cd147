"""The manifests' own commands, variables and probes, each pod in a network namespace: what stands in for a
cluster where none can be started.
"""

import asyncio
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.client import Stream, stream
from tests.support.kubernetes.manifests import needs_kubectl, of_kind, rendered
from tests.support.kubernetes.pods import SECRET, Pod, PodNetwork
from tests.support.machine.machines import can_make_links
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    needs_kubectl,
    pytest.mark.skipif(not can_make_links(), reason="network namespaces are not allowed here"),
    pytest.mark.skipif(not shutil.which("redis-server"), reason="redis-server is not installed"),
]
NEW_TOKENS = 200
KEY = {"Authorization": f"Bearer {SECRET['API_KEY']}"}


def body(number: int, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    parameters = {"max_new_tokens": new_tokens, "ignore_eos": True}
    return {"inputs": f"Story number {number} of the sea:", "parameters": parameters}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodNetwork]:
    """The overlay `cpu`, with the one setting that `keda` adds."""
    (keda,) = of_kind(rendered("keda"), "ConfigMap")
    settings = {"SCALE_TO_ZERO": keda["data"]["SCALE_TO_ZERO"], "DTYPE": "float32", "THREADS": "1"}
    with PodNetwork(rendered("cpu"), tmp_path_factory.mktemp("pods"), **settings) as network:
        yield network


@pytest.fixture(scope="module")
def gateway(network: PodNetwork) -> Pod:
    """The gateway, once all are ready."""
    started = [network.start(name) for name in ("batcher", "worker", "gateway")]
    for pod in started:
        asyncio.run(pod.ready())
    return started[-1]


async def streams(gateway: Pod) -> list[asyncio.Task[Stream]]:
    """Begin four streams; each has its first ten tokens."""
    answers = [Stream() for _ in range(4)]
    url = f"{gateway.url()}/generate_stream"
    tasks = [asyncio.create_task(stream(url, body(i), one, KEY)) for i, one in enumerate(answers)]
    await wait_until(lambda: all(len(one.frames) >= 10 for one in answers))
    return tasks


async def ids(tasks: list[asyncio.Task[Stream]]) -> list[list[int]]:
    return [one.ids for one in await asyncio.gather(*tasks)]


async def test_pods_are_replaced_under_streams(network: PodNetwork, gateway: Pod) -> None:
    """A rollout of worker and batcher, then the loss of both: no stream loses or repeats a token."""
    expected = await ids(await streams(gateway))
    assert [len(one) for one in expected] == [NEW_TOKENS] * 4

    tasks = await streams(gateway)
    for name in ("worker", "batcher"):
        old = newest(network, name)
        await network.start(name).ready()
        assert await old.delete() == 0
    assert await ids(tasks) == expected

    tasks = await streams(gateway)
    for name in ("worker", "batcher"):
        newest(network, name).kill()
        network.start(name)
    assert await ids(tasks) == expected


async def test_a_request_waits_for_a_pool_that_is_scaled_to_zero(network: PodNetwork, gateway: Pod) -> None:
    assert await newest(network, "worker").delete() == 0
    async with httpx.AsyncClient(timeout=None, headers=KEY) as client:
        answer = asyncio.create_task(client.post(f"{gateway.url()}/generate", json=body(0, 5)))
        await wait_until(lambda: is_waiting(gateway))
        await network.start("worker").ready()
        assert (await answer).is_success


async def is_waiting(gateway: Pod) -> bool:
    """Whether the metric that the scaler reads counts a request that waits."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{gateway.url()}/metrics")).text
    return any(
        line.startswith("tgi_queue_size") and float(line.split()[-1]) > 0 for line in text.splitlines()
    )


def newest(network: PodNetwork, name: str) -> Pod:
    return [pod for pod in network.pods if pod.name.endswith(name)][-1]
