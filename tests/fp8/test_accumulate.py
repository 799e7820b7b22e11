"""One-byte gradients: rounding of sums, padding, NaN, and the kernels without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coatlm.fp8 import accumulate, scaling, stochastic
from coatlm.fp8.accumulate import BlockFp8, SumNoise, _launch_write, square_sums, write_ref
from coatlm.fp8.formats import E4M3, E5M2, Fp8Format
from tests.fp8.gluon_on_cpu import simulated
from tests.fp8.sm90 import (
    POINTER,
    access_bytes,
    compile_sm90,
    flushes_subnormals,
    launches_compiled,
)

both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
EXACT = torch.tensor([448.0, -416, 1, 0, 2.0**-9, 13] + [0.0] * 122)  # numbers of E4M3


def zeros(n: int, fmt: Fp8Format = E4M3, seed: int = 0) -> BlockFp8:
    noise = SumNoise(2, seed=seed, rank=0, device=torch.device("cpu"))
    noise.begin_()
    return BlockFp8.zeros(n, noise.noise[1], fmt)


def gradients(n: int) -> Tensor:
    """Values of many sizes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, generator=generator) * torch.randn(n, generator=generator).exp()


def test_a_first_gradient_is_rounded_to_nearest_with_a_scale_per_128_elements() -> None:
    x = torch.cat([EXACT, 3 * EXACT])
    sums = zeros(256)
    sums.copy_(x)
    assert sums.scale.tolist() == [1.0, 3.0] and torch.equal(sums.float(), x)
    sums.copy_(torch.cat([EXACT + torch.tensor([0.0] * 5 + [0.4] + [0.0] * 122), x[128:]]))
    assert torch.equal(sums.float(), x)  # 13.4 is nearest to 13, 14 is 0.6 away


def test_e5m2_fills_its_range() -> None:
    sums = zeros(128, E5M2)
    sums.copy_(torch.full((128,), 57344.0 * 3))
    assert sums.scale.tolist() == [3.0] and sums.codes.float().tolist() == [57344.0] * 128


def test_sums_are_exact_where_the_format_is() -> None:
    sums = zeros(128)
    sums.copy_(EXACT / 2)
    sums.add_((EXACT / 2).bfloat16())
    assert torch.equal(sums.float(), EXACT)


def test_addends_below_half_a_code_are_lost_to_nearest_and_not_on_average() -> None:
    """256 additions of 1/16 of a code to 2; a sum has a standard deviation below sqrt(256) / 4."""
    sums = zeros(128 * 64)
    start = torch.full((len(sums),), 2.0)
    start[::128] = 448.0
    sums.copy_(start)
    addend = torch.full((len(sums),), 0.25 / 16)  # codes from 2 to 4 are 1/4 apart, from 4 on 1/2
    addend[::128] = 0.0
    for _ in range(256):
        sums.add_(addend)
    others = sums.float().view(-1, 128)[:, 1:]
    # the variance of an addition is at most 1/16 (1/2)^2: 0.25 per element of 64 * 127
    assert float(others.mean()) == pytest.approx(6.0, abs=5 * (256 / 64) ** 0.5 / (64 * 127) ** 0.5)
    assert float(others.std()) > 0.2


def test_adding_zero_changes_nothing_however_often() -> None:
    sums = zeros(128 * 16)
    sums.copy_(gradients(len(sums)))
    codes = sums.codes.clone().view(torch.uint8)
    for _ in range(20):
        sums.add_(torch.zeros(len(sums)))
    assert torch.equal(sums.codes.view(torch.uint8), codes)


def test_every_addition_draws_other_bits_and_a_step_repeats_them() -> None:
    def added(count: int) -> Tensor:
        """Codes after 13.5 was added to 0, the addition with this number in its step."""
        sums = zeros(128 * 8)
        for _ in range(count):
            sums.add_(torch.zeros(len(sums)))
        sums.zero_()
        x = torch.full((len(sums),), 13.5)
        x[::128] = 448.0
        sums.add_(x)
        return sums.codes.float()

    first, second = added(0), added(1)
    assert set(first.tolist()) == {13.0, 14.0, 448.0}
    assert torch.equal(first, added(0)) and not torch.equal(first, second)


def test_noise_is_a_function_of_seed_rank_chunk_and_step() -> None:
    def of(seed: int, rank: int, step: int) -> list[list[int]]:
        noise = SumNoise(2, seed=seed, rank=rank, device=torch.device("cpu"))
        noise.step = step
        noise.noise[:, 3] = 9
        noise.begin_()
        assert noise.step == step + 1
        return noise.noise.tolist()

    first, second = of(1, 0, 5)
    assert first[1:] == [0, 5, 0] and second[1:] == [1, 5, 0] and first[0] == second[0]
    assert len({of(seed, rank, 5)[0][0] for seed in (1, 2) for rank in (0, 1)}) == 4


def test_padding_of_the_last_block_is_zero() -> None:
    sums = zeros(256)
    sums.copy_(torch.full((256,), 2.0))
    sums.copy_(torch.ones(2, 70))
    assert sums.float().tolist() == [1.0] * 140 + [0.0] * 116
    sums.add_(torch.ones(140))
    assert sums.float().tolist() == [2.0] * 140 + [0.0] * 116


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_block_that_is_not_finite_is_nan_and_stays_so(bad: float) -> None:
    sums = zeros(256)
    x = torch.ones(256)
    x[5] = bad
    sums.copy_(x)
    sums.add_(torch.ones(256))
    assert sums.float()[:128].isnan().all() and (sums.float()[128:] == 2).all()
    assert not sums.square_sum().isfinite() and float(sums[128:256].square_sum()) == 512.0


def test_bytes_views_and_zero() -> None:
    sums = zeros(1280)
    assert sums.nbytes == 1280 * (1 + 4 / 128) and sums.dtype == torch.float8_e4m3fn
    part = sums[256:512]
    part.copy_(torch.ones(256))
    assert float(sums.float().sum()) == 256 and part.shape == (256,)
    assert torch.equal(sums.to(torch.bfloat16), sums.float().bfloat16())
    assert square_sums(sums).tolist() == [0, 0, 128, 128] + [0] * 6
    sums.zero_()
    assert not sums.float().any()


@pytest.mark.parametrize(
    "values", [torch.ones(128), torch.ones(257), torch.ones(256).double(), torch.ones(256).half()]
)
def test_values_that_do_not_fit_are_refused(values: Tensor) -> None:
    with pytest.raises(ValueError, match=r"values: .* fill 2 blocks of 128"):
        zeros(256).add_(values)
    with pytest.raises(ValueError, match="n=130: must be a multiple of 128"):
        zeros(130)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_simulated_has_the_bits_of_the_reference(
    fmt: Fp8Format, dtype: torch.dtype
) -> None:
    n = 70 * 128  # two programs, the second one partly empty
    made, expected = zeros(n, fmt), zeros(n, fmt)
    x = gradients(n - 50)
    x[300], x[1000], x[2000:2300] = torch.nan, torch.inf, 0.0
    with simulated(accumulate, scaling, stochastic):
        for add in (False, True, True):
            _launch_write(x.to(dtype), made, add=add)
            write_ref(x.to(dtype), expected, add=add)
            pair = made.codes.float(), expected.codes.float()
            torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(made.scale.view(torch.int32), expected.scale.view(torch.int32))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_compile_for_sm90(fmt: Fp8Format, dtype: torch.dtype) -> None:
    sums, x = zeros(4096, fmt), torch.zeros(4096, dtype=dtype)
    with launches_compiled(accumulate) as made:
        _launch_write(x, sums, add=False)
        _launch_write(x, sums, add=True)
    for compiled in made:
        # 4 blocks of 128 per thread and pass: both halves of x, 8 elements each
        assert access_bytes(compiled).count(16) == 4 * 2 * 8 * dtype.itemsize // 16
        assert ".local" not in compiled.asm["ptx"] and "fma.rn.f32" not in compiled.asm["ptx"]
        assert not flushes_subnormals(compiled)
    signature = {"code_ptr": POINTER[fmt.dtype], "scale_ptr": "*fp32", "sum_ptr": "*fp32"}
    compile_sm90(accumulate._squares_kernel, signature | {"blocks": "i32"}, {"ROWS": 32})
