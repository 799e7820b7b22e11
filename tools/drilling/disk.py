"""A small file system that can be filled: a tmpfs, as root or in a user namespace of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MIB = 24  # of the file system: a run takes about four
NAMESPACE = ("unshare", "--map-root-user", "--mount")
INSIDE = "COATLM_DRILL_NAMESPACE"  # set in the process that was started again in a namespace


def mount(directory: Path) -> bool:
    """Whether a tmpfs could be mounted at `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={MIB}m", "tmpfs", str(directory)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def unmount(directory: Path) -> None:
    """Also where a process that is about to end still has files open there."""
    subprocess.run(["umount", "--lazy", str(directory)], capture_output=True)


def enter_namespace(directory: Path) -> None:
    """Start this program again where it may mount, if there is such a way and it is not there."""
    if INSIDE in os.environ:
        return
    script = f"mount -t tmpfs tmpfs '{directory}'"
    try:
        may = subprocess.run([*NAMESPACE, "sh", "-c", script], capture_output=True).returncode == 0
    except OSError:
        return
    if may:
        os.environ[INSIDE] = "1"
        os.execvp(NAMESPACE[0], [*NAMESPACE, sys.executable, *sys.argv])
