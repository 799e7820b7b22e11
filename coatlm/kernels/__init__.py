"""Kernels of a layer in BF16 and fp32, without FP8: norm, rotary positions, SwiGLU, attention.

Their fused FP8 forms are in coatlm/fp8, one file each: norm_quantize, rope_quantize,
swiglu_quantize, and attention, which saves its tensors in FP8.
"""
