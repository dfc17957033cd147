"""`text-generation-benchmark` against a gateway, and its arithmetic."""

import asyncio

import pytest

from common.messages.request import Generate
from common.settings.settings import SettingError
from deploy.bench.measure import TimedAnswer
from deploy.launcher.embedded_broker import Broker
from deploy.tgi import benchmark
from deploy.tgi.benchmark import Latencies, add_run, rates, spread, table
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.machine.ports import free_port
from tests.support.tokenizer import ids


async def test_every_prompt_and_answer_has_the_length_that_is_asked_for(
    broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts: list[bytes] = []

    def answer(request: Generate) -> Answer:
        prompts.append(request.prompt_ids)
        return Answer(ids("one two three"))

    async with answering(broker.url, answer) as (_, _, client):
        words = ["--url", str(client.base_url), "-t", "smollm2", "-b", "1", "-b", "3", "-s", "7", "-d", "3"]
        assert await asyncio.to_thread(benchmark.main, [*words, "-r", "2", "-w", "1", "--top-k", "5"]) == 0
    assert len(prompts) == 3 * 1 + 3 * 3
    assert {len(prompt) // 4 for prompt in prompts} == {7} and len({*prompts}) == len(prompts)
    parameters, latencies, throughputs = capsys.readouterr().out.strip().split("\n\n")
    assert (
        "| Model              | smollm2 |" in parameters and "| Top K              | 5       |" in parameters
    )
    steps = [line.split("|")[1:3] for line in latencies.splitlines()[2:]]
    assert [[step.strip(), size.strip()] for step, size in steps] == [
        [step, size] for step in ("Prefill", "Decode (token)", "Decode (total)") for size in ("1", "3")
    ]
    assert throughputs.count("tokens/secs") == 4 * 3


def test_a_step_lasts_as_long_as_its_slowest_row() -> None:
    latencies = Latencies(2)
    add_run(latencies, [TimedAnswer(10.0, [11.0, 12.0, 13.0]), TimedAnswer(10.0, [12.0, 12.5, 14.0])])
    assert (latencies.prefills, latencies.decodes) == ([2.0], [2.0])
    assert sorted(latencies.tokens) == [0.5, 1.0, 1.0, 1.5]
    assert rates(latencies, "prefills", 3) == [1.0]
    assert rates(latencies, "decodes", 3) == [2.0]
    assert spread([3.0, 1.0, 2.0, 10.0]) == [4.0, 1.0, 10.0, 3.0, 10.0, 10.0]


def test_a_table_is_markdown() -> None:
    assert table(["A", "Size"], [["long", "1"]]).splitlines() == [
        "| A    | Size |",
        "|------|------|",
        "| long | 1    |",
    ]


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["-b", "0"], "--batch-size: 0 is less than 1"),
        (["-d", "1"], "--decode-length: 1 is less than 2"),
        (["--runs", "0"], "--runs: 0 is less than 1"),
        (["--url", "ftp://x"], "is not the address of a server"),
    ],
)
def test_a_wrong_flag_is_named(words: list[str], cause: str) -> None:
    with pytest.raises(SettingError, match=cause):
        benchmark.main(words)


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--url", f"127.0.0.1:{free_port()}"]) == 1
    assert "no server answers at" in capsys.readouterr().err
