"""One fleet for all clients, with the real model."""

from collections.abc import Iterator

import pytest

from tests.support.fleet.fleet import Fleet


@pytest.fixture(scope="package")
def fleet() -> Iterator[Fleet]:
    with Fleet(kv_cache_bytes="128MiB", num_gateways=2) as fleet:
        yield fleet


@pytest.fixture(scope="package")
def url(fleet: Fleet) -> str:
    """What OpenAI's clients call the base URL."""
    return f"{fleet.base_url}/v1"
