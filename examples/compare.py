"""Compare the held-out losses of dense and dynamic attention, trained in the same way on the same text.

    python examples/compare.py                        three seeds of each, for a GPU
    python examples/compare.py --kinds dense,dynamic,window             also a plain window
    python examples/compare.py --device cpu --seeds 0 --steps 50 --batch 2 --length 256 --window 32 --width 64

The model is that of ``train.py``, with pieces of 4096 bytes; a query keeps 512 keys by score and the last 128
(``--recent 0``: only keys by score). For each seed, all kinds of attention start with the same parameters and see the
same pieces of text in the same order. The text is ``--text``, by default the source code of the standard library, in
which names recur after thousands of bytes. The loss after the last step, in nats per byte, is measured on a held-out
tenth of the text.
"""
from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

import torch

from examples.train import KINDS, Run, check, parser_of, text_of

COST = ("The defaults are for a GPU. On a CPU with two cores a step of them takes about half a minute, and there are "
        "6000: try --seeds 0 --steps 50 --batch 2 --length 256 --window 32 --width 64, which takes minutes.")


def seeds_of(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers, such as 0,1,2, got {text!r}") from None


def sources() -> bytes:
    """The sources of the standard library, concatenated."""
    return b"\n".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))


def parsed(arguments: list[str] | None) -> tuple[argparse.Namespace, bytes]:
    parser = parser_of((__doc__ or "").splitlines()[0], "the modules of the standard library")
    parser.epilog = COST
    parser.add_argument("--kinds", default="dense,dynamic", metavar="KIND,...", help=f"attention, out of "
                        f"{', '.join(KINDS)}; the others are compared with the first (default: %(default)s)")
    parser.add_argument("--seeds", type=seeds_of, default="0,1,2", metavar="SEED,...", help="(default: %(default)s)")
    on_gpu = torch.cuda.is_available()
    parser.set_defaults(steps=1000, batch=8, length=4096, layers=4, width=256, heads=4, kv_heads=2, window=512,
                        recent=128, rate=2e-3, validate=250, output=Path("compare.json"), autocast=on_gpu)
    args = parser.parse_args(arguments)
    args.kinds = args.kinds.split(",")
    if set(args.kinds) - set(KINDS):
        parser.error(f"--kinds must be of {', '.join(KINDS)}, got {','.join(args.kinds)}")
    text = text_of(parser, args.text) if args.text else sources()
    check(parser, args, text)
    return args, text


def main(arguments: list[str] | None = None) -> int:
    args, text = parsed(arguments)
    tensor, found, on_gpu = torch.tensor(list(text)), [], args.device != "cpu"
    print(f"{len(text)} bytes of text, {args.steps} steps of {args.batch} x {args.length} bytes; nats per byte of "
          f"held-out text")
    for seed in args.seeds:
        for kind in args.kinds:
            options = copy.copy(args)
            options.seed, options.attention, options.output = seed, kind, None
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            run, started = Run(options, tensor), time.perf_counter()
            run.train()
            found.append({"seed": seed, "attention": kind, "seconds": time.perf_counter() - started,
                          "losses": run.losses, "validation": run.validation,
                          "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None})
            print(f"seed {seed}, {kind:8} {run.validation[-1][1]:.4f}   after {found[-1]['seconds']:.0f} s", flush=True)
            args.output.write_text(json.dumps({"arguments": {name: str(x) for name, x in vars(args).items()},
                                               "device": torch.cuda.get_device_name() if on_gpu else "cpu",
                                               "runs": found}, indent=1) + "\n")
    last = {(run["seed"], run["attention"]): run["validation"][-1][1] for run in found}
    for kind in args.kinds[1:]:
        apart = [last[seed, kind] - last[seed, args.kinds[0]] for seed in args.seeds]
        each = ", ".join(f"{x:+.4f}" for x in apart)
        print(f"{kind} - {args.kinds[0]}: {statistics.mean(apart):+.4f} nats on average ({each})")
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
