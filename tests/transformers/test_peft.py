"""LoRA of peft on converted models: trained parameters, saving and loading, merging."""
import copy
from typing import Any

import pytest
import torch
import transformers

import cupy_dma.transformers as dmt
from cupy_dma import retrofit
from tests.transformers import small_models as small
from tests.transformers.test_generation import GREEDY, prompt

peft = pytest.importorskip("peft")
# The policy, and the modules that are trained and saved whole, beside the adapters.
POLICIES = {"gate": ({"policy": "gate", "delay": 5, "sinks": 2}, ["retention_gate"]),
            "input": ({"window": small.WINDOW, "scores": "input"}, ["score_proj"]),
            "value": ({"window": small.WINDOW}, None)}
every_policy = pytest.mark.parametrize("policy", POLICIES)

pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")]  # peft asks


def adapted(policy: str) -> tuple[Any, Any]:
    """A converted model, and a copy of it with adapters; all their parameters matter."""
    options, whole = POLICIES[policy]
    base = small.randomize(dmt.convert(small.model_of("llama", "eager"), **options))
    targets = ["q_proj", "v_proj", "down_proj", *([] if whole else ["dt_proj"])]
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=2, init_lora_weights=False,
                             modules_to_save=whole)
    torch.manual_seed(1)
    return base, peft.get_peft_model(copy.deepcopy(base), config)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@every_policy
def test_the_base_stays_and_the_rest_learns(policy):
    base, model = adapted(policy)
    before, ids = {name: p.clone() for name, p in model.named_parameters()}, small.batch("plain")[0]["input_ids"]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    kinds = set()
    for name, parameter in model.named_parameters():
        kind = next((word for word in ("lora_", "modules_to_save") if word in name), "base")
        assert torch.equal(parameter, before[name]) == (kind == "base"), name
        kinds.add(kind)
    assert kinds == {"base", "lora_", *(["modules_to_save"] if POLICIES[policy][1] else [])}
    with model.disable_adapter():
        close(model.eval()(input_ids=ids, use_cache=False).logits, base(input_ids=ids, use_cache=False).logits)


@every_policy
@pytest.mark.parametrize("how", ["plain", "left"])
def test_saved_loaded_and_merged(policy, how, tmp_path):
    base, model = adapted(policy)
    with torch.no_grad():  # move away from the base model
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name and name.endswith("weight"):
                torch.nn.init.normal_(parameter, std=0.2)
    (given, real), asked = small.batch(how), prompt(how)
    expected = model.eval()(**given, use_cache=False).logits[real]
    assert (base(**given, use_cache=False).logits[real] - expected).abs().max() > 0.01
    said = model.generate(**asked, **GREEDY)
    assert torch.equal(said, model.generate(**asked, **GREEDY, use_cache=False))
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").eval()
    assert torch.equal(again(**given, use_cache=False).logits[real], expected)
    merged = again.merge_and_unload()
    close(merged(**given, use_cache=False).logits[real], expected)
    assert [type(x) for x in merged.modules()] == [type(x) for x in base.modules()]
    assert merged.state_dict().keys() == base.state_dict().keys()
    assert torch.equal(merged.generate(**asked, **GREEDY), said)
    merged.save_pretrained(tmp_path / "merged")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    close(loaded(**given, use_cache=False).logits[real], expected)


def test_a_retrofit_with_adapters():
    """Divergence is measured from the original model; gates and adapters learn, and gates close."""
    base, model = adapted("gate")
    texts = [torch.randint(3, small.VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:  # results of the base model, with open gates
                parameter.zero_()
    before = {name: p.clone() for name, p in model.named_parameters()}
    logs = retrofit.train(model, texts, steps=3, ratio=4, trainable=None, teacher=base, rate=1e-3, base_rate=1e-3,
                          progress=False)
    assert logs[0]["kl"] < 0.05 and len(logs[0]["kept_by_layer"]) == 2 and logs[-1]["kept"] < logs[0]["kept"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != ("lora_" in name or "modules_to_save" in name), name


def test_an_adapter_on_the_head_is_refused():
    base = dmt.convert(small.model_of("llama", "eager"), policy="gate", delay=5)
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(target_modules=["lm_head"], r=2))
    with pytest.raises(ValueError, match="the head of PeftModel must be linear, without an adapter"):
        retrofit.Distillation(model, base.eval())(torch.randint(3, 60, (1, 20)), target=1.0)
