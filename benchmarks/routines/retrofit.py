"""How much does a pretrained model lose if its cache keeps few rows, and how much do trained gates win back?

Model: SmolLM2-135M-Instruct (GGUF Q4_1, unpacked to bfloat16): 30 layers, 9/3 heads of 64, context 8192. Text and code
are split by documents (harness/corpus.py, which also says how to make ``--data`` for a machine without a network).

Each policy (harness/kept_rows.py) is measured at several numbers of kept rows, ``ROWS``. A row is a key that a query of
a kv head sees, including sinks, recent keys and its own. Policies with scores keep 4 sinks, 64 recent keys, and the
best of the older ones. ``shared``: adaptive head budgets. Heads have different numbers of rows, whose mean over all kv
heads and layers is as stated; one score threshold, found on ``TRIALS`` training pieces, sets them.

    plain     full attention, also with 8-bit rows (``int8``, ``fp8``); a window with sinks; random scores (three
              seeds); an oracle that scores keys by their largest future attention; SnapKV, which prunes the prompt
              after full attention has read it, so that only the ``following`` tokens are measured
    h2o       H2O, simulated token by token
    scores    scores of the layer's input and of its value, trained by regression on the logarithm of the oracle's (one
              hidden layer, AdamW)
    aged      scores of the input plus a bonus for newer keys. Each kv head has its own slope, from ``SLOPES``: the one
              that hides the least attention in ``TRIALS`` training pieces (0: no bonus, 1: a window)
    gates     ``cupy_dma.retrofit.train`` with a frozen base. Gates start open; their delay is the number of recent
              keys. The target of the kept share falls until the last step, where 256 rows are left on average; the
              budget loss has weight 1, as in DMS, and about 390 rows are left in fact
    enforced  as gates, with the defaults of ``train``: weight ``WEIGHT``, and the final target for the last quarter of
              the steps
    longer    as enforced, with ``LONGER`` times the steps
    warm      as gates, but starting from the scores of the layer's input (same seed) instead of open
    tuned     as gates, with the base trained too (float32, bfloat16 autocast); the teacher is the original model

Training sees one piece of ``length`` tokens per step, for 256 rows, with three seeds. Other numbers of rows use the
same scores. Gates are ranked by their logits, so every policy keeps exactly as many rows. Scores and gates only select
keys here: nothing is added to the model's logits.

Each result has the nats per token of held-out documents by position, for text and for code; the nats of the last
``following`` tokens; and how many of ``needles`` hidden needles are found at each length and depth, by the most
probable digits. Compare with full attention. ``training`` has tokens, seconds and the curve.

Checks: no query sees more than the rows. In part ``check``, in float32, the loss of every token under full attention
and under the window equals that of torch's attention with a dense float mask, up to ``NEAR`` of the window's effect.
"""
import argparse
import copy
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import cupy_dma.transformers as dmt
from benchmarks.harness import corpus, kept_rows, measure
from benchmarks.harness.corpus import KINDS, Corpus
from benchmarks.harness.folders import ROOT
from benchmarks.harness.kept_rows import (
    RECENT,
    SINKS,
    Attend,
    Rows,
    Score,
    aged,
    attend_by,
    best,
    budgets_by_threshold,
    scored_by,
    within,
)
from benchmarks.harness.records import Clock, Row, Run, add_run_options, device_of, run_all
from cupy_dma import retrofit
from cupy_dma.cache.state import CODES
from cupy_dma.torch import RetentionGate

PARTS = ("check", "plain", "h2o", "scores", "aged", "gates", "enforced", "longer", "warm", "tuned")
ENFORCED, WEIGHT, LONGER = ("enforced", "longer"), 4.0, 3  # the weight of the budget's loss; times the steps
SLOPES, TRIALS = (0.0, *(2.0**-n for n in range(14, 4, -1)), 1.0), 2
SEEDS, DEPTHS, NEAR = (0, 1, 2), (0.0, 0.25, 0.5, 0.75, 1.0), 0.05
EVERYTHING = ("full", *CODES)  # kinds that keep all keys
DATA = ROOT / "build" / "retrofit"


@dataclass(frozen=True)
class Task:
    """What all numbers depend on; of a policy only the last line."""

    length: int = 8192
    documents: int = 16  # of each kind
    needles: int = 8  # of each depth
    least: int = 2048  # length of the shorter ones
    following: int = 64  # tokens after a prompt
    steps: int = 400
    hidden: int = 64  # of scores, and of gates that start from them; others are linear
    rate: float = 1e-4  # of gates; DMS has 3e-5 for a width of 4096
    ROWS = (128, 256, 512, 1024)
    TRAINED = 256

    @property
    def edges(self) -> list[int]:
        return [0, *(n for n in (256, 512, 1024, 2048, 4096) if n < self.length), self.length]

    @property
    def ratio(self) -> float:
        """That leaves ``TRAINED`` rows on average over the length."""
        return (self.length - RECENT) / 2 / (self.TRAINED - RECENT)


class Tiny(Task):
    ROWS = (80, 100)
    TRAINED = 80


TINY = Tiny(length=256, documents=2, needles=1, least=192, following=8, steps=3, hidden=8)


@dataclass
class Bench:
    """The model, the tokens and where the results of training are kept."""

    task: Task
    model: Any
    tokenizer: Any
    data: Corpus
    folder: Path
    device: str

    def held_out(self, kind: str) -> Tensor:
        tokens = self.data.held_out[kind][:self.task.documents, :self.task.length + 1]
        return torch.from_numpy(tokens.astype(np.int64)).to(self.device)

    def pieces(self, seed: int, steps: int) -> Iterator[Tensor]:
        """A piece of training tokens for each step, the same in every run."""
        rng = np.random.default_rng(1000 + seed)
        for first in rng.integers(0, len(self.data.training) - self.task.length, steps):
            piece = self.data.training[first:first + self.task.length].astype(np.int64)
            yield torch.from_numpy(piece)[None].to(self.device)

    def settings(self, kind: str, rows: int, seed: int, **training: Any) -> dict[str, Any]:
        return {"kind": kind, "rows": rows, "seed": seed, **asdict(self.task), **training,
                "text": self.data.checksum}


# ---- evaluation -----------------------------------------------------------------------------------------------------
def evaluated(bench: Bench, model: Any, kind: str, rows: Rows, clock: Clock, score: Score | None = None) -> Row:
    """What a policy predicts of held-out documents and of needles."""
    task, began = bench.task, time.perf_counter()
    documents = {name: bench.held_out(name) for name in KINDS}
    needles, size = {}, 0
    for length in (task.least, task.length):
        texts, sizes = zip(*(kept_rows.contexts(bench.data.hay, bench.tokenizer, length + 1, depth, task.needles,
                                                seed=round(1000 * depth)) for depth in DEPTHS))
        needles[length], size = torch.cat(texts).to(bench.device), sizes[0]

    def states(tokens: Tensor, following: int, batch: int = 4) -> Tensor:
        clock.check()
        first = tokens.shape[1] - 1 - following if kind == "snapkv" else 0
        whole, storage = kind in EVERYTHING, kind if kind in CODES else None
        attend = within(attend_by("full" if whole else kind, rows, score, following), 0 if whole else rows, first)
        return kept_rows.states(model, tokens, attend, batch, storage)

    groups = [(tokens, task.following) for tokens in documents.values()] + [(needles[task.length], size)]
    if kind == "h2o":  # a step for each token, whatever the batch
        whole = torch.cat([tokens for tokens, _ in groups])
        hidden = states(whole, 0, len(whole)).split([len(tokens) for tokens, _ in groups])
    else:
        hidden = [states(*group) for group in groups]
    found: Row = {"edges": task.edges, "by_position": {}, "ending": {}, "needles": []}
    for (name, tokens), own in zip(documents.items(), hidden):
        loss = kept_rows.nats(model, own, tokens).mean(0)
        found["ending"][name] = round(loss[-task.following:].mean().item(), 4)
        if kind != "snapkv":  # whose prompt is read with full attention
            found["by_position"][name] = [round(loss[a:b].mean().item(), 4)
                                          for a, b in itertools.pairwise(task.edges)]
    short = states(needles[task.least], size, len(needles[task.least]))
    for (length, tokens), own in zip(needles.items(), (short, hidden[-1])):
        right = kept_rows.answered(model, own, tokens, size)
        for i, depth in enumerate(DEPTHS):
            count = sum(right[i * task.needles:(i + 1) * task.needles])
            found["needles"].append({"length": length, "depth": depth, "found": count})
    return {**found, "seconds": round(time.perf_counter() - began, 2)}


def dense_window(n: int, rows: int, device: str, dtype: torch.dtype) -> Tensor:
    """Sinks and a window as a mask ``(1, 1, n, n)`` that is added to the logits."""
    query, key = torch.arange(n, device=device)[:, None], torch.arange(n, device=device)
    seen = (key <= query) & ((key < SINKS) | (query - key < rows - SINKS))
    return torch.zeros(n, n, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)[None, None]


@torch.no_grad()
def check(bench: Bench, own: dict[str, Any], clock: Clock) -> list[Row]:
    """The losses of a document's tokens under full attention and a window, ours and torch's."""
    model, rows, began = copy.deepcopy(bench.model).float(), own["rows"], time.perf_counter()
    tokens = bench.held_out("code")[:1, :bench.task.least + 1]
    n = tokens.shape[1] - 1
    model.set_attn_implementation("sdpa")

    def losses(attend: Attend | None) -> Tensor:
        return kept_rows.nats(model, kept_rows.states(model, tokens, attend), tokens)

    dense = {"full": losses(None)}
    mask = dense_window(n, rows, bench.device, model.dtype)
    logits = model(input_ids=tokens[:, :-1], attention_mask=mask, use_cache=False).logits
    dense["window"] = F.cross_entropy(logits[0], tokens[0, 1:], reduction="none")[None]
    effect = (dense["full"] - dense["window"]).abs().mean().item()
    apart = {}
    for kind, expected in dense.items():
        clock.check()
        ours = losses(within(attend_by(kind, rows), rows if kind == "window" else 0))
        apart[kind] = (ours - expected).abs().mean().item()
    if not all(x <= NEAR * effect for x in apart.values()):
        raise RuntimeError(f"losses differ from those of a dense mask by {apart}, allowed: {NEAR} of the window's "
                           f"effect, {effect:.3g}")
    return [{"settings": own, "apart": apart, "effect": effect, "seconds": round(time.perf_counter() - began, 2)}]


def adaptive_budgets(bench: Bench, model: Any, seed: int, score: Score, clock: Clock) -> dict[int, Tensor]:
    """For each number of rows those of each head ``(layers, Hkv)``."""
    found: list[list[Tensor]] = []

    def look(call: kept_rows.Call) -> None:
        clock.check()
        found[-1].append(score(call)[0])

    for piece in bench.pieces(100 + seed, TRIALS):
        found.append([])
        with torch.no_grad(), kept_rows.attending(model, look):
            model.model(input_ids=piece, use_cache=False)
    scores = torch.stack([torch.stack(own) for own in found], 1)
    return {rows: budgets_by_threshold(scores, rows) for rows in bench.task.ROWS}


def evaluation(bench: Bench, own: dict[str, Any], score: Score | None, clock: Clock) -> list[Row]:
    measure.free_memory()
    kind, rows = own["kind"] if score is None else "scores", own["rows"]
    if own.get("shared"):
        assert score is not None
        rows = adaptive_budgets(bench, bench.model, own["seed"], score, clock)[rows]
    return [{"settings": own, **heads_of(rows), **evaluated(bench, bench.model, kind, rows, clock, score)}]


def heads_of(rows: Rows) -> Row:
    return {} if isinstance(rows, int) else {"heads": rows.tolist()}


# ---- training -------------------------------------------------------------------------------------------------------
def regressed(bench: Bench, seed: int, clock: Clock) -> tuple[dict[str, list[RetentionGate]], dict[str, Any]]:
    """Scores of inputs and of values, as the ``proj`` of gates: their mean squared distance from the logarithm of the
    largest future attention, of all layers in one pass over each piece."""
    task, model, path = bench.task, bench.model, bench.folder / f"scores-{seed}.pt"
    torch.manual_seed(seed)
    config = model.config
    size = {"input": config.hidden_size,
            "value": config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)}
    gates = {of: torch.nn.ModuleList(RetentionGate(width, config.num_key_value_heads, hidden=task.hidden)
                                     for _ in model.model.layers).to(bench.device) for of, width in size.items()}
    if path.exists():
        saved = torch.load(path, map_location=bench.device, weights_only=True)
        for of, own in gates.items():
            own.load_state_dict(saved[of])
        return gates, saved["training"]
    optimizer = torch.optim.AdamW([p for own in gates.values() for p in own.parameters()], 1e-3, weight_decay=0.0)
    losses: dict[str, list[Tensor]] = {of: [] for of in gates}

    def learn(call: kept_rows.Call) -> None:
        truth = kept_rows.future_attention(call)[..., SINKS:-RECENT].clamp(min=-20)
        for of, own in gates.items():
            with torch.enable_grad():
                loss = (scored_by(own, of)(call)[..., SINKS:-RECENT] - truth).square().mean()
                loss.backward()
            losses[of].append(loss.detach())

    began, layers = time.perf_counter(), len(model.model.layers)
    pieces = bench.pieces(seed, task.steps)
    for step in range(task.steps):
        clock.check()
        with torch.no_grad(), kept_rows.attending(model, learn):
            model.model(input_ids=next(pieces), use_cache=False)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, 2 * (1 - step / task.steps))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    training = {"tokens": task.steps * task.length, "seconds": round(time.perf_counter() - began, 2),
                "curve": {of: [round(x, 4) for x in torch.stack(found).view(-1, layers).mean(1).tolist()][::10]
                          for of, found in losses.items()}}
    bench.folder.mkdir(parents=True, exist_ok=True)
    torch.save({**{of: own.state_dict() for of, own in gates.items()}, "training": training}, path)
    return gates, training


def warmed(gates: list[RetentionGate], scores: list[RetentionGate]) -> None:
    """Start gates from scores: logits that spread by about 1 around where open gates start."""
    for gate, known in zip(gates, scores):
        gate.proj.load_state_dict(known.proj.state_dict())
        last = gate.proj[-1]
        with torch.no_grad():
            last.weight /= gate.gain
            last.bias.zero_()


def trained(bench: Bench, kind: str, seed: int, clock: Clock) -> tuple[Any, list[RetentionGate], dict[str, Any]]:
    """The model, the gates and the costs of a retrofit; resumes from its checkpoint."""
    task, began = bench.task, {"tokens": 0, "seconds": 0.0}
    steps = task.steps * (LONGER if kind == "longer" else 1)
    student = copy.deepcopy(bench.model)
    student.set_attn_implementation("sdpa")
    if kind == "tuned":
        student.float()
    dmt.convert(student, policy="gate", delay=RECENT, sinks=SINKS, hidden=task.hidden if kind == "warm" else None,
                trainable="all" if kind == "tuned" else "gate")
    gates = list(retrofit.gates_of(student).values())
    torch.manual_seed(seed)
    for gate in gates:
        gate.reset_parameters()
    if kind == "warm":
        scores, began = regressed(bench, seed, clock)
        warmed(gates, list(scores["input"]))
    options: dict[str, Any] = {"weight": WEIGHT} if kind in ENFORCED else {"weight": 1.0, "shrink": steps}
    if kind == "tuned":
        options |= {"trainable": "all", "teacher": bench.model.eval(), "autocast": torch.bfloat16}
    bench.folder.mkdir(parents=True, exist_ok=True)
    history = retrofit.train(student, bench.pieces(seed, steps), steps=steps, ratio=task.ratio, rate=task.rate,
                             checkpoint=bench.folder / f"{kind}-{seed}.pt", every=100, resume=True,
                             callback=lambda _: clock.check(), progress=False, **options)
    training = {"tokens": began["tokens"] + sum(log["tokens"] for log in history),
                "seconds": round(began["seconds"] + sum(log["seconds"] for log in history), 2),
                "curve": [{name: round(log[name], 4) for name in ("step", "kl", "kept", "target", "dropped")}
                          for log in history[::10]]}
    model = bench.model
    if kind == "tuned":
        model = copy.deepcopy(bench.model)
        own = student.state_dict()
        model.load_state_dict({name: own[name] for name in model.state_dict()})
    return model, gates, training


def slopes_of(bench: Bench, seed: int, score: Score, clock: Clock) -> dict[int, Tensor]:
    """For each number of rows the best slope ``(layers, Hkv)`` of ``aged`` scores."""
    model, task = bench.model, bench.task
    shape = len(task.ROWS), len(SLOPES), len(model.model.layers), model.config.num_key_value_heads
    lost = torch.zeros(shape, device=bench.device)

    def look(call: kept_rows.Call) -> None:
        clock.check()
        raw = score(call)
        own = [aged(lambda _: raw, torch.full(shape[2:], slope, device=bench.device))(call) for slope in SLOPES]
        for i, rows in enumerate(task.ROWS):
            lost[i, :, call.layer] += kept_rows.lost_attention(call, [best(one, rows) for one in own])

    for piece in bench.pieces(100 + seed, TRIALS):
        with torch.no_grad(), kept_rows.attending(model, look):
            model.model(input_ids=piece, use_cache=False)
    chosen = torch.tensor(SLOPES, device=bench.device)[lost.argmin(1)]
    return dict(zip(task.ROWS, chosen))


def training_of(bench: Bench, part: str, seed: int, own: list[dict[str, Any]], clock: Clock) -> list[Row]:
    """Train, then evaluate at every number of rows."""
    measure.free_memory()
    model, more = bench.model, {}
    if part in ("scores", "aged"):
        found, costs = regressed(bench, seed, clock)
        scores = {of: scored_by(list(gates), of) for of, gates in found.items()}
        if part == "aged":
            began = time.perf_counter()
            slopes = slopes_of(bench, seed, scores["input"], clock)
            costs = {**costs, "tokens": costs["tokens"] + TRIALS * bench.task.length,
                     "seconds": round(costs["seconds"] + time.perf_counter() - began, 2)}
            more = {rows: {"slopes": own.tolist()} for rows, own in slopes.items()}
    else:
        model, gates, costs = trained(bench, part, seed, clock)
        scores = {part: scored_by(gates, "input")}
    shares = {kind: adaptive_budgets(bench, model, seed, score, clock) for kind, score in scores.items()} \
        if any(one.get("shared") for one in own) else {}
    found = []
    for one in own:
        kind, rows = one["kind"], one["rows"]
        score = aged(scores["input"], slopes[rows]) if part == "aged" else scores[kind]
        each = shares[kind][rows] if one.get("shared") else rows
        found.append({"settings": one, "training": costs, **more.get(rows, {}), **heads_of(each),
                      **evaluated(bench, model, "scores", each, clock, score)})
        costs = {name: x for name, x in costs.items() if name != "curve"}  # the first row's is enough
    return found


# ---- runs -----------------------------------------------------------------------------------------------------------
def runs_of(part: str, bench: Bench) -> Iterator[tuple[str, list[dict[str, Any]], Callable[[Clock], list[Row]]]]:
    task = bench.task
    if part == "check":
        own = bench.settings("check", task.TRAINED, 0)
        yield "check", [own], lambda clock: check(bench, own, clock)
    elif part in ("plain", "h2o"):
        kinds: list[tuple[str, int, Score | None]] = [("h2o", 0, None)]
        shared: list[dict[str, Any]] = [{}, {"shared": True}]
        if part == "plain":
            kinds = [*((kind, 0, None) for kind in EVERYTHING), ("window", 0, None), ("snapkv", 0, None),
                     ("oracle", 0, kept_rows.future_attention),
                     *(("random", seed, kept_rows.random_scores(seed)) for seed in SEEDS)]
        for (kind, seed, score), how in itertools.product(kinds, shared):
            if how and kind != "oracle":
                continue
            for rows in (0,) if kind in EVERYTHING else task.ROWS:
                one = bench.settings(kind, rows, seed, **how)
                yield (f"{kind} {rows}", [one], lambda clock, one=one, score=score:
                       evaluation(bench, one, score, clock))
    else:
        for seed in SEEDS:
            kinds_of = ("input", "value") if part == "scores" else (part,)
            how_trained = {"trained": task.TRAINED, **({"weight": WEIGHT} if part in ENFORCED else {}),
                           **({"steps": LONGER * task.steps} if part == "longer" else {})}
            own_rows = [bench.settings(kind, rows, seed, **how_trained, **how) for kind in kinds_of
                        for how in ({}, {"shared": True})[:1 if part == "aged" else 2] for rows in task.ROWS]
            yield (f"{part}, seed {seed}", own_rows, lambda clock, seed=seed, own=own_rows:
                   training_of(bench, part, seed, own, clock))


def runs(args: argparse.Namespace) -> list[Run]:
    device = device_of(args)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model, tokenizer = corpus.pretrained(args.data, dtype, device)
    bench = Bench(TINY if args.size == "tiny" else Task(), model.requires_grad_(False), tokenizer,
                  corpus.load(args.data), args.models or args.data / "models", device)
    return [Run(name, settings, make) for part in args.part or PARTS for name, settings, make in runs_of(part, bench)]


def add_options(options: argparse.ArgumentParser) -> None:
    add_run_options(options, PARTS)
    options.add_argument("--data", type=Path, default=DATA, help="folder of model and tokens (harness/corpus.py)")
    options.add_argument("--models", type=Path, help="folder of trained gates (default: models in --data)")


def run(args: argparse.Namespace) -> int:
    return run_all("retrofit", args, __doc__, runs)
