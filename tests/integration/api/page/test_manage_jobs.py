"""Jobs on the page: listed, searched, cancelled, and tried again."""

from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.integration.api.page.test_access import CONTRAST, NAMELESS
from tests.support.page.browser import opened
from tests.support.page.scripted_gateway import ScriptedGateway

pytestmark = pytest.mark.slow

PHONE = {"viewport": {"width": 390, "height": 844}}


def job(job_id: str, state: str, **fields: Any) -> dict[str, Any]:
    known = {"id": job_id, "state": state, "kind": "chat", "tenant": "acme", "created_at": 1_795_000_000}
    return known | {"not_before": 0, "ended_at": 0, "reason": "", "error": ""} | fields


JOBS = [
    job("night/1", "running"),
    job("morning", "scheduled", not_before=1_795_030_000),
    job("night/3", "dead", ended_at=1_795_000_010, error="Request failed during generation: <b>it</b> broke"),
    job("night/4", "done", ended_at=1_795_000_020),
]


def with_jobs(gateway: ScriptedGateway, jobs: list[dict[str, Any]], cursor: str | None = None) -> None:
    counts = {"live": 1, "scheduled": 1, "dead": 1, "ended": 1}
    content = {"jobs": jobs, "cursor": cursor, "counts": counts}
    gateway.routes["GET", "/admin/jobs"] = lambda *_: (200, content)


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}, PHONE])
def test_jobs_are_listed_with_why_they_ended(browser: Browser, options: dict[str, Any]) -> None:
    with ScriptedGateway() as gateway:
        with_jobs(gateway, JOBS)
        with opened(browser, gateway.url, **options) as page:
            page.get_by_role("tab", name="Manage").click()
            part = page.get_by_role("region", name="Jobs")
            expect(part.locator(".sum")).to_contain_text("1 queued or running, 1 scheduled, 1 dead, 1 ended")
            rows = part.locator("tbody tr")
            expect(rows).to_have_count(4)
            expect(rows.nth(1)).to_contain_text("18 Nov 2026, 19:26not before")
            expect(rows.nth(2)).to_contain_text("generation: <b>it</b> broke")
            expect(part.get_by_role("button", name="Retry")).to_have_count(1)
            expect(part.get_by_role("button", name="Cancel")).to_have_count(2)
            assert page.evaluate(CONTRAST) == [] and page.evaluate(NAMELESS) == []
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_job_is_searched_cancelled_and_tried_again(browser: Browser) -> None:
    with ScriptedGateway() as gateway:
        with_jobs(gateway, JOBS, cursor="dead:1:night/3")
        gateway.routes["POST", "/admin/jobs/morning/cancel"] = lambda *_: (200, {})
        gateway.routes["POST", "/admin/jobs/night%2F3/retry"] = lambda *_: (
            409,
            {"error": "Only a dead job can be tried again, and this one is not dead"},
        )
        with opened(browser, gateway.url) as page:
            page.get_by_role("tab", name="Manage").click()
            part = page.get_by_role("region", name="Jobs")
            part.get_by_role("button", name="More").click()
            expect(part.locator("tbody tr")).to_have_count(8)
            part.get_by_label("Part of the id").fill("night")
            part.get_by_role("button", name="Search").click()
            expect(part.locator("tbody tr")).to_have_count(4)
            part.get_by_role("button", name="Cancel morning").click()
            page.get_by_role("button", name="No", exact=True).click()
            part.get_by_role("button", name="Cancel morning").click()
            page.get_by_role("button", name="Yes").click()
            part.get_by_role("button", name="Retry night/3").click()
            expect(part.get_by_role("status")).to_contain_text("this one is not dead")
            posts = [path for method, path, _ in gateway.asked if method == "POST"]
            assert posts == ["/admin/jobs/morning/cancel", "/admin/jobs/night%2F3/retry"]
