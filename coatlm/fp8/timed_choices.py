"""Choices that were made by timing, in a file, so that later starts need not time them again.

    {"format": 1, "machines": {MACHINE: {KIND: CHOICE}}}

MACHINE is the GPU with the versions of torch, CUDA and the library that is timed. For GEMMs KIND is
a kind of GEMM and CHOICE the name of one of cuBLASLt's algorithms for it (gemm.py); for attention
they are a shape and the name of a backend (coatlm/model/attention_backends.py). Whoever reads a
choice looks for its name among those that there are and runs no others, whatever the file says. No
entry with such a name is ever replaced, so all later starts on such a machine add in the same
order.
"""

from __future__ import annotations

import itertools
import json
import logging
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from coatlm.files import open_locked, read_json, whole_file

logger = logging.getLogger("coatlm")
FORMAT = 1  # version of the file; any other is replaced
REPEATS = 8  # how often the work of a choice is timed
Choices = dict[str, str]  # kind -> choice


def machine(device: int, library: str) -> str:
    """The name of a GPU, with the versions of what runs on it; `library` is one with its version.

    The names of GEMMs and of attention differ, because they depend on different libraries.
    """
    gpu = torch.cuda.get_device_name(device)
    return f"{gpu}, torch {torch.__version__}, CUDA {torch.version.cuda}, {library}"


def milliseconds(work: Callable[[], object], *, repeats: int = REPEATS) -> float:
    """Median time of `work` on the GPU."""
    work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for mark in marks[:-1]:
        mark.record()
        work()
    marks[-1].record()
    marks[-1].synchronize()
    pairs = itertools.pairwise(marks)
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def read_choices(path: Path, what: str) -> dict[str, Choices]:
    """The choices for each machine; a warning and none if the file does not have this format.

    `what` is what was timed, in the plural.
    """
    try:
        return _read(path)
    except (OSError, ValueError) as error:
        logger.warning("%s; %s are timed again", error, what)
        return {}


def add_choices(
    path: Path,
    found: Mapping[str, Choices],
    what: str,
    *,
    read: Mapping[str, Choices] | None = None,
) -> dict[str, Choices]:
    """Add choices that the file does not have, and return all that it has then.

    Processes that do this at the same time wait for each other, and the first one's choices count.
    `read` is what `read_choices` returned before the timing: where `found` differs from it, the
    name in the file was unknown, and is replaced unless another process has already done so. If the
    file cannot be written, a warning says so, and the choices are those found.
    """
    read = {} if read is None else read
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_locked(path.with_suffix(".lock")):
            try:
                known = _read(path)
            except ValueError:
                known = {}
            names = {**known, **found}
            merged = {
                name: _merged(known.get(name, {}), found.get(name, {}), read.get(name, {}))
                for name in names
            }
            if merged != known:
                with whole_file(path) as temporary:
                    content = {"format": FORMAT, "machines": merged}
                    temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
            return merged
    except (OSError, ValueError) as error:
        logger.warning("%s are timed again at the next start: %s", what, error)
        return dict(found)


def _merged(known: Choices, found: Choices, read: Choices) -> Choices:
    """The choices `known` to the file, and those `found`: for new kinds, and for kinds whose choice
    in the file is still the one that was `read`, which is either the same or had an unknown name.
    """
    valid = {kind: name for kind, name in known.items() if name != read.get(kind)}
    return {**known, **found, **valid}


def _read(path: Path) -> dict[str, Choices]:
    """The choices in a file; none without one. Raises ValueError."""
    if not path.exists():
        return {}
    content = read_json(path)
    machines = content.get("machines")
    if content.get("format") != FORMAT or not isinstance(machines, dict):
        raise ValueError(f"{path}: not a list of timed choices in format {FORMAT}")
    for choices in machines.values():
        if not isinstance(choices, dict) or not all(isinstance(c, str) for c in choices.values()):
            raise ValueError(f"{path}: not a list of timed choices in format {FORMAT}")
    return machines
