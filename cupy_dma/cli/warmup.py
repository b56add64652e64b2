"""``python -m cupy_dma warmup``: the kernels of usual calls, compiled ahead of the first one."""
from __future__ import annotations

import warnings
from argparse import Namespace

from cupy_dma.cli.exit import FAILED, complain
from cupy_dma.cli.info import INSTALL_CUDA


def main(args: Namespace) -> int:
    """Compile for the local GPU or for ``--arch``; the kernels stay in the disk cache."""
    try:
        import cupy
    except ImportError:
        return complain(f"warmup compiles with CuPy, which is not installed: {INSTALL_CUDA}")
    from tqdm import tqdm

    from cupy_dma.backends.cuda import warmup_jobs
    from cupy_dma.backends.cuda.runtime import disk_cache, jit

    try:
        if args.arch is None:
            cupy.cuda.runtime.getDeviceCount()
        elif args.arch not in (allowed := jit.architectures()):
            return complain(f"--arch must be one of {', '.join(allowed)}, got {args.arch}")
        jobs = warmup_jobs(args.head_dim, args.dtype, args.group, args.arch)
        with tqdm(jobs, unit="kernel", leave=False, disable=None) as bar, warnings.catch_warnings():
            warnings.simplefilter("error", disk_cache.NotKeptWarning)  # they are compiled to be kept
            disk_cache.require_writable()
            for label, compile_kernel in bar:  # NVRTC takes one at a time, also from threads
                bar.set_postfix_str(label)
                compile_kernel()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return complain(f"there is no GPU here ({error}); name an architecture with --arch, such as --arch sm_90a")
    except jit.CompileError as error:
        return complain(str(error))
    except disk_cache.NotKeptWarning as error:
        return complain(str(error), FAILED)
    print(f"{len(jobs)} kernels are ready" + (f" for {args.arch}" if args.arch else ""))
    return 0
