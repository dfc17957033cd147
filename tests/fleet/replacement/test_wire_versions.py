"""Two releases side by side: processes of the last one and of this one serve one pool, in every mix."""

import asyncio
import io
import itertools
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.client import Stream
from deploy.launcher.embedded_broker import Broker
from tests.support.releases.mixed_pool import expected_ids, mixed_pool
from tests.support.source_tree import ROOT
from tests.support.waiting import wait_until

LAST_RELEASE = "fa165ebd"
"""Tag or commit of the last release: a release's commit names the one before it here."""
FOLDERS = ("api", "batcher", "benchmarks", "common", "deploy", "gpu_worker", "tests/support")
OLD, NEW = "old", "new"
MIXES = [*itertools.product((OLD, NEW), repeat=2)]
NUM_STREAMS, NUM_TOKENS, STEP_MS = 6, 500, 20
PROMPTS = [f"number {number}, and what follows it" for number in range(NUM_STREAMS)]


def unpack(directory: Path) -> Path | None:
    """Unpack the last release's files below a directory. Return their root; None if this checkout does not
    have that commit, as a shallow clone or an archive.
    """
    words = ["git", "-C", str(ROOT), "archive", "--format=tar", LAST_RELEASE, *FOLDERS]
    done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode:
        return None
    root = directory / LAST_RELEASE
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(root, filter="data")
    return root


@pytest.fixture(scope="module")
def releases() -> Iterator[dict[str, Path]]:
    """Return the roots of both releases."""
    with tempfile.TemporaryDirectory() as directory:
        old = unpack(Path(directory))
        if old is None:
            pytest.skip(f"this checkout lacks the last release, {LAST_RELEASE}: `git fetch --unshallow`")
        yield {OLD: old, NEW: ROOT}


def other(release: str) -> str:
    return NEW if release == OLD else OLD


@pytest.mark.slow  # five processes that nothing has forked start for each mix
@pytest.mark.parametrize(("gateway", "batcher"), MIXES)
async def test_streams_outlive_a_worker_and_a_batcher_in_every_mix(
    broker: Broker, releases: dict[str, Path], gateway: str, batcher: str
) -> None:
    """The rows of a killed worker resume on a worker of the other release, that of the gateway; a standby of
    the other release takes over from a killed batcher; and each client goes from one gateway to the other
    and back.
    """
    async with mixed_pool(broker.url, f"mix-{gateway}-{batcher}", STEP_MS) as pool:
        pool.start("batcher", "b0", releases[batcher])
        pool.start("gateway", "g0", releases[gateway])
        pool.start("gateway", "g1", releases[other(gateway)])
        for name, release in (("w0", other(gateway)), ("w1", gateway)):
            pool.start("worker", name, releases[release])
        await pool.ready(num_workers=2)
        pool.start("batcher", "b1", releases[other(batcher)])
        await pool.stands_by("b1")
        await pool.stands_by("g1")
        answers = [Stream() for _ in PROMPTS]
        async with asyncio.TaskGroup() as clients:
            for prompt, answer in zip(PROMPTS, answers, strict=True):
                clients.create_task(pool.ask(prompt, NUM_TOKENS, answer))
            await go_on(answers)
            for victim in ("w0", "b0"):
                await go_on(answers)
                pool.kill(victim)
            await go_on(answers)
        check(answers)


async def go_on(answers: list[Stream]) -> None:
    """Wait until each stream has shown some more tokens, and none has ended."""
    before = [len(answer.frames) for answer in answers]
    await wait_until(
        lambda: all(len(answer.frames) > count + 5 for answer, count in zip(answers, before, strict=True))
    )
    assert all(len(answer.frames) < NUM_TOKENS for answer in answers), "tokens come as they are generated"


def check(answers: list[Stream]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.ids == expected_ids(prompt, NUM_TOKENS)
