"""Decoding of unbounded length in constant memory (SPEC section 7).

Under prefix selection a key that has dropped out of the kept set never returns, so ``window`` rows per kv head give
exactly the attention over the full history, however long it gets. ``state.py`` documents what is stored and when a slot
may be overwritten; backends do the work (``cache_extend``).
"""
from __future__ import annotations

from typing import Any

from cupy_dma.arrays import Array, Ints, Windows
from cupy_dma.cache.arguments import extend_call, given
from cupy_dma.cache.key_cache import KeyCache


class DynamicCache(KeyCache):
    """The KV cache of one attention layer: the keys, values and scores that later queries can still see.

    The token at position ``p`` of its sequence attends to the ``window`` highest-scored of all tokens so far (SPEC
    section 3: NaN ranks highest, the newest of equal scores first), to the first ``sinks`` tokens, and to the last
    ``recent`` tokens, including itself; scores are key biases. This equals ``top_w(scores, window) | sinks(n, sinks) |
    sliding_window(n, recent)`` over the full history, without storing it.

    Parameters
    ----------
    batch, kv_heads, head_dim : int
        ``B``, ``Hkv`` and ``D`` (1 to 256).
    window : int, or one int per kv head
        ``w``, at least 1.
    value_dim : int, optional
        ``Dv``, 1 to 256; default ``head_dim``.
    dtype
        Type of queries, keys and values: a name ("float16", "bfloat16", "float32"; "float64" on the numpy backend) or
        a NumPy or torch dtype. Default: that of ``like``, bfloat16 without it. Scores are kept in float32 (float64 in
        a float64 cache).
    like : array, optional
        Sets the library and device of the cache (default: NumPy), and its type if ``dtype`` is not given.
    sinks, recent : int
        Number of first and last tokens that are kept in addition to the top. A key may belong to several of these sets.
    storage : "int8" or "fp8", optional
        Keep keys and values in 8 bits per number, INT8 or E4M3, with a float32 scale per row. Rows are rounded when
        their token is appended, with errors of at most ``max |x| / 253`` (INT8), or ``|x| / 16`` or ``max |x| /
        456000``, whichever is larger (E4M3); all queries read the rounded rows. The kept keys are the same. Default:
        not rounded.
    record_stops : bool
        Keep the scores of all tokens, for ``stops``: 4 bytes per token and kv head, growing with the text.
    backend
        See ``cupy_dma.get_available_backends``; ``cuda`` and ``numpy`` have a cache.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or value, or the backend does not take arrays on this device.
    RuntimeError
        The backend cannot run here.

    Examples
    --------
    >>> cache = DynamicCache(batch=1, kv_heads=2, window=4, head_dim=8, dtype="float32")
    >>> x = np.ones((1, 6, 2, 8), np.float32)
    >>> cache.extend(x, x, x, np.zeros((1, 2, 6), np.float32)).shape  # a prompt of 6 tokens
    (1, 6, 2, 8)

    Notes
    -----
    The constructor allocates ``window + sinks + recent`` rows per sequence and kv head (with that head's window); they
    never grow. All calls work in place on the arrays' device and the current stream, and never synchronize. A cache
    carries no gradient.
    """

    def __init__(self, batch: int, kv_heads: int, window: Windows, head_dim: int, value_dim: int | None = None,
                 dtype: Any = None, *, like: Array | None = None, sinks: int = 0, recent: int = 0,
                 storage: str | None = None, record_stops: bool = False, backend: str | None = None):
        self._allocate(batch, kv_heads, window, head_dim, value_dim, dtype, like, sinks, recent, record_stops, backend,
                       storage=storage)

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def extend(self, query: Array, key: Array, value: Array, scores: Array, *, bias_delay: int = 0,
               scale: float | None = None, softcap: float = 0.0, lengths: Ints | None = None,
               cu_seqlens: Ints | None = None, tail_padding: bool = False, slots: Ints | None = None,
               return_lse: bool = False, out: Array | tuple[Array, Array] | None = None) -> Any:
        """Append ``L >= 0`` tokens to every sequence and attend from them: a prompt, a chunk of one, or one new token.

        Parameters
        ----------
        query : array ``(B, L, H, D)`` of the cache's type, library and device
            ``H`` is a multiple of ``Hkv``.
        key, value : array ``(B, L, Hkv, D)`` and ``(B, L, Hkv, Dv)``
            Any strides of B, L and head, the last axis contiguous.
        scores : float array ``(B, Hkv, L)``
            See ``cupy_dma.key_scores``. Copied if the last axis is not contiguous.
        bias_delay, scale, softcap
            As for ``attention``: the scores are the bias. ``scale`` defaults to ``1 / sqrt(D)``.
        lengths : int32 or int64 array ``(B,)`` or list, optional
            The first ``lengths[b]`` tokens of row ``b`` are real; the others are ignored and get ``out = 0, lse =
            -inf``.
        cu_seqlens : int32 or int64 array ``(B + 1,)`` or list, optional
            Cumulative lengths: the new tokens of all sequences are concatenated, ``(total, H, D)``, scores
            ``(Hkv, total)``.
        tail_padding
            Allow tokens after the last sequence, as in arrays of a fixed size: they are ignored and get ``out = 0,
            lse = -inf``. False: such tokens raise an error where values are checked (see Raises).
        slots : int32 or int64 array ``(n,)`` or list, optional
            Work on some of the cache's sequences only: sequence ``i`` of the arguments, whose ``B`` is then ``n``, is
            number ``slots[i]`` of the cache. Numbers must differ, except -1: tokens of such a sequence are ignored and
            get ``out = 0, lse = -inf``. The cache's other sequences do not change.
        return_lse
            Return ``(out, lse)``.
        out : array, or with ``return_lse`` a pair of arrays, optional
            Where to write the results; contiguous.

        Returns
        -------
        out : array ``(B, L, H, Dv)``, contiguous, or ``(total, H, Dv)``
        lse : float32 array ``(B, H, L)``, or ``(H, total)``, natural log (float64 in a float64 cache)

        Raises
        ------
        TypeError, ValueError
            An argument has the wrong type, shape or device; nothing has been launched. The values of ``lengths``,
            ``cu_seqlens`` and ``slots`` are checked if they are in host memory; in GPU memory only with
            ``CUPY_DMA_CHECK=1``.
        NotImplementedError
            A torch tensor requires grad, or the backend has no cache.
        """
        call = extend_call(self._state, given(query), key, value, scores, scale, softcap, lengths, cu_seqlens,
                           return_lse, out, tail_padding, bias_delay, slots=slots)
        return self._extended(call, out)

    def attend(self, query: Array, key: Array, value: Array, scores: Array, *, bias_delay: int = 0,
               scale: float | None = None, softcap: float = 0.0, lengths: Ints | None = None,
               cu_seqlens: Ints | None = None, tail_padding: bool = False, slots: Ints | None = None,
               return_lse: bool = False, out: Array | tuple[Array, Array] | None = None) -> Any:
        """Return what ``extend`` would, without changing the cache. The tokens are copied, so ``commit`` can append the
        first of them; the next ``attend`` replaces them. Arguments and errors as for ``extend``.
        """
        call = extend_call(self._state, given(query), key, value, scores, scale, softcap, lengths, cu_seqlens,
                           return_lse, out, tail_padding, bias_delay, slots=slots)
        call.commits = False
        return self._extended(call, out)

    def update(self, key: Array, value: Array, scores: Array, *, lengths: Ints | None = None,
               cu_seqlens: Ints | None = None, tail_padding: bool = False, slots: Ints | None = None) -> None:
        """Append tokens without queries. Arguments and errors as for ``extend``.

        >>> cache = DynamicCache(1, 2, window=4, head_dim=8, dtype="float32")
        >>> cache.update(*np.ones((2, 1, 10, 2, 8), np.float32), np.zeros((1, 2, 10), np.float32))
        >>> cache.length
        array([10])
        """
        call = extend_call(self._state, None, key, value, scores, None, 0.0, lengths, cu_seqlens, False, None,
                           tail_padding, slots=slots)
        self._take(call)
