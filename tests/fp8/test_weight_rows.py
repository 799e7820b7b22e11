"""Rows of weights cast before they travel: a layer makes the same codes of what arrives."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coatlm.fp8 import weight_rows
from coatlm.fp8.formats import E4M3
from coatlm.fp8.norm_quantize import quantize_rows
from coatlm.fp8.scaling import top_exponent
from coatlm.fp8.transpose import quantize_rows_transposed, quantize_transposed, transpose_rows
from coatlm.fp8.weight_rows import Rows
from tests.fp8.bounds import bytes_of
from tests.fp8.sm90 import access_bytes, compile_sm90, run_interpreted

CPU = torch.device("cpu")


def arrived(w: Tensor, shards: tuple[int, ...] = ()) -> Tensor:
    """w[M, K] as whoever owns nothing of it sees it; its owners have it up to each of `shards`."""
    m, k = w.shape
    rows, flat = Rows.of([(0, m, k)], CPU), w.reshape(-1)
    edges = [0, *shards, m * k]
    spans = list(pairwise(edges))
    parts = [weight_rows.row_amax(flat, rows, *span) for span in spans]
    amax = torch.stack(parts).amax(0)
    codes = torch.full((m * k,), 0xAA, dtype=torch.uint8)
    for span in spans:
        weight_rows.encode_rows(flat, codes, amax, rows, *span)
    seen = torch.full_like(flat, torch.nan)
    weight_rows.decode_rows(codes, seen, amax, rows, 0, m * k)
    return seen.view(m, k)


def assert_same_codes(seen: Tensor, w: Tensor) -> None:
    """Assert that the codes and scales of forward and of backward are equal."""
    expected, found = quantize_rows(w), quantize_rows(seen)
    assert torch.equal(found.scale, expected.scale)
    assert torch.equal(bytes_of(found.codes), bytes_of(expected.codes))
    backward = quantize_rows_transposed(w, expected.scale)
    again = quantize_rows_transposed(seen, found.scale)
    assert torch.equal(again.scale, backward.scale)
    assert torch.equal(bytes_of(again.codes), bytes_of(backward.codes))


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([2.0**-130, 2.0**-120, 2.0**-100, 1e-6, 0.02, 1.0, 2.0**80]),
    spread=st.floats(0.0, 12.0),
    apart=st.integers(0, 20),
    cut=st.integers(0, 32),
)
def test_a_layer_makes_the_same_codes_of_weights_that_arrived(
    seed: int, size: float, spread: float, apart: int, cut: int
) -> None:
    """Rows may be far smaller than the tensor, and half of a row may be this rank's own."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(16, 32, generator=generator)
    w *= torch.exp2(spread * torch.randn(16, 32, generator=generator))
    w *= 2.0 ** -torch.randint(0, apart + 1, (16, 1), generator=generator)
    w = (w * size).clamp(-(2.0**120), 2.0**120).bfloat16()
    seen = arrived(w, (16 * cut,))
    assert_same_codes(seen, w)
    mixed = torch.cat([w.reshape(-1)[: 16 * cut], seen.reshape(-1)[16 * cut :]])
    assert_same_codes(mixed.view(16, 32), w)


@pytest.mark.parametrize("exponent", [-133, -130, -126, -120, -90, -9, 0, 7, 100, 118])
def test_every_number_of_bf16_beside_every_largest_one_keeps_its_code(exponent: int) -> None:
    """All pairs (amax, w): 128 mantissas of amax in a binade, w down to what becomes zero."""
    mantissas = 1 + torch.arange(128) / 128
    largest = (mantissas * 2.0**exponent).bfloat16()  # [128]
    largest = largest[largest > 0]
    below = (mantissas[None] * 2.0 ** torch.arange(0, -20, -1)[:, None]).flatten()
    w = (below * 2.0**exponent).expand(len(largest), -1)
    w = torch.where(w > largest[:, None].float(), 0.0, w).bfloat16()
    w = torch.cat([largest[:, None], w, -w], 1)
    w = torch.nn.functional.pad(w, (0, -w.shape[1] % 16))
    seen = arrived(w)
    assert_same_codes(seen, w)
    # a part that is one's own: the largest, or all but the largest
    assert_same_codes(torch.cat([w[:, :1], seen[:, 1:]], 1), w)
    assert_same_codes(torch.cat([seen[:, :1], w[:, 1:]], 1), w)


def test_a_largest_weight_whose_code_is_224_keeps_its_scale() -> None:
    """226 / 448 gives the scale 1, and 224 / 448 gives 1/2: rounded alone it would be another."""
    w = torch.zeros(1, 16).bfloat16()
    w[0, :3] = torch.tensor([226.0, -224.0, 2.0**-10])
    seen = arrived(w)
    assert seen[0, :3].tolist() == [225.0, -225.0, 0.0]
    assert quantize_rows(seen).scale.item() == quantize_rows(w).scale.item() == 1.0


def test_backward_rounds_what_forward_rounded() -> None:
    """1.47 of the tensor's smallest number is 1; its row has 1.5 for it, and that becomes 2."""
    w = torch.zeros(2, 16).bfloat16()
    w[0, 0], w[1, 0] = 448.0, 448.0 * 2.0**-12
    w[1, 2] = 1.46875 * 2.0**-9  # 11.75 * 2^-12, and 12 * 2^-12 in the row's codes
    made = quantize_rows(w)
    codes = quantize_rows_transposed(w, made.scale)
    assert codes.dequantize()[2, 1].item() == 2 * E4M3.smallest_subnormal
    assert quantize_transposed(w, codes.scale).dequantize()[2, 1] == E4M3.smallest_subnormal
    assert torch.equal(bytes_of(codes.codes), bytes_of(transpose_rows(made).codes))


def test_a_row_with_a_nan_arrives_as_nans_and_no_other_row_does() -> None:
    w = torch.randn(3, 16).bfloat16()
    w[1, 4] = torch.nan
    seen = arrived(w)
    assert seen.isnan().any(1).tolist() == [False, True, False]
    assert seen[1].isnan().all()


def test_rows_are_numbered_through_matrices_and_gaps_stay() -> None:
    rows = Rows.of([(0, 3, 48), (256, 2, 16), (384, 1, 128)], CPU)
    numbers = weight_rows.row_numbers_ref(rows, 0, 640)
    assert rows.count == 6 and numbers.unique().tolist() == [-1, 0, 1, 2, 3, 4, 5]
    for begin in range(0, 641, 16):
        for end in range(begin, 641, 16):
            inside = numbers[begin:end]
            first, stop = rows.inside(begin, end)
            found = inside[inside >= 0]
            assert len(found) == 0 or (first <= found.min() and found.max() < stop)
            assert stop - first <= len(found.unique()) + 1
    weights, codes = torch.ones(640).bfloat16(), torch.full((640,), 7, dtype=torch.uint8)
    amax = weight_rows.row_amax(weights, rows, 0, 640)
    weight_rows.encode_rows(weights, codes, amax, rows, 0, 640)
    assert (codes[numbers < 0] == 7).all() and (codes[numbers >= 0] != 7).all()


def test_a_row_that_is_no_multiple_of_16_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a weight \[3, 40\] at element 128: .* multiples of 16"):
        Rows.of([(0, 1, 16), (128, 3, 40)], CPU)


@pytest.mark.parametrize(("begin", "end"), [(0, 40960), (640, 20480), (8192, 8192), (16, 10256)])
def interpreted_kernels_take_what_is_in_their_range(begin: int, end: int) -> None:
    """fp32 instead of BF16, and numbers that codes hold: the interpreter rounds wrongly."""
    rows = Rows.of([(0, 30, 48), (1536, 3, 4352), (16384, 7, 16), (17408, 5, 144)], CPU)
    torch.manual_seed(0)
    w = E4M3.encode(torch.randn(40960) * 100).float()
    w *= 2.0 ** -(weight_rows.row_numbers_ref(rows, 0, 40960) % 7)
    amax = torch.zeros(rows.count, dtype=torch.int32)
    weight_rows._launch(weight_rows._row_amax_kernel, (w, amax), rows, begin, end)
    assert torch.equal(amax, weight_rows.row_amax_ref(w, rows, begin, end))
    amax = weight_rows.row_amax_ref(w, rows, 0, 40960)
    codes, expected = (torch.full((40960,), 7, dtype=torch.uint8) for _ in range(2))
    tensors, top = (w, codes.view(E4M3.dtype), amax), top_exponent(E4M3)
    weight_rows._launch(weight_rows._encode_rows_kernel, tensors, rows, begin, end, TOP=top)
    weight_rows.encode_rows_ref(w, expected, amax, rows, begin, end)
    assert torch.equal(codes, expected)
    weight_rows.encode_rows_ref(w, codes, amax, rows, 0, 40960)
    seen, expected = (torch.full((40960,), 0.3) for _ in range(2))
    tensors = codes.view(E4M3.dtype), seen, amax
    weight_rows._launch(weight_rows._decode_rows_kernel, tensors, rows, begin, end, TOP=top)
    weight_rows.decode_rows_ref(codes, expected, amax, rows, begin, end)
    assert torch.equal(seen, expected)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize("width", [64, 1376, 4096])
@pytest.mark.parametrize("name", ["row_amax", "encode_rows", "decode_rows"])
def test_kernels_compile_for_sm90_with_wide_accesses_and_keep_subnormals(
    name: str, width: int
) -> None:
    rows = Rows.of([(128 * i * width, 128, width) for i in range(5)], CPU)
    tile = weight_rows.row_tile(rows)
    warps = tile.pop("num_warps")
    pointers = {"weight_ptr": "*bf16", "amax_ptr": "*i32", "table_ptr": "*i64"}
    if name != "row_amax":
        pointers["code_ptr"] = "*fp8e4nv"
        tile["TOP"] = top_exponent(E4M3)
    compiled = compile_sm90(
        getattr(weight_rows, f"_{name}_kernel"),
        pointers | {"first_row": "i32", "begin": "i32", "end": "i32"},
        tile,
        aligned=("begin", "end"),
        num_warps=warps,
    )
    assert access_bytes(compiled)[0] >= (16 if width >= 512 else 4)
    assert ".ftz" not in compiled.asm["ptx"]
