"""The page in a browser, in front of a real fleet of two workers: a message streams, its worker is killed,
and the answer is whole.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.gateways import GatewayProcesses
from tests.support.page.scripted_gateway import opened
from tests.support.waiting import wait_until_sync

SETTINGS = {
    "num_workers": 2,
    "dtype": "float32",
    "kv_cache_bytes": "192MiB",
    "demo": True,
    "threads": 1,
    "heartbeat_s": 0.1,
}
QUESTION = "Tell me a long story about a fox, a river and a storm."
MAX_TOKENS = 1536
SOME_CHARS = 30
ANSWER_MS = 180_000
CHAOS_MS = 600_000
KILL_BUSY = """(someChars) => new Promise((resolve) => {
  const look = () => {
    const numChars = [...document.querySelectorAll(".turn.model .words")].at(-1)?.textContent.length ?? 0;
    const button = document.querySelector(".tile.busy[data-kind=worker] button");
    if (numChars < someChars || !button) return setTimeout(look, 10);
    resolve([button.ariaLabel, numChars]);
    button.click();
  };
  look();
})"""
"""Kills the worker that writes the answer, once this has so many characters. It looks within the page, since
an answer may be whole before a test that looks from outside has seen its beginning.
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fleet(browser: Browser) -> Iterator[Fleet]:
    """None where there is no browser to look at it."""
    with Fleet(**SETTINGS) as fleet:
        wait_until_sync(lambda: fleet.workers_ready() == 2)
        yield fleet


@pytest.fixture
def page(fleet: Fleet, browser: Browser) -> Iterator[Page]:
    with opened(browser, fleet.base_url, viewport={"width": 1280, "height": 800}) as page:
        expect(page.locator(".tile[data-kind=worker][data-state=ready]").first).to_be_visible(timeout=60_000)
        yield page


def undisturbed(fleet: Fleet, question: str) -> str:
    body = {
        "model": "tgi",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    answer = httpx.post(f"{fleet.base_url}/v1/chat/completions", json=body, timeout=180).json()
    return str(answer["choices"][0]["message"]["content"])


def send(page: Page, text: str, max_tokens: int = MAX_TOKENS) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Max tokens").fill(str(max_tokens))
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def streamed(page: Page) -> str:
    words = page.locator(".turn.model .words")
    return (words.last.text_content() or "") if words.count() else ""


def answered(page: Page) -> str:
    """The last whole answer as the model wrote it: the page shows it as Markdown."""
    said: str = page.evaluate("JSON.parse(sessionStorage.getItem('tokenfleet.history')).at(-1).content")
    return said


def test_a_killed_worker_changes_no_word(fleet: Fleet, browser: Browser) -> None:
    with opened(browser, fleet.base_url, is_quiet=True) as page:
        expected = undisturbed(fleet, QUESTION)
        expect(page.locator("#health[data-state=good]")).to_have_text("2 workers ready")
        send(page, QUESTION)
        name, num_chars = page.evaluate(KILL_BUSY, SOME_CHARS)
        assert num_chars < len(expected), "it was killed while it worked"
        expect(page.locator(".turn.model[data-state=done]")).to_be_visible(timeout=ANSWER_MS)
        assert answered(page) == expected
        expect(page.locator(".turn.model .ribbon i")).to_have_count(2)
        incarnation = str(name).removeprefix("Kill worker ")
        expect(page.locator("#log")).to_contain_text(f"worker {incarnation.split('-')[0]} was killed")
        expect(page.locator("#health[data-state=good]")).to_have_text("2 workers ready", timeout=90_000)
        expect(page.locator(".turn .figures")).to_contain_text(f"{incarnation.split('-')[0]} died at token")


def test_escape_stops_a_stream(page: Page) -> None:
    send(page, QUESTION)
    wait_until_sync(lambda: streamed(page))
    page.keyboard.press("Escape")
    expect(page.locator(".turn.model[data-state=stopped] .figures")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_an_error_names_the_bad_setting_and_a_retry_works(page: Page) -> None:
    send(page, "Hello", 1_000_000)
    expect(page.locator(".turn.model[data-state=broken] .status")).to_contain_text("1000000")
    page.get_by_label("Max tokens").fill("3")
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".turn.model[data-state=done]")).to_be_visible(timeout=ANSWER_MS)


def test_a_question_without_an_answer_is_not_sent_again_with_the_next_one(page: Page) -> None:
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data) if request.method == "POST" else None)
    send(page, "Refused", 1_000_000)
    expect(page.get_by_role("button", name="Ask again")).to_be_visible()
    page.get_by_label("Max tokens").fill("3")
    page.get_by_label("Message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turn.model[data-state=done]")).to_be_visible(timeout=ANSWER_MS)
    refused, answered = [[one["content"] for one in json.loads(body)["messages"]] for body in sent]
    assert (refused, answered) == (["Refused"], ["Hello"])
    expect(page.get_by_role("button", name="Ask again")).to_have_count(0)


def test_an_answer_goes_on_after_its_gateway_died(fleet: Fleet, page: Page) -> None:
    send(page, QUESTION)
    wait_until_sync(lambda: len(streamed(page)) > SOME_CHARS)
    page.locator(".tile[data-kind=gateway]").get_by_role("button").click()
    expect(page.locator(".tile[data-kind=gateway][data-state=ready]")).to_be_visible(timeout=90_000)
    expect(page.locator("#trouble")).to_be_hidden()
    expect(page.locator(".turn.model[data-state=done]")).to_be_visible(timeout=ANSWER_MS)


@pytest.mark.timeout(1500)
def test_under_chaos_no_token_is_lost_or_changed(page: Page) -> None:
    """Workers, a gateway, the batcher and the broker are killed under sixteen streams."""
    page.get_by_role("tab", name="16 streams").click()
    page.get_by_role("switch", name="Chaos").check()
    expect(page.locator("#log")).to_contain_text("Redis is back", timeout=CHAOS_MS)
    page.get_by_role("switch", name="Chaos").uncheck()
    expect(page.get_by_role("button", name="Run 16 streams")).to_be_visible(timeout=CHAOS_MS)
    tally = {name: page.locator(f"#tally-{name}").text_content() for name in ("tokens", "lost", "changed")}
    assert tally["tokens"] != "0" and (tally["lost"], tally["changed"]) == ("0", "0")


def test_the_api_key_is_kept_over_a_reload(broker: Broker, browser: Browser) -> None:
    with GatewayProcesses(broker.url, 1, API_KEY="open sesame") as gateways:
        wait_until_sync(lambda: answers(gateways.url))
        with opened(browser, gateways.url, is_quiet=True) as page:
            for key in ("wrong", "open sesame"):
                page.get_by_label("API key", exact=True).fill(f"\u200b{key}")
                page.get_by_role("button", name="Use this key").click()
            expect(page.locator(".tile[data-kind=gateway]")).to_be_visible()
            page.reload()
            expect(page.locator(".tile[data-kind=gateway]")).to_be_visible()
            expect(page.get_by_role("dialog")).to_be_hidden()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/fleet").status_code == 401
    return False
