"""The last release, unpacked beside this one, so that processes of both serve one pool."""

import io
import subprocess
import tarfile
from pathlib import Path

from tests.support.source_tree import ROOT

LAST_RELEASE = "544b3029"
"""Tag or commit of the last release: a release's commit names the one before it here."""
FOLDERS = ("api", "batcher", "benchmarks", "common", "deploy", "gpu_worker", "tests/support")


def unpack(directory: Path) -> Path | None:
    """Unpack the last release's files below a directory. Return their root; None if this checkout does not
    have that commit, as a shallow clone or an archive.
    """
    words = ["git", "-C", str(ROOT), "archive", "--format=tar", LAST_RELEASE, *FOLDERS]
    done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode:
        return None
    root = directory / LAST_RELEASE
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(root, filter="data")
    return root
