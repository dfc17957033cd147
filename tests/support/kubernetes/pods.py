"""Pods without a cluster: each container of the manifests runs with its own arguments, variables and probes,
in a network namespace of its own. Images, volumes, security contexts and network policies are not applied.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx

from tests.support.kubernetes.manifests import Manifest, of_kind, pods
from tests.support.machine.machines import run, tokenfleet
from tests.support.waiting import wait_until

BRIDGE, NETWORK = "tfpods", "10.88.0"
LOADING_S = 180.0
SECRET = {"REDIS_PASSWORD": "redis-secret", "API_KEY": "client-secret", "HF_TOKEN": ""}


class PodNetwork:
    """A bridge that connects pods with this process, and what a namespace of Kubernetes holds for them.

    Attributes:
        settings: variables of the ConfigMap.
        secret: variables of the Secret, as docs/kubernetes.md makes it.
        number: of pods so far; an address is never used again.
    """

    def __init__(self, manifests: list[Manifest], folder: Path, **settings: str) -> None:
        self.templates = {pod["spec"]["containers"][0]["name"]: pod for pod in pods(manifests)}
        (config,) = of_kind(manifests, "ConfigMap")
        self.settings: dict[str, str] = config["data"] | settings
        self.secret = dict(SECRET)
        self.folder = folder
        self.number = 1
        self.pods: list[Pod] = []

    def __enter__(self) -> Self:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        self.forward("-I")
        redis = self.start("redis")
        self.secret["REDIS_URL"] = f"redis://:{SECRET['REDIS_PASSWORD']}@{redis.address}:6379/0"
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for pod in self.pods:
            if kind is not None:
                print(f"{pod.name}:\n{pod.log()[-3000:]}", file=sys.stderr)
            pod.kill()
            run("ip", "netns", "del", pod.name)
        self.forward("-D")
        run("ip", "link", "del", BRIDGE)

    def forward(self, action: str) -> None:
        """Let pods reach each other where a container engine drops what bridges forward."""
        if shutil.which("iptables"):
            run("iptables", action, "FORWARD", "-i", BRIDGE, "-o", BRIDGE, "-j", "ACCEPT")

    def start(self, name: str) -> "Pod":
        """Start one more pod of a workload."""
        self.number += 1
        pod = Pod(self, name, self.number)
        self.pods.append(pod)
        return pod

    def variables(self, container: Manifest) -> dict[str, str]:
        """The environment of a container, as its `envFrom` and `env` say."""
        found = dict(self.settings) if container.get("envFrom") else {}
        for one in container.get("env", ()):
            found[one["name"]] = one.get("value") or self.secret[one["valueFrom"]["secretKeyRef"]["key"]]
        return found


class Pod:
    """A pod of one container.

    Attributes:
        address: its own.
        process: the first process of the container.
    """

    def __init__(self, network: PodNetwork, kind: str, number: int) -> None:
        self.name, self.address = f"pod{number}-{kind}", f"{NETWORK}.{number}"
        self.spec = network.templates[kind]["spec"]
        self.container = self.spec["containers"][0]
        self.folder = network.folder / self.name
        self.folder.mkdir()
        self.add_address(f"tfpod{number}")
        variables = network.variables(self.container)
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *self.command(variables)],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )

    def add_address(self, link: str) -> None:
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run("ip", "link", "set", link, "master", BRIDGE, "up")
        inside = ["ip", "-n", self.name]
        run(*inside, "addr", "add", f"{self.address}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "link", "set", "lo", "up")

    def command(self, variables: Mapping[str, str]) -> list[str]:
        """The words of the container, its image's entry point before them."""
        words = [word.replace("$(REDISCLI_AUTH)", variables.get("REDISCLI_AUTH", "")) for word in self.words]
        if words[0] == "redis-server":
            return [shutil.which("redis-server") or "redis-server", *words[1:], "--dir", str(self.folder)]
        return tokenfleet(*words)

    @property
    def words(self) -> list[str]:
        args: list[str] = self.container["args"]
        return args

    def url(self, port: str = "http") -> str:
        (number,) = [one["containerPort"] for one in self.container["ports"] if one["name"] == port]
        return f"http://{self.address}:{number}"

    async def ready(self) -> Self:
        """Wait until its readiness probe succeeds."""
        probe: dict[str, Any] = self.container["readinessProbe"]
        await wait_until(lambda: self.probe(probe), LOADING_S)
        return self

    async def probe(self, probe: dict[str, Any]) -> bool:
        assert self.process.poll() is None, self.log()[-3000:]
        where = probe["httpGet"]
        try:
            async with httpx.AsyncClient(timeout=probe["timeoutSeconds"]) as client:
                return (await client.get(self.url(where["port"]) + where["path"])).is_success
        except httpx.TransportError:
            return False

    async def delete(self) -> int:
        """End it as a rollout does: preStop, then SIGTERM. Returns its exit status in the grace period."""
        if hook := self.container.get("lifecycle", {}).get("preStop"):
            run(*hook["exec"]["command"])
        self.process.terminate()
        await wait_until(lambda: self.process.poll() is not None, self.spec["terminationGracePeriodSeconds"])
        return self.process.wait()

    def kill(self) -> None:
        """End all its processes at once, as the loss of its node does."""
        inside = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        )
        for pid in inside.stdout.split():
            subprocess.run(["kill", "-9", pid], capture_output=True, check=False)
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return (self.folder / "log").read_text()
