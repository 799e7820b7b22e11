"""`.metadata` of a checkpoint, which says where the content of each tensor is.

It holds the file and offset at which torch.distributed.checkpoint stored each chunk of a tensor.
It is a pickle, and a checkpoint may come from a stranger. It is read with an allow-list of the
types that it consists of, none of which runs code of the file's choosing, and what it describes
must fit the files that are there: nothing is allocated for a shape that they cannot fill.
"""

from __future__ import annotations

import io
import math
import pickle  # nosec B403 # an allow-list of types only
import pickletools  # nosec B403 # it takes pickles apart and runs nothing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from coatlm.console import in_bytes
from coatlm.train.manifest import CheckpointError, read_checkpoint_manifest
from coatlm.train.reports import error_line


def read_metadata(checkpoint: Path) -> Metadata:
    """Raises CheckpointError for metadata of other types, of other files, or beyond their size."""
    files = read_checkpoint_manifest(checkpoint).files
    path = checkpoint / ".metadata"
    try:
        pickled = path.read_bytes()
        _check_claims(pickled)
        # from memory, where a frame that claims more bytes than there are allocates nothing
        content = _Unpickler(io.BytesIO(pickled)).load()
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
    """Raise for lengths and places in the memo beyond the file: unpickling allocates them first.

    `genops` executes nothing; it raises ValueError for what is longer than the file.
    """
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("PUT", "LONG_BINPUT") and (argument or 0) > len(pickled):
            raise CheckpointError(f"is damaged (place {argument} in the memo)")


def _check_sizes(content: Metadata, stored: int) -> None:
    """Raise CheckpointError for tensors of more bytes than the `stored` ones of all files."""
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
    """Makes what DCP's metadata consists of, none of which runs code of the file's choosing."""

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
