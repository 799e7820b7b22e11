"""Tables of the rotary angles of a model chunk, and their bytes.

The angle of a token in frequency j is position * inv_freq[j]; layers read its cos and sin. The
position is the one in the sample or, with data.reset_position_ids, in the token's document:

    position(i) = i - start(i)        start: the first position of the document of token i

Attention reads differences of positions alone, which are the same, but the rounding errors of an
angle grow with the position. Shapes: B samples, S tokens of this context-parallel rank per sample,
E bounds per sample, D elements per head; K = 2 tables, cos and sin, or 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coatlm.config import Config
from coatlm.data.context_parallel import rank_positions
from coatlm.kernels.document_attention import document_positions
from coatlm.kernels.rope import rope_frequencies, rope_tables
from coatlm.kernels.rope_scaling import attention_factor
from coatlm.platform import device

ELEMENT = 4  # bytes, of cos and sin in fp32, and of a position in int32


def rotary_tables(config: Config, positions_S: Tensor) -> Tensor:
    """cos and sin of the rotary angles, fp32 [2, S, D/2].

    If layers with a window have frequencies of their own (model.window.rope_theta) it is
    [4, S, D/2], and the last two are theirs (`attention.SelfAttention.own_tables`).
    """
    m, length = config.model, config.data.seq_len
    scaling = None if m.rope_scaling is None else m.rope_scaling.parameters()
    kinds = [(m.rope_theta, scaling)]
    if m.window is not None and m.window.rope_theta is not None:
        kinds.append((m.window.rope_theta, None))
    tables: list[Tensor] = []
    for theta, stretched in kinds:
        inv_freq = rope_frequencies(m.rotary_dim, theta, stretched, length=length)
        factor, half = attention_factor(stretched), m.size_per_head // 2
        tables += rope_tables(positions_S, inv_freq, factor=factor, half=half)
    return torch.stack(tables)


def rotary_bytes(config: Config) -> int:
    """Bytes of the tables of one model chunk and of one microbatch.

    A chunk has a table of this rank's tokens of a sample. With documents a microbatch has it once
    more for each of its samples. With data.reset_position_ids a chunk has those tokens' positions
    as well and, under context parallelism, a table for the positions of all ranks.
    """
    m, d, cp = config.model, config.data, config.parallel.cp
    kinds = 2 if m.window is not None and m.window.rope_theta is not None else 1
    tokens, row = d.seq_len // cp, kinds * m.size_per_head * ELEMENT
    size = tokens * row
    if d.reset_attention_mask:
        size *= 1 + config.train.micro_batch
    if d.reset_position_ids:
        size += tokens * ELEMENT + (d.seq_len * row if cp > 1 else 0)
    return size


class RotaryTables:
    """The tables of the tokens of one context-parallel rank, on its device.

    Those of data.seq_len exist from the beginning, as CUDA graphs capture no copy from the host;
    those of shorter samples are computed on first use.
    """

    def __init__(self, run: Config, *, cp_rank: int, cp_size: int) -> None:
        self.run, self.cp_rank, self.cp_size = run, cp_rank, cp_size
        self.tables: dict[int, Tensor] = {}  # by sample length, as the next
        self.positions: dict[int, Tensor] = {}
        length = run.data.seq_len
        # with reset_position_ids: of all positions, in order
        self.by_position = self.of_sample(length)
        if run.data.reset_position_ids:
            self._positions_on_device(length)
            if cp_size > 1:
                self.by_position = rotary_tables(run, torch.arange(length)).to(device())

    def of_sample(self, seq_len: int) -> Tensor:
        """`rotary_tables` of this rank's tokens of a sample of `seq_len` tokens: [K, S, D/2]."""
        if seq_len not in self.tables:
            tables = rotary_tables(self.run, self.token_positions(seq_len))
            self.tables[seq_len] = tables.to(device())
        return self.tables[seq_len]

    def of_documents(self, bounds_BE: Tensor, seq_len: int) -> Tensor:
        """`rotary_tables` of this rank's tokens of B samples with documents: [K, B S, D/2].

        The samples are concatenated along the tokens. With data.reset_position_ids positions begin
        at 0 in every document. The bounds are read on the device: the host does not wait, and a
        CUDA graph can be replayed with other bounds.
        """
        if not self.run.data.reset_position_ids:
            return self.of_sample(seq_len).repeat(1, bounds_BE.shape[0], 1)
        at_BS = document_positions(bounds_BE, self._positions_on_device(seq_len))
        return self.by_position.index_select(1, at_BS.flatten())

    def token_positions(self, seq_len: int) -> Tensor:
        """Positions in a sample of `seq_len` tokens of this rank's S tokens, in host memory."""
        zigzag = self.cp_size > 1 and self.run.context_comm != "a2a"
        return rank_positions(seq_len, self.cp_rank, self.cp_size, zigzag=zigzag)

    def _positions_on_device(self, seq_len: int) -> Tensor:
        """`token_positions` in int32, as document bounds are."""
        if seq_len not in self.positions:
            self.positions[seq_len] = self.token_positions(seq_len).int().to(device())
        return self.positions[seq_len]
