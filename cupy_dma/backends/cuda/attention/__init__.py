"""Attention forward and backward on the device.

    problem.py        a checked call as the kernels see it: strides, mask and bias kinds, key lists
    tiles.py          tile shapes of the portable kernels
    forward.py        chooses the kernel of a call; kernels/sm80/forward.cu
    sm90.py           the forward on Hopper: kernels/sm90/forward.cu, combine.cu
    sm90_tiles.py     its tile shapes, and the properties of a call that they depend on
    sm90_schedule.py  its tile scheduler: the tile of a call and its schedule on the SMs
    sm90_costs.py     measured costs of its tiles
    tma.py            TMA descriptors
    split.py          split-KV for few query rows: how keys are split among blocks
    flash_decode.py   attention of few queries: kernels/decode/flash_decode.cu
    last_queries.py   the same with prefix top-w, from the scores alone
    backward.py       gradients: kernels/sm80/backward_{preprocess,dq,dkv,dbias,reduce}.cu
    sm90_backward.py  the same on Hopper: kernels/sm90/backward_*.cu
    backward_chunks.py  gradients of calls of millions of tokens, a few heads at a time
"""
