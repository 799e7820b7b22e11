"""Casts inside kernels: E4M3 and E5M2 by the casts of the device, E3M4 (uint8) by way of fp16.

    encode    fp32 values -> codes. E3M4 has the bits of `ShortFloat.encode`
    decode    codes -> fp32 values, exact

Values must be at most MAX: the scale of their block, amax / MAX, makes them so. E3M4 is converted
four values at a time, as two pairs of fp16 numbers. Adding 31 and the last bit that remains rounds
to nearest even. After a shift by two bits, the bits that remain are the upper byte of each number,
apart from the sign, which was copied before the shift. E3M4 has no code for NaN: the scale of the
block is NaN instead (payload.py).
"""

import triton
import triton.language as tl

TO_E3M4 = tl.constexpr("""{
    .reg .b32 low, high, odd, sign;
    cvt.rn.f16x2.f32 low, $2, $1;
    cvt.rn.f16x2.f32 high, $4, $3;
    prmt.b32 sign, low, high, 0x7531;
    shr.u32 odd, low, 6;
    and.b32 odd, odd, 0x00010001;
    add.u32 low, low, odd;
    add.u32 low, low, 0x001F001F;
    shr.u32 odd, high, 6;
    and.b32 odd, odd, 0x00010001;
    add.u32 high, high, odd;
    add.u32 high, high, 0x001F001F;
    shl.b32 low, low, 2;
    shl.b32 high, high, 2;
    prmt.b32 low, low, high, 0x7531;
    lop3.b32 $0, low, sign, 0x80808080, 0xD8;
}""")
FROM_E3M4 = tl.constexpr("""{
    .reg .b32 low, high, bits;
    .reg .b16 a, b, c, d;
    prmt.b32 low, $4, 0, 0x1404;
    prmt.b32 high, $4, 0, 0x3424;
    shr.u32 bits, low, 2;
    and.b32 bits, bits, 0x1FC01FC0;
    lop3.b32 low, bits, low, 0x80008000, 0xF8;
    shr.u32 bits, high, 2;
    and.b32 bits, bits, 0x1FC01FC0;
    lop3.b32 high, bits, high, 0x80008000, 0xF8;
    mov.b32 {a, b}, low;
    mov.b32 {c, d}, high;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
}""")


@triton.jit
def encode(x, CODE: tl.constexpr):
    """Cast fp32 values to codes of the type CODE."""
    if CODE.is_fp8():
        code = x.to(CODE)
    else:
        code = tl.inline_asm_elementwise(
            TO_E3M4, "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4
        )
    return code


@triton.jit
def decode(code):
    """Cast codes to the fp32 values that they stand for."""
    if code.dtype.is_fp8():
        value = code.to(tl.float32)
    else:
        value = tl.inline_asm_elementwise(
            FROM_E3M4, "=f,=f,=f,=f,r", [code], dtype=tl.float32, is_pure=True, pack=4
        )
    return value
