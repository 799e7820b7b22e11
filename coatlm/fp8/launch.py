"""Launches of the kernels of emit.py and amax.py, and the GPU path of operand.emit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from coatlm.config.operands import TENSOR, Granularity, Operand
from coatlm.fp8 import amax as amax_passes
from coatlm.fp8 import emit, loaders
from coatlm.fp8.formats import FORMATS, Fp8Format
from coatlm.fp8.gemm import ROW_BLOCK, SQUARE_BLOCK
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.saved_blocks import UNSCALED
from coatlm.fp8.scaling import current_scale, scales_of, tensor_scale
from coatlm.kernels.norm import processors

BLOCK_WARPS, BLOCK_RUN = 16, 8  # of `emit_blocks_kernel`, whose tile is 128 x 128 elements
PROGRAMS_PER_SM = 32  # of `amax_kernel`


class TileShape(NamedTuple):
    """The tile that a program of emit.py or amax.py processes, and how."""

    rows: int
    columns: int  # a power of two
    run: int  # columns per thread
    down: int  # consecutive programs go down this many tiles, then to the next column of tiles
    warps: int
    step: int = 0  # columns from one tile to the next, where they are not `columns`
    width: int = 0  # columns of a tile that are used, where they are not `columns`
    inner: int = 16  # columns of a block, at most

    def options(self) -> dict[str, int]:
        """The constexprs of a kernel and its launch options."""
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "STEP": self.step or self.columns,
            "WIDTH": self.width or self.columns,
            "INNER": self.inner,
            "RUN": self.run,
            "WARPS": self.warps,
            "num_warps": self.warps,
        }


WIDE_TILE = TileShape(128, 64, 8, 1, 8)  # of BF16 and fp32
CODES_TILE = TileShape(128, 128, 16, 1, 8)  # of FP8
LINE_TILE = TileShape(32, 128, 8, 1, 8)  # to find amaxes of rows and columns


class Matrix(NamedTuple):
    """The outputs of a kernel. It writes block-wise scales and reads all others."""

    codes: Tensor | None  # [M, .]
    codes_t: Tensor | None  # [., M']
    scale: Tensor | None
    scale_t: Tensor | None = None

    def pointers(self) -> tuple[Tensor | None, ...]:
        """The tensors with the dtypes that the kernel takes."""
        codes = None if self.codes is None else self.codes.view(torch.uint8)
        codes_t = None if self.codes_t is None else self.codes_t.view(torch.int32)
        return codes, codes_t, self.scale, self.scale_t


class Placed(NamedTuple):
    """Where a value of a loader is stored: one element of VALUES in emit.py."""

    matrix: int  # index of the matrix
    fmt: Fp8Format
    parts: int = 1  # the matrix has `parts` times K columns
    part: int = 0  # which of these parts the value belongs to
    further: int = 0  # columns from the loader's tile to where it is stored

    def constants(self) -> tuple[Any, ...]:
        """The constants that the kernel has for this value, an element of VALUES in emit.py."""
        return self.matrix, self.parts, self.part, self.further, self.fmt.triton_dtype


def launch_emit(
    load: Any,
    source: tuple[Any, ...],
    matrices: tuple[Matrix, ...],
    values: tuple[Placed, ...],
    shape: tuple[int, int, int],
    tile: TileShape,
    *,
    options: Any,
    prepare: Any = None,
    amax: Tensor | None = None,
    noise: Tensor | None = None,
    sums: Tensor | None = None,
    scales: str = "factor",
    power_of_two: bool = True,
) -> None:
    """Launch `emit_kernel`, for scales that are known; `shape`: M, M' and K.

    `noise`: for stochastic rounding (stochastic.py) of the first matrix, of one or two values.
    `sums`: fp32 [tiles of rows, K], to which the first value's sums over the rows of each tile are
    written before it is rounded, with "factor" over its scale.
    """
    m, padded, k = shape
    constants = tile.options()
    assert sums is None or constants["STEP"] == constants["WIDTH"], tile  # all columns have a tile
    rounded = 0 if noise is None else sum(value.matrix == 0 for value in values)
    if noise is not None:
        pairs = constants["STEP"] % 2 == 0 and min(tile.run, tile.inner) > 1  # of columns
        assert scales == "factor", scales
        assert rounded == 2 or (rounded == 1 and pairs), (values, tile)
        assert all(value.matrix == 0 for value in values[:rounded]), values
    grid = triton.cdiv(padded, tile.rows) * triton.cdiv(k, constants["STEP"])
    emit.emit_kernel[(grid,)](
        source,
        tuple(matrix.pointers() for matrix in matrices),
        None if amax is None else amax.view(torch.int32),
        noise,
        sums,
        m,
        padded,
        k,
        PREPARE=prepare,
        LOAD=load,
        OPTIONS=options,
        VALUES=tuple(value.constants() for value in values),
        SCALES=scales,
        POWER=power_of_two,
        ROUNDED=rounded,
        DOWN=tile.down,
        **constants,
    )


def launch_amax(
    load: Any, source: tuple[Any, ...], m: int, k: int, tile: TileShape, *, options: Any
) -> Tensor:
    """Amaxes fp32 [programs] that together cover the values of a loader."""
    device, constants = source[0].device, tile.options()
    tiles = triton.cdiv(m, tile.rows) * triton.cdiv(k, constants["STEP"])
    programs = min(tiles, PROGRAMS_PER_SM * processors(device))
    amax = torch.empty(programs, dtype=torch.float32, device=device)
    amax_passes.amax_kernel[(programs,)](
        source, amax, m, k, LOAD=load, OPTIONS=options, **constants
    )
    return amax


def matrix_source(
    x: Tensor | QTensor, row: Tensor | None = None, weight: Tensor | None = None
) -> tuple[tuple[Any, ...], int, TileShape]:
    """For x: the source of `load_matrix`, the elements per scale, and a tile shape."""
    elements, scales, size = x, None, UNSCALED
    if isinstance(x, QTensor):
        elements, granularity = x.codes, x.granularity
        if granularity.columns is None:  # one scale, or one per row
            row = x.scale.reshape(-1).expand(x.shape[0]).contiguous()
        elif granularity.rows == 1:
            size, scales = granularity.columns, x.scale.contiguous()
            scales = scales if scales.dtype == torch.float32 else scales.view(torch.uint8)
        else:
            raise ValueError(f"granularity={granularity}: a source has scales within rows")
    assert isinstance(elements, Tensor)
    tile = CODES_TILE if elements.element_size() == 1 else WIDE_TILE
    return (elements.contiguous(), scales, row, weight), size, tile._replace(inner=min(size, 16))


def emit_operands(
    x: Tensor | QTensor,
    direct: Operand | None,
    transposed: Operand | None,
    scale: Tensor | None,
    amax: Tensor | None,
    padded: int,
) -> tuple[QTensor | None, QTensor | None]:
    """The GPU path of operand.emit: x is read once where scales are known or block-wise.

    `padded`: M'. Two operands that cannot share a pass (`_together`) take one pass each.
    """
    if direct is None and transposed is None:
        return None, None
    if x.shape[1] % 16:
        raise ValueError(f"rows of {x.shape[1]} elements: on a GPU, a multiple of 16 is needed")
    if direct is not None and transposed is not None and not _together(direct, transposed):
        one, _ = emit_operands(x, direct, None, scale, amax, padded)
        _, other = emit_operands(x, None, transposed, scale, None, padded)
        return one, other
    if _blocks(direct or transposed):
        return _emit_blocks(x, direct, transposed, amax, padded)
    return _emit_scaled(x, direct, transposed, scale, amax, padded)


def _blocks(operand: Operand | None) -> bool:
    return operand is not None and operand.granularity.columns is not None


def _together(a: Operand, b: Operand) -> bool:
    """Whether one pass can write both operands."""
    if _blocks(a) or _blocks(b):
        return _blocks(a) and _blocks(b) and a.power_of_two == b.power_of_two
    if a.granularity == TENSOR and b.granularity == TENSOR:
        return (a.fmt, a.power_of_two) == (b.fmt, b.power_of_two)
    return (a.fmt, a.granularity, a.power_of_two) == (b.fmt, b.granularity, b.power_of_two)


def _emit_scaled(
    x: Tensor | QTensor,
    direct: Operand | None,
    transposed: Operand | None,
    scale: Tensor | None,
    amax: Tensor | None,
    padded: int,
) -> tuple[QTensor | None, QTensor | None]:
    """Operands with tensor-wise or row-wise scales, which are known before codes are written."""
    (m, k), operand = x.shape, direct or transposed
    assert operand is not None
    source, size, tile = matrix_source(x)
    fmt, power = FORMATS[operand.fmt], operand.power_of_two
    codes, codes_t = empty_codes(
        source[0], fmt if direct else None, fmt if transposed else None, padded
    )
    if operand.granularity == TENSOR:
        kind = "factor" if power else "tensor"
        if scale is None and isinstance(x, Tensor):
            scale = current_scale(x, fmt, power_of_two=power)
        elif scale is None:
            amaxes = launch_amax(loaders.load_matrix, source, m, k, tile, options=size)
            scale = tensor_scale(amaxes, fmt, power_of_two=power)
        scales: list[Tensor | None] = [scale, scale]
    else:
        kind = "rows"
        scales = _line_scales(source, size, tile.inner, (m, k), direct, transposed, fmt, power)
    launch_emit(
        loaders.load_matrix,
        source,
        (Matrix(codes, codes_t, *scales),),
        (Placed(0, fmt),),
        (m, padded if transposed else m, k),
        tile,
        options=size,
        amax=amax,
        scales=kind,
        power_of_two=power,
    )
    return _operand(codes, scales[0], direct), _operand(codes_t, scales[1], transposed)


def _line_scales(
    source: tuple[Any, ...],
    size: int,
    inner: int,
    shape: tuple[int, int],
    direct: Operand | None,
    transposed: Operand | None,
    fmt: Fp8Format,
    power: bool,
) -> list[Tensor | None]:
    """Scales [M, 1] of rows and [K, 1] of columns, found in a separate pass."""
    m, k = shape
    # scales of columns follow those of rows, on 16 bytes, as GEMMs need them
    wanted = (-(-m // 4) * 4 if direct else 0, k if transposed else 0)
    bits = torch.zeros(sum(wanted), dtype=torch.int32, device=source[0].device)
    rows, columns = bits.split(wanted)
    constants = LINE_TILE._replace(inner=inner).options()
    del constants["STEP"], constants["WIDTH"]
    grid = triton.cdiv(m, LINE_TILE.rows) * triton.cdiv(k, LINE_TILE.columns)
    amax_passes.line_amax_kernel[(grid,)](
        source,
        rows if direct else None,
        columns if transposed else None,
        m,
        k,
        LOAD=loaders.load_matrix,
        OPTIONS=size,
        **constants,
    )
    made = scales_of(bits.view(torch.float32), fmt, power_of_two=power)
    per_row, per_column = made[:, None].split(wanted)
    return [per_row[:m] if direct else None, per_column if transposed else None]


def _emit_blocks(
    x: Tensor | QTensor,
    direct: Operand | None,
    transposed: Operand | None,
    amax: Tensor | None,
    padded: int,
) -> tuple[QTensor | None, QTensor | None]:
    """Operands with scales of 1 x 128 or 128 x 128 elements; x is read once."""
    (m, k), device = x.shape, x.codes.device if isinstance(x, QTensor) else x.device
    source, size, _ = matrix_source(x)
    operands = (direct, transposed)
    fmts = [None if o is None else FORMATS[o.fmt] for o in operands]
    codes, codes_t = empty_codes(source[0], fmts[0], fmts[1], padded)
    scales = [
        None if o is None else _empty_scales(o.granularity, shape, device)
        for o, shape in zip(operands, [(m, k), (k, padded)], strict=True)
    ]
    inner, operand = min(size, 16), direct or transposed
    assert operand is not None
    formats = tuple(None if fmt is None else fmt.triton_dtype for fmt in fmts)
    padded = padded if transposed else m
    emit.emit_blocks_kernel[(triton.cdiv(padded, 128) * triton.cdiv(k, 128),)](
        source,
        *Matrix(codes, codes_t, *scales).pointers(),
        None if amax is None else amax.view(torch.int32),
        m,
        padded,
        k,
        LOAD=loaders.load_matrix,
        OPTIONS=size,
        SIZES=tuple(0 if o is None else o.granularity.rows for o in operands),
        POWER=operand.power_of_two,
        FORMATS=formats,
        TOPS=tuple(0.0 if fmt is None else fmt.max for fmt in fmts),
        INNER=inner,
        RUN=BLOCK_RUN,
        WARPS=BLOCK_WARPS,
        num_warps=BLOCK_WARPS,
    )
    return _operand(codes, scales[0], direct), _operand(codes_t, scales[1], transposed)


def _empty_scales(granularity: Granularity, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Scales in cuBLASLt's memory order (emit._block_scales). ValueError for other blocks."""
    rows, columns = granularity.scale_shape(shape)
    if granularity == ROW_BLOCK:
        return torch.empty(columns, rows, device=device).t()
    if granularity == SQUARE_BLOCK:
        return torch.zeros(rows, -(-columns // 4) * 4, device=device)[:, :columns]
    raise ValueError(f"granularity={granularity}: on a GPU, blocks are 1 x 128 or 128 x 128")


def empty_codes(
    like: Tensor, fmt: Fp8Format | None, fmt_t: Fp8Format | None, padded: int
) -> tuple[Tensor | None, Tensor | None]:
    """Uninitialized codes [M, K] and [K, M'], of those that have a format."""
    (m, k), device = like.shape, like.device
    codes = None if fmt is None else torch.empty(m, k, dtype=fmt.dtype, device=device)
    codes_t = None if fmt_t is None else torch.empty(k, padded, dtype=fmt_t.dtype, device=device)
    return codes, codes_t


def _operand(codes: Tensor | None, scale: Tensor | None, operand: Operand | None) -> QTensor | None:
    if codes is None or scale is None or operand is None:
        return None
    return QTensor(codes, scale, operand.granularity, FORMATS[operand.fmt])
