"""Kernels of a layer in BF16 and fp32, without FP8: RMSNorm, RoPE, SwiGLU, attention, soft caps.

Their fused FP8 forms are in coatlm/fp8, one file each: norm_quantize, rope_quantize,
swiglu_quantize, and attention, whose saved tensors are FP8.
"""
