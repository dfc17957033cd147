"""The page's view for who has an admin's key: models, usage, API keys, adapters and jobs; pictures that a
person sends to a model that sees; and the page for everybody: contrast, keyboard, names for screen readers,
every width, 24 workers.
"""

import base64
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, FilePayload, Page, expect

from tests.support.page.scripted_gateway import ScriptedGateway, opened
from tests.support.pictures import data_url, image_part, png

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
        with opened(browser, f"{gateway.url}/#manage") as page:
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


@pytest.mark.parametrize("is_secure", [True, False], ids=["this machine", "http in a network"])
def test_a_new_key_is_copied_where_the_browser_lets_a_page(browser: Browser, is_secure: bool) -> None:
    with ScriptedGateway() as gateway, opened(browser, gateway.url) as page:
        managed(gateway)
        gateway.routes["POST", "/admin/keys"] = lambda *_: (201, record("key_new") | {"key": "tf-secret"})
        if is_secure:
            page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        else:
            page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
            page.reload()
        page.get_by_role("tab", name="Manage").click()
        page.get_by_role("button", name="Add key").click()
        expect(page.get_by_role("button", name="Copy")).to_be_visible(visible=is_secure)
        if is_secure:
            page.get_by_role("button", name="Copy").click()
            expect(page.get_by_role("button", name="Copied")).to_be_visible()
            assert page.evaluate("navigator.clipboard.readText()") == "tf-secret"


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
        with opened(browser, f"{gateway.url}/#wall", is_quiet=True) as page:
            expect(page.locator("#health")).to_contain_text("chat only")
            expect(page.get_by_role("region", name="Fleet")).to_have_text("It is hidden", use_inner_text=True)
            expect(page.get_by_role("tab", name="16 streams")).to_be_hidden()
            expect(page.get_by_role("tab", name="Manage")).to_be_visible(visible=status == 403)
            page.get_by_label("Message").fill("Hi")
            page.get_by_label("Message").press("Enter")
            expect(page.locator(".turn.model[data-state=done] .words")).to_have_text("Hello you")
            assert not any(path.startswith("/fleet") for _, path, _ in gateway.asked)


def test_a_question_is_kept_while_it_is_answered_and_the_server_judges_its_settings(browser: Browser) -> None:
    with ScriptedGateway(text="Since it scatters") as gateway, opened(browser, gateway.url) as page:
        gateway.most = 1
        page.get_by_text("Settings").click()
        page.get_by_label("Temperature").fill("0.75")
        page.get_by_text("Settings").click()
        page.get_by_label("Message").fill("Why blue?")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn.model .words")).to_have_text("Since")
        assert [body["temperature"] for _, path, body in gateway.asked if "chat" in path] == [0.75]
        page.reload()
        expect(page.locator(".turn.user")).to_have_text("Why blue?")


def test_a_long_conversation_stands_at_its_end_after_a_reload(browser: Browser) -> None:
    with (
        ScriptedGateway(text="\n\n".join(map(str, range(60)))) as gateway,
        opened(browser, gateway.url) as page,
    ):
        chat(page)
        chat(page)
        page.reload()
        expect(page.locator(".turn.model")).to_have_count(2)
        expect(page.locator(".turn.model").last.get_by_text("59")).to_be_in_viewport()


def test_reasoning_is_shown_and_counted_but_no_part_of_the_conversation(browser: Browser) -> None:
    with ScriptedGateway(text="Say hello. Hello you") as gateway, opened(browser, gateway.url) as page:
        answer = page.locator(".turn.model")
        for num_thoughts, words in ((2, " Hello you"), (4, "")):
            gateway.num_thoughts, gateway.most = num_thoughts, 2
            page.get_by_label("Message").fill("Greet me")
            page.get_by_label("Message").press("Enter")
            expect(answer.last.locator("details > div")).to_have_text("Say hello.")
            expect(answer.last.locator("details > div")).to_be_visible()
            expect(answer.last.locator(".figures")).to_contain_text("2 tokens · first token")
            assert page.evaluate(CONTRAST) == []
            gateway.most = 10
            expect(answer.last).to_have_attribute("data-state", "done")
            expect(answer.last.locator(".words")).to_have_text(words)
            expect(answer.last.locator(".figures")).to_contain_text("4 tokens")
        gateway.num_thoughts = 0
        page.get_by_label("Message").fill("Again")
        page.get_by_label("Message").press("Enter")
        expect(answer).to_have_count(3)
        question = {"role": "user", "content": "Greet me"}
        assert [body["messages"] for _, path, body in gateway.asked if "chat" in path][2] == [
            *(question, {"role": "assistant", "content": " Hello you"}),
            *(question, {"role": "assistant", "content": ""}),
            {"role": "user", "content": "Again"},
        ]


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


# --- pictures -----------------------------------------------------------------------------------------------


PASTED = """(files) => {
    const data = new DataTransfer();
    for (const { name, type, content } of files)
        data.items.add(new File([Uint8Array.from(atob(content), (c) => c.charCodeAt(0))], name, { type }));
    const event = new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true });
    document.getElementById('words').dispatchEvent(event);
}"""
"""Files of the clipboard, pasted into the message."""


def file(name: str, content: bytes, kind: str = "image/png") -> FilePayload:
    return {"name": name, "mimeType": kind, "buffer": content}


def paste(page: Page, *files: FilePayload) -> None:
    given = [
        {
            "name": one["name"],
            "type": one["mimeType"],
            "content": base64.b64encode(one["buffer"]).decode(),
        }
        for one in files
    ]
    page.evaluate(PASTED, given)


def scripted(sees: bool, *names: str) -> ScriptedGateway:
    gateway = ScriptedGateway(text="A red square")
    tag = "image-text-to-text" if sees else "text-generation"
    gateway.routes["GET", "/info"] = lambda *_: (200, {"model_pipeline_tag": tag})
    models = {"data": [{"id": name} for name in ("smolvlm", *names)]}
    gateway.routes["GET", "/v1/models"] = lambda *_: (200, models)
    return gateway


def chats(gateway: ScriptedGateway) -> list[Any]:
    return [body for _, path, body in gateway.asked if path == "/v1/chat/completions"]


def test_pictures_are_chosen_pasted_removed_and_sent(browser: Browser) -> None:
    red, blue = png(), png(color="blue")
    with scripted(True) as gateway, opened(browser, gateway.url) as page:
        expect(page.get_by_role("button", name="Pictures", exact=True)).to_be_visible()
        page.locator("#files").set_input_files([file("red.png", red), file("blue.png", blue)])
        attached = page.get_by_role("list", name="Attached pictures")
        expect(attached.get_by_role("img")).to_have_count(2)
        page.get_by_role("button", name="Remove blue.png").click()
        paste(page, file("notes.txt", b"words", "text/plain"), file("more.png", blue))
        expect(page.get_by_text("No picture of a kind that is read: notes.txt")).to_be_visible()
        expect(attached.get_by_role("img", name="more.png")).to_be_visible()
        assert page.evaluate(CONTRAST) == [] and page.evaluate(NAMELESS) == []
        page.get_by_label("Message").fill("What is this?")
        page.get_by_label("Message").press("Enter")
        expect(page.locator(".turn.model[data-state=done]")).to_contain_text("A red square")
        expect(page.locator(".turn.user img")).to_have_count(2)
        expect(attached).to_be_hidden()
        parts = [image_part(data_url(red)), image_part(data_url(blue))]
        sent = {"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}
        assert [body["messages"] for body in chats(gateway)] == [[sent]]
        page.reload()
        expect(page.locator(".turn.user img")).to_have_count(2)
        expect(page.locator(".turn.user")).to_contain_text("What is this?")


def test_a_picture_needs_no_words_and_is_sent_again_with_the_next_message(browser: Browser) -> None:
    with scripted(True) as gateway, opened(browser, gateway.url) as page:
        expect(page.get_by_role("button", name="Pictures", exact=True)).to_be_visible()
        paste(page, file("red.png", png()))
        expect(page.get_by_role("button", name="Remove red.png")).to_be_visible()
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn.model[data-state=done]")).to_have_count(1)
        page.get_by_label("Message").fill("And its shape?")
        page.get_by_label("Message").press("Enter")
        expect(page.locator(".turn.model[data-state=done]")).to_have_count(2)
        first, second = chats(gateway)
        assert first["messages"] == [{"role": "user", "content": [image_part(data_url(png()))]}]
        assert second["messages"][:1] == first["messages"]


def test_a_model_that_reads_text_gets_no_picture(browser: Browser) -> None:
    with scripted(False) as gateway, opened(browser, gateway.url) as page:
        expect(page.locator(".tile[data-kind=worker]")).to_have_count(2)
        paste(page, file("red.png", png()))
        expect(page.get_by_text("This model reads text only, so it gets no pictures.")).to_be_visible()
        expect(page.get_by_role("button", name="Pictures", exact=True)).to_be_hidden()
        expect(page.get_by_role("list", name="Attached pictures")).to_be_hidden()


@pytest.mark.parametrize(("names", "asked"), [(["sql"], "sql"), ([], "smolvlm")])
def test_an_adapter_is_chosen_among_the_models(browser: Browser, names: list[str], asked: str) -> None:
    with scripted(False, *names) as gateway, opened(browser, gateway.url) as page:
        expect(page.locator(".tile[data-kind=worker]")).to_have_count(2)
        page.get_by_text("Settings").click()
        menu = page.get_by_role("combobox", name="Model", include_hidden=True)
        if names:
            menu.select_option("sql")
        else:
            expect(menu).to_be_hidden()
        page.get_by_label("Message").fill("Hello")
        page.get_by_label("Message").press("Enter")
        expect(page.locator(".turn.model[data-state=done]")).to_be_visible()
        assert [body["model"] for body in chats(gateway)] == [asked]


# --- for everybody ------------------------------------------------------------------------------------------

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


def chat(page: Page) -> None:
    page.get_by_label("Message").fill("Hello")
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".turn.model").last.locator(".ribbon i")).to_have_count(1)
    expect(page.locator(".turn.model").last).to_have_attribute("data-state", "done")


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
