"""A launcher over fake processes: `python -m tests.support.fleet.fake_fleet DIRECTORY PORT` supervises, `…
DIRECTORY PORT KIND` is one of them.

Fakes note what happens to them in DIRECTORY/notes. A file DIRECTORY/{name}.fails makes that process end at
its start with the exit code that it holds; DIRECTORY/hold makes gateways drain for as long as it is there.
"""

import http.server
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from common.process.launch import die_with_parent
from tests.support.waiting import wait_until_sync


def launch(directory: Path, port: int) -> int:
    # here, because a fake that starts need not wait for them
    import asyncio

    from common.process import logs
    from common.settings.settings import Settings
    from deploy.launcher.embedded_broker import embedded
    from deploy.launcher.launcher import LocalFleet, run, supervised_broker
    from deploy.launcher.process import SupervisedProcess

    os.environ.setdefault("PARENT_PID", "0")
    die_with_parent()
    logs.set_up("serve", "info")

    def process(kind: str, name: str) -> SupervisedProcess:
        return SupervisedProcess(
            kind,
            name,
            [sys.executable, "-m", "tests.support.fleet.fake_fleet", str(directory), str(port), kind],
            {},
        )

    with embedded() as broker:
        settings = Settings(
            port=port, hostname="127.0.0.1", redis_url=broker.url, served_model_name=("fake",)
        )
        brokers = [supervised_broker(broker)]
        workers = [process("worker", "w0"), process("worker", "w1")]
        return asyncio.run(
            run(
                LocalFleet(settings, brokers, [process("batcher", "b0")], workers, [process("gateway", "g0")])
            )
        )


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def play(directory: Path, port: int, kind: str) -> int:
    die_with_parent()
    name = os.environ["PROCESS_NAME"]

    def note(text: str) -> None:
        with (directory / "notes").open("a") as notes:
            notes.write(f"{name} {text}\n")

    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    note(f"start {os.getpid()} {os.environ['INCARNATION']}")
    fails = directory / f"{name}.fails"
    if fails.exists():
        print(f"NAME: the cause that {name} found", file=sys.stderr, flush=True)
        return int(fails.read_text())
    note("runs")
    if kind == "gateway" and not (directory / "loading").exists():
        server = http.server.HTTPServer(("127.0.0.1", port), Health)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    terminated.wait()
    note("terminated")
    if kind == "gateway":
        wait_until_sync(lambda: not (directory / "hold").exists())
    note("end")
    return 0


if __name__ == "__main__":
    arguments = Path(sys.argv[1]), int(sys.argv[2])
    sys.exit(launch(*arguments) if len(sys.argv) == 3 else play(*arguments, sys.argv[3]))
