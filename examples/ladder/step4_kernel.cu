// Step 4: the gathered tiles of step 3 as a first CUDA kernel, float32, one head.
//
//     s_ij = scale * q_i . k_j + score_j;   out_i = sum_j exp(s_ij - m_i) v_j / sum_j exp(s_ij - m_i)
//
// over the keys j of the tile's list with j <= i < stop_j. A CTA owns a tile of BLOCK_M consecutive queries, and a
// thread one of them, with q, o, m and l in registers. The CTA gathers BLOCK_N keys and values at a time into shared
// memory, where all its threads read the same element at the same time. Options: D, BLOCK_M (threads of the CTA),
// BLOCK_N.

struct Params {
    const float* q;      // (N, D)
    const float* k;      // (N, D)
    const float* v;      // (N, D)
    const float* score;  // (N)
    const int* stop;     // (N): the first query that no longer sees the key
    const int* keys;     // the concatenated key lists of all tiles
    const int* first;    // (tiles + 1): where each tile's list begins
    float* out;          // (N, D)
    int n;
    float scale;
};

extern "C" __global__ void __launch_bounds__(BLOCK_M) attention(const Params p) {
    __shared__ float k_block[BLOCK_N][D], v_block[BLOCK_N][D];
    __shared__ float score[BLOCK_N];
    __shared__ int key[BLOCK_N], stop[BLOCK_N];

    const int i = blockIdx.x * BLOCK_M + threadIdx.x;  // this thread's query
    float q[D], o[D], m = -3e38f, l = 0.0f;
    for (int d = 0; d < D; ++d) {
        q[d] = i < p.n ? p.scale * p.q[static_cast<long long>(i) * D + d] : 0.0f;
        o[d] = 0.0f;
    }

    const int end = p.first[blockIdx.x + 1];
    for (int begin = p.first[blockIdx.x]; begin < end; begin += BLOCK_N) {
        const int count = min(BLOCK_N, end - begin);
        __syncthreads();  // all threads are done with the previous block
        for (int e = threadIdx.x; e < count * D; e += BLOCK_M) {  // neighbouring threads read neighbouring elements
            const long long row = p.keys[begin + e / D];
            k_block[e / D][e % D] = p.k[row * D + e % D];
            v_block[e / D][e % D] = p.v[row * D + e % D];
        }
        for (int c = threadIdx.x; c < count; c += BLOCK_M) {
            key[c] = p.keys[begin + c];
            stop[c] = p.stop[key[c]];
            score[c] = p.score[key[c]];
        }
        __syncthreads();  // the block is in shared memory

        for (int c = 0; c < count; ++c) {
            if (i >= p.n || i < key[c] || i >= stop[c]) continue;  // the mask: two integers per key
            float s = score[c];
            for (int d = 0; d < D; ++d) s += q[d] * k_block[c][d];
            if (s > m) {
                const float rescale = expf(m - s);
                for (int d = 0; d < D; ++d) o[d] *= rescale;
                l *= rescale;
                m = s;
            }
            const float weight = expf(s - m);
            for (int d = 0; d < D; ++d) o[d] += weight * v_block[c][d];
            l += weight;
        }
    }
    if (i < p.n)
        for (int d = 0; d < D; ++d) p.out[static_cast<long long>(i) * D + d] = o[d] / l;
}
