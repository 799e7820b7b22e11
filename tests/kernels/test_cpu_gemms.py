"""BF16 on a CPU without instructions for it: the bits of fp32, rounded once, by each operator."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from coatlm.kernels import cpu_gemms
from tests.distributed import ROOT

REPLACED = """
from types import SimpleNamespace
import torch
from coatlm.kernels import cpu_gemms

class Recorded:  # torch's operators, which note what they compute
    def __getattr__(self, name):
        real = getattr(torch.ops.aten, name).out
        def out(*tensors, **options):
            computed.append((name, *{x.dtype for x in (*tensors, options["out"])}))
            return real(*tensors, **options)
        return SimpleNamespace(out=out)

computed = []
cpu_gemms.aten = Recorded()
cpu_gemms.multiplies_bf16 = lambda: False  # also where the CPU does
a, b, c = (torch.randn(*shape) for shape in ((5, 7), (7, 9), (9,)))
batch = torch.randn(3, 5, 7), torch.randn(3, 7, 9)
calls = {
    "mm": lambda a, b, c: a @ b,
    "of a transposed matrix": lambda a, b, c: torch.mm(b.t(), a.t()),
    "addmm": lambda a, b, c: torch.addmm(c, a, b, beta=2, alpha=3),
    "linear": lambda a, b, c: torch.nn.functional.linear(a, b.t(), c),
    "bmm": lambda a, b, c: batch[0].to(a.dtype) @ batch[1].to(a.dtype),
    "baddbmm": lambda a, b, c: torch.baddbmm(c, *(x.to(a.dtype) for x in batch), alpha=0.5),
    "nothing": lambda a, b, c: a[:0] @ b,
    "sums of nothing": lambda a, b, c: a[:, :0] @ b[:0],
}
rounded = [x.bfloat16() for x in (a, b, c)]
batch = tuple(x.bfloat16().float() for x in batch)
exact = {name: call(*(x.float() for x in rounded)) for name, call in calls.items()}
double = a.double() @ b.double()
kept = cpu_gemms.widen_bf16_gemms()
assert kept and cpu_gemms.widen_bf16_gemms() is kept
operators = "mm", "mm", "addmm", "addmm", "bmm", "baddbmm", "mm", "mm"
for (name, call), operator in zip(calls.items(), operators, strict=True):
    computed.clear()
    assert torch.equal(call(*rounded), exact[name].bfloat16()), name
    assert torch.equal(call(*(x.float() for x in rounded)), exact[name]), name
    assert computed == [(operator, torch.float32)] * 2, (name, computed)
assert torch.equal(a.double() @ b.double(), double)
x, y = (t.clone().requires_grad_() for t in rounded[:2])
(x @ y).sum().backward()
ones = torch.ones(5, 9)
assert torch.equal(x.grad, (ones @ y.detach().float().t()).bfloat16())
assert torch.equal(y.grad, (x.detach().float().t() @ ones).bfloat16())
for first, second in ((rounded[0], b), (a, rounded[1])):
    try:
        first @ second
    except RuntimeError:
        continue
    raise AssertionError("GEMMs of two dtypes were computed")
print("done")
"""


def test_replaced_gemms_are_those_of_fp32_rounded_once_and_others_are_as_before() -> None:
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", REPLACED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.stdout, found.stderr) == ("done\n", "")


@pytest.mark.parametrize("native", [True, False])
def test_only_bf16_is_widened_and_only_where_the_cpu_has_none(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_gemms, "multiplies_bf16", lambda: native)
    double, half = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bfloat16)
    assert cpu_gemms.widened(double, half) == (double, half)
    assert [x.dtype for x in cpu_gemms.widened(half, half)] == [
        torch.bfloat16 if native else torch.float32
    ] * 2
