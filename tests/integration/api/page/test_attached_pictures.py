"""Pictures that a person sends from the page, to a model that sees; and the choice of an adapter."""

import base64
from typing import Any

import pytest
from playwright.sync_api import Browser, FilePayload, Page, expect

from tests.integration.api.page.test_access import CONTRAST, NAMELESS
from tests.support.page.scripted_gateway import ScriptedGateway, opened
from tests.support.pictures import data_url, image_part, png

pytestmark = pytest.mark.slow

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
