"""Log-probabilities and greedy tokens of texts, computed by the model of a run in its own layout.

    loss(row)      = - sum over the row's labels of log p(label | the tokens up to it)
    exact(row)     = whether every label is the token with the highest probability
    following(row) = the token with the highest probability behind the row's last one

Rows are sorted by length and padded on the right to one of few widths, seq_len / 2^k. A microbatch
has micro_batch * 2^k of them: as many tokens as in training, whatever the width.

All ranks are given the same rows and return the same predictions. Data-parallel ranks compute
different rows, in equally many passes. Pipeline stages, tensor- and context-parallel ranks take
part in all passes of their model. Logits are never gathered, three numbers per row are.

Shapes: B samples, W tokens per sample, S = W / context-parallel size tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from coatlm.model.loss import IGNORE
from coatlm.parallel.collectives import all_gather_single
from coatlm.parallel.groups import Groups
from coatlm.parallel.pipeline import predict_microbatches
from coatlm.platform import device

SHORTEST = 32  # tokens per sample: shorter ones would add shapes and save little


@dataclass(frozen=True)
class Row:
    """Up to seq_len tokens, and for each the label behind it, or IGNORE where none is scored."""

    tokens: Sequence[int]
    labels: Sequence[int]

    @classmethod
    def of(cls, context: Sequence[int], continuation: Sequence[int], seq_len: int) -> Row:
        """Score `continuation` behind `context`; what is too long loses its first tokens.

        Raises ValueError for an empty context.
        """
        if not context:
            raise ValueError("context=[]: the first scored token needs at least one before it")
        ids = [*context, *continuation]
        labels = [*[IGNORE] * (len(context) - 1), *continuation]
        return cls(ids[: len(labels)][-seq_len:], labels[-seq_len:])


class Prediction(NamedTuple):
    """The results of one row, as the module defines them."""

    loss: float  # nats
    exact: bool
    following: int


class Predictor:
    """Computes predictions with a model in any parallel layout.

    `chunks` are the model chunks of this rank's stage: `model.builder.Llama`, bare or in a
    `FlatModel`. `seq_len` and `micro_batch` are those that the model is trained with. `after_pass`
    is called after each forward pass. The model is left in evaluation mode.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        groups: Groups,
        *,
        seq_len: int,
        micro_batch: int,
        after_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self.chunks, self.groups, self.seq_len = chunks, groups, seq_len
        self.micro_batch, self.after_pass = micro_batch, after_pass
        self.widths = widths(seq_len, 2 * groups.cp.size() * groups.tp.size())

    @torch.no_grad()
    def __call__(self, rows: Sequence[Row]) -> list[Prediction]:
        """The predictions of `rows`, in their order. All ranks call it with the same rows."""
        for chunk in self.chunks:
            chunk.eval()
        found: dict[int, Prediction] = {}
        waiting = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))
        while waiting:
            longest = len(rows[waiting[0]].tokens)
            width = next(w for w in self.widths if w >= longest)
            samples = self.micro_batch * (self.seq_len // width)
            # a microbatch for each pipeline stage, so that all of them are busy
            share = samples * self.groups.pp.size()
            everywhere = share * self.groups.dp.size()
            part, waiting = waiting[:everywhere], waiting[everywhere:]
            own = part[self.groups.dp.rank() * share :][:share]
            found |= zip(part, self._pass([rows[i] for i in own], samples, width), strict=False)
            self.after_pass()
        return [found[i] for i in range(len(rows))]

    def _pass(self, own: Sequence[Row], samples: int, width: int) -> list[Prediction]:
        """Run this rank's rows; returns the predictions of all data-parallel ranks' rows."""
        count = samples * self.groups.pp.size()
        tokens_RW = torch.zeros(count, width, dtype=torch.int64)
        labels_RW = torch.full((count, width), IGNORE)
        last_R = torch.zeros(count, dtype=torch.int64)
        for i, row in enumerate(own):
            tokens_RW[i, : len(row.tokens)] = torch.tensor(row.tokens)
            labels_RW[i, : len(row.labels)] = torch.tensor(row.labels)
            last_R[i] = len(row.tokens) - 1
        model = getattr(self.chunks[0], "module", self.chunks[0])
        at_S = model.rotary.token_positions(width)
        tokens_RS, labels_RS = (x[:, at_S].to(device()) for x in (tokens_RW, labels_RW))
        last_RS = (at_S == last_R[:, None]).to(device())
        parts = zip(tokens_RS.split(samples), labels_RS.split(samples), strict=True)
        batches = [{"tokens": tokens, "labels": labels} for tokens, labels in parts]
        outputs = predict_microbatches(self.chunks, batches, seq_len=width)
        result_R3 = torch.zeros(count, 3, dtype=torch.float64, device=device())
        if self.groups.last_stage:
            loss_RS, entry_RS = torch.cat(outputs, 1)
            wrong_RS = (entry_RS != labels_RS) & (labels_RS != IGNORE)
            result_R3 = torch.stack((loss_RS, wrong_RS.double(), entry_RS * last_RS), 2).sum(1)
        for group in (self.groups.cp, self.groups.pp):
            if group.size() > 1:
                dist.all_reduce(result_R3, group=group)
        if self.groups.dp.size() > 1:
            gathered = result_R3.new_empty(count * self.groups.dp.size(), 3)
            all_gather_single(gathered, result_R3, group=self.groups.dp)
            result_R3 = gathered
        return [Prediction(x, not wrong, int(entry)) for x, wrong, entry in result_R3.tolist()]


def widths(seq_len: int, divisor: int) -> list[int]:
    """seq_len / 2^k in increasing order, all multiples of `divisor` and at least SHORTEST.

    seq_len itself always belongs to them.
    """
    found = [seq_len]
    while found[0] % (2 * divisor) == 0 and found[0] >= 2 * SHORTEST:
        found.insert(0, found[0] // 2)
    return found
