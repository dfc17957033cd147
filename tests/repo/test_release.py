"""A release: one version everywhere, a wheel with all files, an archive that the stack starts from, and
workflows whose actions nobody can exchange.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.fleet.fleet import READY_S, Fleet

ROOT = Path(__file__).parents[2]
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
    for name, version in re.findall(r"uses: (\S+)(.*)", path.read_text()):
        assert name.startswith("./") or (
            re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name) and re.fullmatch(r" # v\d+\.\d+\.\d+", version)
        ), name
    workflow: dict[str, Any] = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "uses" in job or job["timeout-minutes"]
