"""The Helm chart: it is what make_chart.py makes of the overlays, and renders what they render."""

from typing import Any

import pytest
import yaml

from deploy.kubernetes import make_chart
from deploy.kubernetes.make_chart import CHART, Manifest, named
from tests.support.kubernetes.manifests import needs_kubectl, pods, rendered

pytestmark = needs_kubectl


@pytest.mark.slow
def test_the_chart_is_what_the_overlays_make() -> None:
    files = {path: (CHART / path).read_text() for path in make_chart.chart_files() if (CHART / path).exists()}
    assert files == make_chart.chart_files(), "run `python -m deploy.kubernetes.make_chart`"
    assert {path.name for path in (CHART / "templates").iterdir()} == {
        path.removeprefix("templates/") for path in files if path.startswith("templates/")
    }


def test_helm_finds_no_fault_in_the_chart() -> None:
    chart = pytest.importorskip("helm_python.chart", reason="helm-python-sdk is not installed")
    assert chart.lint(str(CHART))["errors"] == []


@pytest.mark.parametrize(
    ("overlay", "values"),
    [
        ("gpu", {}),
        ("keda", {"keda": {"enabled": True}}),
        ("cpu", yaml.safe_load((CHART / "values-cpu.yaml").read_text())),
    ],
)
def test_the_chart_renders_what_an_overlay_renders(overlay: str, values: dict[str, Any]) -> None:
    assert named(helm(values)) == named(rendered(overlay))


def test_with_a_redis_of_yours_none_is_installed_and_the_broker_may_be_anywhere() -> None:
    found = named(helm({"redis": {"enabled": False}}))
    assert not [name for _, name in found if name == "tokenfleet-redis"]
    assert found["NetworkPolicy", "tokenfleet-broker"]["spec"]["egress"] == [{"ports": [{"port": 6379}]}]


def test_a_changed_setting_rolls_the_pods_and_reaches_them() -> None:
    plain, changed = (helm_raw({"settings": one}) for one in ({}, {"MODEL_ID": "org/model", "POOL": "large"}))
    digests = [
        {pod["metadata"]["annotations"]["checksum/settings"] for pod in digested(one)}
        for one in (plain, changed)
    ]
    assert not digests[0] & digests[1]
    assert named(changed)["ConfigMap", make_chart.SETTINGS]["data"]["MODEL_ID"] == "org/model"


def digested(manifests: list[Manifest]) -> list[Manifest]:
    return [pod for pod in pods(manifests) if "annotations" in pod["metadata"]]


def helm_raw(values: dict[str, Any]) -> list[Manifest]:
    """Return what Helm's own library renders."""
    helm_python = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    files: dict[str, str] = helm_python.Chart.load(str(CHART)).render(
        values, name="any", namespace="tokenfleet"
    )
    return [one for text in files.values() for one in yaml.safe_load_all(text) if one]


def helm(values: dict[str, Any]) -> list[Manifest]:
    """As `helm_raw`, without the digests that stand for the names that Kustomize changes."""
    manifests = helm_raw(values)
    for pod in digested(manifests):
        del pod["metadata"]["annotations"]
    return manifests
