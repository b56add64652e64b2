"""Many requests on one GPU: continuous batching on caches of constant size, beside full attention.

Requests: ``--requests`` texts whose lengths are log-uniform from 512 to 65536 tokens (density 1 / length: a heavy
tail), drawn by ``--seed``. An eighth of a text, at most 1024 tokens, is generated; the rest is a prompt of random
tokens. All requests are submitted at once. Only its length ends a text, so all peers do the same work.

Model: the shapes of Llama 3.2 1B (16 layers of width 2048, 32/8 heads of 64, vocabulary 128256), random weights,
bfloat16. cupy_dma: the converted model, ``--window`` keys by scores of values, A drawn with a deviation of 0.3, in
``ContinuousBatching`` with ``--slots`` and ``--chunk``, CUDA graphs. full: the unconverted model in the same scheduler
and graphs, with torch's FlashAttention over all keys of each slot (benchmarks/harness/static_slots.py). The other peers
run the unconverted model in transformers' ``generate_batch`` (paged), each with the attention of its name, the same
number of requests at a time, and otherwise default options.

A peer stops after ``--seconds``, and its tokens up to then count. The clock starts when the requests are submitted,
after each peer's own warm-up. Tokens per second: generated tokens over the time to the last one. Time per token:
between two tokens of a text, p50 and p99 over all. First token: from the submission. Memory: the GPU's allocated bytes,
sampled every 50 ms; on a CPU the size of the cache, if known.

Check: every request ends without an error (if there is time), the cache keeps its size, and ``CHECKED`` requests give
the same tokens when they run alone on the same slots, bit for bit; on a CPU, in float32, also the tokens of
``model.generate``.
"""
import argparse
import inspect
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.harness import measure
from benchmarks.harness.command import Refused, at_least_1, attempted, conclude, listed

CHECKED, POINTS = 3, 200  # points of a line of the chart
OURS = ("cupy_dma", "full")
PEERS = (*OURS, "sdpa", "flash_attention_2", "flash_attention_3")
SIZES: dict[str, dict[str, Any]] = {
    "1b": {"num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
           "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True},
    "tiny": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "intermediate_size": 64, "vocab_size": 600}}
LENGTHS = {"1b": (512, 65536), "tiny": (16, 160)}
MOST_GENERATED = 1024
Text = tuple[list[int], int]  # prompt, tokens to generate


def texts(args: argparse.Namespace) -> list[Text]:
    drawn, (least, most) = np.random.default_rng(args.seed), LENGTHS[args.size]
    lengths = np.exp(drawn.uniform(np.log(least), np.log(most), args.requests)).astype(int).tolist()
    new = [min(n // 8, MOST_GENERATED) for n in lengths]
    return [(drawn.integers(0, SIZES[args.size]["vocab_size"], n - m).tolist(), m) for n, m in zip(lengths, new)]


def model_of(args: argparse.Namespace, attention: str, window: int | None = None) -> Any:
    """A model with the same weights each time; converted if ``window`` is given."""
    import transformers

    import cupy_dma.transformers as dmt

    device = "cuda" if measure.on_gpu() else "cpu"
    config = transformers.LlamaConfig(**SIZES[args.size], max_position_embeddings=2**18, bos_token_id=None,
                                      eos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.bfloat16 if measure.on_gpu() else torch.float32)
    if window is not None:
        for layer in dmt.convert(model, window).model.layers:
            torch.nn.init.normal_(layer.self_attn.A, std=0.3)
    return model.eval()


@contextmanager
def memory(of: Any = None) -> Iterator[list[tuple[float, int]]]:
    """Inside the context, sample (seconds, allocated bytes); without a GPU, bytes come from ``of()``."""
    points: list[tuple[float, int]] = []
    ended, read = threading.Event(), torch.cuda.memory_allocated if measure.on_gpu() else of

    def watch() -> None:
        while read is not None and not ended.is_set():
            points.append((time.perf_counter(), read()))
            ended.wait(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield points
    finally:
        ended.set()
        thread.join()
        if read is not None:
            points.append((time.perf_counter(), read()))


def few(points: list[Any]) -> list[Any]:
    """At most ``POINTS`` samples, including the first and the last."""
    return [points[i] for i in sorted({round(i) for i in np.linspace(0, len(points) - 1, min(POINTS, len(points)))})]


def found(outputs: list[Any], began: float, points: list[tuple[float, int]], wanted: int) -> dict[str, Any]:
    """The results of a peer's outputs, which may be incomplete."""
    times = [output.timestamps for output in outputs if output.timestamps]
    errors = sorted({output.error for output in outputs if output.error})
    if not times:
        raise RuntimeError(errors[0] if errors else "no token in time")
    every = sorted(stamp - began for stamps in times for stamp in stamps)
    gaps = np.concatenate([np.diff(stamps) for stamps in times]) * 1e3
    first = [stamps[0] - began for stamps in times]
    return {"ms": float(np.median(gaps)), "p99_ms": float(np.quantile(gaps, 0.99)), "tokens": len(every),
            "seconds": every[-1], "tokens_per_second": len(every) / every[-1],
            "first_s": [float(np.quantile(first, share)) for share in (0.5, 0.99)], "errors": errors,
            "ended": sum(output.status.name == "FINISHED" for output in outputs), "wanted": wanted,
            "said": few([[stamp, i + 1] for i, stamp in enumerate(every)]),
            "memory": few([[stamp - began, size] for stamp, size in points if stamp >= began]),
            "peak_bytes": max((size for _, size in points), default=None)}


def ours(args: argparse.Namespace, peer: str, work: list[Text]) -> dict[str, Any]:
    from benchmarks.harness import static_slots
    from cupy_dma.transformers import ContinuousBatching

    if peer == "cupy_dma":
        model = model_of(args, "cupy_dma", args.window)
        batching = ContinuousBatching(model, slots=args.slots, chunk=args.chunk)
    else:
        static_slots.register()
        model = model_of(args, static_slots.NAME)
        longest = max(len(prompt) + new for prompt, new in work)
        batching = static_slots.FullBatching(model, longest, slots=args.slots, chunk=args.chunk)
    size = batching.memory_bytes
    with memory(lambda: batching.memory_bytes) as points:
        began = time.perf_counter()
        requests = [batching.submit(prompt, new, record_timestamps=True) for prompt, new in work]
        with tqdm(total=len(work), desc=peer, disable=None) as bar:
            while (batching.waiting or batching.running) and time.perf_counter() - began < args.seconds:
                bar.update(sum(request.is_finished() for request, _ in batching.step()))
    late = [request for request in requests if batching.cancel(request)]
    row = found(requests, began, points, len(work))
    done = sorted((request for request in requests if request.error is None), key=lambda r: len(r.prompt_ids))
    alone = [equal_alone(batching, model, request) for request in done[::-(-len(done) // CHECKED) or 1]]
    ok = all(alone) and bool(alone) and batching.memory_bytes == size and all(
        request.error is None or request in late for request in requests)
    return {**row, "cache_bytes": size, "alone": alone, "ok": ok}


def equal_alone(batching: Any, model: Any, request: Any) -> bool:
    """Whether a text gets the same tokens alone on the same slots, and without a GPU from ``generate``."""
    name = model.config._attn_implementation
    again = batching.submit(request.prompt_ids, request.max_new_tokens)
    for _ in batching:
        pass
    said = again.generated_tokens
    if not measure.on_gpu():
        model.set_attn_implementation("cupy_dma" if hasattr(model.config, "dynamic_mask") else "sdpa")
        ids = torch.tensor([request.prompt_ids])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(said), do_sample=False)
        model.set_attn_implementation(name)
        if whole[0, ids.shape[1]:].tolist() != said:
            return False
    return said == request.generated_tokens


def theirs(args: argparse.Namespace, peer: str, work: list[Text]) -> dict[str, Any]:
    """transformers' own scheduler."""
    import transformers

    options = {"auto_switch_to_flash": False} if "auto_switch_to_flash" in inspect.signature(
        transformers.ContinuousBatchingConfig).parameters else {}  # older ones never switch
    config = transformers.ContinuousBatchingConfig(max_requests_per_batch=args.slots, **options,
                                                   **({} if measure.on_gpu() else {"num_blocks": 64}))
    generation = transformers.GenerationConfig(do_sample=False, max_new_tokens=MOST_GENERATED, eos_token_id=-1)
    outputs: dict[str, Any] = {}
    manager = model_of(args, peer).init_continuous_batching(generation, config)
    with memory() as points, tqdm(total=len(work), desc=peer, disable=None) as bar:
        try:
            manager.warmup()
            manager.start()
            began = time.perf_counter()
            for prompt, new in work:
                manager.add_request(prompt, max_new_tokens=new, record_timestamps=True)
            while len(outputs) < len(work) and manager.is_running() and time.perf_counter() - began < args.seconds:
                output = manager.get_result(timeout=0.1)
                if output is not None and output.is_finished():
                    outputs[output.request_id] = output
                    bar.update()
        finally:
            manager.stop(hard_stop=True)
        while (output := manager.get_result(timeout=0)) is not None:  # unfinished requests, with their tokens so far
            outputs[output.request_id] = output
    manager.destroy()
    return found(list(outputs.values()), began, points, len(work))


def row_of(args: argparse.Namespace, peer: str, work: list[Text]) -> dict[str, Any]:
    row = {"peer": peer, "note": "", **attempted(partial(ours if peer in OURS else theirs, args, peer, work))}
    if row["ms"] and row["ended"] < row["wanted"]:
        row["note"] = f"{row['ended']} of {row['wanted']} requests"
    return row


def run(args: argparse.Namespace) -> int:
    at_least_1(args, "requests", "slots", "chunk", "window", "seconds")
    if "cupy_dma" not in args.peers:
        raise Refused("--peers must name cupy_dma")
    import transformers

    import cupy_dma.transformers as dmt

    dmt.register()
    work = texts(args)
    rows = [row_of(args, peer, work) for peer in args.peers]
    ok = all(row.get("ok", False) for row in rows if row["peer"] in OURS)
    return conclude("serve", args, __doc__, ok, rows=rows, lengths=sorted(len(prompt) + new for prompt, new in work),
                    transformers=transformers.__version__)


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--size", choices=SIZES, default="1b")
    options.add_argument("--peers", type=listed(PEERS), default=list(PEERS))
    options.add_argument("--requests", type=int, default=256)
    options.add_argument("--slots", type=int, default=32)
    options.add_argument("--chunk", type=int, default=1024)
    options.add_argument("--window", type=int, default=1024)
    options.add_argument("--seconds", type=int, default=300, help="time limit of a peer")
    options.add_argument("--seed", type=int, default=0)
