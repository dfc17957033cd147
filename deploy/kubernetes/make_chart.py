"""Make the Helm chart from the Kustomize overlays: `python -m deploy.kubernetes.make_chart`. Needs kubectl.

The overlays are the source. The chart's templates are what `kubectl kustomize` renders of them, with a value
in place of each field of KNOBS; its values are what stood there. tests/repo/kubernetes/ renders both and
compares.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).parent
CHART = HERE / "chart"
FULL, SCALED, SMALL = "gpu", "keda", "cpu"
"""Overlays: of the templates and values.yaml, of the optional objects of KEDA, and of values-cpu.yaml."""
SETTINGS = "tokenfleet-settings"
HEAD = "# Made by deploy/kubernetes/make_chart.py from the overlays: change those.\n"
BROKER = "spec.egress.0.to"
"""The field of a NetworkPolicy without which the broker may be anywhere."""
METRICS_URL = "http://tokenfleet.{{ .Release.Namespace }}.svc/metrics"
SCALED_SETTINGS = "(merge (dict) .Values.settings .Values.keda.settings)"
ALL_SETTINGS = f"ternary {SCALED_SETTINGS} .Values.settings .Values.keda.enabled"

Manifest = dict[str, Any]
Field = list[str | int]


class Knob(NamedTuple):
    """A field of a manifest that a value of the chart sets.

    Attributes:
        value: path of the value in values.yaml.
        unless: value with which the field is left out.
    """

    kind: str
    name: str
    field: str
    value: str
    unless: str = ""


POD = "spec.template.spec"
WORKER = "tokenfleet-worker"


def knobs_of(process: str) -> list[Knob]:
    """The fields of a Deployment that all have."""
    kind, name = "Deployment", f"tokenfleet-{process}"
    return [
        Knob(kind, name, f"{POD}.containers.0.image", f"{process}.image"),
        Knob(kind, name, f"{POD}.containers.0.resources", f"{process}.resources"),
        Knob(kind, name, "spec.replicas", f"{process}.replicas", "keda.enabled" if name == WORKER else ""),
    ]


KNOBS = [
    *(knob for process in ("gateway", "batcher", "jobs", "worker") for knob in knobs_of(process)),
    Knob("Deployment", WORKER, f"{POD}.volumes.2.emptyDir.sizeLimit", "worker.sharedMemory"),
    Knob("PersistentVolumeClaim", "tokenfleet-models", "spec", "models"),
    Knob("StatefulSet", "tokenfleet-redis", f"{POD}.containers.0.image", "redis.image"),
    Knob("StatefulSet", "tokenfleet-redis", f"{POD}.containers.0.resources", "redis.resources"),
    Knob("StatefulSet", "tokenfleet-redis", "spec.volumeClaimTemplates.0.spec", "redis.data"),
    Knob("ScaledObject", WORKER, "spec.minReplicaCount", "keda.minReplicas"),
    Knob("ScaledObject", WORKER, "spec.maxReplicaCount", "keda.maxReplicas"),
    Knob("ScaledObject", WORKER, "spec.cooldownPeriod", "keda.cooldownPeriod"),
    Knob("ScaledObject", WORKER, "spec.triggers.0.metadata.targetValue", "keda.requestsPerWorker"),
    Knob("ScaledObject", WORKER, "spec.triggers.1.metadata.targetValue", "keda.jobsPerWorker"),
    Knob("ScaledObject", WORKER, "spec.triggers.2.metadata.targetValue", "keda.kvCacheUsage"),
]


def find_kubectl() -> str | None:
    """Return the program: that of the wheel beside this Python, or any other."""
    return shutil.which("kubectl", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


def render(overlay: str) -> list[Manifest]:
    return render_folder(HERE / "overlays" / overlay)


def render_folder(folder: Path) -> list[Manifest]:
    """Return what a folder's kustomization renders, with the settings under their plain name."""
    command = [find_kubectl() or "kubectl", "kustomize", str(folder)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [one for one in yaml.safe_load_all(re.sub(rf"{SETTINGS}-\w+", SETTINGS, text)) if one]


def named(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(one["kind"], one["metadata"]["name"]): one for one in manifests}


def condition_of(kind: str, name: str) -> str:
    """Return the value without which an object is left out; empty if it is always there."""
    if name == "tokenfleet-redis":
        return "redis.enabled"
    return "keda.enabled" if kind == "ScaledObject" or name == "tokenfleet-scaler" else ""


def steps(field: str) -> Field:
    return [int(step) if step.isdigit() else step for step in field.split(".")]


def take(manifest: Any, field: Field) -> Any:
    for step in field:
        manifest = manifest[step]
    return manifest


def put(target: dict[str, Any], path: str, value: Any) -> None:
    """Set a value by its path, whose parents are made."""
    *parents, last = path.split(".")
    for parent in parents:
        target = target.setdefault(parent, {})
    target[last] = value


# --- values -------------------------------------------------------------------------------------------------


def values_of(manifests: list[Manifest]) -> dict[str, Any]:
    """Return what stands in the fields of KNOBS, and the settings."""
    by_name = named(manifests)
    values: dict[str, Any] = {"settings": by_name["ConfigMap", SETTINGS]["data"]}
    for knob in KNOBS:
        if (manifest := by_name.get((knob.kind, knob.name))) is not None:
            put(values, knob.value, take(manifest, steps(knob.field)))
    return values


def chart_values() -> dict[str, Any]:
    """Return all values."""
    full, scaled = render(FULL), render(SCALED)
    values = values_of([*full, *(one for one in scaled if one["kind"] == "ScaledObject")])
    added = named(scaled)["ConfigMap", SETTINGS]["data"].items() - values["settings"].items()
    put(values, "keda.settings", dict(sorted(added)))
    put(values, "keda.enabled", False)
    put(values, "redis.enabled", True)
    return values


def differing(values: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are not those of `base`. Where there is none it is null: Helm removes that."""
    found = {name: value for name, value in values.items() if base.get(name) != value}
    for name, value in found.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            found[name] = differing(value, base[name])
    return found | dict.fromkeys(base.keys() - values.keys())


# --- templates ----------------------------------------------------------------------------------------------


class Template:
    """A manifest with placeholders, and the lines that take their places."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.lines: list[str] = []

    def place(self, field: Field, line: str) -> None:
        """Let `line` stand for a field; `<key>`, `<pad>` and `<in>` in it are the field's name, its
        indentation, and that of what it holds.
        """
        take(self.manifest, field[:-1])[field[-1]] = f"placeholder-{len(self.lines)}"
        self.lines.append(line)

    def text(self) -> str:
        def fill(match: re.Match[str]) -> str:
            pad, dash, key, number = match[1], match[2] or "", match[3], int(match[4])
            inner = len(pad) + len(dash) + 2
            line = self.lines[number].replace("<key>", key).replace("<in>", str(inner))
            return line.replace("<pad>", pad + dash)

        dumped = yaml.safe_dump(self.manifest, sort_keys=True, width=1000)
        return re.sub(r"(?m)^( *)(- )?([\w./-]+): placeholder-(\d+)$", fill, dumped)


def line_of(knob: Knob, value: Any) -> str:
    path = f".Values.{knob.value}"
    if isinstance(value, dict | list):
        line = f"<pad><key>: {{{{- toYaml {path} | nindent <in> }}}}"
    else:
        line = f"<pad><key>: {{{{ {path}{' | quote' if isinstance(value, str) else ''} }}}}"
    return f"{{{{- if not .Values.{knob.unless} }}}}\n{line}\n{{{{- end }}}}" if knob.unless else line


def template_of(manifest: Manifest) -> str:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    template = Template(manifest)
    for knob in KNOBS:
        if (knob.kind, knob.name) == (kind, name):
            template.place(steps(knob.field), line_of(knob, take(manifest, steps(knob.field))))
    template.place(["metadata", "namespace"], "<pad><key>: {{ .Release.Namespace }}")
    if kind == "ConfigMap":
        template.place(["data"], f"<pad><key>: {{{{- toYaml ({ALL_SETTINGS}) | nindent <in> }}}}")
    if kind == "Deployment":
        manifest["spec"]["template"]["metadata"]["annotations"] = {}
        digest = f"<pad><key>: {{{{ toJson ({ALL_SETTINGS}) | sha256sum }}}}"
        template.place([*steps("spec.template.metadata.annotations"), "checksum/settings"], digest)
    if name == "tokenfleet-broker":
        pods = yaml.safe_dump(take(manifest, steps(BROKER)), default_flow_style=True, width=1000).strip()
        template.place(
            steps(BROKER), f"{{{{- if .Values.redis.enabled }}}}\n<pad><key>: {pods}\n{{{{- end }}}}"
        )
    for i in range(len(manifest["spec"]["triggers"]) if kind == "ScaledObject" else 0):
        place_trigger(template, ["spec", "triggers", i, "metadata"])
    text = template.text()
    if condition := condition_of(kind, name):
        text = f"{{{{- if .Values.{condition} }}}}\n{text}{{{{- end }}}}\n"
    return text


def place_trigger(template: Template, field: Field) -> None:
    """Let a trigger read this release's metrics, of the pool that its settings name."""
    metric = take(template.manifest, [*field, "valueLocation"]).partition("{")[0]
    template.place(
        [*field, "valueLocation"], f"<pad><key>: '{metric}{{pool=\"{{{{ .Values.settings.POOL }}}}\"}}'"
    )
    template.place([*field, "url"], f"<pad><key>: {METRICS_URL}")


def manifests() -> Iterator[Manifest]:
    """Yield the objects of FULL, and those that only SCALED has."""
    full = named(render(FULL))
    yield from full.values()
    yield from (one for key, one in named(render(SCALED)).items() if key not in full)


def chart_files() -> dict[str, str]:
    """Return path → text of the chart's files; a template has all objects of one name."""
    version = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]["version"]
    about = {
        "apiVersion": "v2",
        "name": "tokenfleet",
        "description": "LLM serving as a fleet of workers around a message queue",
        "type": "application",
        "version": version,
        "appVersion": version,
    }
    files = {
        "Chart.yaml": HEAD + yaml.safe_dump(about, sort_keys=False),
        "values.yaml": HEAD + yaml.safe_dump(chart_values()),
        "values-cpu.yaml": HEAD
        + yaml.safe_dump(differing(values_of(render(SMALL)), values_of(render(FULL)))),
    }
    for one in manifests():
        name = one["metadata"]["name"].removeprefix("tokenfleet-")
        text = files.setdefault(f"templates/{name}.yaml", HEAD)
        files[f"templates/{name}.yaml"] = f"{text}---\n{template_of(one)}"
    return files


def main() -> None:
    for old in (CHART / "templates").glob("*.yaml"):
        old.unlink()
    for path, text in chart_files().items():
        (CHART / path).parent.mkdir(parents=True, exist_ok=True)
        (CHART / path).write_text(text)


if __name__ == "__main__":
    main()
