"""The decode cache on the device.

    cache.py  extending a cache: by a few tokens, or in chunks
    step.py   up to 8 tokens: kernels/decode/plan.cu and step.cu
    chunk.py  more of them: kernels/decode/chunk.cu
    codes.py  8-bit rows: kernels/decode/quantize_rows.cu
"""
