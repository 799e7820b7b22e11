"""Check that all ranks were started alike: with one configuration, and on the same data.

Each rank reads its own configuration and opens the data itself. On nodes with other copies of a
file, or if a file appears while rank 0 tokenizes, ranks would train on different samples without an
error: under tensor or pipeline parallelism one layer would then see one text and the next another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coatlm.config import Config, ConfigError, dotted
from coatlm.data.dataset import Datasets
from coatlm.data.identity import SourceIdentity, describe_change, same_identity
from coatlm.data.tokenizer import Tokenizer
from coatlm.train.agreement import Peers, together

# paths, which may differ between hosts; what files of data hold is compared by `check_same_data`
OF_A_HOST = (
    *("run.dir", "data.text", "data.paths", "data.tokenizer", "data.cache_dir", "data.workers"),
    *("data.remote_cache", "eval.tasks", "checkpoint.resume"),
)


def check_same_config(config: Config, peers: Peers) -> None:
    """Raise ConfigError on every rank if a rank has another value of a key than rank 0."""
    mine = dict(dotted(config.model_dump(mode="json")))
    found = together(lambda: mine, peers.group)
    for key in dict.fromkeys(key for one in found for key in one):
        values = [one.get(key) for one in found]
        if key not in OF_A_HOST and (rank := _differs(values)) is not None:
            raise ConfigError(
                f"{key}: {values[0]} on {_place(0, peers)} and {values[rank]} on "
                f"{_place(rank, peers)}: all ranks need the same configuration"
            )


def check_same_data(data: Datasets, tokenizer: Tokenizer, peers: Peers) -> list[SourceIdentity]:
    """The identity of the data, which is that of every rank.

    Raises ConfigError on every rank if a rank has opened other data than rank 0, or has another
    tokenizer.
    """
    found = together(lambda: (tokenizer.fingerprint, data.identity()), peers.group)
    prints, identities = [one for one, _ in found], [one for _, one in found]
    if (rank := _differs(prints)) is not None:
        raise ConfigError(
            f"data.tokenizer: fingerprint {prints[0][:8]} on {_place(0, peers)} and "
            f"{prints[rank][:8]} on {_place(rank, peers)}: all ranks need the same tokenizer"
        )
    for rank, identity in enumerate(identities):
        if not same_identity(identities[0], identity):
            first, other = describe_change(identities[0], identity)
            raise ConfigError(
                f"the data has {first} on {_place(0, peers)} and {other} on "
                f"{_place(rank, peers)}: all ranks need the same data. Files differ between hosts, "
                "or changed while the run started"
            )
    return identities[0]


def _differs(values: Sequence[Any]) -> int | None:
    """The first rank whose value is not that of rank 0."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def _place(rank: int, peers: Peers) -> str:
    return f"rank {rank} ({peers.hosts[rank]})"
