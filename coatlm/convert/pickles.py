"""Read torch.save files of Megatron through an allow-list: they are pickles, and may be hostile.

`torch.load(weights_only=True)` builds tensors, containers of Python and the globals that are named
here, and refuses any other global by its name; nothing is imported. Only `argparse.Namespace` is
the real class. In place of the others, enumerations and states of random generators that a
conversion does not read, the file gets `Inert` objects.
"""

from __future__ import annotations

import argparse
import io
import pickle  # nosec B403 # for UnpicklingError only
import re
from pathlib import Path
from typing import Any

import torch

from coatlm.train.manifest import CheckpointError
from coatlm.train.reports import error_line

ENUMS = "megatron.core.transformer.enums."
RERUN = "megatron.core.rerun_state_machine."
IGNORED = (  # globals in checkpoints of Megatron whose values do not matter here
    *(
        ENUMS + n
        for n in ("AttnBackend", "AttnMaskType", "AttnType", "LayerType", "CudaGraphScope")
    ),
    *(f"megatron.core.enums.{n}" for n in ("ModelType", "Fp8Recipe", "Fp4Recipe")),
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


def load_pickle(path: Path, content: bytes | None = None) -> Any:
    """The content of a torch.save file, whose tensors stay in the file until they are used.

    `content`: its bytes if they are part of another file; `path` is then only its name in errors.
    Raises ValueError with the file's name if it cannot be opened or holds a global that is not
    allowed, and CheckpointError if it is damaged.
    """
    allowed: list[Any] = [argparse.Namespace, *((Inert, name) for name in IGNORED)]
    try:
        if content is None:
            path.open("rb").close()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    try:
        with torch.serialization.safe_globals(allowed):
            if content is not None:
                return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message suggests loading the file anyway
        found = REFUSED.search(str(error))
        what = found[1] if found else "something other than tensors"
        raise ValueError(f"{path}: holds {what}, which is not allowed: refused") from None
    except Exception as error:  # a damaged file raises nearly anything
        raise CheckpointError(f"{path} is damaged ({error_line(error)})") from None


def is_plain(value: Any) -> bool:
    """Whether a value is a dense tensor on the host that is not larger than its storage.

    A pickle of a few bytes may describe a tensor of any size, with strides of 0.
    """
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return value.device.type == "cpu" and value.nbytes <= value.untyped_storage().nbytes()
