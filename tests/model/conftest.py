"""What several tests of models start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from coatlm import megatron_hook


@pytest.fixture
def megatron() -> Iterator[None]:
    """megatron-core in a world of one process."""
    megatron_hook.install()
    from megatron.core import parallel_state

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
