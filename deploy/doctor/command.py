"""`tokenfleet doctor`: checks this machine and the settings, and prints what would not work and how
to fix it. It starts and downloads nothing.
"""

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from common.settings.settings import SettingError, Settings
from deploy.doctor import machine, resources
from deploy.doctor.finding import Finding
from deploy.output import print_lines
from deploy.serve import checks

DESCRIPTION = (
    "Check this machine and the settings, and print what would not work, and the fix. Nothing is started or "
    "downloaded. Give it the settings that `tokenfleet serve` will get."
)
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def main(argv: Sequence[str]) -> int:
    """Print the findings. Returns 1 if one of them is a failure. Raises SettingError."""
    settings = checks.read_settings(argv, "tokenfleet doctor", DESCRIPTION)
    checks.set_hub_variables(settings)
    findings = dict(examine(settings))
    print_lines(table(findings))
    return 1 if any(finding.level == "fail" for finding in findings.values()) else 0


def examine(settings: Settings) -> Iterator[tuple[str, Finding]]:
    for name, check in CHECKS.items():
        try:
            yield name, check(settings)
        except SettingError as error:
            yield name, Finding("fail", error.cause, FIXES.get(error.name, f"set {error.name.upper()}"))


def table(findings: dict[str, Finding]) -> Table:
    rows = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        rows.add_column(overflow="fold")
    for name, finding in findings.items():
        rows.add_row(
            Text(finding.level, STYLES[finding.level]),
            name,
            Text(finding.found),
            Text(finding.fix and f"→ {finding.fix}"),
        )
    return rows


CHECKS: dict[str, Callable[[Settings], Finding]] = {
    "python": machine.check_python,
    "torch": machine.check_torch,
    "GPU": machine.check_gpu,
    "bfloat16": machine.check_bfloat16,
    "compiler": machine.check_compiler,
    "kernels": machine.check_kernels,
    "memory": resources.check_memory,
    "disk": resources.check_disk,
    "open files": resources.check_files,
    "port": resources.check_port,
    "broker": resources.check_broker,
    "model": resources.check_model,
}
FIXES = {
    "port": "set PORT to a free port",
    "hostname": "set HOSTNAME to 0.0.0.0, or to an address of this machine",
    "kv_cache_bytes": "set a smaller KV_CACHE_BYTES, or fewer workers (NUM_WORKERS)",
    "redis_url": "start a Redis 7 or later, or unset REDIS_URL to use the embedded broker",
    "model_id": "set MODEL_ID to a hub id, a directory, a GGUF file, or `smollm2`",
}
