"""Compiling, loading and launching kernels.

    configs.py     the compile-time options of each kernel file
    jit.py         configuration -> prelude + source -> cubin -> loaded kernel
    disk_cache.py  cubins on disk
    params.py      kernel arguments, with holes for addresses
    builder.py     the interface with which functions build a program
    program.py     the launches of a call, built once and run at any addresses
    replay.py      the launches of a program, ready for the driver
    launch.py      launches through the driver, with programmatic dependent launch
    device.py      the device as the backend sees it (``Runtime``)
    warmup.py      kernels to compile ahead
"""
