"""Small random models of transformers, batches for them, and helpers to compare two implementations."""
import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import cupy_dma.transformers as dmt

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
CACHE = "cache" if VERSION >= (5, 20) else "past_key_values"  # the name of that argument
VOCABULARY, WINDOW, LENGTH = 512, 16, 40
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"head_dim": 16}
LOCAL = {"sliding_window": 8}
# Every token uses every expert, because a router's choice could depend on a rounding.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "doge": ("Doge", {"keep_window_size": WINDOW}),
    "doge-moe": ("Doge", {"keep_window_size": WINDOW, "is_moe": True, "num_experts": 16, "num_experts_per_tok": 16}),
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", HEADS),
    "mistral": ("Mistral", LOCAL),
    "gemma": ("Gemma", HEADS),
    "gemma2": ("Gemma2", {**HEADS, **LOCAL, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3Text", {**HEADS, **LOCAL, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt-oss": ("GptOss", {**HEADS, **LOCAL, "num_local_experts": 4, "num_experts_per_tok": 4}),
    "llama4": ("Llama4Text", {**HEADS, "attention_chunk_size": 8, "intermediate_size_mlp": 64, "num_local_experts": 2,
                              "layer_types": ["chunked_attention", "full_attention"]}),
}
DOGES = ("doge", "doge-moe")


def config_of(name: str, **others: Any) -> Any:
    if name == "doge-moe" and VERSION < (5, 18):
        pytest.skip("Doge's mixture of experts does not run in this version of transformers, whatever the attention")
    form, options = FORMS[name]
    sizes = {key: value for key, value in SIZES.items() if form != "GPTNeoX" or key != "num_key_value_heads"}
    return getattr(transformers, f"{form}Config")(**{**sizes, **options, **others})


def randomize(model: nn.Module, seed: int = 0, spread: float = 0.15) -> nn.Module:
    """Draw all matrices, and the ``A`` of dynamic masks, so that every part of the model matters and no key gets all
    the weight."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(".A"):
            nn.init.normal_(parameter, std=0.3)
        elif parameter.ndim > 1:
            nn.init.normal_(parameter, std=spread)
    return model.eval()


def model_of(name: str, implementation: str = "cupy_dma", seed: int = 0, **others: Any) -> Any:
    dmt.register()
    made = transformers.AutoModelForCausalLM.from_config(
        config_of(name, **others), attn_implementation=implementation, experts_implementation="eager")
    return randomize(made, seed)


def converted(name: str, seed: int = 0, window: int = WINDOW, **options: Any) -> Any:
    made = transformers.AutoModelForCausalLM.from_config(config_of(name))
    return randomize(dmt.convert(made, window, **options), seed)


def converted_from(config: Any, *window: Any, seed: int = 0, **options: Any) -> Any:
    """A model with masks that strongly affect its outputs."""
    made = transformers.AutoModelForCausalLM.from_config(config)
    return randomize(dmt.convert(made, *window, **options), seed, 0.25)


def twin(model: Any, implementation: str, kind: torch.dtype | None = None) -> Any:
    """A copy with another attention implementation."""
    other = copy.deepcopy(model).to(kind or model.dtype)
    other.set_attn_implementation(implementation)
    assert other.config._attn_implementation == implementation
    return other


def batch(how: str, rows: int = 2, length: int = LENGTH, seed: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of a forward pass, and which of its tokens are real."""
    drawn = torch.rand(rows, VOCABULARY - 3, generator=torch.Generator().manual_seed(seed))
    ids = drawn.argsort(1)[:, torch.arange(length) % drawn.shape[1]] + 3  # no token twice in a row, if there are enough
    real = torch.ones_like(ids)
    given: dict[str, Any] = {"input_ids": ids}
    if how == "left":
        real[0, :length // 5] = 0
        given.update(attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp(min=0))
    elif how == "right":
        real[-1, -length // 4:] = 0
        given.update(attention_mask=real)
    elif how == "packed":
        parts = length // 4, length // 2, length - length // 4 - length // 2
        position = torch.cat([torch.arange(part) for part in parts])
        given.update(position_ids=position.expand(rows, -1), use_cache=False)
    else:
        assert how == "plain"
    return given, real.bool()


def logits(model: Any, input_ids: Tensor, cache: Any, **options: Any) -> Tensor:
    """Of the next tokens, which are appended to the cache."""
    with torch.no_grad():
        return model(input_ids=input_ids, **{CACHE: cache}, **options).logits


@contextmanager
def failing(owner: Any, name: str, *calls: int, error: BaseException | None = None) -> Iterator[None]:
    """Inside the context, the method raises ``OutOfMemoryError``, or another error, at these of its calls."""
    original, count = getattr(owner, name), [0]

    def method(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] in calls:
            raise error or torch.OutOfMemoryError("out of memory")
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, method)
        yield


class Largest(TorchDispatchMode):
    """Records the largest number of elements that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.by = 0, ""

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else [found]:
            if isinstance(x, Tensor) and x.numel() > self.most:
                self.most, self.by = x.numel(), str(function)
        return found


def check_unchanged(name: str, how: str, *added: str, **options: Any) -> None:
    """Check that ``convert`` does not change a model's results, and adds parameters of these names to each layer with a
    dynamic mask."""
    given, real = batch(how)
    model = model_of(name, "eager")
    expected = model(**given).logits[real]
    before = {key: x.clone() for key, x in model.state_dict().items()}
    assert dmt.convert(model, **options) is model
    torch.testing.assert_close(model(**given).logits[real], expected, rtol=0, atol=2e-5)
    after = model.state_dict()
    assert all(torch.equal(after[key], x) for key, x in before.items())
    new = set(after) - set(before)
    assert len(new) == len(added) * len(model.config.dynamic_mask["layers"]) > 0
    assert all(key.endswith(added) for key in new)


def check_reloaded(model: Any, folder: Path, noted: dict[str, Any], form: Any = None, **options: Any) -> Any:
    """Save a model, with this note in its configuration, load it and check that it computes the same; returns the
    loaded model."""
    given, real = batch("left")
    expected = model(**given).logits[real]
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["dynamic_mask"] == {"layers": model.config.dynamic_mask["layers"], **noted}
    form = form or transformers.AutoModelForCausalLM
    loaded, about = form.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), about
    assert not loaded.training and loaded.config._attn_implementation == "cupy_dma"
    assert torch.equal(loaded(**given).logits[real], expected)
    return loaded


@contextmanager
def attention_by(function: Any) -> Iterator[None]:
    """Inside the context, models with ``cupy_dma`` call this function instead."""
    transformers.AttentionInterface.register("cupy_dma", function)
    try:
        yield
    finally:
        transformers.AttentionInterface.register("cupy_dma", dmt.attention_forward)


def best_by_position(scores: Tensor, k: int, dim: int = -1, **_: Any) -> Any:
    """``torch.topk`` that prefers the last of equal scores, as this library does."""
    assert dim == -1
    order = scores.shape[-1] - 1 - scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :k]
    return torch.return_types.topk((scores.gather(-1, order), order))


@contextmanager
def ties_broken_alike(*models: nn.Module) -> Iterator[None]:
    """Inside the context, Doge's own implementation gives equal values equal scores and keeps the newest of them.

    Tokens that repeat have equal scores in layer 0. transformers' ``topk`` keeps any of them, and its scores differ in
    the last bit with the shapes of a call.
    """
    def exactly(module: nn.Linear, given: tuple[Tensor, ...], _: Tensor) -> Tensor:
        bias = None if module.bias is None else module.bias.double()
        return nn.functional.linear(given[0].double(), module.weight.double(), bias).to(given[0].dtype)

    hooks = [module.register_forward_hook(exactly) for model in models for name, module in model.named_modules()
             if name.endswith("dt_proj")]
    original = torch.topk
    torch.topk = lambda x, k, dim=-1, **others: (best_by_position if x.ndim == 4 else original)(x, k, dim=dim, **others)
    try:
        yield
    finally:
        torch.topk = original
        for hook in hooks:
            hook.remove()
