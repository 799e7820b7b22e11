"""Chunked, vocabulary-parallel cross entropy against torch's on whole logits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from coatlm.model import loss_kernels
from coatlm.model.loss import (
    cross_entropy_ref,
    default_chunk,
    largest_logits,
    linear_cross_entropy,
)
from tests.distributed import run_ranks
from tests.fp8.sm90 import POINTER, access_bytes, compile_sm90, run_interpreted

S, B, H, V = 6, 3, 32, 80  # tokens, samples, hidden, vocabulary
FP32 = 1e-6  # relative error of a vector: sums of at most V terms, each within 2^-24, random signs


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """hidden, weight, labels (one of them -100), dloss: the same on every call and rank."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, B, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).div(H**0.5).to(dtype).requires_grad_()
    labels = torch.randint(V, (S, B), generator=generator)
    labels[2, 1] = -100
    return hidden, weight, labels, torch.randn(S, B, generator=generator)


def reference(
    dtype: torch.dtype = torch.float32, z_loss: float = 0.0, cap: float | None = None
) -> tuple[torch.Tensor, ...]:
    """loss, dhidden, dweight of the definition."""
    hidden, weight, labels, dloss = tensors(dtype)
    loss = cross_entropy_ref(hidden, weight, labels, z_loss, cap)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight), dloss)


def test_the_definition_is_torch_cross_entropy_per_token() -> None:
    hidden, weight, labels, _ = tensors()
    logits = (hidden @ weight.t()).permute(0, 2, 1)
    expected = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(cross_entropy_ref(hidden, weight, labels), expected)


@pytest.mark.parametrize("chunk", [None, 1, 7, V, V + 1])
def test_fp32_loss_and_gradients_equal_the_definition(chunk: int | None) -> None:
    hidden, weight, labels, dloss = tensors()
    loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
    actual = (loss, *torch.autograd.grad(loss, (hidden, weight), dloss))
    assert max(map(relative, actual, reference())) < FP32
    assert loss.dtype == torch.float32


def test_soft_cap_of_the_definition_is_the_formula_of_gemma() -> None:
    hidden, weight, labels, _ = tensors()
    logits = 2.0 * torch.tanh((hidden @ weight.t()).permute(0, 2, 1) / 2.0)
    expected = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(cross_entropy_ref(hidden, weight, labels, cap=2.0), expected)


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.3}, {"save_logits": True}])
def test_capped_loss_and_its_gradients_equal_the_definition(options: dict[str, Any]) -> None:
    hidden, weight, labels, dloss = tensors()
    loss = linear_cross_entropy(hidden, weight, labels, chunk=7, cap=2.0, **options)
    actual = (loss, *torch.autograd.grad(loss, (hidden, weight), dloss))
    expected = reference(z_loss=options.get("z_loss", 0.0), cap=2.0)
    assert max(map(relative, actual, expected)) < FP32


@pytest.mark.parametrize("chunk", [None, 7])
def test_the_z_loss_and_its_gradients_equal_the_definition(chunk: int | None) -> None:
    hidden, weight, labels, dloss = tensors()
    loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk, z_loss=0.3)
    actual = (loss, *torch.autograd.grad(loss, (hidden, weight), dloss))
    assert max(map(relative, actual, reference(z_loss=0.3))) < FP32
    lse = (hidden @ weight.t()).logsumexp(-1)
    extra = (loss - reference()[0]).masked_fill(labels == -100, 0.0)
    torch.testing.assert_close(extra, (0.3 * lse**2).masked_fill(labels == -100, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_saved_logits_give_the_bits_of_recomputed_ones(dtype: torch.dtype, z_loss: float) -> None:
    results = []
    for save in (False, True):
        hidden, weight, labels, dloss = tensors(dtype)
        loss = linear_cross_entropy(
            hidden, weight, labels, chunk=24, save_logits=save, z_loss=z_loss
        )
        gradients = torch.autograd.grad(loss, (hidden, weight), dloss, retain_graph=True)
        again = torch.autograd.grad(loss, (hidden, weight), dloss)  # dlogits overwrote the logits
        results.append((loss, *gradients, *again))
    for recomputed, saved in zip(*results, strict=True):
        assert torch.equal(recomputed, saved)


class Gemms(TorchDispatchMode):
    """Counts GEMMs."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("save", "gemms"), [(False, 4), (True, 3)])
def test_saved_logits_spare_a_gemm(save: bool, gemms: int) -> None:
    hidden, weight, labels, dloss = tensors()
    with Gemms() as counted:
        linear_cross_entropy(hidden, weight, labels, save_logits=save).backward(dloss)
    assert counted.count == gemms


class Allocations(TorchDispatchMode):
    """Lists the elements of every new empty tensor."""

    def __init__(self, elements: list[int]) -> None:
        super().__init__()
        self.elements = elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.new_empty:
            self.elements.append(result.numel())
        return result


def test_without_autograd_no_logits_are_saved() -> None:
    hidden, weight, labels, _ = tensors()
    kept = []
    with torch.no_grad(), Allocations(kept):
        linear_cross_entropy(hidden, weight, labels, chunk=16, save_logits=True)
    assert kept.count(S * B * 16) == 1


def test_bf16_gradients_do_not_depend_on_the_chunks() -> None:
    results = []
    for chunk in (V, 16):
        hidden, weight, labels, dloss = tensors(torch.bfloat16)
        loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
        results.append(torch.autograd.grad(loss, (hidden, weight), dloss))
    # dhidden is summed over the chunks in fp32 and rounded once, dweight is one GEMM per row;
    # lse differs in its last fp32 bits, which can flip a BF16 rounding: 2^-8 of single elements
    for whole, chunked in zip(*results, strict=True):
        assert whole.dtype == torch.bfloat16
        assert relative(chunked, whole) < 2**-10


@pytest.mark.parametrize("chunk", [None, 1, 7, V])
def test_the_largest_logit_is_that_of_all_chunks_and_of_equal_ones_the_first(
    chunk: int | None,
) -> None:
    hidden, weight, *_ = tensors()
    expected = (hidden @ weight.t()).argmax(-1)
    assert torch.equal(largest_logits(hidden, weight, chunk=chunk), expected)
    at = [3, 9, 50]
    equal = torch.zeros_like(weight).index_fill_(0, torch.tensor(at), 1.0)
    found = largest_logits(hidden.detach().abs(), equal, chunk=chunk)
    assert found.shape == (S, B) and (found == 3).all()


def test_label_minus_100_has_zero_loss_and_no_gradient() -> None:
    hidden, weight, labels, _ = tensors()
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.sum().backward()
    assert loss[2, 1] == 0
    assert not hidden.grad[2, 1].any()


@pytest.mark.parametrize("label", [V, -1])
def test_a_label_outside_the_vocabulary_gives_nan(label: int) -> None:
    hidden, weight, labels, _ = tensors()
    labels[0, 0] = label
    loss = linear_cross_entropy(hidden, weight, labels)
    assert loss.isnan().nonzero().tolist() == [[0, 0]]


class LargestResult(TorchDispatchMode):
    """Records the most elements that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    hidden, weight, labels, _ = tensors()
    tokens, chunk = S * B * 40, V // 2
    hidden, labels = (x.detach().repeat_interleave(40, dim=0) for x in (hidden, labels))
    with LargestResult() as largest:
        linear_cross_entropy(hidden.requires_grad_(), weight, labels, chunk=chunk).sum().backward()
    assert largest.elements == tokens * chunk > max(hidden.numel(), weight.numel())


def test_saves_its_inputs_and_eight_bytes_per_token() -> None:
    hidden, weight, labels, _ = tensors()
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t
    ):
        linear_cross_entropy(hidden, weight, labels)
    inputs = {x.data_ptr() for x in (hidden, weight, labels)}
    others = [t for at, t in saved.items() if at not in inputs]  # the label's logit, and lse
    assert [(t.numel(), t.dtype) for t in others] == 2 * [(S * B, torch.float32)]
    assert all(t.untyped_storage().nbytes() == 4 * S * B for t in others)


@pytest.mark.parametrize(
    ("tokens", "dtype", "rows", "mib"),
    [
        (512, torch.bfloat16, 262144, 256),
        (8192, torch.bfloat16, 16384, 256),
        (16384, torch.bfloat16, 16384, 512),
        (16384, torch.float32, 16384, 1024),
        (65536, torch.bfloat16, 8192, 1024),
        (2**30, torch.bfloat16, 128, 2**18),  # a GEMM's tile, whatever it takes
    ],
)
def test_a_chunk_has_16384_rows_or_256_mib_if_that_is_more_and_at_most_1_gib(
    tokens: int, dtype: torch.dtype, rows: int, mib: int
) -> None:
    assert default_chunk(tokens, dtype) == rows
    assert tokens * rows * dtype.itemsize == mib * 2**20


@pytest.mark.parametrize(
    ("dtype", "main_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
)
def test_weight_gradient_is_added_to_main_grad(dtype: torch.dtype, main_dtype: torch.dtype) -> None:
    hidden, weight, labels, dloss = tensors(dtype)
    weight.main_grad = torch.zeros(V, H, dtype=main_dtype)
    for _ in range(2):
        linear_cross_entropy(hidden, weight, labels, chunk=16).backward(dloss)
    expected = 2 * reference(dtype)[2].float()
    # logits, dlogits and main_grad are rounded to the formats in use, whichever is coarser
    eps = max(torch.finfo(dtype).eps, torch.finfo(main_dtype).eps)
    assert relative(weight.main_grad, expected) < 4 * eps
    assert weight.grad is None


def test_main_grad_leaves_the_hooks_and_other_uses_of_a_tied_weight_alone() -> None:
    """The hook is that of a data-parallel wrapper: on the accumulation node, once a backward."""
    hidden, weight, labels, dloss = tensors()
    weight.main_grad = torch.zeros(V, H)
    weight.grad_added_to_main_grad = False
    calls = []

    def hook(*_: Any) -> None:
        calls.append(weight.grad is not None)
        if weight.grad is not None and not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(hook)
    linear_cross_entropy(hidden, weight, labels).backward(dloss)
    assert relative(weight.main_grad, reference()[2]) < FP32

    embedded = F.embedding(labels.clamp(min=0), weight)
    (linear_cross_entropy(embedded, weight, labels) * dloss).sum().backward()
    plain = tensors()[1]
    (
        cross_entropy_ref(F.embedding(labels.clamp(min=0), plain), plain, labels) * dloss
    ).sum().backward()
    assert relative(weight.main_grad, reference()[2] + plain.grad) < FP32
    assert calls == [False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels_SB": torch.zeros(S, dtype=torch.int64)}, "labels have shape"),
        ({"weight_VH": torch.zeros(V, H + 1)}, "weight is"),
        ({"weight_VH": torch.zeros(V, H, dtype=torch.bfloat16)}, "weight is torch.bfloat16"),
        ({"chunk": 0}, "chunk is 0"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    hidden, weight, labels, _ = tensors()
    arguments = {"hidden_SBH": hidden, "weight_VH": weight, "labels_SB": labels} | change
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)


def vocabulary_parallel(rank: int, size: int, cases: list[dict[str, Any]]) -> list[list[float]]:
    """For each case of options: relative errors of loss, dhidden (summed over ranks), dweight."""
    dist.init_process_group("gloo")
    errors = []
    for options in cases:
        hidden, weight, labels, dloss = tensors()
        expected = reference(z_loss=options.get("z_loss", 0.0))
        rows = slice(rank * V // size, (rank + 1) * V // size)
        shard = weight.detach()[rows].clone().requires_grad_()
        loss = linear_cross_entropy(hidden, shard, labels, group=dist.group.WORLD, **options)
        dhidden, dweight = torch.autograd.grad(loss, (hidden, shard), dloss)
        dist.all_reduce(dhidden)
        actual = (loss.detach(), dhidden, dweight)
        expected = (*expected[:2], expected[2][rows])
        errors.append([relative(a, e) for a, e in zip(actual, expected, strict=True)])
    return errors


def test_two_ranks_equal_one() -> None:
    cases = [{}, {"chunk": 7}, {"chunk": V // 2}, {"chunk": 7, "save_logits": True, "z_loss": 0.3}]
    for errors in run_ranks(2, f"{__name__}:vocabulary_parallel", cases):
        assert max(map(max, errors)) < FP32


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """Labels left of, in and right of columns 100 ... 5099, at both ends, and one ignored."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, 5000)
    logits[1] = -1e4
    logits[2, 7] = float("-inf")
    return logits, torch.tensor([0, -100, 5099, 5100, 100, 3000])


@pytest.mark.parametrize("cap", [None, 2.0])
def interpreted_row_stats_equal_the_reference(cap: float | None) -> None:
    logits, labels = logits_and_labels()
    actual = loss_kernels.row_stats(logits, labels, 100, cap)
    expected = loss_kernels.row_stats_ref(logits, labels, 100, cap)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cap", [None, 2.0])
def interpreted_logits_gradient_is_written_in_place_and_equals_the_reference(
    cap: float | None,
) -> None:
    for slope in (None, torch.rand(6)):
        logits, labels = logits_and_labels()
        top, total, _ = loss_kernels.row_stats_ref(logits, labels, 100, cap)
        arguments = (labels, top + total.log(), torch.randn(6), 100, slope, cap)
        expected = loss_kernels.logits_grad_ref(logits, *arguments)
        actual = loss_kernels.logits_grad_(logits, *arguments)
        assert actual.data_ptr() == logits.data_ptr()
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_compile_for_sm90_with_16_byte_accesses(
    dtype: torch.dtype, cap: float | None
) -> None:
    common = {"logits_ptr": POINTER[dtype], "label_ptr": "*i64", "C": "i32", "first": "i32"}
    constexprs = {"BLOCK": loss_kernels.BLOCK, "CAP": cap}
    options = {"aligned": ("C", "first"), "num_warps": loss_kernels.WARPS}
    stats = compile_sm90(
        loss_kernels._row_stats_kernel,
        common | {"stats_ptr": "*fp32", "T": "i32"},
        constexprs,
        **options,
    )
    grad = compile_sm90(
        loss_kernels._logits_grad_kernel,
        common | {"lse_ptr": "*fp32", "dloss_ptr": "*fp32", "slope_ptr": "*fp32"},
        constexprs,
        **options,
    )
    for compiled in (stats, grad):  # narrow are only the label and the other values of a row
        assert access_bytes(compiled).count(16) >= 2
        assert len([size for size in access_bytes(compiled) if size < 16]) <= 6
