"""AdamW with one definition of its arithmetic; how m, v and the weight are stored is a recipe.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2         g = clip * gradient
    w = w - lr (m / c1) / (sqrt(v / c2) + eps) - lr wd w         c = 1 - b^t

Decoupled weight decay: Loshchilov & Hutter 2019 (arXiv 1711.05101), algorithm 2. An update uses the
new moments before they are rounded to their storage format; the recipes of Collage (arXiv
2405.03637) compute the moments in BF16 in the first place.

The optimizer sees flat shards and no process groups. Whether a step is skipped is decided on the
device: if the clip coefficient is not finite, nothing changes, and the host does not wait for it.
With `device_rate` the learning rate is in device memory as well, and replays of a CUDA graph read
its current value.
On a GPU `fused.FusedStep` runs the step; `AdamW.propose` is its reference and the path of the CPU.
With `offload` the states are in host memory, and a step passes them through the device in pieces.
A step updates all shards at once, or with `by_shard` each shard as soon as it has gradients.

A tensor-wise scale belongs to a whole parameter. Scales grow with the amax, so ranks whose shards
have parts of a parameter use the largest of their scales. One all-reduce per step covers all
parameters that are cut; on a GPU it reduces amaxes while the other parameters are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.optim.fused import FusedStep, prepare
from coatlm.optim.moment_formats import Proposal, Stored, named_state
from coatlm.optim.offload import PIECE, Piece, StateOffload, make_pieces, parts
from coatlm.optim.recipes import MASTER, M, Recipe, V, find_recipe
from coatlm.optim.shards import FlatShard, check_recipe, decayed_blocks, initial_states, round_up

CHUNK = 1 << 22  # elements that the reference updates at a time: bounds its fp32 temporaries


class AdamW:
    """The optimizer. It updates shards in place; `states[i]` are the flat states of shard i.

    With `offload` the states are in host memory, page-locked if the shards are on a GPU, and a step
    passes at most `piece` elements at a time through the GPU. Results have the same bits.
    With `by_shard` a step is one call of `update_shard` per shard, and then `count_update`.
    With `device_rate` kernels read the learning rate in device memory; otherwise it is an argument
    of each launch.
    `cut` is the number of parameters that are cut, the same on all ranks; `share` starts to
    all-reduce a tensor [cut, 3] to its maxima, in place, and returns a handle with `wait`.
    """

    def __init__(
        self,
        shards: Sequence[FlatShard],
        *,
        recipe: str | Recipe,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        offload: bool = False,
        piece: int = PIECE,
        by_shard: bool = False,
        device_rate: bool = False,
        cut: int = 0,
        share: Callable[[Tensor], Any] | None = None,
    ) -> None:
        betas = (float(betas[0]), float(betas[1]))
        check_recipe(recipe, shards, betas=betas, eps=eps, weight_decay=weight_decay)
        self.shards, self.recipe = tuple(shards), find_recipe(recipe)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.cut, self.share = cut, share if cut and self.recipe.tensor_scaled else None
        device = shards[0].weight.device
        self.step_count = torch.zeros((), dtype=torch.int64, device=device)  # updates done
        self._rates: Tensor | tuple[float, float] = 0.0, 0.0  # lr, lr * weight_decay
        if device_rate:
            self._rates = torch.zeros(2, device=device)
        self._starts = list(accumulate((s.weight.numel() for s in shards), initial=0))
        n = self._starts[-1]
        block = shards[0].weight[:SCALE_BLOCK]
        self._flat = initial_states(self.recipe, block, n, None if offload else device)
        self._states = [parts(self._flat, *shard, n) for shard in pairwise(self._starts)]
        decayed = torch.cat([decayed_blocks(shard) for shard in shards]).to(device)
        self._decayed = decayed.split([shard.weight.numel() // SCALE_BLOCK for shard in shards])
        spans = tuple(self.spans(min(CHUNK, piece)))
        size = piece if offload else None
        self.pieces = make_pieces(spans, self._starts, size, by_shard=by_shard)
        self.offload: StateOffload | None = None
        self._in_place = [parts(self._flat, at.start, at.stop, n) for at in self.pieces]
        self._pieces_of: dict[int, list[int]] = {i: [] for i in range(len(shards))}
        for j, at in enumerate(self.pieces):
            self._pieces_of[at.spans[0][0]].append(j)
        if offload:
            self.offload = StateOffload(self._flat, self.pieces, n, device)
        self.reload_from_weights()
        self.fused: list[FusedStep] = []  # one per piece; the reference runs without them
        self.fused_cut: list[tuple[FusedStep, Tensor]] = []  # of cut parameters, with their numbers
        if device.type == "cuda":
            self.scalars = torch.zeros(4, device=device)
            device_states = self._in_place if self.offload is None else self.offload.device
            for part, states in zip(self.pieces, device_states, strict=True):
                whole = [span for span in part.spans if self._number(*span) is None]
                self.fused.append(self._fused_step(part, whole, states, decayed))
                rest = [span for span in part.spans if self._number(*span) is not None]
                numbers = torch.tensor([self._number(*span) for span in rest]).long().to(device)
                self.fused_cut.append((self._fused_step(part, rest, states, decayed), numbers))

    def _fused_step(
        self, piece: Piece, spans: Sequence[tuple[int, int, int]], states: Stored, decayed: Tensor
    ) -> FusedStep:
        """The fused step of some spans of a piece."""
        return FusedStep(
            self.recipe,
            weights=[shard.weight for shard in self.shards],
            grads=[shard.grad for shard in self.shards],
            spans=spans,
            states=states,
            decayed=decayed[piece.start // SCALE_BLOCK : piece.stop // SCALE_BLOCK],
            first_block=piece.start // SCALE_BLOCK,
            betas=self.betas,
            eps=self.eps,
        )

    @torch.no_grad()
    def step(self, *, lr: float, clip_coefficient: Tensor | None = None) -> None:
        """`set_rate(lr)`, then `update(clip_coefficient)`."""
        self.set_rate(lr)
        self.update(clip_coefficient)

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of later updates, >= 0. Does not wait for the device."""
        if not lr >= 0.0:
            raise ValueError(f"lr={lr}: must be >= 0")
        rates = float(lr), float(lr * self.weight_decay)  # an int would be another kernel
        if isinstance(self._rates, Tensor):
            for at, rate in enumerate(rates):
                self._rates[at].fill_(rate)
        else:
            self._rates = rates

    @torch.no_grad()
    def update(self, clip_coefficient: Tensor | None = None) -> None:
        """Update all shards at the rate of `set_rate`; gradients are multiplied by
        `clip_coefficient` (fp32[], 1 if None).

        If the coefficient is NaN or Inf, nothing changes, not even `step_count`. With `device_rate`
        and without `offload` a CUDA graph can capture this, once the kernels are compiled.
        """
        self._update(range(len(self.pieces)), clip_coefficient, self.step_count)

    @torch.no_grad()
    def update_shard(self, i: int, clip_coefficient: Tensor) -> None:
        """`update` of shard i alone, once per step; needs `by_shard`. `step_count` does not change.

        With `share` all ranks that have parts of the shard's parameters call it together.
        """
        self._update(self._pieces_of[i], clip_coefficient, self.step_count.clone())

    @torch.no_grad()
    def count_update(self, clip_coefficient: Tensor) -> None:
        """Count a step of calls of `update_shard`, unless the coefficient is NaN or Inf."""
        self.step_count += clip_coefficient.isfinite()

    def _update(
        self, which: Collection[int], clip_coefficient: Tensor | None, step_count: Tensor
    ) -> None:
        """Update the pieces numbered `which`; count the step in `step_count`, a tensor."""
        if self.fused:
            fixed = not isinstance(self._rates, Tensor)
            assert not (fixed and torch.cuda.is_current_stream_capturing()), "needs device_rate"
            prepare(
                self.scalars,
                betas=self.betas,
                clip_coefficient=clip_coefficient,
                step_count=step_count,
            )
            self._fused_update(which)
            return
        one = torch.ones((), device=step_count.device)
        clip = one if clip_coefficient is None else clip_coefficient
        go = clip.abs() < torch.inf
        shards = {span[0] for j in which for span in self.pieces[j].spans}
        scales = self.cut_scales(clip_coefficient=clip, shards=shards)
        for states, j in zip(self._passes(which), which, strict=True):
            piece = self.pieces[j]
            for i, start, stop in piece.spans:
                at = self._starts[i] - piece.start
                old = parts(states, at + start, at + stop, piece.stop - piece.start)
                new = self.propose(i, start, stop, clip_coefficient=clip, old=old, scales=scales)
                for name, tensor in new.states.items():
                    old[name].copy_(torch.where(go, tensor, old[name]))
                weight = self.shards[i].weight[start:stop]
                weight.copy_(torch.where(go, new.weight, weight))
        step_count += go

    def _passes(self, which: Collection[int]) -> Iterator[Stored]:
        """The states of some pieces on the device, which are copied back after their turn."""
        if self.offload is not None:
            return self.offload.passes(which)
        return iter([self._in_place[j] for j in which])

    def _fused_update(self, which: Collection[int]) -> None:
        """The step on a GPU. With `offload` and cut parameters, states pass through it twice."""
        shared: Any = None
        if self.share is not None:
            amax = torch.zeros(self.cut, 3, dtype=torch.int32, device=self.scalars.device)
            for _, j in zip(self._passes(which), which, strict=True):
                fused, numbers = self.fused_cut[j]
                fused(self.scalars, self._rates, passes=(True,))
                amax[numbers] = fused.amax
            shared = self.share(amax)
        for _, j in zip(self._passes(which), which, strict=True):
            self.fused[j](self.scalars, self._rates)
            if shared is not None:
                fused, numbers = self.fused_cut[j]
                shared.wait()
                fused.amax.copy_(amax[numbers])
                fused(self.scalars, self._rates, passes=(False,))

    @torch.no_grad()
    def cut_scales(
        self,
        *,
        clip_coefficient: Tensor,
        lr: float | None = None,
        shards: Container[int] | None = None,
    ) -> Tensor:
        """The scales of m, v and master after the reference's step, fp32[cut, 3]. A collective.

        Those of parameters that are not in `shards` are zero; None: all shards.
        """
        scales = torch.zeros(self.cut, 3, device=self.step_count.device)
        for i, start, stop in self.spans(CHUNK):
            number = self._number(i, start, stop)
            if number is not None and (shards is None or i in shards):
                new = self.propose(i, start, stop, lr=lr, clip_coefficient=clip_coefficient)
                for column, name in enumerate((M, V, MASTER)):
                    if name + ".scale" in new.states:
                        scales[number, column] = new.states[name + ".scale"][0]
        if self.share is not None:
            self.share(scales).wait()
        return scales

    def _number(self, i: int, start: int, _: int) -> int | None:
        """The number of the parameter of a span among those that are cut; None for a whole one."""
        return None if self.share is None else self.shards[i].cut.get(start)

    @torch.no_grad()
    def propose(
        self,
        i: int,
        start: int,
        stop: int,
        *,
        clip_coefficient: Tensor,
        lr: float | None = None,
        old: Stored | None = None,
        scales: Tensor | None = None,
    ) -> Proposal:
        """The reference of a step: its result for elements [start, stop) of shard i, unwritten.

        `lr` is the learning rate; None: that of `set_rate`. `old` are the states of the elements on
        the device of the weights; None: a copy of `states`. `scales` are those of `cut_scales`;
        None: a part of a parameter has scales of its own.
        """
        rate, weight_decay = self._rates if lr is None else (lr, lr * self.weight_decay)
        recipe, old = self.recipe, self.fetch(i, start, stop) if old is None else old
        if scales is not None and (number := self._number(i, start, stop)) is not None:
            recipe = recipe.at_least(*scales[number])
        weight = self.shards[i].weight[start:stop]
        g = self.shards[i].grad[start:stop].float() * clip_coefficient
        w = recipe.weight.decode(weight, named_state(old, MASTER))
        if recipe.strict:
            g, w = g.bfloat16().float(), weight.float()
        m, new_m = recipe.m.ema(named_state(old, M), g, self.betas[0])
        v, new_v = recipe.v.ema(named_state(old, V), g * g, self.betas[1])
        scale_m, scale_v = (self._inverse_correction(beta) for beta in self.betas)
        # torch's fp32 root is not correctly rounded on every CPU; through fp64 it is
        root = (v * scale_v).double().sqrt().float()
        direction = (m * scale_m) / (root + self.eps)
        decay = self._decayed[i][start // SCALE_BLOCK : stop // SCALE_BLOCK] * weight_decay
        update = -rate * direction - decay.repeat_interleave(SCALE_BLOCK) * w
        new_weight, new_w = recipe.weight.add(weight, named_state(old, MASTER), update)
        states = {M + suffix: tensor for suffix, tensor in new_m.items()}
        states |= {V + suffix: tensor for suffix, tensor in new_v.items()}
        states |= {MASTER + suffix: tensor for suffix, tensor in new_w.items()}
        return Proposal(update, new_weight, states)

    @torch.no_grad()
    def reload_from_weights(self) -> None:
        """Reset the weight states (master, remainder, low half) to the weights: call it after
        weights were loaded without optimizer states.
        """
        for i, start, stop in self.spans(CHUNK):
            state = self.recipe.weight.initial(self.shards[i].weight[start:stop])
            for suffix, tensor in state.items():
                self.state_of(i, start, stop)[MASTER + suffix].copy_(tensor)

    @property
    def states(self) -> list[Stored]:
        """The states of each shard. With `offload`, waits for the last update."""
        if self.offload is not None:
            self.offload.synchronize()
        return self._states

    @torch.no_grad()
    def decode(self, i: int, name: str) -> Tensor:
        """fp32[n] of shard i: a moment, or for "fp32_param" the weight at its full precision."""
        weight = self.shards[i].weight
        states = self.fetch(i, 0, weight.numel())
        if name == MASTER:
            return self.recipe.weight.decode(weight, named_state(states, MASTER)).float()
        if name not in self.recipe.moments:
            raise ValueError(f"name={name!r}: one of {(MASTER, *self.recipe.moments)}")
        return self.recipe.moments[name].decode(named_state(states, name))

    def decode_parts(self, name: str, state: Stored) -> Tensor:
        """fp32[n] of a moment or of FP8-LM's master, decoded from its stored tensors by suffix."""
        return self.recipe.scaled_format(name).decode(state)

    def encode_parts(self, name: str, values: Tensor) -> Stored:
        """The stored tensors, by suffix, of fp32 `values` [n]; n is a multiple of 128."""
        return self.recipe.scaled_format(name).encode(values)

    def spans(self, longest: int) -> Iterator[tuple[int, int, int]]:
        """(shard, start, stop) of ranges that can be updated one at a time; multiples of 128.

        A range has at most `longest` elements, but with tensor scales it is a whole parameter.
        """
        for i, shard in enumerate(self.shards):
            n = shard.weight.numel()
            if self.recipe.tensor_scaled:
                yield from ((i, start, round_up(end)) for start, end in shard.params or ((0, n),))
            else:
                yield from ((i, at, min(at + longest, n)) for at in range(0, n, longest))

    def state_of(self, i: int, start: int, stop: int) -> Stored:
        """Views of the states of elements [start, stop) of shard i; both are multiples of 128."""
        return parts(self.states[i], start, stop, self.shards[i].weight.numel())

    def fetch(self, i: int, start: int, stop: int) -> Stored:
        """`state_of` on the device of the weights: with `offload` on a GPU, copies."""
        device = self.step_count.device
        return {name: t.to(device) for name, t in self.state_of(i, start, stop).items()}

    def _inverse_correction(self, beta: float) -> Tensor:
        """1 / (1 - beta^t) of the current step, fp32."""
        return (1.0 / (1.0 - beta ** (self.step_count + 1).double())).float()
