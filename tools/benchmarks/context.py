"""The attention of one context-parallel rank on one GPU: pieces against a lower-right mask.

Rows are S x B tokens, query heads, key heads, head sizes and context-parallel ranks. `pieces` is
what a rank computes with parallel.cp_comm=p2p: causal attention to its own keys, attention without
a mask to those of each other rank, and the sums of outputs and gradients. `prefixes` is what it
computes with all_gather: each chunk of its queries attends to all earlier keys under a mask that is
aligned at the lower right corner. Both are timed without communication, for the first and the last
rank. `whole / ranks` is causal attention to whole samples, divided by the ranks. `ratio` divides
forward and backward by the time of `prefixes`, `error` is the relative difference of its output.
Options: cases=16384:1:32:32:128:2,16384:1:32:8:128:8 (S:B:heads:kv_heads:size:ranks).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coatlm.data.context_parallel import zigzag_positions
from coatlm.kernels.attention_pieces import piece_backend
from coatlm.model.attention_backends import Shape, random_inputs, torch_attention
from coatlm.parallel.ring_attention import Received, attend_to_peers, gradients_of_peers
from tools.benchmarks.clock import DEVICE, milliseconds

OPTIONS = ("cases",)
CASES = "16384:1:32:32:128:2,16384:1:32:8:128:4,32768:1:32:8:128:8"
LARGEST = 1 << 22


class AbsentPeers:
    """Ranks whose packed keys and values are here already; whatever a rank swaps, it gets these."""

    def __init__(self, rank: int, kv_RS2BGD: list[Tensor]) -> None:
        self.rank, self.size, self.kv_RS2BGD = rank, len(kv_RS2BGD), kv_RS2BGD

    def swap(self, x_X: Tensor, *, to: int, source: int, rows: int) -> Received:
        """The first rows of keys and values of `source`."""
        return lambda: self.kv_RS2BGD[source][:rows]


def rows(options: dict[str, str]) -> list[str]:
    """S:B:heads:kv_heads:size:ranks of each case. Raises ValueError for one of another form."""
    found = options.get("cases", CASES).split(",")
    for row in found:
        numbers = [int(n[:8]) if n.isdecimal() else 0 for n in row.split(":")]
        if len(numbers) != 6 or not all(0 < number < LARGEST for number in numbers):
            raise ValueError(
                f"cases={row}: must be S:B:heads:kv_heads:size:ranks, whole numbers from 1 to "
                f"{LARGEST - 1}"
            )
        tokens, *_, ranks = numbers
        if ranks < 2 or tokens % (2 * ranks):
            raise ValueError(f"cases={row}: needs 2 ranks or more, and S a multiple of 2 * ranks")
    return found


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs."""
    return 1


def measure(row: str, options: dict[str, str]) -> list[dict[str, Any]]:
    """One record per way and rank: milliseconds of forward and backward, ratio and error."""
    tokens, samples, heads, kv_heads, size, ranks = (int(number) for number in row.split(":"))
    shape = Shape(samples, tokens, heads, kv_heads, size, None)
    q, k, v, do = random_inputs(shape, torch.device(DEVICE))
    whole = [part / ranks for part in _autograd_times(lambda: _causal(q, k, v), (q, k, v), do)]
    records = [_record(row, "whole / ranks", "", whole)]
    with torch.no_grad():
        places = [zigzag_positions(tokens, rank, ranks).to(q.device) for rank in range(ranks)]
        kv = [torch.stack((k[at], v[at]), dim=1) for at in places]
    for rank in (0, ranks - 1):
        at = places[rank]
        own = [x.detach()[at].requires_grad_() for x in (q, k, v)]
        prefixes = partial(_prefixes, own[0], k, v, rank, ranks)
        masked = _autograd_times(prefixes, (own[0], k, v), do[at])
        records.append(_record(row, "prefixes", rank, masked, sum(masked)))
        peers, inputs = AbsentPeers(rank, kv), [x.detach() for x in own]
        backend = piece_backend(*own)
        attend = partial(attend_to_peers, *inputs, peers, scale=None, backend=backend)
        merged, expected = attend(), prefixes().detach()
        gradients = partial(gradients_of_peers, do[at], *inputs, merged, peers)
        step = partial(gradients, scale=None, backend=backend)
        times = [milliseconds(attend), milliseconds(step)]
        record = _record(row, f"pieces, {backend}", rank, times, sum(masked))
        difference = (merged.o_SBND.float() - expected.float()).norm() / expected.float().norm()
        records.append(record | {"error": f"{float(difference):.1e}"})
    return records


def _causal(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor) -> Tensor:
    return torch_attention(q_SBND, k_SBGD, v_SBGD, None)


def _prefixes(q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, rank: int, ranks: int) -> Tensor:
    from torch.nn.attention.bias import causal_lower_right

    length, outputs = len(q_SBND) // 2, []
    for chunk, q in zip((rank, 2 * ranks - 1 - rank), q_SBND.chunk(2), strict=True):
        keys = (chunk + 1) * length
        mask = causal_lower_right(length, keys) if keys > length else None
        outputs.append(torch_attention(q, k_TBGD[:keys], v_TBGD[:keys], None, mask=mask))
    return torch.cat(outputs)


def _autograd_times(
    attend: Callable[[], Tensor], inputs: tuple[Tensor, ...], do_SBND: Tensor
) -> list[float]:
    """Milliseconds of forward and of backward, each alone."""
    out = attend()
    backward = partial(torch.autograd.grad, out, inputs, do_SBND, retain_graph=True)
    return [milliseconds(attend), milliseconds(backward)]


def _record(
    row: str, way: str, rank: int | str, times: list[float], of: float | None = None
) -> dict[str, Any]:
    forward, backward = times
    record = {"case": row, "way": way, "rank": str(rank), "forward_ms": f"{forward:.3f}"}
    record |= {"backward_ms": f"{backward:.3f}", "total_ms": f"{forward + backward:.3f}"}
    return record | ({"ratio": f"{(forward + backward) / of:.3f}"} if of else {})
