"""Read `.metadata` of a checkpoint, which maps each tensor to files and offsets.

torch.distributed.checkpoint (DCP) writes it as a pickle, and a checkpoint may be untrusted. It is
unpickled with an allow-list of the types that DCP uses, none of which executes code from the file.
The tensors that it describes must not be larger than the files, so that a forged shape allocates no
memory.
"""

from __future__ import annotations

import io
import math
import pickle  # nosec B403 # an allow-list of types only
import pickletools  # nosec B403 # it parses pickles and executes nothing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from coatlm.console import in_bytes
from coatlm.train.manifest import CheckpointError, read_checkpoint_manifest
from coatlm.train.reports import error_line


def read_metadata(checkpoint: Path, files: Collection[str] | None = None) -> Metadata:
    """Read the metadata of a checkpoint, whose files are those in its manifest.

    `files` are those of a checkpoint without one, which megatron-core has written; it may describe
    entries other than tensors, which coatlm does not read.
    Raises CheckpointError for other types, files outside the checkpoint, and tensors larger than
    the files.
    """
    unpickler: type[_Unpickler] = _Unpickler
    if files is None:
        files = read_checkpoint_manifest(checkpoint).files
    else:
        unpickler = _ForeignUnpickler
    path = checkpoint / ".metadata"
    try:
        pickled = path.read_bytes()
        _check_claims(pickled)
        # from memory: a frame that declares too many bytes then allocates nothing
        content = unpickler(io.BytesIO(pickled)).load()
        if not isinstance(content, Metadata):
            raise CheckpointError(f"a {type(content).__name__}, not metadata")
        places = content.storage_data.values()
        if any(p.relative_path not in files or p.transform_descriptors for p in places):
            raise CheckpointError("refers to data outside the checkpoint")
        _check_sizes(content, sum((checkpoint / name).stat().st_size for name in files))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path} is damaged ({error_line(error)})") from error
    return content


def _check_claims(pickled: bytes) -> None:
    """Raise an error for lengths and memo indices beyond the file: unpickling allocates them.

    `genops` executes nothing; it raises ValueError for lengths beyond the file.
    """
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("PUT", "LONG_BINPUT") and (argument or 0) > len(pickled):
            raise CheckpointError(f"is damaged (place {argument} in the memo)")


def _check_sizes(content: Metadata, stored: int) -> None:
    """Raise CheckpointError if the tensors take more than the `stored` bytes of all files."""
    described = 0
    for key, item in content.state_dict_metadata.items():
        if not isinstance(item, TensorStorageMetadata):
            continue
        if not all(type(n) is int and n >= 0 for n in item.size):
            raise CheckpointError(f"{key} has the shape {list(item.size)}")
        described += math.prod(item.size) * item.properties.dtype.itemsize
    if described > stored:
        raise CheckpointError(
            f"describes {in_bytes(described)} of tensors, the files hold {in_bytes(stored)}"
        )


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise CheckpointError(f"tensors of layout {name!r} are not supported")
    return torch.strided


class _Unpickler(pickle.Unpickler):
    """Constructs only the types of DCP's metadata, none of which executes code from the file."""

    ALLOWED: ClassVar[Mapping[tuple[str, str], Any]] = {
        (metadata.__name__, "Metadata"): metadata.Metadata,
        (metadata.__name__, "MetadataIndex"): metadata.MetadataIndex,
        (metadata.__name__, "StorageMeta"): metadata.StorageMeta,
        (metadata.__name__, "TensorStorageMetadata"): metadata.TensorStorageMetadata,
        (metadata.__name__, "ChunkStorageMetadata"): metadata.ChunkStorageMetadata,
        (metadata.__name__, "TensorProperties"): metadata.TensorProperties,
        (metadata.__name__, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
        (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _layout,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.ALLOWED:
            return self.ALLOWED[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise CheckpointError(f"{module}.{name} is not a part of metadata, refused")


class _ForeignUnpickler(_Unpickler):
    """An unpickler that also allows what megatron-core adds: objects of torch.save, save plans."""

    ALLOWED: ClassVar[Mapping[tuple[str, str], Any]] = {
        **_Unpickler.ALLOWED,
        (metadata.__name__, "BytesStorageMetadata"): metadata.BytesStorageMetadata,
        (planner.__name__, "SavePlan"): planner.SavePlan,
        (planner.__name__, "WriteItem"): planner.WriteItem,
        (planner.__name__, "WriteItemType"): planner.WriteItemType,
        (planner.__name__, "TensorWriteData"): planner.TensorWriteData,
    }
