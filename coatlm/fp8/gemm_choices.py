"""GEMM algorithms that were timed once, in a file, so that later starts need not time them again.

    {"format": 1, "machines": {MACHINE: {KIND: ALGORITHM}}}

MACHINE is the GPU with the versions of torch, CUDA and cuBLASLt, KIND a kind of GEMM, ALGORITHM the
name of one of cuBLASLt's algorithms for it. `Plans.tune` looks for that name among the candidates
that cuBLASLt returns and runs no others, whatever the file says. An entry of the file is never
replaced, so all later starts on such a machine add in the same order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from coatlm.files import open_locked, read_json, whole_file
from coatlm.fp8 import cublaslt

logger = logging.getLogger("coatlm")
FORMAT = 1  # version of the file; any other is replaced
Choices = dict[str, str]  # kind of GEMM -> algorithm


def machine(device: int) -> str:
    """The name of a GPU, with the versions of what runs GEMMs on it."""
    gpu, library = torch.cuda.get_device_name(device), cublaslt.version()
    return f"{gpu}, torch {torch.__version__}, CUDA {torch.version.cuda}, cuBLASLt {library}"


def read_choices(path: Path) -> dict[str, Choices]:
    """The choices for each machine; a warning and none if the file does not have this format."""
    try:
        return _read(path)
    except ValueError as error:
        logger.warning("%s; GEMM algorithms are timed again", error)
        return {}


def add_choices(path: Path, found: Mapping[str, Choices]) -> None:
    """Add choices that the file does not have; a warning if it cannot be written.

    Processes that do this at the same time wait for each other.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_locked(path.with_suffix(".lock")):
            try:
                known = _read(path)
            except ValueError:
                known = {}
            names = {**known, **found}
            merged = {name: {**found.get(name, {}), **known.get(name, {})} for name in names}
            if merged != known:
                with whole_file(path) as temporary:
                    content = {"format": FORMAT, "machines": merged}
                    temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
    except (OSError, ValueError) as error:
        logger.warning("GEMM algorithms are timed again at the next start: %s", error)


def _read(path: Path) -> dict[str, Choices]:
    """The choices in a file; none without one. Raises ValueError."""
    if not path.exists():
        return {}
    content = read_json(path)
    machines = content.get("machines")
    if content.get("format") != FORMAT or not isinstance(machines, dict):
        raise ValueError(f"{path}: not a list of GEMM algorithms in format {FORMAT}")
    for choices in machines.values():
        if not isinstance(choices, dict) or not all(isinstance(c, str) for c in choices.values()):
            raise ValueError(f"{path}: not a list of GEMM algorithms in format {FORMAT}")
    return machines
