"""Convert the states of one recipe to those of another, for a run that changes optim.recipe.

    m, v, master = decode(weight, states of the source)        weight, states = encode(m, v, master)

Decoding gives fp32 values, and encoding rounds each once, to the nearest value of its new format.
So fp32 states become what the new recipe would store of them, and states in fewer bits become fp32
without a further error; the bits that they lack are not recovered. The model's weight becomes the
BF16 value nearest to the master. With `Direct`, which has no master, the rest of it is dropped.

The states of the source are loaded to the host, and converted on the device in pieces, so the
device needs no memory for them.
"""

from __future__ import annotations

import torch

from coatlm.optim.adamw import CHUNK, AdamW
from coatlm.optim.moment_formats import Stored, named_state
from coatlm.optim.recipes import MASTER, Recipe
from coatlm.optim.shards import FlatShard


def optimizer_on_host(optimizer: AdamW, recipe: str | Recipe) -> AdamW:
    """An optimizer with another recipe over zero weights on the host, in the shards of `optimizer`.

    Its states have the right layout for a load to fill. Raises ValueError for an unknown recipe,
    and for one that the dtype of the weights does not allow.
    """
    shards = []
    for shard in optimizer.shards:
        weight = torch.zeros_like(shard.weight, device="cpu")
        shards.append(FlatShard(weight, weight, decay=()))
    return AdamW(
        shards,
        recipe=recipe,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )


@torch.no_grad()
def convert_states_(optimizer: AdamW, source: AdamW) -> None:
    """Set weights and states of `optimizer` from its weights and the states of `source`.

    `source` is of `optimizer_on_host`; its weights are not read. The parts of a parameter that
    shards cut have tensor-wise scales of their own until the next update.
    """
    old, new = source.recipe, optimizer.recipe
    for i, start, stop in optimizer.spans(CHUNK):
        weight = optimizer.shards[i].weight[start:stop]
        stored = {k: t.to(weight.device) for k, t in source.state_of(i, start, stop).items()}
        master = old.weight.decode(weight, named_state(stored, MASTER)).float()
        states: Stored = {}
        for name, moment in new.moments.items():
            value = old.moments[name].decode(named_state(stored, name))
            states |= {name + suffix: t for suffix, t in moment.encode(value).items()}
        new_weight, state = new.weight.encode(master, weight.dtype)
        states |= {MASTER + suffix: t for suffix, t in state.items()}
        for name, tensor in optimizer.state_of(i, start, stop).items():
            tensor.copy_(states[name])
        weight.copy_(new_weight)
