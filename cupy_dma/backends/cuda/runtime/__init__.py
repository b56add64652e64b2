"""Compiling, loading and launching kernels.

    configs.py     what each kernel file can be specialised in
    jit.py         configuration -> prelude + source -> cubin -> loaded kernel
    disk_cache.py  cubins on disk
    params.py      the arguments of kernels, with holes for addresses
    builder.py     what functions build a program with
    program.py     what a call launches, built once and run at any addresses
    replay.py      the launches of a program, ready for the driver
    launch.py      launches through the driver, with programmatic dependent launch
    device.py      the device as the backend sees it (``Runtime``)
    warmup.py      kernels to compile ahead
"""
