"""Many requests on a few slots, in constant memory, each with the tokens that it would get alone.

    python examples/serve.py                      seconds on a CPU, with a small new Llama
    python examples/serve.py --device cuda --requests 200 --slots 32 --longest 20000 --window 512

Requests of all lengths arrive while others run; one is cancelled. Every finished request is then generated alone, by
``model.generate``. The exit status is 1 if a token differs, or if the cache has grown. On a GPU, attention multiplies
float32 in TF32, whose roundings may decide between nearly equal tokens.
"""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import cupy_dma.transformers as dmt

VOCABULARY = 512


def build(args: argparse.Namespace) -> Any:
    """A small Llama that selects keys by random scores; normally scores are trained."""
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, bos_token_id=None,
                         eos_token_id=None, pad_token_id=None, max_position_embeddings=2**20)
    model = dmt.convert(AutoModelForCausalLM.from_config(config), args.window, sinks=1, recent=args.window // 4)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.A, std=0.3)
    return model.eval().to(args.device)


def alone(model: Any, request: Any) -> list[int]:
    ids = torch.tensor([request.prompt_ids], device=model.device)
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens,
                          do_sample=False)
    return text[0, ids.shape[1]:].tolist()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Continuous batching on caches of constant size.")
    parser.add_argument("--requests", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument("--slots", type=int, default=4, help="concurrent requests (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=64, help="prompt tokens per step (default: %(default)s)")
    parser.add_argument("--window", type=int, default=32, help="keys kept by score (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=400, help="tokens of the longest prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=20, help="tokens to generate per request (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = build(args)
    batching = dmt.ContinuousBatching(model, slots=args.slots, chunk=args.chunk)
    memory, began = batching.memory_bytes, time.perf_counter()

    def arrive() -> Any:
        length = int(args.longest ** torch.rand(()).item())  # many short texts, a few long ones
        return batching.submit(torch.randint(VOCABULARY, (length,)), args.tokens)

    requests = [arrive() for _ in range(args.requests // 2)]
    tokens = 0
    for request, token in batching:
        tokens += token is not None
        if len(requests) < args.requests:
            requests.append(arrive())
        if request is requests[1] and len(request.generated_tokens) == 3:
            batching.cancel(request)
    seconds = time.perf_counter() - began
    done = [request for request in requests if request.error is None]
    wrong = [request.request_id for request in done if request.generated_tokens != alone(model, request)]
    lengths = [len(request.prompt_ids) for request in requests]
    print(f"{len(done)} of {len(requests)} requests of {min(lengths)} to {max(lengths)} tokens on {args.slots} slots: "
          f"{tokens / seconds:.0f} tokens per second")
    print(f"the cache takes {batching.memory_bytes / 1024:.0f} KiB, {memory / 1024:.0f} at first")
    print(f"the same tokens alone: {f'NOT of {wrong}' if wrong else 'yes'}")
    return int(bool(wrong) or batching.memory_bytes != memory)


if __name__ == "__main__":
    sys.exit(main())
