"""Read torch.save files of Megatron through an allow-list: they are pickles, and may be hostile.

`torch.load(weights_only=True)` builds tensors, containers of Python and the globals that are named
here, and refuses any other global by its name; nothing is imported. Only `argparse.Namespace` is
the real class. In place of the others, enumerations and states of random generators that a
conversion does not read, the file gets `Inert` objects. Releases of megatron-core add enumerations
to their modules `enums`, so any class there is allowed. Real classes that megatron-core has
registered with torch as safe under these names are unregistered while a file is read.
"""

from __future__ import annotations

import argparse
import io
import pickle  # nosec B403 # for UnpicklingError only
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)

from coatlm.train.manifest import CheckpointError
from coatlm.train.reports import error_line

ENUM = re.compile(r"megatron\.core\.(\w+\.)*enums\.\w+")
RERUN = "megatron.core.rerun_state_machine."
IGNORED = (  # globals in checkpoints of Megatron whose values do not matter here
    *(f"megatron.{n}" for n in ("model.enums.ModelType", "enums.PositionEmbeddingType")),
    *(RERUN + n for n in ("RerunMode", "RerunState", "RerunDiagnostic", "QuickStats")),
    *(f"numpy.{c}.multiarray.{n}" for c in ("core", "_core") for n in ("_reconstruct", "scalar")),
    *("numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType", "_codecs.encode"),
    *("signal.Signals", "pathlib.PosixPath", "_io.BytesIO", "types.SimpleNamespace"),
)
REFUSED = re.compile(r"GLOBAL ([\w.]+)")


class Inert:
    """An object that holds what the pickle gave its class, and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


@contextmanager
def none_registered() -> Iterator[None]:
    """Put aside the globals that libraries have registered with torch.

    If a name is registered twice, torch takes either; numpy's `_reconstruct` fails on an `Inert`.
    """
    registered = get_safe_globals()
    clear_safe_globals()
    try:
        yield
    finally:
        add_safe_globals(registered)


def load_pickle(path: Path, content: bytes | None = None) -> Any:
    """The content of a torch.save file, whose tensors stay in the file until they are used.

    `content`: its bytes if they are part of another file; `path` is then only its name in errors.
    Raises ValueError with the file's name if it cannot be opened or holds a global that is not
    allowed, and CheckpointError if it is damaged.
    """
    try:
        if content is None:
            path.open("rb").close()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    try:
        with none_registered():
            return _load(path, content)
    except pickle.UnpicklingError as error:  # torch's message suggests loading the file anyway
        refused = REFUSED.search(str(error))
        what = refused[1] if refused else "something other than tensors"
        raise ValueError(f"{path}: holds {what}, which is not allowed: refused") from None
    except Exception as error:  # a damaged file raises nearly anything
        raise CheckpointError(f"{path} is damaged ({error_line(error)})") from None


def _load(path: Path, content: bytes | None) -> Any:
    found = get_unsafe_globals_in_checkpoint(path if content is None else io.BytesIO(content))
    names = [*IGNORED, *(name for name in found if ENUM.fullmatch(name))]
    with safe_globals([argparse.Namespace, *((Inert, name) for name in names)]):
        if content is not None:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def is_plain(value: Any) -> bool:
    """Whether a value is a dense tensor on the host that is not larger than its storage.

    A pickle of a few bytes may describe a tensor of any size, with strides of 0.
    """
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return value.device.type == "cpu" and value.nbytes <= value.untyped_storage().nbytes()
