"""`tokenfleet serve` as a person sees it, with the real processes and the real model."""

import json
import os
import signal
import time

import httpx
import psutil

from common.settings.settings import Settings
from deploy.serve import checks
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until_sync

GONE_S = 3.0
PROMPT = "The sky is blue because"


def test_processes_have_names_restart_and_drain() -> None:
    with Fleet(num_workers=2, kv_cache_bytes="64MiB") as fleet:
        titles = {" ".join(process.cmdline()).strip() for process in fleet.processes()}
        assert {
            "tokenfleet serve",
            "tokenfleet api g0",
            "tokenfleet batcher b0",
            "tokenfleet worker w0",
            "tokenfleet worker w1",
        } <= titles
        assert httpx.get(f"{fleet.base_url}/v1/models").json()["data"][0]["id"] == "smollm2"

        old = fleet.pid("w1")
        os.kill(old, signal.SIGKILL)
        fleet.restarted("w1", old)

        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 400, "ignore_eos": True, "details": True}}
        with httpx.stream("POST", f"{fleet.base_url}/generate_stream", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            fleet.launcher.terminate()
            wait_until_sync(lambda: httpx.get(f"{fleet.base_url}/health").status_code == 503)
            refused = httpx.post(f"{fleet.base_url}/generate", json=body)
            assert refused.status_code == 503 and "shutting down" in refused.text
            frames = [json.loads(line.removeprefix("data:")) for line in lines if line.startswith("data:")]
        assert frames[-1]["details"]["generated_tokens"] == 400
        assert fleet.launcher.wait(60) == 0
        checks.check_port(
            Settings(hostname="127.0.0.1", port=fleet.settings["port"])
        )  # a next fleet may start at once


def test_a_killed_launcher_leaves_no_process() -> None:
    with Fleet(kv_cache_bytes="64MiB") as fleet:
        processes = fleet.processes()
        assert any("engine" in " ".join(process.cmdline()) for process in processes)
        for process in processes[1:]:
            process.suspend()
        fleet.launcher.kill()
        fleet.launcher.wait()
        wait_until_sync(lambda: not [process for process in processes if is_alive(process)], GONE_S)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_cache_larger_than_memory_is_one_error_line() -> None:
    fleet = Fleet(kv_cache_bytes=2**50)
    begun_s = time.monotonic()
    try:
        assert fleet.start().launcher.wait(60) == os.EX_CONFIG
        assert time.monotonic() - begun_s < 10
        last = fleet.errors().splitlines()[-1]
        assert "KV_CACHE_BYTES" in last
        assert "Traceback" not in fleet.errors()
    finally:
        fleet.kill()
