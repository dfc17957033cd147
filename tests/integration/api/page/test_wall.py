"""The wall: sixteen streams on one connection, and the workers that computed each stretch of them."""

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.page.scripted_gateway import ScriptedGateway, opened, worker
from tests.support.waiting import wait_until_sync

TEXT = " ".join(str(number) for number in range(60))
NUM_STREAMS = 16


def run_wall(page: Page) -> None:
    page.get_by_role("tab", name="16 streams").click()
    page.get_by_role("button", name="Run 16 streams").click()


def stretches(page: Page) -> list[list[tuple[str, str]]]:
    """Of each cell: worker and text of each stretch."""
    found: list[list[list[str]]] = page.locator(".cell").evaluate_all(
        "cells => cells.map(cell => [...cell.querySelectorAll('.stretch')]"
        ".map(one => [one.title.split(' ')[0], one.textContent]))"
    )
    return [[(worker, text) for worker, text in cell] for cell in found]


def run_whole_wall(page: Page) -> None:
    """Run it, until each cell has all of the text."""
    run_wall(page)
    expect(page.locator(".cell[data-state=done]")).to_have_count(NUM_STREAMS)
    assert {"".join(text for _, text in cell) for cell in stretches(page)} == {TEXT}


@pytest.mark.slow
def test_streams_of_a_killed_worker_pause_hop_and_go_on(browser: Browser) -> None:
    with ScriptedGateway(2, TEXT, pause_s=1.0) as gateway, opened(browser, gateway.url) as page:
        gateway.most = 12
        run_wall(page)
        of_w1 = page.locator(".chip", has_text="w1").locator("output")
        expect(of_w1).to_have_text("8 streams")
        page.get_by_role("button", name="Kill w1", exact=True).click()
        expect(page.locator(".cell[data-state=paused]")).to_have_count(8)
        expect(page.get_by_text("w1 died: 8 streams paused.")).to_be_visible()
        expect(page.locator(".cell[data-state=paused] .figures").first).to_contain_text("w1 died")
        gateway.most = 20
        expect(page.locator("#wall-says")).to_contain_text("w1 died: 8 streams went on")
        gateway.most = 1000
        expect(page.locator(".cell[data-state=done]")).to_have_count(NUM_STREAMS)
        expect(page.locator("#wall-says")).to_contain_text(
            "All 16 answers are whole: 960 tokens. 8 hops to another worker."
        )
        expect(page.get_by_role("button", name="Run 16 streams")).to_be_visible()
        cells = stretches(page)
        assert ["".join(text for _, text in cell) for cell in cells] == [TEXT] * NUM_STREAMS
        assert sorted([worker for worker, _ in cell] for cell in cells) == [["w0"]] * 8 + [["w1", "w0"]] * 8
        assert {len(cell[0][1].split()) for cell in cells if len(cell) == 2} == {
            runs[1][0] for runs in gateway.runs.values() if len(runs) == 2
        }
        assert page.locator(".words > .worker").count() == 8, "a later stretch begins with its worker's name"


@pytest.mark.slow
def test_workers_have_colours_and_marks_by_the_order_of_their_names(browser: Browser) -> None:
    with ScriptedGateway(12) as gateway, opened(browser, gateway.url) as page:
        gateway.workers.reverse()
        page.get_by_role("tab", name="16 streams").click()
        expect(page.locator(".chip")).to_have_count(12)
        names = page.locator(".chip .worker").all_text_contents()
        assert names == [f"{'●▲■◆★✚▼◗'[i % 8]}w{i}" for i in range(12)]
        colours = page.locator(".chip .worker").evaluate_all(
            "all => all.map(one => getComputedStyle(one).color)"
        )
        assert len(set(colours)) == 8 and colours[0] == colours[8]
        tiles = page.locator(".tile[data-kind=worker] h3 .worker").all_text_contents()
        assert [tile[1:] for tile in tiles] == [f"w{i}" for i in range(12)], "w2 before w10"


@pytest.mark.slow
def test_later_runs_are_compared_with_the_undisturbed_one(browser: Browser) -> None:
    with ScriptedGateway(2, TEXT) as gateway, opened(browser, gateway.url) as page:
        tally = {name: page.locator(f"#tally-{name}") for name in ("tokens", "lost", "changed", "killed")}
        run_wall(page)
        expect(page.locator("#tally")).to_be_visible()
        gateway.tokens = ["another", *gateway.tokens[1:-2]]
        page.get_by_role("button", name="Run 16 streams").click()
        expect(tally["lost"]).to_have_text("32")
        expect(tally["changed"]).to_have_text("16")
        gateway.tokens = TEXT.split(" ")
        gateway.gap_s = 0.1
        page.get_by_role("switch", name="Chaos").check()
        expect(tally["killed"]).not_to_have_text("0")
        page.get_by_role("switch", name="Chaos").uncheck()
        expect(tally["tokens"]).to_have_text(f"{58 * 16 + 60 * 16:,}")
        expect(page.get_by_role("button", name="Run 16 streams")).to_be_visible()
        assert (tally["lost"].text_content(), tally["changed"].text_content()) == ("32", "16")


@pytest.mark.slow
def test_replicas_of_one_name_are_told_apart_by_what_is_their_hosts_own(browser: Browser) -> None:
    with ScriptedGateway(3, TEXT) as gateway:
        gateway.workers = [worker("w0", id=f"w0-{host}", host=f"pod-{host}") for host in "abc"]
        gateway.most, shown = 12, ["●w0 a", "▲w0 b", "■w0 c"]
        with opened(browser, gateway.url) as page:
            run_wall(page)
            expect(page.locator(".tile[data-kind=worker] h3 .worker")).to_have_text(shown)
            expect(page.locator(".chip .worker")).to_have_text(shown)
            expect(page.locator(".way .box .name")).to_have_text(
                ["g0", "Redis", "b0", *(f"{one[0]} {one[1:]}" for one in shown)]
            )
            expect(page.locator(".chip output")).to_have_text(["6 streams", "5 streams", "5 streams"])
            page.get_by_role("button", name="Kill w0 c", exact=True).click()
            expect(page.locator(".chip", has_text="w0 c")).to_have_attribute("data-state", "away")
            expect(page.locator("#log")).to_contain_text("worker w0 c was killed")
            gateway.most = 1000
            expect(page.locator("#wall-says")).to_contain_text("5 hops to another worker.")
            titles = page.locator(".cell .stretch").evaluate_all("all => all.map(one => one.title)")
            assert {title.partition(" computed")[0] for title in titles} == {one[1:] for one in shown}


@pytest.mark.slow
def test_reasoning_is_text_of_a_cell(browser: Browser) -> None:
    with ScriptedGateway(2, TEXT) as gateway, opened(browser, gateway.url) as page:
        gateway.num_thoughts = 20
        run_whole_wall(page)


@pytest.mark.slow
def test_stopped_streams_are_cancelled(browser: Browser) -> None:
    with ScriptedGateway(2, TEXT) as gateway, opened(browser, gateway.url) as page:
        gateway.most = 5
        gateway.routes |= {
            ("DELETE", f"/requests/{i:032x}"): lambda *_: (200, {}) for i in range(NUM_STREAMS)
        }
        run_wall(page)
        expect(page.locator(".cell[data-state=streaming]")).to_have_count(NUM_STREAMS)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".cell[data-state=failed] .figures").first).to_have_text("stopped")
        wait_until_sync(lambda: sum(method == "DELETE" for method, _, _ in gateway.asked) == NUM_STREAMS)


@pytest.mark.slow
def test_a_lost_connection_is_made_again_and_no_event_comes_twice(browser: Browser) -> None:
    with ScriptedGateway(2, TEXT) as gateway, opened(browser, gateway.url) as page:
        gateway.cut_after = 20
        run_whole_wall(page)
        _, again, *_ = [body["streams"] for _, path, body in gateway.asked if path == "/requests/streams"]
        assert all("/" in place for place in again)


@pytest.mark.slow
def test_a_refused_question_stops_no_other(browser: Browser) -> None:
    with ScriptedGateway(2, "one two", gap_s=0.01) as gateway, opened(browser, gateway.url) as page:
        page.route("**/v1/chat/completions", refuse_second_question)
        run_wall(page)
        expect(page.locator(".cell[data-state=done]")).to_have_count(NUM_STREAMS - 1)
        expect(page.locator(".cell[data-state=failed] .figures")).to_have_text("too many")
        expect(page.locator("#wall-says")).to_contain_text("15 of 16 answers are whole")


def refuse_second_question(route: Route) -> None:
    if "gravity" in (route.request.post_data or ""):
        route.fulfill(status=429, json={"error": {"message": "too many"}})
    else:
        route.continue_()
