"""The decode cache on the device.

    cache.py  extending a cache: by a few tokens, or in chunks
    step.py   up to 8 tokens: kernels/decode/plan.cu and step.cu
"""
