"""A request of continuous batching: what is asked for, and what has been said so far."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers.generation.continuous_batching.requests import GenerationOutput

from cupy_dma import checks
from cupy_dma.transformers.sampling import Sampling


@dataclass(eq=False)
class Request(GenerationOutput):
    """A text under way, and at its end what transformers' ``generate_batch`` returns of it.

    Attributes
    ----------
    request_id, prompt_ids, generated_tokens, created_time, lifespan, timestamps
        As in transformers' ``GenerationOutput``; times are of ``time.perf_counter``.
    status : RequestStatus
        ``PENDING`` in the queue, then ``PREFILLING`` and ``DECODING``; ``FINISHED``, or ``FAILED`` with an ``error``,
        also where it was cancelled. ``is_finished()``: one of the last two.
    """

    max_new_tokens: int | None = None
    eos: frozenset[int] = frozenset()
    endings: tuple[list[int], ...] = ()
    sampling: Sampling | None = None
    slot: int = -1
    cached: int = 0  # tokens of its text that its slot holds
    failures: int = 0

    __hash__, __eq__ = object.__hash__, object.__eq__

    def text(self, begin: int, end: int) -> list[int]:
        """Tokens of the prompt and of what has been generated."""
        n = len(self.prompt_ids)
        return self.prompt_ids[begin:end] + self.generated_tokens[max(begin - n, 0):max(end - n, 0)]

    @property
    def missing(self) -> int:
        """Tokens that are not cached. The next one is known when none is."""
        return len(self.prompt_ids) + len(self.generated_tokens) - self.cached

    @property
    def is_complete(self) -> bool:
        """Whether the last token ends it."""
        said = self.generated_tokens
        return (len(said) == self.max_new_tokens or said[-1] in self.eos
                or any(said[-len(ending):] == ending for ending in self.endings))


def new_request(config: Any, vocabulary: int, prompt_ids: Any, max_new_tokens: int | None, eos_token_id: Any,
                stop: Iterable[Sequence[int]], do_sample: bool, drawn: dict[str, Any], timestamps: bool) -> Request:
    """A request without an id. Raises what ``ContinuousBatching.submit`` documents."""
    prompt = np.asarray(prompt_ids.tolist() if isinstance(prompt_ids, Tensor) else prompt_ids)
    if prompt.ndim != 1 or prompt.size == 0 or prompt.dtype.kind not in "iu":
        raise ValueError(f"prompt_ids must be one or more ints, got {prompt_ids!r:.100}")
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        raise ValueError(f"prompt_ids must lie between 0 and {vocabulary - 1}, got {prompt.min()} to "
                         f"{prompt.max()}")
    given = () if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
    eos = frozenset(token for token in given if token >= 0)  # -1 is none, as in transformers
    endings = tuple(list(ending) for ending in stop)
    if not all(endings):
        raise ValueError("stop must be sequences of at least one token, got an empty one")
    if max_new_tokens is not None:
        checks.whole(max_new_tokens, "max_new_tokens", 1)
    elif not eos and not endings:
        raise ValueError("max_new_tokens must be given where no eos_token_id and no stop ends the text")
    most = getattr(config, "max_position_embeddings", None)
    if most and getattr(config, "rope_parameters", None) is None and (
            max_new_tokens is None or prompt.size + max_new_tokens > most):
        raise ValueError(f"prompt_ids and max_new_tokens must make at most {most} tokens, for which the model has "
                         f"positions, got {prompt.size} and {max_new_tokens}")
    idle = [name for name, value in drawn.items() if value is not None]
    if not checks.flag(do_sample, "do_sample") and idle:
        raise ValueError(f"do_sample must be True with {', '.join(idle)}")
    sampling = Sampling(**drawn) if do_sample else None
    return Request("", prompt.tolist(), max_new_tokens=max_new_tokens, eos=eos, endings=endings, sampling=sampling,
                   timestamps=[] if timestamps else None)
