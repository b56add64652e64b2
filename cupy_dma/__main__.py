"""The command line: ``cupy-dma`` or ``python -m cupy_dma``, with the commands info, demo, plot, bench, warmup and
clear-cache. Exit status: cli/exit.py."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import cupy_dma
from cupy_dma.cli import bench, demo, demo_ranks, info, plot, warmup
from cupy_dma.cli.arguments import Parser, whole
from cupy_dma.cli.exit import status_of

head_dim = whole(1, 256)


def clear_cache(args: argparse.Namespace) -> int:
    """Remove the compiled kernels."""
    from cupy_dma.backends.cuda.runtime import disk_cache

    files, size = disk_cache.clear()
    print(f"removed {files} files, {size:,} bytes, from {disk_cache.directory()}")
    return 0


def parser() -> argparse.ArgumentParser:
    called = "cupy-dma" if Path(sys.argv[0]).stem == "cupy-dma" else "python -m cupy_dma"
    top = Parser(prog=called, description="Flash Dynamic Mask Attention.")
    top.add_argument("-V", "--version", action="version", version=f"cupy_dma {cupy_dma.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name, function, summary):
        made = commands.add_parser(name, help=summary, description=summary)
        made.set_defaults(run=function)
        return made

    found = command("info", lambda args: info.main(args.explain, args.arch),
                    "Show versions, devices, headers, the cache, and which backends can run and why others cannot.")
    found.add_argument("--explain", metavar="SHAPE", help="which kernels a call launches and why no others, such as "
                       "'B=1 H=16/8 N=8192 D=128 w=1024 bfloat16 backward'; needs no GPU")
    found.add_argument("--arch", default="sm_90a", help="of the GPU to explain for (default: %(default)s)")

    def demonstrate(args: argparse.Namespace) -> int:
        return demo.main(args) if args.ranks is None else demo_ranks.main(args)

    run = command("demo", demonstrate, "Run dynamic mask attention over a text, check it and draw the mask.")
    run.add_argument("--file", metavar="PATH", help="the text (default: the standard library's documentation topics)")
    run.add_argument("--length", type=whole(1), metavar="N",
                     help="use the first N bytes (default: 16384, on a GPU 131072; less if the text is shorter)")
    run.add_argument("--window", type=whole(1), default=512, metavar="W",
                     help="keys kept per query (default: %(default)s)")
    run.add_argument("--heads", type=whole(1), default=4, help="query heads (default: %(default)s)")
    run.add_argument("--kv-heads", type=whole(1), default=2, help="key and value heads (default: %(default)s)")
    run.add_argument("--head-dim", type=head_dim, default=64, help="1 to 256 (default: %(default)s)")
    run.add_argument("--dtype", choices=["float16", "bfloat16", "float32", "float64"],
                     help="(default: float32, on a GPU bfloat16)")
    run.add_argument("--backend", choices=["cuda", "numpy"], help="(default: cuda where it can run, else numpy)")
    run.add_argument("--seed", type=whole(0), default=0, help="of the projections (default: %(default)s)")
    run.add_argument("--ranks", type=whole(1), metavar="N",
                     help="spread the text over N processes, on the CPU or, with --backend cuda, over N GPUs")
    run.add_argument("--output", metavar="PNG",
                     help="the picture of the mask (default: mask.png, where matplotlib is installed)")

    pictures = command("plot", plot.main, "Draw the mask that a file of scores makes: one number per key.")
    pictures.add_argument("file", metavar="FILE",
                          help="a .npy or .npz file with floats (Lk,), (Hkv, Lk) or (B, Hkv, Lk)")
    pictures.add_argument("--window", type=whole(1), default=512, metavar="W",
                          help="keys kept per query (default: %(default)s)")
    pictures.add_argument("--kind", nargs="+", choices=plot.KINDS, default=list(plot.KINDS),
                          help="what to draw (default: all three)")
    pictures.add_argument("--batch", type=whole(0), default=0, help="(default: %(default)s)")
    pictures.add_argument("--head", type=whole(0), default=0, help="kv head (default: %(default)s)")
    pictures.add_argument("--array", metavar="NAME", help="of an .npz file (default: scores, or the only one)")
    pictures.add_argument("--output", metavar="PNG", default="plot.png", help="(default: %(default)s)")

    measure = command("bench", bench.main, "Time forward, backward and decoding for one shape, beside torch's SDPA.")
    on_gpu, on_cpu = bench.DEFAULTS["cuda"], bench.DEFAULTS["numpy"]
    for name in ("batch", "length", "heads", "kv_heads", "head_dim", "window"):
        kind = head_dim if name == "head_dim" else whole(1)
        measure.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N",
                             help=f"(default: {getattr(on_gpu, name)}, on the CPU {getattr(on_cpu, name)})")
    measure.add_argument("--dtype", choices=["float16", "bfloat16", "float32"],
                         help="(default: bfloat16, on the CPU float32)")
    measure.add_argument("--backend", choices=["cuda", "numpy"], help="(default: cuda where it can run, else numpy)")
    measure.add_argument("--seconds", type=whole(1), default=20, metavar="S",
                         help="to measure, besides compiling (default: %(default)s)")
    measure.add_argument("--output", metavar="PNG",
                         help="the chart (default: bench.png, where matplotlib is installed)")

    prepare = command("warmup", warmup.main, "Compile the kernels of usual calls ahead of their first use.")
    prepare.add_argument("--head-dim", type=head_dim, nargs="+", default=[64, 128], help="1 to 256 (default: 64 128)")
    prepare.add_argument("--dtype", nargs="+", default=["bfloat16", "float16"],
                         choices=["float16", "bfloat16", "float32"], help="(default: bfloat16 float16)")
    prepare.add_argument("--group", type=whole(1), nargs="+", default=[1, 2, 4],
                         help="query heads per key and value head (default: 1 2 4)")
    prepare.add_argument("--arch", help="such as sm_90a: compile for another architecture; needs no GPU")

    command("clear-cache", clear_cache, "Remove the compiled kernels from the disk cache.")
    return top


def main(arguments: list[str] | None = None) -> int:
    def command() -> int:
        args = parser().parse_args(arguments)
        return args.run(args)

    return status_of(command)


if __name__ == "__main__":
    sys.exit(main())
