"""The page for everybody: contrast, keyboard, names for screen readers, every width, 24 workers."""

import re
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.page.scripted_gateway import ScriptedGateway, opened

CONTRAST = (Path(__file__).parents[3] / "support/page/contrast.js").read_text().partition("\n")[2]
TEXT = "# Title\n\nSome `code` and a [link](https://a.b), " + " ".join(map(str, range(60)))
NAMELESS = """() => [...document.querySelectorAll('button, a, input, textarea, [role], summary, ol, ul')]
    .filter(one => one.checkVisibility() && !one.closest('.markdown, [role=status]'))
    .filter(one => !(one.ariaLabel || one.labels?.length || one.getAttribute('aria-labelledby')
        || one.textContent.trim()))
    .map(one => one.outerHTML)"""
FOCUSED = """() => {
    const one = document.activeElement, style = getComputedStyle(one);
    return [one.id || one.ariaLabel || one.textContent.trim(), style.outlineStyle, style.outlineWidth];
}"""
MANY = 24

pytestmark = pytest.mark.slow


def chat(page: Page) -> None:
    page.get_by_label("Message").fill("Hello")
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".turn.model[data-state=done] .ribbon i")).to_have_count(1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(browser: Browser, scheme: Literal["light", "dark"]) -> None:
    with (
        ScriptedGateway(9, TEXT, pause_s=600) as gateway,
        opened(browser, gateway.url, color_scheme=scheme, reduced_motion="reduce") as page,
    ):
        chat(page)
        assert page.evaluate(CONTRAST) == []
        page.get_by_role("tab", name="16 streams").click()
        gateway.most = 30
        page.get_by_role("button", name="Run 16 streams").click()
        expect(page.locator(".cell .holder .worker")).to_have_count(16)
        page.get_by_role("button", name="Kill w1", exact=True).click()
        expect(page.locator(".cell[data-state=paused]").first).to_be_visible()
        expect(page.locator(".tile[data-state=gone]")).to_be_visible()
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate(NAMELESS) == []


def test_everything_is_reached_by_keyboard_and_shows_its_focus(browser: Browser) -> None:
    with ScriptedGateway(2) as gateway, opened(browser, gateway.url) as page:
        expect(page.locator(".tile[data-kind=worker]")).to_have_count(2)
        seen = []
        for _ in range(20):
            page.keyboard.press("Tab")
            name, style, width = page.evaluate(FOCUSED)
            assert (style, width) != ("none", "0px") and width != "0px", name
            seen.append(name)
        assert seen[:3] == ["To the chat", "API", "tab-chat"]
        assert "words" in seen and "tiles" in seen and any(name.startswith("Kill worker") for name in seen)
        page.get_by_role("tab", name="Chat").focus()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name="16 streams")).to_be_focused()
        expect(page.get_by_role("tabpanel", name="16 streams")).to_be_visible()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tabpanel", name="Chat")).to_be_visible()


@pytest.mark.parametrize("width", [360, 820, 1400])
def test_24_workers_fit_every_width(browser: Browser, width: int) -> None:
    size = {"width": width, "height": 900}
    with ScriptedGateway(MANY, TEXT) as gateway, opened(browser, gateway.url, viewport=size) as page:
        expect(page.locator(".tile[data-kind=worker]")).to_have_count(MANY)
        for view in ("Chat", "16 streams"):
            page.get_by_role("tab", name=view).click()
            assert page.evaluate("document.documentElement.scrollWidth") == width
        expect(page.get_by_role("img", name="The way of a token")).to_be_visible()
        assert page.locator(".way .box").count() == 1 + 1 + 1 + 5, "the others are one box"
        page.get_by_role("button", name="Run 16 streams").click()
        expect(page.locator(".cell[data-state=done]")).to_have_count(16)
        heights = page.locator(".cell").evaluate_all("all => all.map(one => one.offsetHeight)")
        assert 80 < min(heights) <= max(heights) < 200, "whole answers make no cell higher"
        page.locator(".tile").last.scroll_into_view_if_needed()
        expect(page.locator(".tile").last).to_be_in_viewport(ratio=0.9)


def test_nothing_moves_when_the_gateway_is_away(browser: Browser) -> None:
    places = "all => all.map(one => one.getBoundingClientRect().toJSON())"
    with ScriptedGateway(2) as gateway, opened(browser, gateway.url) as page:
        expect(page.locator("#log li")).to_have_count(1)
        parts = page.locator(".desk, .flow, .charts, #tiles, #log")
        before = parts.evaluate_all(places)
        page.route("**/fleet", lambda route: route.abort())
        expect(page.get_by_role("alert")).to_contain_text("No gateway answers")
        assert parts.evaluate_all(places) == before
        page.unroute("**/fleet")
        expect(page.get_by_role("alert")).to_be_hidden()
        assert parts.evaluate_all(places) == before


def test_the_log_says_what_came_back_and_the_charts_grow(browser: Browser) -> None:
    with ScriptedGateway(2) as gateway, opened(browser, gateway.url) as page:
        expect(page.locator(".strip h3")).to_have_text(["Tokens/s", "Queue", "KV cache"])
        for number in range(3):
            expect(page.locator(".strip .line").nth(number)).to_have_attribute("d", re.compile("L.*L"))
        page.locator(".tile", has_text="w1").get_by_role("button").click()
        expect(page.locator("#log")).to_contain_text("worker w1 was killed")
        gateway.workers.append(gateway.workers[0] | {"id": "w1-abcd", "state": "starting"})
        expect(page.locator("#log")).to_contain_text("worker w1 is back after")
        expect(page.locator("#log")).to_contain_text("s, starting")
