"""What a pretrained model predicts when a cache keeps only some rows, under any policy, in one pass over the text.

Every policy becomes an ``IntervalMask`` of each layer, from what the layer computes under the masks of those below it.
**Kept rows** are the keys that a query of a kv head sees, including its own: sinks, recent keys and the best of the
older ones. A mask under which a query sees more raises an error. Either every kv head has the same number, or budgets
are *adaptive*: each head of each layer has its own, with that mean.

    window      the first ``SINKS`` and the last keys
    scores      the first ``SINKS``, the last ``RECENT`` and, of the older ones, those with the best scores: random,
                learned from the layer's input or the value, the logits of gates, or an oracle's
    oracle      the largest attention that the key will get, from queries at least ``RECENT`` later: it sees the future
    h2o         ``policies.evictions``, half of the rows recent
    snapkv      ``policies.snapkv`` at the end of a prompt, which itself is read with full attention; the rows of what
                follows count, so that it begins with fewer
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cupy_dma import IntervalMask, policies
from cupy_dma.arrays import library_named
from cupy_dma.cache.storage import fake_quantized
from cupy_dma.retrofit.budgets import above_one_threshold
from cupy_dma.torch import RetentionGate, attention

NAME = "kept_rows"  # of the attention implementation
SINKS, RECENT, VOTES = 4, 64, 32


@dataclass
class Call:
    """What a policy sees of a layer."""

    layer: int
    query: Tensor  # (B, N, H, D)
    key: Tensor  # (B, N, Hkv, D)
    value: Tensor
    x: Tensor  # (B, N, width): the layer's input


Attend = Callable[[Call], IntervalMask | None]  # None: full attention
Score = Callable[[Call], Tensor]  # (B, Hkv, N): the higher, the longer a key stays
Rows = int | Tensor  # of every kv head; int64 (layers, Hkv)


# ---- policies -------------------------------------------------------------------------------------------------------
def best(scores: Tensor, rows: Rows, recent: int = RECENT) -> IntervalMask:
    """Sinks, recent keys, and the best of those that are no longer recent: ``rows``, an int or ``(Hkv,)``, in all. A
    key joins the contest when it is ``recent`` positions old, so that no row is spent twice."""
    ranked = scores.detach().float().contiguous().clone()
    ranked[..., :SINKS] = torch.finfo(torch.float32).max
    window = rows - recent if isinstance(rows, int) else tuple((rows - recent).tolist())
    stop = IntervalMask.top_w(ranked, window).stop.long() + recent
    return IntervalMask.from_stop(stop, window=rows if isinstance(rows, int) else None)


def budgets_by_threshold(scores: Tensor, rows: int) -> Tensor:
    """The rows of each head, on average at most ``rows``, given the scores of texts ``(layers, B, Hkv, N)``: one
    threshold for all scores says how many older keys a head keeps."""
    older = scores[..., SINKS:-RECENT].transpose(1, 2).flatten(2)  # (layers, Hkv, B * older keys)
    most = (rows - SINKS - RECENT) * older[..., 0].numel() * scores.shape[1]
    return torch.stack(above_one_threshold(list(older), most)) // scores.shape[1] + SINKS + RECENT


def probabilities(call: Call, chunk: int = 512) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For chunks of queries of each row of the batch: the row, how far each query is from each key ``(chunk, N)``, and
    the logarithms of the layer's attention without a mask ``(Hkv, G, chunk, N)``."""
    (batch, n, heads, size), kv_heads = call.query.shape, call.key.shape[2]
    place = torch.arange(n, device=call.query.device)
    for b in range(batch):
        key = call.key[b].permute(1, 2, 0)[:, None]  # (Hkv, 1, D, N)
        for first in range(0, n, chunk):
            query = call.query[b, first:first + chunk].unflatten(1, (kv_heads, heads // kv_heads)).permute(1, 2, 0, 3)
            logits = (query @ key).float() * size**-0.5
            apart = place[first:first + chunk, None] - place
            logits.masked_fill_(apart < 0, -torch.inf)
            yield b, apart, logits.sub_(logits.logsumexp(-1, keepdim=True))


def future_attention(call: Call, recent: int = RECENT, chunk: int = 512) -> Tensor:
    """``(B, Hkv, N)``: log of the largest probability that a key gets in any head, from queries ``recent`` or more
    later; -inf where there are none."""
    batch, n, kv_heads = call.key.shape[:3]
    found = call.query.new_full((batch, kv_heads, n), -torch.inf, dtype=torch.float32)
    for b, apart, logits in probabilities(call, chunk):
        torch.maximum(found[b], logits.masked_fill_(apart < recent, -torch.inf).amax((1, 2)), out=found[b])
    return found


def lost_attention(call: Call, masks: list[IntervalMask], chunk: int = 512) -> Tensor:
    """``(masks, Hkv)``: how much of all attention goes to keys that each mask hides. Every key begins at its
    position."""
    stops = torch.stack([torch.as_tensor(mask.stop) for mask in masks])  # (masks, B, Hkv, N)
    place = torch.arange(stops.shape[-1], device=stops.device)
    found = torch.zeros(stops.shape[0], stops.shape[2], device=stops.device)
    for b, apart, logits in probabilities(call, chunk):
        p, query = logits.exp_().sum(1), (apart + place)[:, :1]
        for i, stop in enumerate(stops[:, b]):
            found[i] += (p * (query >= stop[:, None])).sum((1, 2))
    return found


def aged(score: Score, slopes: Tensor) -> Score:
    """Scores that favour newer keys: in units of each head's deviation, ``slopes (layers, Hkv)`` more for each
    position. Ranks of any two keys stay as they are, so a key that is dropped never returns."""
    def found(call: Call) -> Tensor:
        raw = score(call)
        place = torch.arange(raw.shape[-1], device=raw.device)
        return raw / raw.std((0, 2), keepdim=True) + slopes[call.layer][None, :, None] * place

    return found


def scored_by(gates: list[RetentionGate], of: str) -> Score:
    """The logits of gates, which read the ``"input"`` or the ``"value"`` of a layer."""
    def score(call: Call) -> Tensor:
        x = call.x if of == "input" else call.value.flatten(2)
        return gates[call.layer].proj(F.rms_norm(x.float(), x.shape[-1:], eps=1e-6)).mT.float()

    return score


def random_scores(seed: int) -> Score:
    def score(call: Call) -> Tensor:
        generator = torch.Generator(call.key.device).manual_seed(1000 * seed + call.layer)
        shape = call.key.shape[0], call.key.shape[2], call.key.shape[1]
        return torch.rand(shape, generator=generator, device=call.key.device)

    return score


def of_layer(rows: Rows, layer: int) -> Rows:
    return rows if isinstance(rows, int) else rows[layer]


def attend_by(kind: str, rows: Rows, score: Score | None = None, following: int = 0) -> Attend:
    """A policy at so many kept rows, which only scores can share out. ``following``: tokens after the prompt, for
    snapkv."""
    def attend(call: Call) -> IntervalMask | None:
        n = call.key.shape[1]
        if kind == "full":
            return None
        if score is not None:
            return best(score(call), of_layer(rows, call.layer))
        assert isinstance(rows, int)
        if kind == "window":
            return (IntervalMask.sinks(n, SINKS, like=call.key)
                    | IntervalMask.sliding_window(n, rows - SINKS, like=call.key))
        if kind == "h2o":
            stop = policies.evictions(call.query, call.key, rows, "h2o", recent=rows // 2)
            return IntervalMask.from_stop(stop, window=rows)
        if kind == "snapkv":
            stop = policies.snapkv(call.query, call.key, rows - following, n - following, window=VOTES)
            return IntervalMask.from_stop(stop)
        raise ValueError(f"kind must be full, window, h2o, snapkv or have scores, got {kind}")

    return attend


def most_seen(mask: IntervalMask, first: int = 0) -> Tensor:
    """``(1|Hkv,)``: the largest number of keys that a query sees, from position ``first`` on. Every key begins at its
    position."""
    stop = torch.as_tensor(mask.stop).expand(*mask.shape).long()
    n = stop.shape[-1]
    place = torch.arange(n, device=stop.device)
    gone = torch.zeros(*stop.shape[:-1], n + 1, dtype=torch.long, device=stop.device)
    gone.scatter_add_(-1, stop.clamp(max=n).maximum(place), torch.ones_like(stop))
    return (place + 1 - gone[..., :n].cumsum(-1))[..., first:].amax((0, -1))


def within(attend: Attend, rows: Rows, first: int = 0) -> Attend:
    """The same, checked. ``rows`` 0: no limit."""
    def checked(call: Call) -> IntervalMask | None:
        mask, most = attend(call), of_layer(rows, call.layer)
        unlimited = isinstance(most, int) and not most
        if not unlimited and (mask is None or bool((most_seen(mask, first) > most).any())):
            seen = call.key.shape[1] if mask is None else most_seen(mask, first).tolist()
            raise RuntimeError(f"layer {call.layer}: a query sees {seen} keys of {most}")
        return mask

    return checked


# ---- models ---------------------------------------------------------------------------------------------------------
@contextmanager
def attending(model: Any, attend: Attend, storage: str | None = None) -> Iterator[None]:
    """The model's layers attend under ``attend``'s masks, with ``storage`` to rows that a cache has rounded."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None,
                **_: Any) -> tuple[Tensor, None]:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if storage is not None:
            library, dtype = library_named("torch"), str(key.dtype).removeprefix("torch.")
            key, value = (fake_quantized(library, x, storage, dtype) for x in (key, value))
        found = attend(Call(module.layer_idx, query, key, value, module.input_of_call))
        return attention(query, key, value, mask=found, causal=found is None, scale=scaling), None

    def note(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        module.input_of_call = given[0] if given else named["hidden_states"]

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    modules = [layer.self_attn for layer in model.model.layers]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for hook, module in zip(hooks, modules):
            hook.remove()
            module.input_of_call = None


@torch.no_grad()
def states(model: Any, tokens: Tensor, attend: Attend | None, batch: int = 4, storage: str | None = None) -> Tensor:
    """The last hidden states ``(B, N, width)`` of ``tokens (B, N + 1)``, all but the last. ``attend`` None: as the
    model itself attends."""
    with nullcontext() if attend is None else attending(model, attend, storage):
        return torch.cat([model.model(input_ids=part, use_cache=False).last_hidden_state
                          for part in tokens[:, :-1].split(batch)])


@torch.no_grad()
def nats(model: Any, hidden: Tensor, tokens: Tensor, chunk: int = 4096) -> Tensor:
    """``(B, N)`` losses of ``tokens (B, N + 1)``, all but the first."""
    parts = zip(hidden.flatten(0, 1).split(chunk), tokens[:, 1:].flatten().split(chunk))
    return torch.cat([F.cross_entropy(model.lm_head(h).float(), y, reduction="none") for h, y in parts]).view(
        len(tokens), -1)


@torch.no_grad()
def answered(model: Any, hidden: Tensor, tokens: Tensor, size: int) -> list[bool]:
    """Of each text, whether all of its last ``size`` tokens are the most probable ones."""
    return (model.lm_head(hidden[:, -size:]).argmax(-1) == tokens[:, -size:]).all(1).tolist()


# ---- needles --------------------------------------------------------------------------------------------------------
SAID, ASKED = "\n\nThe secret code of {} is {}.\n\n", "\n\nQuestion: What is the secret code of {}?\n\n" \
    "Answer: The secret code of {} is"
NAMES = ("Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Oslo", "Dublin", "Lisbon", "Athens", "Prague",
         "Warsaw", "Cairo", "Tokyo", "Delhi", "Sydney")
DIGITS = 5


def contexts(hay: np.ndarray, tokenizer: Any, length: int, depth: float, count: int, seed: int) -> tuple[Tensor, int]:
    """``(count, length)`` texts that end with the digits of a code, said at ``depth`` (0 to 1) of what comes before
    the question, and how many tokens the digits are."""
    rng = np.random.default_rng(seed)
    rows, sizes = [], set()
    for i in range(count):
        name, code = NAMES[i % len(NAMES)], "".join(map(str, rng.integers(0, 10, DIGITS)))
        said, asked, answer = (tokenizer(text, add_special_tokens=False).input_ids for text in (
            SAID.format(name, code), ASKED.format(name, name), " " + code))
        sizes.add(len(answer))
        room = length - len(said) - len(asked) - len(answer)
        if room < 0 or room > len(hay):
            raise ValueError(f"length must leave room for {len(hay)} tokens of hay or fewer, got {length}")
        begin, at = int(rng.integers(0, len(hay) - room + 1)), round(depth * room)
        straw = hay[begin:begin + room].tolist()
        rows.append([*straw[:at], *said, *straw[at:], *asked, *answer])
    if len(sizes) > 1:
        raise ValueError(f"tokenizer must give all codes of {DIGITS} digits as many tokens, got {sorted(sizes)}")
    return torch.tensor(rows), sizes.pop()
