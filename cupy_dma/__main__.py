"""The command line: ``python -m cupy_dma {info,demo,warmup,clear-cache}``. Exit status: cli/exit.py."""
from __future__ import annotations

import argparse
import sys

from cupy_dma.cli import demo, info
from cupy_dma.cli.exit import complain


def warmup(args: argparse.Namespace) -> int:
    """Compile the kernels of usual calls, for the local GPU or for ``--arch``; they stay in the disk cache."""
    try:
        import cupy
    except ImportError:
        return complain(f"warmup compiles with CuPy, which is not installed: {info.INSTALL_CUDA}")
    if args.arch is None:
        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            return complain(f"there is no GPU here ({error}); name an architecture with --arch, such as --arch sm_90a")
    from tqdm import tqdm

    from cupy_dma.backends.cuda import warmup_jobs
    from cupy_dma.backends.cuda.runtime import jit

    jobs = warmup_jobs(args.head_dim, args.dtype, args.group, args.arch)
    with tqdm(jobs, unit="kernel", leave=False, disable=None) as bar:  # NVRTC takes one at a time, also from threads
        for label, compile_kernel in bar:
            bar.set_postfix_str(label)
            try:
                compile_kernel()
            except jit.CompileError as error:
                return complain(str(error))
    print(f"{len(jobs)} kernels are ready" + (f" for {args.arch}" if args.arch else ""))
    return 0


def clear_cache(args: argparse.Namespace) -> int:
    """Remove the compiled kernels."""
    from cupy_dma.backends.cuda.runtime import disk_cache

    files, size = disk_cache.clear()
    print(f"removed {files} files, {size:,} bytes, from {disk_cache.directory()}")
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m cupy_dma", description="Flash Dynamic Mask Attention.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name, function, summary):
        made = commands.add_parser(name, help=summary, description=summary)
        made.set_defaults(run=function)
        return made

    command("info", lambda args: info.main(),
            "Show versions, devices, headers, the cache, and which backends can run and why others cannot.")

    run = command("demo", demo.main, "Run dynamic mask attention over a text, check it and draw the mask.")
    run.add_argument("--file", metavar="PATH", help="the text (default: the standard library's documentation topics)")
    run.add_argument("--length", type=int, metavar="N",
                     help="use the first N bytes (default: 16384, on a GPU 131072; less if the text is shorter)")
    run.add_argument("--window", type=int, default=512, metavar="W", help="keys kept per query (default: %(default)s)")
    run.add_argument("--heads", type=int, default=4, help="query heads (default: %(default)s)")
    run.add_argument("--kv-heads", type=int, default=2, help="key and value heads (default: %(default)s)")
    run.add_argument("--head-dim", type=int, default=64, help="(default: %(default)s)")
    run.add_argument("--dtype", choices=["float16", "bfloat16", "float32", "float64"],
                     help="(default: float32, on a GPU bfloat16)")
    run.add_argument("--backend", choices=["cuda", "numpy"], help="(default: cuda where it can run, else numpy)")
    run.add_argument("--seed", type=int, default=0, help="of the projections (default: %(default)s)")
    run.add_argument("--output", default="mask.png", metavar="PNG",
                     help="the picture of the mask (default: %(default)s)")

    prepare = command("warmup", warmup, "Compile the kernels of usual calls ahead of their first use.")
    prepare.add_argument("--head-dim", type=int, nargs="+", default=[64, 128], help="(default: 64 128)")
    prepare.add_argument("--dtype", nargs="+", default=["bfloat16", "float16"],
                         choices=["float16", "bfloat16", "float32"], help="(default: bfloat16 float16)")
    prepare.add_argument("--group", type=int, nargs="+", default=[1, 2, 4],
                         help="query heads per key and value head (default: 1 2 4)")
    prepare.add_argument("--arch", help="such as sm_90a: compile for another architecture; needs no GPU")

    command("clear-cache", clear_cache, "Remove the compiled kernels from the disk cache.")
    return top


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
