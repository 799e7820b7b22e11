"""Check that all ranks were started alike: with one configuration, and on the same data.

Each rank reads its own configuration and opens the data itself. On nodes with other copies of a
file, or if a file appears while rank 0 tokenizes, ranks would train on different samples without an
error: under tensor or pipeline parallelism one layer would then see one text and the next another.
"""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

from coatlm.config import Config, ConfigError, dotted
from coatlm.data.identity import SourceIdentity, describe_change, same_identity
from coatlm.data.tokenizer import Tokenizer
from coatlm.train.agreement import Peers

T = TypeVar("T")
# paths, which may differ between hosts; what files of data hold is compared by `check_same_data`
OF_A_HOST = (
    *("run.dir", "data.text", "data.paths", "data.tokenizer", "data.cache_dir", "data.workers"),
    *("data.remote_cache", "eval.tasks", "checkpoint.resume"),
)


def check_same_config(config: Config, peers: Peers) -> None:
    """Raise ConfigError on a rank that has another value of a key than rank 0."""
    mine = dict(dotted(config.model_dump(mode="json")))
    first = _of_rank_zero(mine, peers)
    for key in dict.fromkeys([*first, *mine]):
        if key not in OF_A_HOST and first.get(key) != mine.get(key):
            raise ConfigError(
                f"{key}: {first.get(key)} on {_place(0, peers)} and {mine.get(key)} on "
                f"{_place(peers.rank, peers)}: all ranks need the same configuration"
            )


def check_same_data(identity: list[SourceIdentity], tokenizer: Tokenizer, peers: Peers) -> None:
    """Raise ConfigError on a rank that has other data than rank 0, or another tokenizer."""
    mine = tokenizer.fingerprint, identity
    found, first = _of_rank_zero(mine, peers)
    if found != tokenizer.fingerprint:
        raise ConfigError(
            f"data.tokenizer: fingerprint {found[:8]} on {_place(0, peers)} and "
            f"{tokenizer.fingerprint[:8]} on {_place(peers.rank, peers)}: all ranks need the same "
            "tokenizer"
        )
    if not same_identity(first, identity):
        there, here = describe_change(first, identity)
        raise ConfigError(
            f"the data has {there} on {_place(0, peers)} and {here} on "
            f"{_place(peers.rank, peers)}: all ranks need the same data. Files differ between "
            "hosts, or changed while the run started"
        )


def _of_rank_zero(mine: T, peers: Peers) -> T:
    """The value of rank 0; all ranks call it."""
    found = [mine]
    if len(peers.hosts) > 1:
        dist.broadcast_object_list(found, src=0, group=peers.group)
    return found[0]


def _place(rank: int, peers: Peers) -> str:
    return f"rank {rank} ({peers.hosts[rank]})"
