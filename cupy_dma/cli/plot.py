"""``python -m cupy_dma plot``: the mask that a file of scores makes, in pictures."""
from __future__ import annotations

import zipfile
from argparse import Namespace
from typing import Any

import numpy as np

import cupy_dma as dma
from cupy_dma.cli import picture
from cupy_dma.cli.exit import complain

KINDS = ("mask", "lifetimes", "survival")


def read_scores(path: str, name: str | None) -> np.ndarray:
    """float32 ``(B, Hkv, Lk)`` from a .npy file, or from the array ``name`` of an .npz file (by default ``scores``, or
    the only one there is). ValueError if the file holds nothing of that kind."""
    try:
        loaded: Any = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"FILE must be a .npy or .npz file of NumPy, got {path}: {error}") from None
    if isinstance(loaded, np.ndarray):
        if name is not None:
            raise ValueError(f"--array names an array of an .npz file, got {path}, which is one array")
    else:
        with loaded:
            names = loaded.files
            name = name or ("scores" if "scores" in names else names[0] if len(names) == 1 else None)
            if name not in names:
                raise ValueError(f"--array must name one of the arrays in {path}, {', '.join(names) or 'none'}; "
                                 f"got {name or 'no --array'}")
            loaded = loaded[name]
    if loaded.dtype.kind != "f" or not 1 <= loaded.ndim <= 3 or loaded.shape[-1] < 1:
        raise ValueError(f"the scores must be floats of shape (Lk,), (Hkv, Lk) or (B, Hkv, Lk), got {loaded.dtype} "
                         f"{loaded.shape} in {path}")
    return loaded.astype(np.float32).reshape((1,) * (3 - loaded.ndim) + loaded.shape)


def draw(scores: np.ndarray, window: int, kinds: list[str], batch: int, head: int) -> Any:
    """A matplotlib Figure with one panel for each of ``kinds``."""
    from matplotlib.figure import Figure

    mask = dma.IntervalMask.top_w(scores, window)
    figure = Figure(figsize=(6.2 * len(kinds), 5.4), layout="constrained")
    for kind, ax in zip(kinds, figure.subplots(1, len(kinds), squeeze=False)[0]):
        if kind == "mask":
            mask.plot(batch=batch, head=head, ax=ax)
            ax.set_title("keys that each query sees", fontsize="medium")
        elif kind == "lifetimes":
            mask.plot_lifetimes(scores, batch=batch, head=head, ax=ax)
        else:
            mask.plot_survival(batch=batch, head=head, ax=ax)
    return figure


def main(args: Namespace) -> int:
    """0 if the picture is written, 1 if that fails, 2 if there is nothing to draw or nothing to draw with."""
    reason = picture.why_not(args.output)
    if reason:
        return complain(f"--output {args.output}: {reason}")
    try:
        scores = read_scores(args.file, args.array)
        figure = draw(scores, args.window, args.kind, args.batch, args.head)
    except ValueError as error:
        return complain(str(error))
    batch, heads, length = scores.shape
    figure.suptitle(f"{args.file}: batch entry {args.batch} of {batch}, kv head {args.head} of {heads}, "
                    f"{length:,} keys, window {args.window}")
    figure.savefig(args.output, dpi=120)
    print(f"{args.output}: {', '.join(args.kind)}")
    return 0
