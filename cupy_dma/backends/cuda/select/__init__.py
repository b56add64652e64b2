"""Key scores and the selection of keys.

    scores.py        key scores and their gradient: kernels/select/key_scores.cu, key_scores_backward.cu
    prefix.py        prefix top-w: kernels/select/prefix_top_w.cu
    last_queries.py  prefix top-w of the last queries: kernels/select/last_queries_top_w.cu
"""
