"""A retrofitted model beside full attention: time and memory of a training step, prefill and decoding.

Model: the shape of SmolLM2-135M (30 layers, 9/3 heads of 64, width 576, MLP of 1536, vocabulary 49152), bfloat16,
random weights and tokens. Lengths beyond the model's context of 8192 show speed only; positions there cost the same.
Gates are linear. Beyond the ``RECENT`` newest keys they keep one older key in ``length / 2 / (ROWS - RECENT)``, as if
trained for ``ROWS`` rows: each bias is that quantile of the random model's gate logits.

    step      forward, loss, backward and AdamW (fused) of all parameters, one sequence, no activation checkpointing
    prefill   a forward pass, logits of the last tokens alone, no cache
    decode    a token after a history; ours on a bounded ``GatedCache``, ``ROWS`` rows per kv head, as eager calls and
              as a CUDA graph, and the window on a ``DynamicMaskCache`` with as many rows, as a graph; full attention
              on transformers' cache, eager, filled with random rows

Peers: ``sdpa``, torch's choice; ``flash``, its FlashAttention-2; ``window``, ours with as many rows; ``gates, open``,
how training begins; ``compiled``: every layer with ``torch.compile``. Timing and memory:
benchmarks/harness/generation.py.

Check: with all gates open, eager and compiled, hidden states of a text are sdpa's within ``NEAR``, relative to their
norm. Those of compiled gates are the eager ones', in float32, since other rounding in 16 bits opens and closes gates.
Gates keep their intended share within a tenth; the graph decodes the same tokens as eager calls.
"""
import argparse
import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import cupy_dma.transformers as dmt
from benchmarks.harness import folders, generation, measure
from benchmarks.harness.command import at_least_1, listed, why_not
from benchmarks.harness.records import Clock, OutOfTime, Row, Run, add_run_options, device_of, run_all
from cupy_dma import retrofit

PARTS = ("check", "step", "prefill", "decode")
NEAR = 0.02
ROWS, RECENT, SINKS = 256, 64, 4
PEERS = {"step": ("gates", "gates, open", "window", "sdpa", "flash", "gates, compiled", "sdpa, compiled"),
         "prefill": ("gates", "gates, open", "window", "sdpa", "flash"),
         "decode": ("gates", "gates, graph", "window, graph", "sdpa")}
SIZES = {"smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                     "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
         "tiny": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "vocab_size": 256}}


class Bench:
    def __init__(self, size: str, device: str, repeats: int):
        import transformers

        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SIZES[size], max_position_embeddings=2**18, rope_theta=100000.0)
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self.base = transformers.AutoModelForCausalLM.from_config(config).to(device, dtype).eval()
        self.device, self.repeats = device, repeats

    def ids(self, batch: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(length)
        return torch.randint(self.base.config.vocab_size, (batch, length), generator=generator).to(self.device)

    def model(self, peer: str, length: int, trained: bool) -> Any:
        model = copy.deepcopy(self.base)
        if peer.startswith("gates"):
            dmt.convert(model, policy="gate", delay=RECENT, sinks=SINKS, trainable="all")
            if peer != "gates, open":
                set_kept_share(model, self.ids(1, length), min(0.5, 2 * (ROWS - RECENT) / length))
        elif peer.startswith("window"):
            dmt.convert(model, policy="window", window=ROWS - SINKS, sinks=SINKS)
        else:
            model.set_attn_implementation("sdpa")
        if "compiled" in peer:
            compile_layers(model)
        return model.train(trained)

    def step(self, peer: str, batch: int, length: int) -> dict[str, Any]:
        model, ids = self.model(peer, length, trained=True), self.ids(batch, length)
        step, losses = generation.trainer(model, ids, 1e-6)
        with kernels(peer):
            found = generation.timed(step, self.repeats, self.device)
        return {**found, "losses": [loss.item() for loss in losses]}

    def prefill(self, peer: str, batch: int, length: int) -> dict[str, Any]:
        with kernels(peer):
            return generation.prefill(self.model(peer, length, trained=False), self.ids(batch, length), self.repeats)

    def decode(self, peer: str, batch: int, length: int) -> dict[str, Any]:
        import transformers

        model = self.model(peer, length, trained=False)
        if peer == "sdpa":
            cache, latest = transformers.DynamicCache(config=model.config), self.ids(batch, 1)
            shape = batch, model.config.num_key_value_heads, length, model.config.head_dim
            for layer in range(model.config.num_hidden_layers):
                cache.update(*(torch.randn(shape, device=self.device, dtype=model.dtype) for _ in range(2)), layer)
        else:
            cache = dmt.DynamicMaskCache(model.config) if peer.startswith("window") else \
                dmt.GatedCache(model.config, capacity=ROWS - RECENT - SINKS)
            latest = generation.filled(model, self.ids(batch, length), cache, 2**17 // batch)
        return generation.decode(model, cache, latest, peer.endswith("graph"), self.repeats)


def compile_layers(model: Any) -> None:
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, dynamic=False)


def set_kept_share(model: Any, ids: Tensor, share: float) -> None:
    """Let each gate keep this share of the tokens: random weights, and a quantile of the logits as bias."""
    def before(gate: Any, given: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            gate.proj.weight.normal_(std=1.0)  # large weights: hardly any gate is half open
            gate.proj.bias.zero_()
            x = torch.nn.functional.rms_norm(given[0].float(), given[0].shape[-1:], eps=1e-6)
            logits = gate.proj(x).flatten(0, 1)[-2**17:]
            place = max(1, round((1 - share) * len(logits)))
            gate.proj.bias.copy_(-logits.kthvalue(place, 0).values - gate.offset / gate.gain)

    hooks = [gate.register_forward_pre_hook(before) for gate in retrofit.gates_of(model).values()]
    with torch.no_grad():
        model.eval().model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()


@contextmanager
def kernels(peer: str) -> Iterator[None]:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if peer == "flash" and measure.on_gpu() else nullcontext():
        yield


@torch.no_grad()
def check(bench: Bench, own: dict[str, Any]) -> dict[str, Any]:
    ids, began = bench.ids(1, own["length"]), time.perf_counter()

    def hidden(model: Any) -> Tensor:
        return model.model(input_ids=ids, use_cache=False).last_hidden_state

    expected = hidden(bench.model("sdpa", own["length"], False))
    model = bench.model("gates, open", own["length"], False)
    off = {"open": apart(hidden(model), expected)}
    compile_layers(model)
    off["open, compiled"] = apart(hidden(model), expected)

    model, kept = bench.model("gates", own["length"], False).float(), []  # rounding to 16 bits closes and opens gates
    hooks = [gate.register_forward_hook(lambda _, given, found: kept.append(found.kept.mean().item()))
             for gate in retrofit.gates_of(model).values()]
    eager = hidden(model)
    for hook in hooks:
        hook.remove()
    compile_layers(model)
    off["compiled"] = apart(hidden(model), eager)
    share, target = sum(kept) / len(kept), min(0.5, 2 * (ROWS - RECENT) / own["length"])
    if not max(off.values()) <= NEAR or not abs(share - target) <= 0.1 * target:
        raise RuntimeError(f"hidden states are off by {off} of their norm, allowed {NEAR}; gates keep {share:.4f} of "
                           f"{target:.4f}")
    return {"off": off, "share": share, "ms": 1e3 * (time.perf_counter() - began)}


def apart(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).float().norm() / expected.float().norm()).item()


def measured(bench: Bench, own: dict[str, Any], clock: Clock) -> list[Row]:
    clock.check()
    began = time.perf_counter()
    part, peer = own["part"], own["peer"]
    if part == "check":
        found = check(bench, own)
    else:
        try:
            found = getattr(bench, part)(peer, own["batch"], own["length"])
        except (OutOfTime, AssertionError):
            raise
        except Exception as error:  # a peer that cannot run is a result too
            if peer not in ("sdpa", "flash") and "memory" not in str(error).lower():
                raise
            found = {"ms": None, "note": why_not(error)}
    measure.free_memory()
    return [{"settings": own, **found, "seconds": round(time.perf_counter() - began, 2)}]


def runs(args: argparse.Namespace) -> list[Run]:
    device, tiny = device_of(args), args.size == "tiny"
    bench = Bench("tiny" if tiny else "smollm2", device, args.repeats)
    lengths = args.lengths or ([200] if tiny else [8192, 32768, 131072])
    chosen = []
    for part in args.part or PARTS:
        if part == "check":
            chosen.append({"part": "check", "length": lengths[0], "batch": 1, "peer": "gates"})
            continue
        for length in lengths if part != "step" else [n for n in lengths if n <= 32768]:
            for batch in (1,) if part == "step" else args.batches or ([2] if tiny else [1, 16]):
                for peer in PEERS[part]:
                    if not peer.endswith("graph") or device.startswith("cuda"):
                        chosen.append({"part": part, "length": length, "batch": batch, "peer": peer})
    return [Run(" ".join(map(str, own.values())), [own], lambda clock, own=own: measured(bench, own, clock))
            for own in chosen]


def add_options(options: argparse.ArgumentParser) -> None:
    add_run_options(options, PARTS)
    options.add_argument("--lengths", type=listed(None, int), help="default: 8192, 32768 and 131072")
    options.add_argument("--batches", type=listed(None, int), help="default: 1 and 16")
    options.add_argument("--repeats", type=int, default=5)


def run(args: argparse.Namespace) -> int:
    at_least_1(args, "repeats")
    args.out = args.out or str(folders.output(None))
    status = run_all("retrofit_speed", args, __doc__, runs)
    rows = folders.read("retrofit_speed.json", args.out)["rows"]
    return status if same_tokens(rows) else 1


def same_tokens(rows: list[Row]) -> bool:
    """Whether graphs decode the same tokens as eager calls, as far as both have run."""
    by: dict[tuple[Any, ...], dict[str, list[int]]] = {}
    for row in rows:
        if "tokens" in row:
            one = row["settings"]
            by.setdefault((one["length"], one["batch"]), {})[one["peer"]] = row["tokens"]
    return all(a == b for found in by.values() if "gates, graph" in found and "gates" in found
               for a, b in zip(found["gates"], found["gates, graph"]))
