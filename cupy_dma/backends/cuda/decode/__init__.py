"""The decode cache on the device.

    cache.py  extending a cache: token by token, or in chunks
    step.py   one token: kernels/decode/step.cu
"""
