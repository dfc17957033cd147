"""A real browser for tests of the page, and what every page must keep to."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
LAPTOP = {"width": 1400, "height": 900}


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """Chromium; what a test expects of a page may take long while all other tests run."""
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser: Browser, url: str, is_quiet: bool = False, **context_options: Any) -> Iterator[Page]:
    """A page. In the end it must not have raised an error nor violated the Content Security Policy; one that
    is quiet has no error at all in the browser's console, as a response of 403 is.
    """
    context = browser.new_context(**{"viewport": LAPTOP} | context_options)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda message: (
            errors.append(message.text)
            if "Content Security Policy" in message.text or (is_quiet and message.type == "error")
            else None
        ),
    )
    page.goto(url)
    yield page
    context.close()
    assert not errors
