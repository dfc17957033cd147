"""The page in a browser, in front of a scripted gateway. Without Chromium these tests are skipped."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.page.scripted_gateway import CHROMIUM, browsing


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH")
    with browsing() as browser:
        yield browser
