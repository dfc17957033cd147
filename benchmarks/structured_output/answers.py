"""Checks answers under real JSON schemas while workers are killed: `python -m
benchmarks.structured_output.answers CLONE [--count 500] [--seed 3] [--max-tokens 200] [--kill-every 50]`.

CLONE is one of MaskBench (cases.py). A fleet of two workers answers 8 requests at a time, greedy and hot in
turns; after each 50 answers a worker is killed. Each answer is checked by the package `jsonschema` (formats,
too), not by the library that makes the masks. Printed, every 25 answers and at the end, are the schemas
refused, the answers that are valid, those that `max_tokens` cuts, and how many requests a kill has moved. An
answer that ended by itself and is not valid is a failure (exit status 1).
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.structured_output.cases import Case, read_cases
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until

AT_ONCE = 8
HOT = {"temperature": 1.3, "top_p": 0.95}
RESUMES = "tokenfleet_request_resumes_total"
QUESTION = "Invent an example of this, as JSON: "


@dataclass(slots=True)
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    cut: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    kills: int = 0

    def __str__(self) -> str:
        return f"{self.outcomes.total()} schemas, {self.kills} kills: {dict(self.outcomes)}"


def body_of(case: Case, number: int, max_tokens: int) -> dict[str, Any]:
    question = QUESTION + str(case.schema.get("description", case.schema.get("title", "a thing")))[:400]
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": case.schema}}
    sampling = HOT if number % 2 else {"temperature": 0}
    messages = [{"role": "user", "content": question}]
    return {
        "messages": messages,
        "response_format": form,
        "max_tokens": max_tokens,
        "seed": number,
    } | sampling


async def ask(client: httpx.AsyncClient, case: Case, number: int, max_tokens: int, tally: Tally) -> None:
    response = await client.post("/v1/chat/completions", json=body_of(case, number, max_tokens))
    answer = response.json()
    if response.status_code == 400 and "cannot be compiled" in response.text:
        tally.outcomes["refused"] += 1
    elif response.status_code != 200:
        tally.outcomes["failed"] += 1
        tally.wrong.append(f"{case.name}: {response.status_code}: {response.text[:300]}")
    else:
        [choice] = answer["choices"]
        judge(case, choice["message"]["content"], choice["finish_reason"], tally)


def judge(case: Case, text: str, reason: str, tally: Tally) -> None:
    validator = jsonschema.validators.validator_for(case.schema, jsonschema.Draft202012Validator)
    try:
        validator(case.schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        tally.outcomes["cut" if reason == "length" else "invalid"] += 1
        if reason == "length":
            tally.cut.append(case.name)
        else:
            tally.wrong.append(f"{case.name}: {str(error)[:200]}: {text[:300]}")
        return
    tally.outcomes["valid"] += 1


async def run(fleet: Fleet, cases: list[Case], max_tokens: int, kill_every: int, tally: Tally) -> None:
    queue = list(enumerate(cases))

    async def take() -> None:
        while queue:
            number, case = queue.pop(0)
            await ask(client, case, number, max_tokens, tally)
            if tally.outcomes.total() % 25 == 0:
                print(tally, flush=True)
            if tally.outcomes.total() % kill_every == 0:
                await wait_until(lambda: fleet.workers_ready() == 2, timeout_s=300)
                os.kill(fleet.pid(f"w{tally.kills % 2}"), signal.SIGKILL)
                tally.kills += 1

    async with (
        httpx.AsyncClient(base_url=fleet.base_url, timeout=900) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(AT_ONCE):
            group.create_task(take())


def count_resumes(base_url: str) -> int:
    """Times that a request went on elsewhere because its worker had died."""
    shown = httpx.get(f"{base_url}/metrics", timeout=60).text
    samples = [
        sample
        for family in text_string_to_metric_families(shown)
        for sample in family.samples
        if sample.name == RESUMES and sample.labels["cause"] == "died"
    ]
    return int(sum(sample.value for sample in samples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--kill-every", type=int, default=50)
    chosen = parser.parse_args()
    cases, tally = list(read_cases(chosen.clone, chosen.count, chosen.seed)), Tally()
    with Fleet(num_workers=2, kv_cache_bytes="256MiB") as fleet:
        asyncio.run(run(fleet, cases, chosen.max_tokens, chosen.kill_every, tally))
        moved = count_resumes(fleet.base_url)
    print(f"{tally}, {moved} requests moved by kills")
    print(f"cut: {', '.join(tally.cut)}")
    print(*tally.wrong, sep="\n")
    sys.exit(bool(tally.wrong))


if __name__ == "__main__":
    main()
