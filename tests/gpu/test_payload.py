"""Payload kernels on a GPU: the codes and scales of the reference, sums within fp32 rounding."""

import pytest
import torch
from torch import Tensor

from coatlm.fp8.formats import E3M4, E4M3, E5M2, SCALE_BLOCK, Coding
from coatlm.fp8.payload import pack, pack_ref, unpack, unpack_ref
from coatlm.fp8.payload_layout import Layout, Own, Shared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
A, B, N = 3, 2, 70 * SCALE_BLOCK  # more than two programs a payload, the last one partly empty
SCALED = [(fmt, "own") for fmt in (E4M3, E5M2, E3M4)]
SHARED = [(fmt, how) for fmt in (E4M3, E5M2) for how in ("shared", "divide")]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def gradients(dtype: torch.dtype) -> Tensor:
    """[A, B, N], a strided view; zeros, a NaN and an infinity among values of many sizes."""
    torch.manual_seed(0)
    x = torch.randn(B, A, N) * torch.exp(4 * torch.randn(B, A, N // SCALE_BLOCK)).repeat_interleave(
        128, 2
    )
    x[0, 0, :200] = 0.0
    x[0, 0, 5] = -0.0
    x[1, 0, 300], x[1, 1, 700] = torch.nan, torch.inf
    return x.to(dtype).transpose(0, 1)


def shared_scales(fmt: Coding, device: str) -> Shared:
    """Owners in an order of memory that is not the one of `gradients`."""
    owner = torch.arange(A * B * (N // SCALE_BLOCK + 3), dtype=torch.int32).remainder(5)
    scale = torch.tensor([1e-3, 2.0**-130, 7.0, torch.nan, torch.inf]) / fmt.max
    return Shared(scale.to(device), owner.to(device).view(A, B, -1)[:, :, 3:])


def within(x: Tensor, shared: Shared) -> Tensor:
    """x as scales agreed on leave it: tiny under a tiny one, finite under a finite one."""
    scale = shared.scale[shared.owner.long()].repeat_interleave(SCALE_BLOCK, 2)
    x = torch.where(scale < 2.0**-126, x.float() * 2.0**-134, x.float())
    return torch.where(scale.isfinite() & x.isinf(), 1.0, x)


@pytest.mark.parametrize(("fmt", "how"), SCALED + SHARED)
@dtypes
@pytest.mark.parametrize("skip", [-1, 0, 1, A - 1])
def test_payloads_have_the_bits_of_the_reference(
    fmt: Coding, dtype: torch.dtype, how: str, skip: int
) -> None:
    x = gradients(dtype)
    layout = Layout(N, fmt, scaled=how == "own")
    shared = None if how == "own" else shared_scales(fmt, "cpu")
    if shared is not None and how == "shared":
        x = within(x, shared).to(dtype)
    expected = layout.empty(A, B, device=torch.device("cpu"))
    pack_ref(x, expected, layout, shared, how == "divide")
    on_gpu = torch.empty(B, A, N, dtype=dtype, device="cuda").transpose(0, 1)
    on_gpu.copy_(x)
    payloads = layout.empty(A, B, device=torch.device("cuda"))
    there = None if how == "own" else shared_scales(fmt, "cuda")
    pack(on_gpu, payloads, layout=layout, shared=there, divide=how == "divide", skip=skip)
    used = N + (4 * N // SCALE_BLOCK if how == "own" else 0)
    rest = [a for a in range(A) if a != skip]
    payloads, expected = payloads.cpu()[rest], expected[rest]
    codes, wanted = payloads[..., :N], expected[..., :N]
    if fmt is E3M4:  # which says NaN by a scale
        nan = ~x[rest].isfinite().view(*wanted.shape[:-1], -1, SCALE_BLOCK).all(-1)
        nan = nan.repeat_interleave(SCALE_BLOCK, -1)
    else:
        nan = fmt.decode(wanted.view(fmt.dtype)).isnan()
        assert torch.equal(fmt.decode(codes.view(fmt.dtype)).isnan(), nan)
    assert torch.equal(codes[~nan], wanted[~nan])
    scales, wanted = (p[..., N:used].contiguous().view(torch.float32) for p in (payloads, expected))
    torch.testing.assert_close(scales, wanted, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize(("fmt", "how"), SCALED + SHARED[::2])
@dtypes
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("sources", [1, 4, 7])
@pytest.mark.parametrize("own", [False, True])
def test_sums_are_those_of_the_reference(
    fmt: Coding, how: str, dtype: torch.dtype, add: bool, sources: int, own: bool
) -> None:
    layout = Layout(N, fmt, scaled=how == "own")
    shared = None if layout.scaled else shared_scales(fmt, "cpu")
    payloads = layout.empty(sources, A, B, device=torch.device("cpu"))
    for source in payloads:
        pack_ref(gradients(torch.float32) * torch.rand(A, B, 1), source, layout, shared, False)
    expected = torch.ones(B, A, N, dtype=dtype).transpose(0, 1)
    y = expected.cuda()
    mine = torch.rand(A, B, N).to(dtype)
    kept = Own(mine, sources - 1) if own else None
    unpack_ref(payloads, expected, layout, shared, kept, add)
    unpack(
        payloads.cuda(),
        y,
        layout=layout,
        shared=None if layout.scaled else shared_scales(fmt, "cuda"),
        own=Own(mine.cuda(), sources - 1) if own else None,
        add=add,
    )
    # fused multiply-adds round once where the reference rounds twice; BF16 then rounds to 2^-8
    rtol = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-18
    scale = expected.float().nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True)
    torch.testing.assert_close(
        (y.cpu().float() / scale), expected.float() / scale, rtol=rtol, atol=rtol, equal_nan=True
    )


@pytest.mark.parametrize(("fmt", "how"), SCALED + SHARED[::2])
@dtypes
@pytest.mark.parametrize("sources", [1, 2])
def test_a_sum_of_negative_zeros_is_negative(
    fmt: Coding, how: str, dtype: torch.dtype, sources: int
) -> None:
    layout = Layout(SCALE_BLOCK, fmt, scaled=how == "own")
    x = torch.full((1, 1, SCALE_BLOCK), -0.0, device="cuda")
    x[..., 0] = 1.0
    payloads = layout.empty(sources, 1, 1, device=x.device)
    owner = torch.zeros(1, 1, 1, dtype=torch.int32, device=x.device)
    shared = None if layout.scaled else Shared(torch.ones(1, device=x.device), owner)
    for source in payloads:
        pack(x, source, layout=layout, shared=shared)
    y = torch.empty(1, 1, SCALE_BLOCK, dtype=dtype, device=x.device)
    unpack(payloads, y, layout=layout, shared=shared)
    assert y[..., 1:].signbit().all() and not y[..., 0].signbit().any()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@dtypes
@pytest.mark.parametrize("skip", [-1, 1])
def test_scales_fixed_before_give_the_codes_and_amaxes_of_the_reference(
    fmt: Coding, dtype: torch.dtype, skip: int
) -> None:
    """Values far beyond their scale, a NaN and an infinity in tensors of four blocks and more."""
    x = gradients(dtype)
    layout = Layout(N, fmt, scaled=False)
    owner = torch.arange(A * B * N // SCALE_BLOCK, dtype=torch.int32).div(4, rounding_mode="floor")
    scale = torch.linspace(1e-3, 1.0, len(owner)) / fmt.max
    found = []
    for device in ("cpu", "cuda"):
        amax = torch.full((len(owner),), 2.0, device=device).view(torch.int32)
        shared = Shared(scale.to(device), owner.to(device).view(A, B, -1), amax)
        payloads = layout.empty(A, B, device=torch.device(device))
        there = torch.empty(B, A, N, dtype=dtype, device=device).transpose(0, 1)
        pack(there.copy_(x), payloads, layout=layout, shared=shared, skip=skip)
        codes = payloads[[a for a in range(A) if a != skip], :, :N].contiguous().cpu()
        found.append((fmt.decode(codes.view(fmt.dtype)), amax.cpu().view(torch.float32)))
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0.0, atol=0.0, equal_nan=True)
    spoiled = 1 if skip == 1 else 2  # the blocks of the NaN and, in x[1], of the infinity
    assert int(found[0][0].isnan().sum()) == spoiled * SCALE_BLOCK
