"""How many keys each kv head needs."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from cupy_dma import checks
from cupy_dma.retrofit.distillation import gates_of


@torch.no_grad()
def capacities(model: nn.Module, batches: Iterable[Tensor], rows: int) -> list[list[int]]:
    """Share out a number of rows among the kv heads of a model with trained gates.

    Heads differ: few of them need many far keys. One threshold for the logits of all gates decides how many each may
    keep, as many as it has open keys above it in these texts. The result is a ``capacity`` for
    ``cupy_dma.transformers.GatedCache``, and for ``convert``.

    Parameters
    ----------
    model
        Of transformers, converted with ``policy="gate"``.
    batches : iterable of int64 Tensors ``(B, N)``
        Texts without padding, as long as those that the model will read.
    rows : int
        Rows of a kv head (``delay + sinks + capacity``), the mean over all heads of all layers.

    Returns
    -------
    list of lists of ints, ``(layers with a gate, Hkv)``
        At least 1 each. The mean of ``delay + sinks + capacity`` is at most ``rows``.

    Raises
    ------
    TypeError, ValueError
        The model has no gates, ``rows`` leaves no key beyond ``delay + sinks``, or there are no texts longer than that.
    """
    gates = list(gates_of(model).values())
    if not gates:
        raise ValueError("model must be converted with policy='gate', got one without gates")
    rows, heads = checks.whole(rows, "rows", 1), [gate.kv_heads for gate in gates]
    least = sum(number * (gate.delay + gate.sinks + 1) for number, gate in zip(heads, gates))
    if rows * sum(heads) < least:
        raise ValueError(f"rows must be at least delay + sinks + 1, {-(-least // sum(heads))} on average, got {rows}")
    older: list[list[Tensor]] = [[] for _ in gates]  # logits (Hkv, keys) that compete

    def look(number: int) -> Any:
        def hook(gate: Any, given: tuple[Any, ...], named: dict[str, Any], _: Any) -> None:
            logits = gate.ranks(given[0] if given else named["x"])
            older[number].append(logits[..., gate.sinks:logits.shape[2] - gate.delay].transpose(0, 1).flatten(1))
        return hook

    training, texts, base = model.training, 0, getattr(model, "base_model", model)
    device = next(model.parameters()).device
    hooks = [gate.register_forward_hook(look(i), with_kwargs=True) for i, gate in enumerate(gates)]
    try:
        model.eval()
        for batch in batches:
            if not isinstance(batch, Tensor) or batch.ndim != 2:
                raise TypeError(f"batches must be Tensors (B, N), got {type(batch).__name__} "
                                f"{tuple(getattr(batch, 'shape', ()))}")
            if batch.shape[1] <= max(gate.delay + gate.sinks for gate in gates):
                raise ValueError(f"batches must hold texts longer than delay + sinks, got {batch.shape[1]} tokens")
            base(input_ids=batch.to(device), use_cache=False)
            texts += batch.shape[0]
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if not texts:
        raise ValueError("batches must hold at least one text, got none")
    logits = [torch.cat(own, 1) for own in older]
    free = (rows * sum(heads) - least) * texts  # keys beyond the one of each head
    return [(count // texts + 1).tolist() for count in above_one_threshold(logits, free)]


def above_one_threshold(scores: list[Tensor], most: int) -> list[Tensor]:
    """``(Hkv,)`` each: how many of ``scores (Hkv, keys)`` lie above the one threshold that ``most`` of all do."""
    every = torch.cat([own.flatten() for own in scores])
    threshold = every.topk(most + 1).values[-1] if most < len(every) else every.new_tensor(-torch.inf)
    return [(own > threshold).sum(1) for own in scores]
