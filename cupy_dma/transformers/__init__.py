"""transformers: Doge in O(N), ``attn_implementation="cupy_dma"`` for any causal model, dynamic masks for any of them.

    cupy_dma.transformers.register()
    model = AutoModelForCausalLM.from_pretrained("SmallDoge/Doge-160M", attn_implementation="cupy_dma")
    model.generate(...)                                 # keeps keep_window_size keys a layer, however long the text

    cupy_dma.transformers.convert(model, window=2048)   # dynamic masks for a model that has none
    cupy_dma.transformers.convert(model, policy="gate")     # or gates, to be trained (cupy_dma.retrofit)

    cupy_dma.transformers.generate_batch(model, prompts, max_new_tokens=100)    # many requests on a few slots

Importing this module imports transformers.
"""
from cupy_dma.transformers.attention import attention_forward
from cupy_dma.transformers.cache import DynamicMaskCache, GatedCache, cache_argument
from cupy_dma.transformers.convert import convert
from cupy_dma.transformers.gate import FullGatedCache
from cupy_dma.transformers.generate_batch import generate_batch
from cupy_dma.transformers.graph import DecodingStep
from cupy_dma.transformers.registration import register
from cupy_dma.transformers.replay import replay
from cupy_dma.transformers.request import Request
from cupy_dma.transformers.serving import ContinuousBatching

__all__ = ["ContinuousBatching", "DecodingStep", "DynamicMaskCache", "FullGatedCache", "GatedCache", "Request",
           "attention_forward", "cache_argument", "convert", "generate_batch", "register", "replay"]
