"""Models with ``attn_implementation="cupy_dma"`` give the results of transformers' own attention.

Tolerance: SPEC section 12 for a whole model. The error may be twice that of the model with plain attention in the same
precision (eager), three times for gradients, plus roundings: four of the result, because norms of the float64 reference
model still round to float32, and for the gradient of ``A``, a sum over all keys, roundings of its terms.
"""
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.transformers import small_models as small

KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SOFTCAPPED = ("gemma2", "gpt-oss")  # transformers' sdpa has no softcap and no sinks
ROUNDING = {"float32": 2**-23, "bfloat16": 2**-8}


def results(model: Any, given: dict[str, Any], real: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and loss of the real tokens, and the gradients of all parameters."""
    model.zero_grad()
    logits = model(**given).logits[real].double()
    target = given["input_ids"][real].roll(-1)
    loss = torch.nn.functional.cross_entropy(logits, target)
    loss.backward()
    found = {"logits": logits.detach(), "loss": loss.detach()[None]}
    found.update((name, p.grad.double()) for name, p in model.named_parameters() if p.grad is not None)
    return found


@contextmanager
def terms_of_A(model: Any) -> Iterator[dict[str, float]]:
    """The largest sum of ``|dscore * score * softplus(dt)|`` over the keys; without the absolute values, the sum is the
    gradient of an ``A``. Known after a backward pass inside the context."""
    found: dict[str, float] = {}
    seen: list[tuple[str, Any, torch.Tensor]] = []

    def keep(name: str, module: Any) -> Any:
        def hook(_: Any, __: Any, dt: torch.Tensor) -> None:
            dt.retain_grad()
            seen.append((name, module, dt))
        return hook

    hooks = [module.dt_proj.register_forward_hook(keep(name, module)) for name, module in model.named_modules()
             if hasattr(module, "dt_proj")]
    yield found
    for name, module, dt in seen:  # ddt = dscore * score * A * sigmoid(dt)
        terms = dt.grad / (module.A * dt.sigmoid()) * torch.nn.functional.softplus(dt)
        found[f"{name}.A"] = terms.abs().sum((0, 1)).max().item()
    for hook in hooks:
        hook.remove()


def check(name: str, kind: str, how: str, **others: Any) -> None:
    given, real = small.batch(how)
    ours = small.model_of(name, **others).to(KINDS[kind])
    plain, truth = small.twin(ours, "eager"), small.twin(ours, "sdpa" if name not in SOFTCAPPED else "eager",
                                                         torch.float64)
    with small.ties_broken_alike(plain, truth), terms_of_A(truth) as terms:
        expected, same = results(truth, given, real), results(plain, given, real)
    found = results(ours, given, real)
    assert expected.keys() == same.keys() == found.keys()
    wrong = []
    for part, x in expected.items():
        size = x.abs().max().item()
        ours_off, plain_off = ((y[part] - x).abs().max().item() for y in (found, same))
        factor = 2 if part in ("logits", "loss") else 3
        if ours_off > factor * plain_off + ROUNDING[kind] * (4 * size + terms.get(part, 0)):
            wrong.append(f"{part}: error {ours_off:.3g}, plain attention's {plain_off:.3g}, largest {size:.3g}")
    assert not wrong, wrong


# Not with padding on the left: Doge's router mixes the tokens of a batch, and outputs of padding are arbitrary. With a
# softcap there is no float64 reference, because eager attention gives NaN in rows without visible keys.
CASES = [(name, how) for name in small.FORMS for how in ("plain", "left", "right", "packed")
         if how != "left" or name not in ("doge-moe", *SOFTCAPPED)]


@pytest.mark.parametrize(("name", "how"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward(name, how, kind):
    check(name, kind, how)


@pytest.mark.parametrize(("name", "how", "options"), [
    ("llama4", "packed", {"attention_chunk_size": 4}), ("doge", "left", {"attention_bias": True}),
    ("doge", "plain", {"sliding_window": small.WINDOW}),
    *(("doge", "plain", {"keep_window_size": small.LENGTH + more}) for more in (-1, 0, 1))], ids=str)
def test_other_options_of_models(name, how, options):
    check(name, "float32", how, **options)


def test_doge_within_another_sliding_window():
    model = small.model_of("doge", sliding_window=small.WINDOW + 1)
    with pytest.raises(NotImplementedError, match="best 16 keys within a sliding window of 17"):
        model(**small.batch("plain")[0])


def test_ties_are_broken_by_position():
    """transformers leaves ties open; here equal scores (``A = 0``) keep the newest keys."""
    model = small.model_of("doge")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.A)
    given, _ = small.batch("plain")
    eager = small.twin(model, "eager")
    with small.ties_broken_alike(eager):
        expected = eager(**given).logits
    torch.testing.assert_close(model(**given).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["doge", "llama", "mistral"])
def test_gradient_checkpointing_changes_nothing(name):
    given, real = small.batch("left")
    model = small.model_of(name).train()
    expected = results(model, given, real)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    found = results(model, given, real)
    for part, x in expected.items():
        assert torch.equal(found[part], x), part


@pytest.mark.parametrize(("name", "how"), [
    ("doge", "left"), pytest.param("doge", "plain", marks=pytest.mark.slow),
    pytest.param("qwen3", "left", marks=pytest.mark.slow)])
def test_compiled(name, how):
    given, real = small.batch(how)
    given["use_cache"] = False
    model = small.model_of(name)
    expected = model(**given).logits[real]
    torch._dynamo.reset()
    found = torch.compile(model, backend="aot_eager")(**given).logits[real]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name, how", [("doge", "plain"), ("doge", "left"), ("llama", "left"), ("mistral", "packed")])
def test_no_array_of_queries_times_keys(name, how):
    """No tensor, and no array of the NumPy backend, has that size; eager attention makes some of (2, 4, N, N)."""
    length = 3072
    given, real = small.batch(how, rows=1, length=length)
    model = small.model_of(name, max_position_embeddings=length)
    tracemalloc.start()
    with small.Largest() as largest:
        results(model, given, real)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest.most < length**2 / 2, largest.by
    assert peak < 4 * length**2, peak


# ---- bad input ----
def test_dropout_of_attention_weights():
    model = small.model_of("llama", attention_dropout=0.1)
    given, _ = small.batch("plain")
    model(**given)
    with pytest.raises(NotImplementedError, match=r"dropout=0\.1"):
        model.train()(**given)
    doge = small.model_of("doge", attention_dropout=0.1).train()
    with pytest.raises(NotImplementedError, match=r"attention_dropout=0\.1"):
        doge(**given)


def test_attention_weights():
    given, _ = small.batch("plain")
    with pytest.warns(UserWarning, match="never computes attention weights"):
        small.model_of("llama")(**given, output_attentions=True)


def test_a_mask_of_unknown_kind():
    from transformers.masking_utils import create_causal_mask

    model = small.model_of("llama")
    with pytest.raises(NotImplementedError, match=r"the model asks for .*or_masks"):
        create_causal_mask(config=model.config, inputs_embeds=torch.zeros(1, 4, 8), attention_mask=None,
                           or_mask_function=lambda batch, head, q, kv: q == kv, **{small.CACHE: None})


@pytest.mark.parametrize("form", ["bool", "float"])
def test_a_mask_made_by_hand(form):
    given, _ = small.batch("plain")
    model = small.model_of("llama")
    n = small.LENGTH
    seen = torch.ones(n, n, dtype=torch.bool).tril() & (torch.arange(n) % 3 != 1) | torch.eye(n, dtype=torch.bool)
    seen = seen.expand(2, 1, n, n)
    mask = seen if form == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = small.twin(model, "sdpa")(**given, attention_mask=mask).logits
    torch.testing.assert_close(model(**given, attention_mask=mask).logits, expected, rtol=0, atol=1e-4)
    with pytest.raises(NotImplementedError, match=r"needs padding \(B, K\)"):
        small.model_of("doge")(**given, attention_mask=mask)
