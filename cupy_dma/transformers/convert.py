"""Dynamic masks for any causal model of transformers, with one of three policies.

    top_w      the best keys by scores of their values or of the layer's input. All scores are equal at first, so with
               a window of at least the length the model's function is unchanged (specification, section 15)
    gate       keys whose gates stay open, and the last ones. All gates are open at first, so the model's function is
               unchanged (specification, section 16)
    window     the first and the last keys: no parameters, a baseline for the other two
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedModel

from cupy_dma import checks
from cupy_dma.calls.scores import FORMS, SOURCES
from cupy_dma.torch import RetentionGate
from cupy_dma.transformers.budgets import budgets, stored
from cupy_dma.transformers.converted import convert_modules, plans
from cupy_dma.transformers.layers import GATE, KEY, dynamic_layers
from cupy_dma.transformers.registration import register
from cupy_dma.transformers.served import self_attention

Budget: TypeAlias = int | Sequence[int] | Sequence[Sequence[int]]
OPTIONS = {"top_w": ("window", "sinks", "recent", "form", "scores"), "window": ("window", "sinks"),
           "gate": ("delay", "threshold", "sinks", "temperature", "hidden", "capacity")}


def convert(model: PreTrainedModel, window: Budget | None = None, *, policy: str = "top_w",
            layers: Iterable[int] | None = None, sinks: int | None = None, recent: int | None = None,
            form: str | None = None, scores: str | None = None, delay: int | None = None,
            threshold: float | None = None, hidden: int | None = None, temperature: float | None = None,
            capacity: Budget | None = None, trainable: str | None = None) -> PreTrainedModel:
    """Give a model dynamic masks, in place::

        convert(model, window=2048, sinks=4, recent=256, scores="input")
        convert(model, window=[4096, 512, 512, 4096], recent=256)       # four layers
        convert(model, policy="gate", delay=256, capacity=2048)

    Parameters
    ----------
    model
        A causal model of transformers, e.g. of ``AutoModelForCausalLM``. Its attention implementation becomes
        ``"cupy_dma"``.
    window : int, one int per layer, or for each layer one per kv head
        With ``"top_w"`` and ``"window"``: keys kept per query and kv head, the highest-scored or the last ones. Of
        several, there is one for each layer that is converted, in order; ``[[9, 4]]`` stands for 9 and 4 keys of two
        kv heads in every layer.
    policy
        ``"top_w"``, ``"gate"`` or ``"window"``; it determines which of the other arguments are allowed.
    layers : ints, optional
        Which layers to convert; by default all but those with a sliding window or chunks of their own.
    sinks : int
        First tokens of each sequence that are kept too; by default none with ``"top_w"``, otherwise 4.
    recent : int
        With ``"top_w"``: last tokens that are kept too, by default none.
    scores
        With ``"top_w"``: ``"value"``, the default, or ``"input"``: scores are a linear function of the attention
        module's input, ``hidden_states``, from which they predict better what the model will need.
    form
        With ``"top_w"``: of the scores of values; see ``cupy_dma.key_scores``. ``"linear"`` scores are 0 at first,
        ``"exp"`` (the default) scores are 1.
    delay, threshold, hidden, temperature
        With ``"gate"``: as for ``cupy_dma.torch.RetentionGate``.
    capacity : as ``window``
        With ``"gate"``: the most open keys that a kv head keeps in evaluation, those with the highest logits, besides
        the last ``delay`` and the sinks. A forward pass and the ``GatedCache`` of ``generate`` keep to it. By default
        there is no bound.
    trainable
        With ``"gate"``: ``"gate"``, the default, leaves ``requires_grad`` set on the gates only, ``"all"`` does not
        change it.

    Returns
    -------
    The model. ``config.dynamic_mask`` says which layers were converted, and how. Each of their attention modules has
    new parameters: with ``"top_w"`` ``A (Hkv,)``, zeros, and ``dt_proj.weight (Hkv, Hkv * D)``, drawn as the model
    draws its own, or ``score_proj.weight (Hkv, width)``, zeros; with ``"gate"`` a ``RetentionGate``,
    ``retention_gate``, which reads the module's ``hidden_states``; with ``"window"`` none.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or value, does not belong to the policy, or the model cannot have dynamic masks:
        it is converted already, is not causal, or has an attention that they do not fit. Nothing is changed then.

    Notes
    -----
    ``save_pretrained`` and ``from_pretrained`` keep the masks, provided ``cupy_dma.transformers.register()`` has been
    called before ``from_pretrained``; the loaded parameters all require gradients.

    ``"top_w"``: while ``A = 0``, only ``A`` gets a gradient, not ``dt_proj``, and of the equal scores the newest win:
    the model sees the last ``window`` keys. After the first training step the selection is nearly unrelated to what the
    model needs, so keep ``recent`` keys too, unless the window is long.

    With ``scores="input"`` the same holds for ``score_proj``, which learns from the first step on. It is float32 or
    float64, whatever the model's type, and so are gates. Caches other than a ``DynamicMaskCache`` raise if they contain
    earlier keys, whose scores they do not store.

    ``"gate"``: ``cupy_dma.retrofit`` trains the gates.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a PreTrainedModel of transformers, got {type(model).__name__}")
    config = model.config.get_text_config(decoder=True)
    if dynamic_layers(config) or getattr(config, "model_type", None) == "doge":
        raise ValueError(f"model has dynamic masks already: {type(model).__name__}")
    given = {"window": window, "sinks": sinks, "recent": recent, "form": form, "scores": scores, "delay": delay,
             "threshold": threshold, "hidden": hidden, "temperature": temperature, "capacity": capacity}
    found = self_attention(model)
    how = _options(policy, {name: value for name, value in given.items() if value is not None})
    if trainable is not None:
        checks.choice(trainable, "trainable", ("gate", "all"))
        if policy != "gate":
            raise ValueError(f"trainable needs policy='gate', got policy={policy!r}")
    layers = None if layers is None else list(layers)
    chosen = _chosen(layers, found, config)
    heads = [plan.heads for plan in plans(model, chosen)]
    for name in ("window", "capacity"):
        if name in how:
            each = budgets(how[name], name, chosen, heads)
            if isinstance(stored(each), list) and layers is not None and layers != chosen:
                raise ValueError(f"layers must ascend where {name} has one entry per layer, got {layers}")
            how[name] = stored(each)
    noted = {"layers": chosen, **how}
    register()
    setattr(config, KEY, noted)
    convert_modules(model)
    if policy == "gate" and trainable != "all":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(f".{GATE}." in name)
    return model


def _options(policy: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options of a policy, as stored in the configuration; checked but for budgets."""
    checks.choice(policy, "policy", tuple(OPTIONS))
    wrong = [name for name in given if name not in OPTIONS[policy]]
    if wrong:
        raise ValueError(f"policy={policy!r} takes {', '.join(OPTIONS[policy])}, got {', '.join(wrong)}")
    if policy == "gate":
        bound = {"capacity": given.pop("capacity")} if "capacity" in given else {}
        gate = RetentionGate(1, 1, device="meta", **given)  # checks them and supplies the defaults
        names = [name for name in OPTIONS["gate"] if name != "capacity"]
        return {"policy": policy, **{name: getattr(gate, name) for name in names}, **bound}
    if "window" not in given:
        raise TypeError(f"policy={policy!r} needs a window")
    window = given["window"]
    if policy == "window":
        return {"policy": policy, "window": window, "sinks": checks.whole(given.get("sinks", 4), "sinks", 0)}
    found = {"window": window, "sinks": checks.whole(given.get("sinks", 0), "sinks", 0),
             "recent": checks.whole(given.get("recent", 0), "recent", 0)}
    checks.choice(given.get("scores", "value"), "scores", SOURCES)
    if given.get("scores") == "input":
        if "form" in given:
            raise ValueError(f"form needs scores='value', got form={given['form']!r} and scores='input'")
        return {**found, "scores": "input"}
    checks.choice(given.get("form", "exp"), "form", FORMS)
    return {**found, "form": given.get("form", "exp")}


def _chosen(layers: Iterable[int] | None, found: dict[int, nn.Module], config: Any) -> list[int]:
    """The layers to convert."""
    local = [index for index in sorted(found) if _is_local(config, index)]
    if layers is None:
        chosen = [index for index in sorted(found) if index not in local]
        if not chosen:
            raise ValueError("every layer of the model has a sliding window or chunks of its own, and the best keys of "
                             "such a mask are not an interval mask: set config.sliding_window to None to remove it")
        return chosen
    chosen = sorted({checks.whole(index, "layers", 0) for index in layers})
    unknown, wrong = [i for i in chosen if i not in found], [i for i in chosen if i in local]
    if not chosen or unknown:
        raise ValueError(f"layers must name some of the model's {sorted(found)}, got {chosen}")
    if wrong:
        raise ValueError(f"layers must not name those with a sliding window or chunks of their own, {local}, got "
                         f"{chosen}")
    return chosen


def _is_local(config: Any, index: int) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(word in kinds[index] for word in ("sliding", "chunked"))
    return any(getattr(config, name, None) is not None for name in ("sliding_window", "attention_chunk_size"))
