"""Peak device memory of a rank while its model is built, before there are optimizer states.

Below stage 3 of ZeRO, and with one rank, only the weights of the rank are counted. At stage 3
buckets are filled one after the other in the order of backward, output layer, layers, embedding,
and only shards of them stay:

    peak = shards of the buckets before + weights of a bucket
           + max(its gradients, which are allocated and freed; the shard of them, and beside it that
                 of the weights or the largest tensor as it is drawn: whole, in fp32, for all
                 tensor-parallel ranks)

Shards are of weights and of gradients. With train.update=backward all gradients are allocated first
and stay.
"""

from __future__ import annotations

import math

from coatlm.config import Config
from coatlm.model.accounting import key_size, layer_matrices, query_size
from coatlm.model.grad_memory import EACH, arena_bytes
from coatlm.model.layer_memory import element_bytes

DRAWN = 4  # bytes per element: fp32


def construction_bytes(
    config: Config, count: int, vocab: int, *, stage: int, data_parallel: int
) -> int:
    """The peak in bytes of a rank of pipeline stage `stage`, which has `count` parameters."""
    m, p, size = config.model, config.parallel, element_bytes(config)
    ranks = data_parallel * p.cp
    if p.zero < 3 or ranks == 1:
        return count * size
    backward = config.train.update == "backward"
    accumulated, moving = (0.0, 0) if backward else EACH[p.main_grads]
    each = size + accumulated
    arena = arena_bytes(config, vocab, data_parallel) if backward else 0

    def peak(before: int, bucket: int, drawn: int) -> int:
        shard = bucket / ranks * accumulated
        more = max(moving * bucket, shard + max(bucket / ranks * size, DRAWN * drawn))
        return arena + math.ceil(before / ranks * each + bucket * size + more)

    first, last = stage == 0, stage == p.pp - 1
    whole, layer = vocab * m.hidden, layer_matrices(m) // p.tp
    table = whole // p.tp
    widest = max(2 * m.ffn, query_size(m) + 2 * key_size(m)) * m.hidden
    layers = count - table * first
    peaks = [peak(layers - layer, layer, widest)]
    if first:
        peaks.append(peak(layers, table, whole))
    if last and not (first and m.tie_embeddings):
        before = (layers - table - m.hidden) * (p.vpp - 1) // p.vpp  # chunks before the last
        peaks.append(peak(before, table + m.hidden, whole))
    return max(peaks)
