"""Every causal language model of transformers works or is refused as docs/transformers.md says."""
import ast
import inspect
import re

import pytest
import torch

from cupy_dma.transformers import attention_forward
from tests.transformers import every_model

# Types that cover different kinds of faults; all types together are slow.
QUICK = {"bart", "bert", "bigbird_pegasus", "bloom", "deepseek_v3", "deepseek_v32", "diffllama", "dory", "falcon",
         "falcon_h1", "gemma3n_text", "gemma4_text", "gemma4_unified", "git", "got_ocr2", "gpt_oss", "hrm_text",
         "inkling2_text", "inkling_text", "jetmoe", "longcat_flash", "minimax", "minimax_m3_vl_text", "mllama", "mpt",
         "xglm", "zamba"}
# Extra arguments that models pass to the attention interface: the mask already has them, or only other kernels use
# them.
IGNORED = {"sliding_window", "position_ids", "max_length_q", "max_length_k", "output_attentions", "deterministic"}
REFUSED = {"head_mask", "indices", "block_indices"}
# Faults of transformers by version: two types cannot be built, and moshi's eager attention is not causal.
BROKEN = {"5.17": {"cohere_compass_text", "gemma4_unified_assistant", "moshi"}}
UPDATE = "run: python -m tests.transformers.every_model"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
                                  for name in every_model.NAMES])
def test_type(name):
    if name in BROKEN.get(every_model.VERSION, ()):
        pytest.skip(f"broken in transformers {every_model.VERSION}")
    version, shown = every_model.recorded()
    found = every_model.outcome(name)
    if version == every_model.VERSION and not shown[name][0].startswith("not tested"):
        assert found == shown[name], UPDATE


def test_the_table_is_complete():
    version, shown = every_model.recorded()
    page = every_model.PAGE.read_text().split(every_model.BEGIN)[1].split(every_model.END)[0].strip()
    assert every_model.table(dict(sorted(shown.items()))).replace(every_model.VERSION, version) == page, UPDATE
    if version == every_model.VERSION:
        assert sorted(shown) == every_model.NAMES, UPDATE


def test_what_models_pass_is_known():
    """New keywords of transformers may change results, so each must be known as supported, refused or without
    effect."""
    served = {name for name, parameter in inspect.signature(attention_forward).parameters.items()
              if parameter.kind is parameter.KEYWORD_ONLY} | {"attention_mask"}
    unknown = {}
    for path in sorted(every_model.sources()):
        for call in re.finditer(r"= attention_interface(\((?:[^()]|\([^()]*\))*\))", path.read_text()):
            names = {each.arg for each in ast.parse(f"f{call[1]}", mode="eval").body.keywords} - {None}
            if names - served - IGNORED - REFUSED:
                unknown[path.stem] = names - served - IGNORED - REFUSED
    assert not unknown


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused(name):
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match=f"takes no {name}"):
        attention_forward(torch.nn.Identity(), q, q, q, **{name: q})
