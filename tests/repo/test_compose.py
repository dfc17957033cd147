"""docker-compose.yml and the images, as far as a machine without a container engine can tell: commands and
environments of the services are started as processes, the lines of the Dockerfiles replayed into empty
folders.

Prometheus' and Grafana's files: they are valid, and ask for nothing that is not there.
Redis: at SIGTERM a fleet that drains may finish, and nobody else is waited for.
"""

import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import yaml
from fastapi.routing import APIRoute

from api.admin.routes_fleet import render_fleet
from api.admin.routes_health import HIDES_FLEET
from api.app import ROUTERS
from api.requests.monitors import SILENT_S
from common.broker import acl
from common.broker.keys import Keys
from common.metrics import catalogue
from common.rank import machine_ranks
from common.settings.fields import SettingFields
from common.settings.settings import Settings
from deploy.launcher.embedded_broker import Broker
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync

ROOT = Path(__file__).parents[2]
DEPLOYED = {"NNODES": "2", "NODE_RANK": "1", "NUM_SHARD": "16", "MASTER_ADDR": "10.0.0.1"}
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
yaml.SafeLoader.add_constructor("!reset", lambda *_: None)
OVERRIDE = yaml.safe_load((ROOT / "deploy/several_machines.yml").read_text())["services"]
OURS = {"api", "batcher", "gpu_worker", "cpu_worker"}
FILES = ["deploy/Dockerfile", "deploy/Dockerfile.worker"]
FIXED = {
    *("HOSTNAME", "GATEWAY_PORT", "GPU_LOCKS"),  # of the container
    *("NUM_GATEWAYS", "NUM_BATCHERS"),  # `--scale` says it
}
"""Settings that have no effect on a service."""


def test_services_of_the_compose_file() -> None:
    assert set(SERVICES) == OURS | {"redis", "proxy", "prometheus", "alertmanager", "grafana"}
    assert all("healthcheck" in service for service in SERVICES.values())
    assert {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service} == {
        "gpu_worker": ["gpu"],
        "cpu_worker": ["cpu"],
    }
    assert COMPOSE["name"] == "tokenfleet", "the next release's folder has another name"
    assert "redis:/data" in SERVICES["redis"]["volumes"] and "--appendonly" in SERVICES["redis"]["command"]
    for name in OURS:
        assert (ROOT / SERVICES[name]["build"]["dockerfile"]).exists()
        assert not {"container_name", "ports"} & SERVICES[name].keys(), "it can be scaled"
        assert SERVICES[name]["command"][0] == "supervise", "a death is reported at once"
    assert all(service["logging"]["options"]["max-size"] for service in SERVICES.values())


def rendered(text: str, **variables: str) -> str:
    """A value as Compose reads it, with the variables of a shell."""
    while found := re.search(r"\$\{(\w+):([-+])([^{}]*)\}", text):
        given = variables.get(found[1], "")
        text = text.replace(found[0], found[3] if bool(given) is (found[2] == "+") else given)
    return text


def test_who_may_ask_without_a_key_is_on_this_machine() -> None:
    """What names no address is published at that of its network."""
    [binding] = COMPOSE["networks"]["edge"]["driver_opts"].values()
    ports = [rendered(port) for service in SERVICES.values() for port in service.get("ports", ())]
    assert {port.split(":")[0] or binding for port in ports} == {"127.0.0.1"} and len(ports) == 4
    both = f"{SERVICES['proxy']['ports'][0]} {SERVICES['api']['environment']['PUBLIC_URL']}"
    assert rendered(both) == ":3000:3000 http://localhost:3000"
    assert rendered(both, DOMAIN="a.io", PORT="443") == "0.0.0.0:443:30001 https://a.io:443"
    assert rendered(both, PROXY_ADDRESS="10.0.0.5").startswith("10.0.0.5:3000:3000 ")


def test_health_is_asked_without_the_proxy_of_the_environment(tmp_path: Path) -> None:
    """Docker gives HTTP_PROXY of its own configuration to every container."""
    (tmp_path / "readyz").touch()
    tests = [service["healthcheck"]["test"] for service in [*SERVICES.values(), OVERRIDE["gpu_worker"]]]
    programs = {words[-1] for words in tests if words[1] == "python"}
    environ = os.environ | {"http_proxy": f"http://127.0.0.1:{free_port()}", "no_proxy": ""}
    assert len(programs) == 3
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for program in programs:
            asked = re.sub(r":\d+/", f":{server.server_port}/", program)
            subprocess.run([sys.executable, "-c", asked], env=environ, check=True)
        server.shutdown()


def test_every_service_is_confined() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"] and service["read_only"] is True, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert {"mem_limit", "cpus", "pids_limit", "networks"} <= service.keys(), name
        assert not {"privileged", "network_mode", "pid", "ipc", "devices"} & service.keys(), name
    assert {name: service["cap_add"] for name, service in SERVICES.items() if "cap_add" in service} == {
        "proxy": ["NET_BIND_SERVICE"]
    }


def test_the_proxy_reaches_gateways_alone_and_redis_reaches_nothing_else() -> None:
    networks = {name: set(service["networks"]) for name, service in SERVICES.items()}
    assert {name for name in networks if networks[name] & networks["proxy"]} == {"proxy", "api"}
    assert {name for name in networks if networks[name] & networks["redis"]} == {"redis", *OURS}
    assert networks["redis"] == {"broker"} and COMPOSE["networks"]["broker"] == {"internal": True}
    assert {name for name, service in SERVICES.items() if "ports" in service} == {
        *("proxy", "prometheus", "alertmanager", "grafana")
    }


def test_each_process_has_the_password_of_its_own_user_alone() -> None:
    for name in OURS:
        url = urlsplit(SERVICES[name]["environment"]["REDIS_URL"])
        assert url.username in acl.PROCESSES and url.password is None
        assert SERVICES[name]["secrets"] == [f"redis_{url.username}"]
        assert url.query == f"password_file=/run/secrets/redis_{url.username}"
    assert set(SERVICES["redis"]["secrets"]) == {"redis_admin", *(f"redis_{kind}" for kind in acl.PROCESSES)}


def test_passwords_are_made_once_and_for_their_owner(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    for _ in range(2):
        subprocess.run(["sh", ROOT / "deploy/make_secrets.sh", folder], check=True, capture_output=True)
        made = {path.name: path.read_text() for path in folder.iterdir()}
    assert {f"./secrets/{name}": {"file": f"./secrets/{name}"} for name in made} == {
        secret["file"]: secret for secret in COMPOSE["secrets"].values()
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(re.fullmatch("[0-9a-f]{64}", password) for password in made.values())
    assert len(set(made.values())) == len(made)
    (folder / "redis_admin").write_text("chosen")
    subprocess.run(["sh", ROOT / "deploy/make_secrets.sh", folder], check=True, capture_output=True)
    assert (folder / "redis_admin").read_text() == "chosen", "what is there already stays"


def test_the_proxy_passes_on_what_is_public() -> None:
    """Routes of `api/admin` are not, but for health and the page, which says so."""
    caddyfile = (ROOT / "deploy/Caddyfile").read_text()
    assert "protocols h1 h2\n" in caddyfile, "no port of UDP is published for HTTP/3"
    [listed] = re.findall(r"@internal path (.*)", caddyfile)
    assert f"header_up {HIDES_FLEET} 1" in caddyfile.lower()
    for router in (router for _, routers in ROUTERS for router in routers):
        for route in router.routes:
            assert isinstance(route, APIRoute)
            module = route.endpoint.__module__
            is_internal = module.startswith("api.admin.") and module != "api.admin.routes_health"
            assert any(fnmatchcase(route.path, one) for one in listed.split()) is is_internal, route.path


def test_alerts_go_to_the_url_of_the_variable(tmp_path: Path) -> None:
    config = ROOT / "deploy/prometheus/alertmanager.yml"
    words = [
        "sh",
        str(ROOT / "deploy/prometheus/alertmanager_entry.sh"),
        "cat",
        str(tmp_path / "alertmanager.yml"),
    ]
    for url in ("", "https://example.org/a?b=c&d='e'|f"):
        own = {"CONFIG": str(config), "MADE": str(tmp_path), "ALERT_WEBHOOK": url}
        done = subprocess.run(words, env=os.environ | own, check=True, capture_output=True, text=True)
        [receiver] = yaml.safe_load(done.stdout)["receivers"]
        assert [Path(one["url_file"]).read_text() for one in receiver.get("webhook_configs", [])] == (
            [url] if url else []
        )


def test_down_stops_gateways_before_workers_and_redis_last() -> None:
    stopped_after = {name: set(SERVICES[name].get("depends_on", ())) for name in SERVICES}
    assert stopped_after["proxy"] == {"api"}
    assert stopped_after["api"] >= {"batcher", "gpu_worker", "cpu_worker"}
    assert all("batcher" in stopped_after[name] for name in ("gpu_worker", "cpu_worker"))
    assert all("redis" in stopped_after[name] for name in OURS)


def test_every_setting_may_come_from_the_shell() -> None:
    """A variable without a value has that of the shell, or of .env."""
    settings = {name.upper() for name in SettingFields.model_fields}
    for name in OURS:
        variables = SERVICES[name]["environment"]
        assert settings - FIXED - {"DEVICE"} <= variables.keys() <= settings | {"HF_TOKEN", "PUBLIC_URL"}
        assert settings - FIXED - {"DEVICE"} - {name for name in variables if variables[name] is None} == {
            *("REDIS_URL", "PORT", "METRICS_PORT", "JSON_OUTPUT", "NUM_WORKERS")
        }


def test_the_file_of_users_is_what_doctor_prints() -> None:
    """`tokenfleet doctor --acl --pool '*' > deploy/users.acl` writes it anew."""
    assert (ROOT / "deploy/users.acl").read_text().splitlines() == [
        f"user {kind} on {' '.join(acl.rules(kind, [acl.EVERY_POOL]))}" for kind in acl.USERS
    ]


# --- the images ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("file", "command", "torch"), [(FILES[0], "api", False), (FILES[1], "worker", True)])
def test_an_image_holds_what_it_needs(file: str, command: str, torch: bool, tmp_path: Path) -> None:
    """The image's COPY and pip lines, replayed into an empty folder and an empty environment, make something
    that starts. The worker's environment sees the packages of this one, because torch is gigabytes.
    """
    app, venv = tmp_path / "app", tmp_path / "venv"
    app.mkdir()
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    if torch:
        [packages] = venv.glob("lib/python*/site-packages")
        (packages / "this.pth").write_text(sysconfig.get_path("purelib"))
    environ = {
        **os.environ,
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(app),
        "EXTRAS": "worker" if torch else "",
    }
    for line in (ROOT / file).read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word == "COPY" and not rest.startswith("--from="):
            *sources, target = rest.split()
            for source in sources:
                place = app / target
                where = place / Path(source).name if target.endswith("/") else place
                (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, where)
        command_line = re.sub(r"^--mount=\S+ ", "", rest)
        if word == "RUN" and re.match(r"pip|python", command_line):
            subprocess.run(["sh", "-c", command_line], cwd=app, env=environ, check=True)
        if word == "ENTRYPOINT":
            words = [str(venv / "bin" / part) for part in json.loads(rest)]
    imported = subprocess.run([venv / "bin/python", "-c", "import torch"], env=environ, capture_output=True)
    assert (imported.returncode == 0) is torch
    version = subprocess.run(
        [*words, "--version"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert version.stdout.startswith("tokenfleet ")
    started = subprocess.run(
        [*words, command], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert started.returncode == os.EX_CONFIG and "REDIS_URL: is not set" in started.stderr


def test_tgi_s_image_has_an_init() -> None:
    """The other images get theirs from Compose and Kubernetes; TGI's line starts none."""
    text = (ROOT / "deploy/Dockerfile.tgi").read_text()
    [words] = re.findall("^ENTRYPOINT (.*)$", text, re.MULTILINE)
    assert json.loads(words) == ["tini", "-s", "--", "text-generation-launcher"] and " tini " in text


def test_the_override_for_two_machines_changes_services_and_settings_that_exist() -> None:
    assert OVERRIDE.keys() <= SERVICES.keys()
    worker, broker = ({**SERVICES[name], **OVERRIDE[name]} for name in ("gpu_worker", "redis"))
    assert worker["network_mode"] == "host" and not worker["networks"], "Compose refuses both"
    assert broker["ports"] and "watched" in broker["networks"], "an internal network publishes no port"
    environ = {
        name: re.sub(r"\$\{(\w+):.*\}", lambda match: DEPLOYED[match[1]], value)
        for name, value in OVERRIDE["gpu_worker"]["environment"].items()
    }
    own, overridden = (urlsplit(one["REDIS_URL"]) for one in (SERVICES["gpu_worker"]["environment"], environ))
    assert overridden == own._replace(netloc="worker@127.0.0.1:6379")
    settings = Settings.read([], environ)
    assert [info.rank for info in machine_ranks(settings, 16)] == [*range(8, 16)]
    assert f":{settings.metrics_port}/" in OVERRIDE["gpu_worker"]["healthcheck"]["test"][-1]


# --- dashboards ---------------------------------------------------------------------------------------------

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
GRAFANA = DEPLOY / "grafana"
BUILT_IN = {"up"}
OF_VLLM = """
e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum e2e_request_latency_seconds_count
prompt_tokens_total generation_tokens_total request_success_total time_per_output_token_seconds_bucket
time_per_output_token_seconds_sum inter_token_latency_seconds_bucket inter_token_latency_seconds_sum
inter_token_latency_seconds_count num_requests_running num_requests_waiting kv_cache_usage_perc
gpu_cache_usage_perc time_to_first_token_seconds_bucket time_to_first_token_seconds_sum
time_to_first_token_seconds_count request_prompt_tokens_bucket request_generation_tokens_bucket
request_queue_time_seconds_sum request_prefill_time_seconds_sum request_decode_time_seconds_sum
request_max_num_generation_tokens_sum prefix_cache_queries_total prefix_cache_hits_total
""".split()


@cache
def exported() -> set[str]:
    """Names of all series that a gateway can show."""
    gauges = {one.name: {("x",) * len(one.labels): 1.0} for one in catalogue.TABLE if one.kind == "gauge"}
    return set(re.findall(r"^(\w+)[{ ]", render_fleet("p", {}, gauges).decode(), re.MULTILINE))


def named(expression: str) -> set[str]:
    """Return the names of series in a PromQL expression, found by their selectors and our prefixes."""
    return set(re.findall(r"[a-z_]+(?={)", expression)) | set(
        re.findall(r"\b(?:tgi|tokenfleet)_\w+", expression)
    )


def expressions(value: Any) -> list[str]:
    """Return all expressions of a dashboard or of rules."""
    if isinstance(value, list):
        return [found for one in value for found in expressions(one)]
    if not isinstance(value, dict):
        return []
    own = [text for key in ("expr", "definition") if isinstance(text := value.get(key), str)]
    return own + [found for one in value.values() for found in expressions(one)]


@pytest.mark.parametrize(
    "path",
    [PROMETHEUS / "alerts.yml", PROMETHEUS / "vllm.rules.yml", GRAFANA / "dashboards" / "tokenfleet.json"],
    ids=lambda path: path.name,
)
def test_every_metric_of_a_dashboard_is_exported(path: Path) -> None:
    asked = expressions(yaml.safe_load(path.read_text()))
    assert len(asked) >= 8
    for expression in asked:
        assert named(expression) and named(expression) <= exported() | BUILT_IN, expression


def test_vllm_s_dashboard_finds_its_names() -> None:
    """The series of vLLM's own dashboard, by its older and its newer names."""
    [group] = yaml.safe_load((PROMETHEUS / "vllm.rules.yml").read_text())["groups"]
    assert {*OF_VLLM} <= {rule["record"].removeprefix("vllm:") for rule in group["rules"]}
    assert all(set(rule["labels"]) == {"model_name", "engine"} for rule in group["rules"])


def test_an_alert_fires_within_30_s_of_the_last_turn_of_a_batcher() -> None:
    """Gateways show it after two leases; a scrape follows, then evaluations until `for` is over."""
    [group] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    scrape = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["global"]["scrape_interval"]
    [alert] = [rule for rule in group["rules"] if rule["alert"] == "NoActiveBatcher"]
    first_s = SILENT_S + seconds(scrape) + seconds(group["interval"])
    pending_s = -(-seconds(alert["for"]) // seconds(group["interval"])) * seconds(group["interval"])
    assert first_s + pending_s <= 30


def test_an_alert_that_another_one_inhibits_has_the_labels_that_must_be_equal() -> None:
    [group] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    texts = {rule["alert"]: str(rule["annotations"]) for rule in group["rules"]}
    for rule in yaml.safe_load((PROMETHEUS / "alertmanager.yml").read_text())["inhibit_rules"]:
        for matcher in rule["source_matchers"] + rule["target_matchers"]:
            for alert in matcher.split("=")[-1].strip(' ~"').split("|"):
                assert all(f"$labels.{label} " in texts[alert] for label in rule.get("equal", ())), alert


def test_every_alert_stands_in_the_runbook() -> None:
    [group] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    runbook = (DEPLOY.parent / "docs" / "runbook.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", runbook, re.MULTILINE) == [rule["alert"] for rule in group["rules"]]


def seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


@pytest.mark.parametrize(
    "command",
    [
        "promtool check config prometheus.yml",
        "promtool check rules alerts.yml vllm.rules.yml",
        "promtool test rules rules_test.yml",
        "amtool check-config alertmanager.yml",
    ],
)
def test_the_files_pass_the_checks_of_their_own_tools(command: str) -> None:
    words = command.split()
    if not shutil.which(words[0]):
        pytest.skip(f"needs {words[0]}")
    done = subprocess.run(words, cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# --- redis in the stack -------------------------------------------------------------------------------------

SERVICE = SERVICES["redis"]
LOOK_S, LATE_S = 3.0, 30.0


def redis_command(folder: Path) -> list[str]:
    """The command of the service, with its variables' defaults, and the file of users in a folder."""
    words = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in SERVICE["command"]]
    return [word.replace("/tmp/", f"{folder}/") for word in words]


class Entry:
    """The entry point and command of the service, with a fake of the image's own entry point."""

    def __init__(self, folder: Path) -> None:
        images_own = folder / "docker-entrypoint.sh"
        images_own.write_text('#!/bin/sh\nexec "$@"\n')
        images_own.chmod(0o755)
        port = free_port()
        words = [*SERVICE["entrypoint"][:1], ROOT / "deploy/redis_entry.sh", *redis_command(folder)]
        for name in SERVICE["secrets"]:
            (folder / name).write_text(f"{name}\n")
        own = {"REDIS_PORT": str(port), "SECRETS": str(folder), "ACL_FILE": str(folder / "users.acl")}
        own["USERS"] = str(ROOT / "deploy/users.acl")
        environ = os.environ | own | {"PATH": f"{folder}:{os.environ['PATH']}"}
        self.process = subprocess.Popen([*words, "--port", str(port), "--dir", str(folder)], env=environ)
        self.client = redis.Redis(port=port, password="redis_admin")
        wait_until_sync(self.answers)

    def answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False

    def show(self, state: str) -> None:
        """Write a state as a gateway's heartbeat does."""
        self.client.hset(Keys("default").gateway("g0-1"), "state", state)

    def ends_within(self, seconds: float) -> bool:
        try:
            return self.process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False


@pytest.fixture
def entry(tmp_path: Path) -> Iterator[Entry]:
    if not (shutil.which("redis-server") and shutil.which("redis-cli")):
        pytest.skip("Debian's redis is not installed")
    one = Entry(tmp_path)
    yield one
    if one.process.poll() is None:
        one.client.shutdown(nosave=True)
        one.process.wait(LATE_S)
    one.client.close()


def test_the_append_only_file_is_kept_as_short_as_the_embedded_brokers(tmp_path: Path) -> None:
    """A restart reads the file from its beginning."""
    own, option = Broker(tmp_path).command(), "--auto-aof-rewrite-min-size"
    assert SERVICE["command"][SERVICE["command"].index(option) + 1] == own[own.index(option) + 1]


def test_users_have_the_rights_of_their_kinds_and_their_own_passwords(entry: Entry) -> None:
    port = entry.client.get_connection_kwargs()["port"]
    for kind in acl.PROCESSES:
        with redis.Redis(port=port, username=kind, password=f"redis_{kind}") as client:
            assert client.ping()
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.flushall()
    for user, password in (("worker", "redis_gateway"), (None, None)):
        with (
            redis.Redis(port=port, username=user, password=password) as client,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            client.ping()
    names: Any = entry.client.acl_users()
    assert set(names) == {"default", *acl.PROCESSES}, "no user without a password"


@pytest.mark.slow
def test_redis_stays_while_a_gateway_drains(entry: Entry) -> None:
    entry.show("ready")
    entry.process.send_signal(signal.SIGTERM)
    entry.show("draining")
    assert not entry.ends_within(LOOK_S + 2) and entry.answers()
    entry.client.delete(Keys("default").gateway("g0-1"))
    assert entry.ends_within(LATE_S)


@pytest.mark.slow
def test_redis_ends_at_once_without_a_fleet_and_soon_with_one_that_does_not_drain(entry: Entry) -> None:
    entry.show("ready")
    begun_s = time.monotonic()
    entry.process.send_signal(signal.SIGTERM)
    assert entry.ends_within(LATE_S)
    assert time.monotonic() - begun_s >= LOOK_S - 1, "a fleet that was told to end, too, has to say so"
