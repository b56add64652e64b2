"""Key lists: which keys each tile of queries gathers.

    intervals.py          from interval masks: kernels/lists/intervals.cu
    dense_mask.py         dense masks as bits, and their lists: kernels/lists/dense_mask.cu
    dense_macro_tiles.py  lists of super-tiles under dense masks: kernels/lists/dense_macro_tiles.cu
    varlen.py             masks of packed sequences in query rows: kernels/lists/varlen.cu
"""
