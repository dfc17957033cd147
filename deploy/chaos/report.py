"""Report of a run for the terminal: a table, why requests failed, and what the figures do not say."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.process.logs import plural
from deploy.bench.measure import Server
from deploy.chaos.compare import TokenErrors
from deploy.chaos.figures import ChaosFigures, judged
from deploy.chaos.run import TRUTH_ROUNDS, Recording


def view(server: Server, recording: Recording, found: ChaosFigures) -> RenderableType:
    """Return the whole report."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column(justify="left", style="dim")
    for name, value, note in rows(found):
        is_bad = name in BAD and value != "0"
        table.add_row(name, Text(value, style="bold red" if is_bad else "bold"), note)
    lines = [Text(note, style="yellow") for note in notes(recording, found)]
    return Group(Text(headline(server, recording, found)), Text(), table, *lines)


BAD = ("tokens lost", "tokens repeated", "tokens changed", "requests failed")


def headline(server: Server, recording: Recording, found: ChaosFigures) -> str:
    plan = recording.plan
    strikes = ", ".join(plural(count, kind) for kind, count in found.strikes.items()) or "no strike"
    if plan.drop:
        strikes += f", {plural(found.cuts, 'cut connection')}"
    return (
        f"{server.name} at {server.url}, {server.model}: {plural(plan.num_streams, 'stream')}, "
        f"{found.seconds:.0f} s, {strikes}"
    )


def rows(found: ChaosFigures) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and note of each line."""
    of_compared = f"in {plural(found.compared, 'compared answer')}, {found.tokens} tokens in all"
    yield "tokens lost", str(found.lost), of_compared
    yield "tokens repeated", str(found.repeated), ""
    yield "tokens changed", str(found.changed), ""
    began = f"{found.broken} of them after their first token"
    yield "requests failed", str(found.failed), f"of {found.requests}; {began}"
    yield "tokens undelivered", str(found.undelivered), "of answers that broke off"
    if found.cuts or found.returns:
        yield (
            "connections cut",
            str(found.cuts),
            f"by this client; {plural(found.given_up, 'answer')} could not go on",
        )
        yield "answers gone on", str(found.returns), "over another connection"
    yield "longest gap", seconds(found.gap_max_s), f"undisturbed {seconds(found.undisturbed_gap_max_s)}"
    yield "gap p99", seconds(found.gap_p99_s), f"undisturbed {seconds(found.undisturbed_gap_p99_s)}"
    yield "gap p50", seconds(found.gap_p50_s), ""
    yield "first token p99", seconds(found.first_p99_s), f"p50 {seconds(found.first_p50_s)}"
    yield "longest outage", seconds(found.outage_max_s), "no stream got a token"
    yield "tokens/s", f"{found.tokens_per_s:.1f}", f"undisturbed {found.undisturbed_tokens_per_s:.1f}"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def notes(recording: Recording, found: ChaosFigures) -> Iterator[str]:
    """Yield why requests failed, which strikes hit nothing, and which prompts were not compared."""
    for reason, count in found.failures.items():
        yield f"{plural(count, 'request')} failed: {reason}"
    for strike in recording.striker.strikes:
        if strike.problem:
            yield f"the {strike.kind} at {strike.begun_s - recording.begun_s:.0f} s: {strike.problem}"
    if unstable := found.num_prompts - found.num_stable:
        yield (
            f"{unstable} of {found.num_prompts} prompts had different answers without any strike (asked "
            f"{TRUTH_ROUNDS} times); their tokens are not compared"
        )


def wrong_answers(recording: Recording) -> list[dict[str, Any]]:
    """Return the answers that differ from the truth, or failed, with both texts."""
    errors = {id(answer): found for answer, found in judged(recording)}
    wrong = []
    for answer in recording.answers:
        found = errors.get(id(answer), TokenErrors())
        if answer.error or found != TokenErrors():
            truth = recording.truths[answer.prompt]
            about = {
                "prompt": answer.prompt,
                "at_s": answer.sent_s - recording.begun_s,
                "error": answer.error,
            }
            texts = {"text": answer.text, "truth": truth.text if truth else None}
            wrong.append(about | dataclasses.asdict(found) | texts)
    return wrong
