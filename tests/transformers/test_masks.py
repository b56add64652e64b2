"""Mask functions, layers without a mask, and learned sinks."""
import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import masking_utils as masks

import cupy_dma.transformers as dmt
from cupy_dma.transformers import attention_forward
from cupy_dma.transformers.layers import DynamicMask
from cupy_dma.transformers.visibility import Visibility, visibility
from tests.transformers import small_models as small

N = 10


def by_pairs(function, queries=range(N), keys=N):
    places = torch.arange(max(keys, max(queries) + 1))
    return torch.tensor([[bool(function(0, 0, i, j)) for j in places[:keys]] for i in places[list(queries)]])


def dense(found):
    return found.interval().to_dense(found.query_length)[0, 0]


WINDOWS = {f"within {w}": masks.sliding_window_bidirectional_mask_function(w) for w in (0, 1, 3, N - 1, N, 20)}
FUNCTIONS = {
    **WINDOWS,
    **{f"last {w}": masks.sliding_window_causal_mask_function(w) for w in (1, 3, N - 1, N, 20)},
    "all": masks.bidirectional_mask_function,
    "causal": masks.causal_mask_function,
    "two windows": masks.and_masks(masks.sliding_window_overlay(3), masks.sliding_window_causal_mask_function(6)),
    "two windows, reversed": masks.and_masks(masks.sliding_window_overlay(6),
                                             masks.sliding_window_causal_mask_function(3)),
    "blocks, empty": masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(torch.full((1, N), -1))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_pair_by_pair(name):
    found = visibility(1, N, N, mask_function=FUNCTIONS[name])
    assert torch.equal(dense(found), by_pairs(FUNCTIONS[name]))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("part", [slice(3, 7), slice(-1, None), slice(0, 1), slice(None, -2), slice(-0, None)], ids=str)
def test_parts_of_masks(name, part):
    found = visibility(1, N, N, mask_function=FUNCTIONS[name])
    assert torch.equal(dense(found[:, :, part, :]), by_pairs(FUNCTIONS[name])[part])


@pytest.mark.parametrize("name", ["all", "causal", "within 3", "last 3"])
def test_first_keys_of_masks(name):
    padding = torch.arange(N)[None] != 2
    found = visibility(1, 4, N, q_offset=2, mask_function=FUNCTIONS[name], attention_mask=padding)[..., :7]
    assert found.shape == (1, 1, 4, 7)
    assert torch.equal(dense(found), by_pairs(FUNCTIONS[name], range(2, 6), 7) & padding[:, :7])


@pytest.mark.parametrize("index", [0, (slice(None), 0), (slice(0, 1),), (..., None), (..., slice(None, None, 2)),
                                   (..., slice(2, None)), (..., slice(None, None, -1), slice(None))], ids=str)
def test_other_parts_are_refused(index):
    with pytest.raises(NotImplementedError, match="a part"):
        Visibility(N, N, 0, torch.device("cpu"))[index]


def test_packed_sequences_keep_their_keys():
    packed = Visibility(N, N, 0, torch.device("cpu"), documents=[torch.arange(N)[None] // 4])
    assert torch.equal(dense(packed[:, :, 3:]), dense(packed)[3:])
    with pytest.raises(NotImplementedError, match="a part"):
        packed[..., :5]


@pytest.mark.parametrize("how", [DynamicMask(3), DynamicMask(2, sinks=1, recent=2)], ids=str)
def test_a_selection_within_chunks_of_packed_sequences(how):
    """Chunks and sequences both start documents; keys are selected within each piece between two starts."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 30, 8), torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8)
    module = SimpleNamespace(dynamic_mask=how, dynamic_cache=None, dt_proj=torch.nn.Linear(16, 2, bias=False),
                             A=torch.tensor([0.5, -0.5]))
    places = torch.arange(30)[None]
    mask = Visibility(30, 30, 0, q.device, documents=[(places >= 11).long(), places // 8])
    with torch.no_grad():
        out, _ = attention_forward(module, q, k, v, mask)
        for begin, end in ((0, 8), (8, 11), (11, 16), (16, 24), (24, 30)):
            part, _ = attention_forward(module, *(x[:, :, begin:end] for x in (q, k, v)))
            torch.testing.assert_close(out[:, begin:end], part)


def test_masks_that_are_refused():
    with pytest.raises(NotImplementedError, match="beside all keys after it"):
        visibility(1, N, N, mask_function=masks.and_masks(masks.sliding_window_overlay(3),
                                                          masks.bidirectional_mask_function))
    blocks = masks.blockwise_overlay(torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, -1, -1]]))
    with pytest.raises(NotImplementedError, match="blocks of images"):
        visibility(1, N, N, mask_function=masks.or_masks(masks.causal_mask_function, blocks))


# ---- layers without a mask ----
@pytest.mark.parametrize("own", [True, False, None])
@pytest.mark.parametrize("given", [True, False, None])
@pytest.mark.parametrize("mask", ["causal", "all", None])
def test_where_causality_is_read_from(own, given, mask):
    """The mask decides, else the call, else the module; without any of these, queries attend to all keys."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    module = SimpleNamespace() if own is None else SimpleNamespace(is_causal=own)
    made = None if mask is None else visibility(1, 6, 6, mask_function=FUNCTIONS[mask])
    out, _ = attention_forward(module, q, k, v, made, is_causal=given)
    causal = mask == "causal" if mask else bool(own if given is None else given)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_cumulative_lengths(causal):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 30, 16), torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 16)
    bounds = torch.tensor([0, 9, 21, 30], dtype=torch.int32)
    module = SimpleNamespace(is_causal=causal)
    for mask in (None, visibility(1, 30, 30, mask_function=FUNCTIONS["causal" if causal else "all"])):
        out, weights = attention_forward(module, q, k, v, mask, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
        assert weights is None
        for begin, end in bounds.unfold(0, 2, 1).tolist():
            part, _ = attention_forward(module, *(x[:, :, begin:end] for x in (q, k, v)))
            torch.testing.assert_close(out[:, begin:end], part)
    with pytest.raises(NotImplementedError, match="one row"):
        attention_forward(module, q[:, :, :9], k, v, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)


def test_cumulative_lengths_of_a_model():
    model = small.model_of("llama")
    ids = small.batch("plain", rows=1, length=30)[0]["input_ids"]
    bounds = torch.tensor([0, 9, 30], dtype=torch.int32)
    found = model(ids, position_ids=torch.arange(30)[None], cu_seq_lens_q=bounds, cu_seq_lens_k=bounds,
                  use_cache=False).logits
    second = model(ids[:, 9:], position_ids=torch.arange(9, 30)[None], use_cache=False).logits
    torch.testing.assert_close(found[:, 9:], second, rtol=0, atol=1e-4)


def test_rows_need_not_be_contiguous():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    expected, _ = attention_forward(SimpleNamespace(is_causal=True), q, k, v)
    turned = [x.mT.contiguous().mT for x in (q, k, v)]
    assert all(x.stride(-1) != 1 for x in turned)
    assert torch.equal(attention_forward(SimpleNamespace(is_causal=True), *turned)[0], expected)


# ---- bidirectional models and cross-attention ----
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
BART = {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
STATES = torch.randn(2, 17, 32, generator=torch.Generator().manual_seed(1))
REAL = torch.ones_like(IDS)
REAL[1, -4:] = 0


def built(name, config, **sizes):
    torch.manual_seed(0)
    kind, config = getattr(transformers, name), getattr(transformers, config)(**sizes)
    return small.randomize(kind._from_config(config, attn_implementation="eager"))


MODELS = {
    "bert": lambda: built("BertModel", "BertConfig", vocab_size=64, **SIZES),
    "modernbert": lambda: built("ModernBertModel", "ModernBertConfig", vocab_size=64, local_attention=6,
                                pad_token_id=0, **SIZES),
    "vit": lambda: built("ViTModel", "ViTConfig", image_size=32, patch_size=8, **SIZES),
    "bart": lambda: built("BartModel", "BartConfig", **BART),
    "bart decoder": lambda: built("BartForCausalLM", "BartConfig", **BART),
    "gpt2": lambda: built("GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_embd=32, n_layer=2, n_head=4,
                          add_cross_attention=True),
    "bert decoder": lambda: built("BertLMHeadModel", "BertConfig", vocab_size=64, is_decoder=True,
                                  add_cross_attention=True, **SIZES),
}
CALLS = [
    ("bert", {"input_ids": IDS}), ("bert", {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}),
    ("bert", {"input_ids": IDS, "attention_mask": REAL}),
    ("modernbert", {"input_ids": IDS}), ("modernbert", {"input_ids": IDS, "attention_mask": REAL}),
    ("vit", {"pixel_values": torch.ones(2, 3, 32, 32)}),
    ("bart", {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}),
    ("bart", {"input_ids": IDS, "attention_mask": REAL, "decoder_input_ids": IDS[:, :5]}),
    ("bart decoder", {"input_ids": IDS, "encoder_hidden_states": STATES}),
    ("gpt2", {"input_ids": IDS, "encoder_hidden_states": STATES}),
    ("bert decoder", {"input_ids": IDS, "encoder_hidden_states": STATES}),
]


@pytest.mark.parametrize(("name", "given"), CALLS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_bidirectional_models_and_cross_attention(name, given):
    dmt.register()
    model = MODELS[name]()
    other = copy.deepcopy(model)
    other.set_attn_implementation("cupy_dma")
    real = given.get("attention_mask", torch.ones_like(IDS)).bool()
    with torch.no_grad():
        expected, found = model(**given)[0], other(**given)[0]
    if expected.shape[:2] == real.shape:
        expected, found = expected[real], found[real]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * expected.abs().max().item())


def test_cross_attention_without_is_causal():
    """Mllama's has no ``is_causal`` and gets no mask."""
    dmt.register()
    config = transformers.models.mllama.MllamaTextConfig(
        vocab_size=64, num_key_value_heads=2, cross_attention_layers=[1], pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **{**SIZES, "num_hidden_layers": 3})
    model = small.randomize(transformers.MllamaForCausalLM._from_config(config, attn_implementation="eager"))
    for name, parameter in model.named_parameters():
        if "gate" in name and parameter.numel() == 1:
            torch.nn.init.constant_(parameter, 1.0)
    given = {"input_ids": IDS, "cross_attention_states": STATES, "use_cache": False}
    expected = model(**given).logits
    without = model(input_ids=IDS, use_cache=False).logits
    assert (expected - without).abs().max() > 0.1
    model.set_attn_implementation("cupy_dma")
    torch.testing.assert_close(model(**given).logits, expected, rtol=0, atol=1e-4)


# ---- learned sinks ----
@pytest.mark.parametrize("name", ["s_aux", "sinks", "both"])
def test_learned_sinks(name):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    given = {"s_aux": torch.randn(4, dtype=torch.float64, requires_grad=True),
             "sinks": torch.randn(2, 4, 9, 1, dtype=torch.float64, requires_grad=True)}
    given = given if name == "both" else {name: given[name]}
    out, _ = attention_forward(SimpleNamespace(is_causal=True), q, k, v, scaling=0.3, **given)
    logits = 0.3 * q @ k.repeat_interleave(2, 1).mT
    logits = logits.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    more = [x.reshape(1, 4, 1, 1).expand(2, 4, 9, 1) if key == "s_aux" else x for key, x in given.items()]
    weights = torch.cat([logits, *more], -1).softmax(-1)[..., :9]
    expected = (weights @ v.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    inputs = [q, k, v, *given.values()]
    found, wanted = (torch.autograd.grad(x, inputs, upstream) for x in (out, expected))
    torch.testing.assert_close(found, wanted)
