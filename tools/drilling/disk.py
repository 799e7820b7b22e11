"""A small file system that can be filled: a tmpfs, mounted as root or in a user namespace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MIB = 24  # size of the file system; a run takes about four
NAMESPACE = ("unshare", "--map-root-user", "--mount")
INSIDE = "COATLM_DRILL_NAMESPACE"  # set in the process that runs inside the namespace


def mount(directory: Path) -> bool:
    """Mount a tmpfs at `directory`; returns whether it succeeded."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={MIB}m", "tmpfs", str(directory)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def unmount(directory: Path) -> None:
    """Unmount lazily, because a process that is ending may still have open files there."""
    subprocess.run(["umount", "--lazy", str(directory)], capture_output=True)


def enter_namespace(directory: Path) -> None:
    """Restart this program in a user namespace that allows mounting, unless it is already in one.

    Does not return if it succeeds; returns if no such namespace can be created.
    """
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
