"""Continuous batching on caches of constant size: requests come and go on a fixed number of slots.

A step is at most two forward passes on one ``DynamicMaskCache``, each of a shape that never changes (``slot_pass.py``):

    decode     (slots, 1)    the last token of every text that is cached up to it; other slots are idle
    prefill    (1, chunk)    the next tokens of the oldest text with more than one token to cache

so on a GPU both are CUDA graphs, and requests join and leave between replays. The host decides which requests run, from
numbers that it knows without asking the device: the length of each text and how much of it is cached. If a decoding
pass fails, its texts are cached again from the first token, including the generated ones, so no output is lost.

transformers' own ``generate_batch`` cannot serve these models: it accepts only its own names of attention, and stores
all keys in a paged cache.
"""
from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.generation.continuous_batching.requests import RequestStatus

from cupy_dma import checks
from cupy_dma.transformers.cache import DynamicMaskCache, GatedCache
from cupy_dma.transformers.graph import captured
from cupy_dma.transformers.layers import gated_layers
from cupy_dma.transformers.request import Request, new_request
from cupy_dma.transformers.slot_pass import Row, SlotPass, checked_config

ATTEMPTS = 3  # decoding passes that may fail before their requests do


Event: TypeAlias = tuple[Request, int | None]


class ContinuousBatching:
    """Generation for many requests on a fixed number of slots::

        batching = ContinuousBatching(model, slots=32, chunk=256)
        requests = [batching.submit(prompt, max_new_tokens=100) for prompt in prompts]
        for request, token in batching:                 # until no request is left; submit more at any time
            print(request.request_id, token)            # token None: the request has failed

    Greedy tokens are those of ``model.generate`` for the request alone, up to the rounding of the logits, whatever else
    is running. The constructor allocates all memory: a ``DynamicMaskCache`` for ``slots`` sequences.

    Parameters
    ----------
    model
        A Doge or converted model in evaluation mode. All its layers must have dynamic masks; gates need a capacity.
    slots : int
        Number of requests that run at a time.
    chunk : int
        Tokens of a prompt per step. Longer chunks prefill faster, but the other requests wait longer for each of them.
    queue_size : int, optional
        Maximum number of requests that wait for a slot. Unlimited by default.
    storage : "int8" or "fp8", optional
        Keep rows in 8 bits per number, as for ``cupy_dma.DynamicCache``.
    cuda_graphs : bool
        False: do not use CUDA graphs, for models that cannot be captured.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or value, or the model cannot be served: one of its layers has no dynamic mask,
        it takes no ``position_ids``, or its texts would depend on each other (Doge's mixture of experts, rotary
        frequencies that follow the longest text).

    Notes
    -----
    Only one thread may call ``step`` or iterate; any thread may ``submit`` and ``cancel``. A request whose prefill
    fails, for example out of memory, ends with the error. Requests whose decoding fails restart with their text so far;
    after three failures they end with the error. All others continue.
    """

    def __init__(self, model: Any, *, slots: int = 32, chunk: int = 256, queue_size: int | None = None,
                 storage: str | None = None, cuda_graphs: bool = True) -> None:
        checks.whole(slots, "slots", 1)
        checks.whole(chunk, "chunk", 1)
        self._queue_size = None if queue_size is None else checks.whole(queue_size, "queue_size", 1)
        graphs = checks.flag(cuda_graphs, "cuda_graphs") and model.device.type == "cuda"
        self._config, self._cache = model.config.get_text_config(decoder=True), self._made_cache(model, slots, storage)
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._decode = SlotPass(model, self._cache, slots, 1, graphs)
        self._prefill = SlotPass(model, self._cache, 1, chunk, graphs)
        self._emptied = torch.zeros(1, dtype=torch.int32, device=model.device)
        self._empty: Callable[[], Any] = partial(self._cache.reset, self._emptied)
        if graphs:
            self._empty = captured(self._empty, model.device)[0].replay
        self._slots: list[Request | None] = [None] * slots
        self._queue: deque[Request] = deque()
        self._lock, self._count = threading.RLock(), 0

    def _made_cache(self, model: Any, slots: int, storage: str | None) -> DynamicMaskCache:
        config = checked_config(model)
        return (GatedCache if gated_layers(config) else DynamicMaskCache)(config, slots=slots, storage=storage)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def submit(self, prompt_ids: Sequence[int] | Tensor, max_new_tokens: int | None = None, *,
               eos_token_id: int | Sequence[int] | None = None, stop: Iterable[Sequence[int]] = (),
               do_sample: bool = False, temperature: float | None = None, top_k: int | None = None,
               top_p: float | None = None, seed: int | None = None, request_id: str | None = None,
               record_timestamps: bool = False) -> Request:
        """Queue a request.

        Parameters
        ----------
        prompt_ids : ints, or int Tensor ``(N,)``
            At least one token.
        max_new_tokens : int, optional
            Unlimited by default: ``eos_token_id`` or ``stop`` ends the text.
        eos_token_id : int or ints, optional
            Tokens that end the text, as its last one.
        stop : sequences of ints
            Token sequences that end the text, as its last tokens.
        do_sample, temperature, top_k, top_p
            As in transformers' ``GenerationConfig``. Greedy by default.
        seed : int, optional
            Seed of the request's own random numbers. By default drawn from torch's generator.
        request_id : str, optional
            By default ``"req_0"``, ``"req_1"``, ...
        record_timestamps : bool
            Record when each token was known.

        Raises
        ------
        TypeError, ValueError
            An argument has the wrong type or value.
        queue.Full
            ``queue_size`` requests are waiting.
        """
        request = new_request(
            self._config, self._vocabulary, prompt_ids, max_new_tokens, eos_token_id, stop, do_sample,
            {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}, record_timestamps)
        with self._lock:
            if self._queue_size is not None and len(self._queue) >= self._queue_size:
                raise queue.Full(f"queue_size={self._queue_size} requests are waiting already; steps make room")
            request.request_id = request_id or f"req_{self._count}"
            self._count += 1
            self._queue.append(request)
        return request

    def cancel(self, request: Request) -> bool:
        """End a waiting or running request. Returns False if it has already ended."""
        with self._lock:
            if request.is_finished():
                return False
            if request.status == RequestStatus.PENDING:
                self._queue.remove(request)
            self._end(request, "cancelled")
            return True

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Number of requests in slots."""
        return len(self._running())

    @property
    def memory_bytes(self) -> int:
        """Size of the cache in bytes; constant."""
        return self._cache.memory_bytes

    def _running(self) -> list[Request]:
        """Requests in slots, oldest first."""
        found = [request for request in self._slots if request is not None and not request.is_finished()]
        return sorted(found, key=lambda request: request.created_time)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Event]:
        """Run steps until no request is left."""
        while self.waiting or self.running:
            yield from self.step()

    def step(self) -> list[Event]:
        """Decode one token of every running request whose prompt is cached, and prefill one chunk of another's prompt.

        Returns
        -------
        list of (Request, int or None)
            New tokens; None for a request that failed in this step.
        """
        events: list[Event] = []
        try:
            self._admit(events)
            running = self._running()
            decoding = [request for request in running if request.missing == 1]
            lacking = [request for request in running if request.missing > 1][:1]
            decoded, filled = self._decoded(decoding, events), self._prefilled(lacking, events)
            if decoded is not None:  # only now wait for the device
                said = decoded.tolist()
                for request in decoding:
                    self._take(request, said[request.slot], events)
            if filled is not None:
                self._take(lacking[0], filled.item(), events)
        except BaseException:  # interrupted: what the slots hold is unknown
            for request in self._running()[::-1]:
                self._requeue(request)
            raise
        return events

    def _admit(self, events: list[Event]) -> None:
        """Give free slots to waiting requests."""
        for slot, holder in enumerate(self._slots):
            if holder is not None and not holder.is_finished():
                continue
            with self._lock:
                request = self._slots[slot] = self._queue.popleft() if self._queue else None
                if request is None:
                    continue
                request.slot, request.cached, request.status = slot, 0, RequestStatus.PREFILLING
                request.lifespan = max(request.lifespan[0], time.perf_counter()), -1
            try:
                self._emptied.fill_(slot)
                self._empty()
            except Exception as error:
                self._fail(request, error, events)

    def _decoded(self, requests: list[Request], events: list[Event]) -> Tensor | None:
        """The next token of each, int64 ``(slots,)``; None if there are none or their pass has failed."""
        if not requests:
            return None
        try:
            tokens = self._decode.run([Row(request.slot, request.text(request.cached, request.cached + 1),
                                           request.sampling) for request in requests])
        except Exception as error:
            for request in requests[::-1]:
                request.failures += 1
                if request.failures < ATTEMPTS:
                    self._requeue(request)
                else:
                    self._fail(request, error, events)
            return None
        for request in requests:
            request.cached += 1
        return tokens

    def _prefilled(self, requests: list[Request], events: list[Event]) -> Tensor | None:
        """int64 ``(1,)``: the next token of a text, if a chunk of it was the last; None if there is no text."""
        for request in requests:
            chunk = request.text(request.cached, request.cached + self._prefill.length)
            try:
                tokens = self._prefill.run([Row(request.slot, chunk, request.sampling)])
            except Exception as error:
                self._fail(request, error, events)
                continue
            request.cached += len(chunk)
            return tokens
        return None

    def _take(self, request: Request, token: int, events: list[Event]) -> None:
        """Append a token, unless more of the text is to be cached, or it has been cancelled."""
        with self._lock:
            if request.missing or request.is_finished():
                return
            request.status = RequestStatus.DECODING
            request.generated_tokens.append(token)
            if request.timestamps is not None:
                request.timestamps.append(time.perf_counter())
            if request.sampling is not None:
                request.sampling.advance()
            if request.is_complete:
                self._end(request)
        events.append((request, token))

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _end(self, request: Request, error: str | None = None) -> None:
        """Its slot is free from now on, and is emptied for the next request."""
        request.status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
        request.error, request.lifespan = error, (request.lifespan[0], time.perf_counter())

    def _fail(self, request: Request, error: Exception, events: list[Event]) -> None:
        with self._lock:
            if not request.is_finished():
                self._end(request, f"{type(error).__name__}: {error}")  # the exception itself would hold tensors
                events.append((request, None))

    def _requeue(self, request: Request) -> None:
        """Begin again, before all that wait, with the text so far."""
        with self._lock:
            if not request.is_finished():
                self._slots[request.slot], request.status = None, RequestStatus.PENDING
                self._queue.appendleft(request)
