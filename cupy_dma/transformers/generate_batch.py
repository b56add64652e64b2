"""transformers' ``generate_batch`` for models with dynamic masks: many prompts at once, by continuous batching."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cupy_dma.transformers.request import Request
from cupy_dma.transformers.serving import ContinuousBatching

DRAWN = ("temperature", "top_k", "top_p")
# Settings that apply, and those that change no token here.
USED = (*DRAWN, "do_sample", "max_new_tokens", "max_length", "eos_token_id", "num_return_sequences")
IDLE = ("pad_token_id", "bos_token_id", "decoder_start_token_id", "use_cache", "output_attentions",
        "output_hidden_states", "return_dict_in_generate", "transformers_version", "_from_model_config")


def generate_batch(model: Any, inputs: Sequence[Sequence[int] | Tensor], generation_config: Any = None,
                   record_timestamps: bool = False, *, max_new_tokens: int | None = None, slots: int = 32,
                   chunk: int = 256, storage: str | None = None, cuda_graphs: bool = True) -> dict[str, Request]:
    """Generate for each of the prompts, ``slots`` at a time.

    Parameters
    ----------
    model, slots, chunk, storage, cuda_graphs
        As for ``ContinuousBatching``.
    inputs : sequence of prompts
        Each one or more ints, or an int Tensor ``(N,)``.
    generation_config : GenerationConfig, optional
        By default the model's, which also says what ends a text if this one does not. Its ``max_new_tokens`` (or
        ``max_length``), ``eos_token_id``, ``do_sample``, ``temperature``, ``top_k``, ``top_p`` and
        ``num_return_sequences`` apply.
    record_timestamps : bool
        Note when each token was known.
    max_new_tokens : int, optional
        In place of that of ``generation_config``.

    Returns
    -------
    dict of str to Request
        In order of ``inputs``, with the attributes of transformers' ``GenerationOutput``. Further sequences of a prompt
        stand before its own, under ``"req_0__child#0"``, as there.

    Raises
    ------
    TypeError, ValueError
        As for ``ContinuousBatching`` and ``submit``, or ``generation_config`` has other settings that change tokens.
    """
    config = model.generation_config if generation_config is None else generation_config
    neutral = config._get_default_generation_params()
    wrong = {name: value for name, value in config.to_diff_dict().items()
             if name not in USED + IDLE and value not in (None, False, neutral.get(name))}
    if wrong:
        raise ValueError(f"generation_config must leave out what generate_batch does not do, got {wrong}")
    eos = model.generation_config.eos_token_id if config.eos_token_id is None else config.eos_token_id
    drawn = {name: getattr(config, name) for name in DRAWN} if config.do_sample else {}
    copies = config.num_return_sequences or 1
    if not inputs:
        return {}
    batching = ContinuousBatching(model, slots=min(slots, len(inputs) * copies), chunk=chunk, storage=storage,
                                  cuda_graphs=cuda_graphs)
    limit = config.max_new_tokens if max_new_tokens is None else max_new_tokens
    requests = []
    for number, prompt in enumerate(inputs):
        most = config.max_length - len(prompt) if limit is None and config.max_length is not None else limit
        for name in (*(f"req_{number}__child#{child}" for child in range(copies - 1)), f"req_{number}"):
            requests.append(batching.submit(prompt, most, eos_token_id=eos, do_sample=bool(config.do_sample), **drawn,
                                            request_id=name, record_timestamps=record_timestamps))
    for _ in batching:
        pass
    return {request.request_id: request for request in requests}
