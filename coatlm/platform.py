"""The device of a process, its memory, whether apex is installed, and the boot id."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import psutil
import torch


def device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_memory(gpu: torch.device | None, processes: int) -> tuple[int, str]:
    """The memory in bytes that this process can use, and the name of its device.

    It is the whole memory of `gpu`, or without one the available host memory / `processes`.
    """
    if gpu is not None:
        properties = torch.cuda.get_device_properties(gpu)
        return properties.total_memory, f"GPU {gpu.index} ({properties.name})"
    share = psutil.virtual_memory().available // processes
    return share, f"this host, shared by {processes} ranks," if processes > 1 else "this host"


def gpu_memory() -> int:
    """The memory in bytes of this process's GPU; 0 on a CPU."""
    here = device()
    return device_memory(here, 1)[0] if here.type == "cuda" else 0


def has_apex() -> bool:
    """Whether NVIDIA's apex is installed with the kernel that accumulates weight gradients."""
    kernels = importlib.util.find_spec("fused_weight_gradient_mlp_cuda")
    return torch.cuda.is_available() and kernels is not None


def has_foreign_apex() -> bool:
    """Whether a package apex that is not NVIDIA's is installed, such as PyPI's web library."""
    found = importlib.util.find_spec("apex")
    if found is None or found.submodule_search_locations is None:
        return found is not None
    places = [Path(place) for place in found.submodule_search_locations]
    return not any((place / "multi_tensor_apply").is_dir() for place in places)


def boot_id() -> str:
    """The kernel's random id of this boot of this machine; empty where /proc does not show it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # a sandbox without /proc
        return ""
