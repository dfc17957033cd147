"""The page's view for who has an admin's key: models, usage, API keys, adapters and jobs."""

from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.integration.api.page.test_access import CONTRAST, NAMELESS
from tests.support.page.scripted_gateway import ScriptedGateway, opened

pytestmark = pytest.mark.slow

LIMITS: dict[str, Any] = dict.fromkeys(
    ("max_concurrent", "requests_per_minute", "tokens_per_minute", "budget_tokens"), 0
)


def record(key_id: str, **fields: Any) -> dict[str, Any]:
    key = {"key_id": key_id, "name": "web", "tenant": "acme", "state": "active", "admin": False, "models": []}
    return key | {"expires_at": 0} | LIMITS | fields


def usage(key: str, tokens: int) -> dict[str, Any]:
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "total_tokens")
    return {"key": key, "tenant": "acme", "model": "smollm2", "requests": 3} | dict.fromkeys(names, tokens)


def managed(gateway: ScriptedGateway, *keys: dict[str, Any]) -> None:
    rows = [usage("key_a", 100), usage("key_b", 900)]
    gateway.routes["GET", "/usage"] = lambda *_: (200, {"data": rows, "total": usage("", 1000)})
    gateway.routes["GET", "/v1/models"] = lambda *_: (200, {"data": [{"id": "smollm2"}]})
    gateway.routes["GET", "/admin/keys"] = lambda *_: (200, {"keys": [*keys]})


def test_usage_and_keys_are_listed(browser: Browser) -> None:
    with ScriptedGateway() as gateway:
        managed(
            gateway,
            record("key_a", requests_per_minute=60, budget_tokens=1_000_000, admin=True),
            record("key_b", state="revoked", models=["smollm2"], name="<b>x</b>"),
        )
        with opened(browser, gateway.url) as page:
            page.get_by_role("tab", name="Manage").click()
            used = page.get_by_role("region", name="Usage of this month")
            expect(used.locator("tbody tr").first).to_contain_text("key_b")
            expect(used.locator(".sum")).to_contain_text("3 requests, 1,000 tokens")
            keys = page.get_by_role("region", name="API keys").locator("tbody tr")
            expect(keys.nth(0)).to_contain_text("60 requests/min, 1,000,000 tokens/month")
            expect(keys.nth(0)).to_contain_text("web (admin)")
            expect(keys.nth(1)).to_contain_text("<b>x</b>")
            expect(page.get_by_role("button", name="Revoke key_b")).to_be_disabled()
            assert page.evaluate(CONTRAST) == [] and page.evaluate(NAMELESS) == []


def test_models_that_take_turns_are_listed_with_what_waits(browser: Browser) -> None:
    with ScriptedGateway() as gateway:
        managed(gateway)
        sleeper = {"state": "asleep", "kept_in": "memory", "swap_s": 1.25}
        fleet = gateway.fleet() | {"models": [{"pool": "big", "waiting": 3, "workers": [sleeper]}]}
        gateway.routes["GET", "/fleet"] = lambda *_: (200, fleet)
        with opened(browser, gateway.url) as page:
            page.get_by_role("tab", name="Manage").click()
            row = page.get_by_role("region", name="Models").locator("tbody tr")
            expect(row.locator("td")).to_have_text(["big", "3", "asleep in memory, the last swap took 1.3 s"])


def test_a_key_is_added_rotated_and_revoked(browser: Browser) -> None:
    with ScriptedGateway() as gateway:
        managed(gateway, record("key_a"))
        issued = record("key_new") | {"key": "tf-secret"}
        gateway.routes["POST", "/admin/keys"] = lambda *_: (201, issued)
        gateway.routes["POST", "/admin/keys/key_a/rotate"] = lambda *_: (200, issued)
        gateway.routes["POST", "/admin/keys/key_a/revoke"] = lambda *_: (
            409,
            {"error": {"message": "key_a stands in a file"}},
        )
        with opened(browser, gateway.url) as page:
            page.get_by_role("tab", name="Manage").click()
            page.get_by_label("Name").fill("batch jobs")
            page.get_by_label("Tenant").fill("acme")
            page.get_by_label("Requests a minute").fill("60")
            page.get_by_label("Expires").fill("2027-01-31")
            page.get_by_role("button", name="Add key").click()
            expect(page.get_by_label("API key, shown this once")).to_have_value("tf-secret")
            page.get_by_role("button", name="Done").click()
            page.get_by_role("button", name="Rotate key_a").click()
            page.get_by_role("button", name="No", exact=True).click()
            page.get_by_role("button", name="Rotate key_a").click()
            page.get_by_role("button", name="Yes").click()
            page.get_by_role("button", name="Done").click()
            page.get_by_role("button", name="Revoke key_a").click()
            page.get_by_role("button", name="Yes").click()
            expect(page.locator("#keys-say")).to_have_text("key_a stands in a file")
            assert [(path, body) for method, path, body in gateway.asked if method == "POST"] == [
                (
                    "/admin/keys",
                    {
                        "name": "batch jobs",
                        "tenant": "acme",
                        "expires_at": "2027-01-31",
                        "requests_per_minute": 60,
                    },
                ),
                ("/admin/keys/key_a/rotate", None),
                ("/admin/keys/key_a/revoke", None),
            ]


@pytest.mark.parametrize("status", [403, 404], ids=["no admin's key", "behind a proxy"])
def test_who_may_not_see_the_fleet_has_the_chat_and_the_reason(browser: Browser, status: int) -> None:
    with ScriptedGateway(text="Hello you") as gateway:
        gateway.routes |= {
            ("GET", "/page/access"): lambda *_: (200, {"status": status, "text": "It is hidden"}),
            ("GET", "/fleet"): lambda *_: (status, {"error": "It is hidden"}),
            ("GET", "/v1/models"): lambda *_: (200, {"data": []}),
            ("GET", "/info"): lambda *_: (200, {}),
            ("GET", "/usage"): lambda *_: (200, {"data": [], "total": usage("", 0)}),
        }
        with opened(browser, gateway.url, is_quiet=True) as page:
            expect(page.locator("#health")).to_contain_text("chat only")
            expect(page.get_by_role("region", name="Fleet")).to_have_text("It is hidden", use_inner_text=True)
            expect(page.get_by_role("tab", name="16 streams")).to_be_hidden()
            expect(page.get_by_role("tab", name="Manage")).to_be_visible(visible=status == 403)
            page.get_by_label("Message").fill("Hi")
            page.get_by_label("Message").press("Enter")
            expect(page.locator(".turn.model[data-state=done] .words")).to_have_text("Hello you")
            assert not any(path.startswith("/fleet") for _, path, _ in gateway.asked)


def adapter(name: str, **fields: Any) -> dict[str, Any]:
    known = {"name": name, "state": "ready", "num_workers": 2, "rank": 8, "path": f"/adapters/{name}"}
    return known | {"refused": {}} | fields


def test_adapters_are_listed_loaded_and_unloaded(browser: Browser) -> None:
    asked: list[Any] = []
    shown = [adapter("sql"), adapter("new", state="loading", refused={"w1": "no room"})]

    def change(_: str, body: Any) -> tuple[int, Any]:
        asked.append(body)
        return (400, {"error": {"message": "there is no folder /x"}}) if "lora_path" in body else (200, {})

    with ScriptedGateway() as gateway:
        managed(gateway)
        content = {"adapters": shown, "num_workers": 3, "may_change": True}
        gateway.routes["GET", "/admin/adapters"] = lambda *_: (200, content)
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            gateway.routes["POST", path] = change
        with opened(browser, gateway.url) as page:
            page.get_by_role("tab", name="Manage").click()
            part = page.get_by_role("region", name="Adapters")
            expect(part.locator("tbody tr").nth(0)).to_contain_text("2 of 3")
            expect(part.locator("tbody tr").nth(1)).to_contain_text("2 of 3; w1: no room")
            expect(page.get_by_role("button", name="Unload new")).to_be_disabled()
            page.get_by_role("button", name="Unload sql").click()
            part.get_by_label("Name").fill("other")
            part.get_by_label("Folder or hub id").fill("/x")
            part.get_by_role("button", name="Load", exact=True).click()
            expect(part.get_by_role("status")).to_have_text("there is no folder /x")
            assert asked == [{"lora_name": "sql"}, {"lora_name": "other", "lora_path": "/x"}]
            assert page.evaluate(CONTRAST) == [] and page.evaluate(NAMELESS) == []


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
            assert [path for method, path, _ in gateway.asked if method == "POST"] == [
                *("/admin/jobs/morning/cancel", "/admin/jobs/night%2F3/retry")
            ]
