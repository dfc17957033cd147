"""What the overlays of deploy/kubernetes render: valid, restricted, and in step with compose and settings."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.metrics import catalogue
from common.rank import machine_ranks
from common.settings.fields import SettingFields
from common.settings.settings import Settings
from deploy.launcher.launcher import LAST_WORDS_S
from tests.support.kubernetes.manifests import (
    FOLDER,
    OVERLAYS,
    SETTINGS,
    Manifest,
    containers,
    is_selected,
    named,
    needs_kubectl,
    of_kind,
    pods,
    rendered,
)

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
KUBERNETES_PAGE = (ROOT / "docs/kubernetes.md").read_text()
SERVICES = {"gateway": "api", "batcher": "batcher", "redis": "redis"}
"""Container → the service of docker-compose.yml."""
CUSTOM = ("ScaledObject", "LeaderWorkerSet")
SECRETS = {"REDIS_URL", "REDIS_PASSWORD", "API_KEY", "HF_TOKEN"}
"""Keys of the Secret that docs/kubernetes.md creates."""

pytestmark = needs_kubectl


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def manifests(overlay: str) -> list[Manifest]:
    return rendered(overlay)


def settings_of(manifests: list[Manifest]) -> dict[str, str]:
    found: dict[str, str] = named(manifests)["ConfigMap", SETTINGS]["data"]
    return found


def test_manifests_are_valid(manifests: list[Manifest]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for one in manifests:
        if one["kind"] not in CUSTOM:
            validate.validate(one, "1.30", strict=True)


def test_pods_are_restricted(manifests: list[Manifest]) -> None:
    """As the Pod Security Standard `restricted` says, with a root file system that is read-only."""
    for pod in pods(manifests):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec["automountServiceAccountToken"]
        assert not spec["enableServiceLinks"], "GATEWAY_PORT of a Service would be read as a setting"
        assert spec.get("shareProcessNamespace", False) is (spec["containers"][0]["name"] != "redis")
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & spec.keys()
        assert all("hostPath" not in volume for volume in spec.get("volumes", ()))
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_the_folders_that_processes_write_to_are_volumes(manifests: list[Manifest]) -> None:
    dockerfiles = "".join((ROOT / f"deploy/Dockerfile{kind}").read_text() for kind in ("", ".worker"))
    caches = set(re.findall(r"(?:XDG_CACHE_HOME|HF_HOME|_CACHE_\w+|_BASE)=(/\w+)", dockerfiles))
    for pod in pods(manifests):
        volumes = {one["name"] for one in pod["spec"].get("volumes", ())} | {"data"}
        for container in pod["spec"]["containers"]:
            mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
            assert {*mounts.values()} <= volumes and "/tmp" in mounts
            assert container["name"] == "redis" or caches <= mounts.keys()


def test_containers_have_probes_and_resources(manifests: list[Manifest]) -> None:
    """Liveness never asks for the broker: what it fails is restarted."""
    for name, one in containers(manifests).items():
        assert one["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in one["resources"]["limits"]
        if name == "redis":
            assert one["livenessProbe"].keys() >= {"tcpSocket"}
            continue
        paths = {kind: one[kind]["httpGet"]["path"] for kind in one if kind.endswith("Probe")}
        assert paths == {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
        port = "http" if name == "gateway" else "metrics"
        assert {one[kind]["httpGet"]["port"] for kind in paths} == {port}
        assert one["startupProbe"]["periodSeconds"] * one["startupProbe"]["failureThreshold"] >= 3600


def test_pods_have_the_time_that_a_drain_takes(manifests: list[Manifest]) -> None:
    timeout_s = float(settings_of(manifests)["GRACEFUL_TERMINATION_TIMEOUT"])
    for pod in pods(manifests):
        for container in pod["spec"]["containers"]:
            hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
            assert (hook is not None) is (container["name"] == "gateway")
            sleep_s = float(hook[1]) if hook else 0.0
            needed_s = sleep_s + timeout_s + LAST_WORDS_S
            assert container["name"] == "redis" or pod["spec"]["terminationGracePeriodSeconds"] >= needed_s


def test_settings_exist_and_are_valid(manifests: list[Manifest]) -> None:
    data = settings_of(manifests)
    known = {name.upper() for name in SettingFields.model_fields}
    assert data.keys() <= known and not {name for name in data if "OTLP" in name}
    settings = Settings.read([], data)
    for name, one in containers(manifests).items():
        ports = {entry["name"]: entry["containerPort"] for entry in one["ports"]}
        if name == "redis":
            continue
        assert {entry["name"] for entry in one["env"]} <= known - data.keys() | {"HF_TOKEN"}
        assert one["envFrom"] == [{"configMapRef": {"name": SETTINGS}}]
        assert ports["metrics"] == settings.metrics_port
        assert ports.get("http", settings.port) == settings.port
        assert ports.get("rendezvous", settings.master_port) == settings.master_port


def test_secrets_are_references_to_one_secret(manifests: list[Manifest]) -> None:
    assert not of_kind(manifests, "Secret")
    found: dict[str, set[str]] = {}
    for name, one in containers(manifests).items():
        for entry in one["env"]:
            reference = entry["valueFrom"]["secretKeyRef"]
            assert reference["name"] == "tokenfleet"
            found.setdefault(reference["key"], set()).add(name)
    assert found.keys() == SECRETS
    assert found["API_KEY"] == {"gateway"} and found["REDIS_PASSWORD"] == {"redis"}
    assert all(f"--from-literal={key}=" in KUBERNETES_PAGE for key in SECRETS)


def without_pairs(words: list[str], *options: str) -> list[str]:
    """The words of a command without some options and their values."""
    skipped = {i + step for i, word in enumerate(words) if word in options for step in (0, 1)}
    return [word for i, word in enumerate(words) if i not in skipped]


def test_images_and_commands_are_those_of_compose(overlay: str, manifests: list[Manifest]) -> None:
    found = containers(manifests)
    assert found.keys() == {*SERVICES, "worker"}
    worker = COMPOSE["cpu_worker" if overlay == "cpu" else "gpu_worker"]
    for name, one in found.items():
        service = COMPOSE[SERVICES[name]] if name in SERVICES else worker
        [image] = re.findall(r"^\$\{\w+:-(.+)\}$", service["image"])
        assert one["image"].removesuffix(":latest") == image
        command = without_pairs(service["command"], "--maxmemory", "--aclfile")
        assert one["args"][: len(command)] == command
    device = settings_of(manifests)["DEVICE"]
    assert device == worker["environment"]["DEVICE"]
    assert ("nvidia.com/gpu" in found["worker"]["resources"]["limits"]) is (device == "cuda")


def test_selectors_select(manifests: list[Manifest]) -> None:
    templates = list(pods(manifests))
    selectors: list[Any] = [
        *(
            one["spec"]["selector"]
            for kind in ("Deployment", "PodDisruptionBudget")
            for one in of_kind(manifests, kind)
        ),
        *({"matchLabels": one["spec"]["selector"]} for one in of_kind(manifests, "Service")),
        *(
            part["labelSelector"]
            for pod in templates
            for part in pod["spec"].get("topologySpreadConstraints", ())
        ),
    ]
    assert all(sum(is_selected(one, pod) for pod in templates) == 1 for one in selectors)
    budgets = [one["spec"]["selector"] for one in of_kind(manifests, "PodDisruptionBudget")]
    ours = [pod for pod in templates if pod["spec"]["containers"][0]["name"] != "redis"]
    assert all(any(is_selected(one, pod) for one in budgets) for pod in ours)


def test_network_policies_close_every_pod_and_name_pods_and_ports_that_exist(
    manifests: list[Manifest],
) -> None:
    templates, policies = list(pods(manifests)), of_kind(manifests, "NetworkPolicy")
    closed = named(policies)["NetworkPolicy", "tokenfleet-nothing-else"]["spec"]
    assert closed.keys() == {"podSelector", "policyTypes"} and len(closed["policyTypes"]) == 2
    assert all(is_selected(closed["podSelector"], pod) for pod in templates)
    for policy in policies:
        spec = policy["spec"]
        selected = [pod for pod in templates if is_selected(spec["podSelector"], pod)]
        assert selected, policy["metadata"]["name"]
        names = {
            port["name"] for pod in selected for one in pod["spec"]["containers"] for port in one["ports"]
        }
        for rule in [*spec.get("ingress", ()), *spec.get("egress", ())]:
            assert {port["port"] for port in rule.get("ports", ())} <= names | {53, 443, 6379}
            peers = [
                peer
                for peer in [*rule.get("from", ()), *rule.get("to", ())]
                if peer.keys() == {"podSelector"}
            ]
            for peer in peers:
                own = any(is_selected(peer["podSelector"], pod) for pod in templates)
                assert own or peer["podSelector"] == {"matchLabels": {"tokenfleet-clients": "true"}}


def test_only_our_pods_reach_redis_and_only_clients_reach_gateways(manifests: list[Manifest]) -> None:
    policies = of_kind(manifests, "NetworkPolicy")

    def sources(component: str) -> list[Any]:
        [pod] = [one for one in pods(manifests) if one["spec"]["containers"][0]["name"] == component]
        chosen = [one["spec"] for one in policies if is_selected(one["spec"]["podSelector"], pod)]
        return [peer for one in chosen for rule in one.get("ingress", ()) for peer in rule["from"]]

    assert sources("redis") == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "tokenfleet"}}}]
    assert all(
        "namespaceSelector" in peer or "tokenfleet-clients" in str(peer) for peer in sources("gateway")
    )


def test_the_scaler_reads_metrics_that_exist_from_a_service_that_exists(tmp_path: Path) -> None:
    check_scaler(rendered("keda"))
    [lines] = re.findall("^replacements:.*?(?=^```)", KUBERNETES_PAGE, re.DOTALL | re.MULTILINE)
    own = {"namespace": "other", "resources": [os.path.relpath(FOLDER / "overlays/keda", tmp_path)]}
    literals = {"name": SETTINGS, "behavior": "merge", "literals": ["POOL=b"]}
    overlay = own | yaml.safe_load(lines) | {"configMapGenerator": [literals]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    manifests = rendered(str(tmp_path))
    assert settings_of(manifests)["POOL"] == "b"
    check_scaler(manifests)


def check_scaler(manifests: list[Manifest]) -> None:
    [scaler] = of_kind(manifests, "ScaledObject")
    workers = named(manifests)["Deployment", scaler["spec"]["scaleTargetRef"]["name"]]
    assert "replicas" not in workers["spec"], "an apply would take workers away"
    settings = Settings.read([], settings_of(manifests))
    assert settings.scale_to_zero and settings.worker_grace_s >= settings.request_timeout_s
    for trigger in scaler["spec"]["triggers"]:
        name, service, namespace = re.fullmatch(  # type: ignore[union-attr]
            r"(\w+) http://(\w+)\.(\w+)\.svc/metrics",
            f"{trigger['metadata']['valueLocation'].partition('{')[0]} {trigger['metadata']['url']}",
        ).groups()
        assert catalogue.BY_NAME[name].kind == "gauge"
        assert trigger["metadata"]["valueLocation"] == f'{name}{{pool="{settings.pool}"}}'
        assert named(manifests)["Service", service]["metadata"]["namespace"] == namespace


def test_a_leader_worker_set_starts_a_rank_for_each_gpu() -> None:
    manifests = rendered("multi-node")
    [workers] = of_kind(manifests, "LeaderWorkerSet")
    assert ("Deployment", "tokenfleet-worker") not in named(manifests)
    group = workers["spec"]["leaderWorkerTemplate"]
    container = containers(manifests)["worker"]
    injected = {"LWS_GROUP_SIZE": str(group["size"]), "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "w-0.w"}
    command, kind, *flags = [
        re.sub(r"\$\((\w+)\)", lambda match: injected[match[1]], word) for word in container["args"]
    ]
    assert (command, kind) == ("supervise", "worker")
    settings = Settings.read(flags, settings_of(manifests))
    ranks = machine_ranks(settings, settings.num_shard or 0)
    assert len(ranks) == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert (ranks[0].rank, ranks[0].address) == (8, "w-0.w")
