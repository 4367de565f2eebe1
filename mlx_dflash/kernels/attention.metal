// Attention of a few query rows over a long context and the block after it: first pass, one slice of the keys.
//
// A threadgroup owns up to 8 * RTG query rows of one key/value head and one slice of its keys. It reads each key and
// each value of the slice once, straight from the buffers they live in, and leaves un-normalised partial results.
// Keys are numbered 0 .. n + L: n rows of context, then the L rows of the block.
//
// Template: T element type; G query heads per key/value head; D head size; RTG row tiles, DS slices of D and KS slices
// of a key tile, one simdgroup for each combination; BK keys per tile; BLOCK: the block has its own arrays (else it
// follows the context in the same buffers); CAUSAL: block row i sees block keys 0..i; WINDOW: a row sees keys less than
// that far away (0: all).
    // q: [B, Hk * G, L, D]; keys, values: [B, Hk, C, D]; block_keys, block_values: [B, Hk, L, D]
    // length: [B], n; scale: [1]
    // partial: [B, Hk, P, RP, D]; maximum, total: [B, Hk, P, RP], with P = splits * KS and RP = padded rows
    const int L = q_shape[2];
    const int R = G * L;                                    // rows of one key/value head: r = g * L + i
    const int groups = (R + 8 * RTG - 1) / (8 * RTG);       // row groups of one key/value head
    constexpr int DT = D / 8 / DS;                          // 8-wide tiles of D that one simdgroup owns
    constexpr int KT = BK / 8 / KS;                         // 8-key tiles that one simdgroup owns
    constexpr int EPV = 16 / sizeof(T);                     // elements in a 16-byte load
    constexpr int LD = D + EPV;                             // padded row of the staged tile: no bank conflicts
    constexpr int THREADS = RTG * DS * KS * 32;
    const int thread_id = int(thread_index_in_threadgroup);
    const int lane = int(thread_index_in_simdgroup);
    const int sg = int(simdgroup_index_in_threadgroup);
    const int head = int(threadgroup_position_in_grid.x) / groups;
    const int heads = int(threadgroups_per_grid.x) / groups;
    const int b = int(threadgroup_position_in_grid.y);
    const int split = int(threadgroup_position_in_grid.z);
    const int splits = int(threadgroups_per_grid.z);
    const int key_slice = sg % KS;
    const int d_slice = sg / KS % DS;
    const int row0 = (int(threadgroup_position_in_grid.x) % groups * RTG + sg / (KS * DS)) * 8;
    const int d0 = d_slice * (D / DS);
    // a lane holds elements (fm, fn) and (fm, fn + 1) of an 8x8 fragment
    const int fm = ((lane >> 4) << 2) | ((lane >> 1) & 3);
    const int fn = (((lane >> 3) & 1) << 2) | ((lane & 1) << 1);

    threadgroup uint4 staged_keys[BK * LD / EPV];
    threadgroup uint4 staged_values[BK * LD / EPV];
    threadgroup float exchange[DS > 1 ? RTG * DS * KS * KT * 64 : 1];

    const int n = length[b];
    const int first = WINDOW > 0 ? max(0, n - WINDOW + 1) : 0;
    const int share = ((n + L - first + splits - 1) / splits + BK - 1) / BK * BK;
    const int begin = first + split * share;
    const int end = min(n + L, begin + share);
    const device T* context_keys = keys + b * keys_strides[0] + head * keys_strides[1];
    const device T* context_values = values + b * values_strides[0] + head * values_strides[1];
    const device T* own_keys = block_keys + b * block_keys_strides[0] + head * block_keys_strides[1];
    const device T* own_values = block_values + b * block_values_strides[0] + head * block_values_strides[1];

    simdgroup_matrix<float, 8, 8> Q[DT];                    // transposed: [d][row], scaled for exp2
    simdgroup_matrix<float, 8, 8> O[DT];                    // [row][d]
    int position[2];                                        // of my two rows, in the block
    for (int e = 0; e < 2; ++e) {
        const int r = min(row0 + fn + e, R - 1);            // rows past the end repeat the last one
        position[e] = r % L;
        const device T* query = q + b * q_strides[0] + (head * G + r / L) * q_strides[1] + position[e] * q_strides[2];
        for (int t = 0; t < DT; ++t)
            Q[t].thread_elements()[e] = float(query[(d0 + t * 8 + fm) * q_strides[3]]) * scale[0] * M_LOG2E_F;
    }
    for (int t = 0; t < DT; ++t) O[t] = simdgroup_matrix<float, 8, 8>(0.0f);
    float top[2] = {-1e30f, -1e30f};                        // running maximum of my two rows
    float sum[2] = {0.0f, 0.0f};                            // this lane's part of their denominators

    for (int tile = begin; tile < end; tile += BK) {
        for (int v = thread_id; v < BK * D / EPV; v += THREADS) {
            const int row = v / (D / EPV), col = v % (D / EPV) * EPV, j = tile + row;
            uint4 k = uint4(0u), w = uint4(0u);             // keys past the end stay zero: 0 * garbage may be NaN
            if (BLOCK && j >= n && j < end) {
                k = *(const device uint4*)(own_keys + (j - n) * block_keys_strides[2] + col);
                w = *(const device uint4*)(own_values + (j - n) * block_values_strides[2] + col);
            } else if (j < end) {
                k = *(const device uint4*)(context_keys + j * keys_strides[2] + col);
                w = *(const device uint4*)(context_values + j * values_strides[2] + col);
            }
            staged_keys[(row * LD + col) / EPV] = k;
            staged_values[(row * LD + col) / EPV] = w;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        simdgroup_matrix<float, 8, 8> S[KT];                // transposed scores: [key][row]
        for (int u = 0; u < KT; ++u) {
            S[u] = simdgroup_matrix<float, 8, 8>(0.0f);
            const int staged = ((key_slice * KT + u) * 8 + fm) * LD + d0 + fn;
            const threadgroup T* key = (const threadgroup T*)staged_keys + staged;
            for (int t = 0; t < DT; ++t) {
                simdgroup_matrix<float, 8, 8> K;
                K.thread_elements()[0] = float(key[t * 8]);
                K.thread_elements()[1] = float(key[t * 8 + 1]);
                simdgroup_multiply_accumulate(S[u], K, Q[t], S[u]);
            }
        }
        if (DS > 1) {                                       // add the scores of the other slices of D
            for (int u = 0; u < KT; ++u)
                for (int e = 0; e < 2; ++e)
                    exchange[(sg * KT + u) * 64 + fm * 8 + fn + e] = S[u].thread_elements()[e];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (int o = 1; o < DS; ++o) {
                const int other = (sg / (KS * DS) * DS + (d_slice + o) % DS) * KS + key_slice;
                for (int u = 0; u < KT; ++u)
                    for (int e = 0; e < 2; ++e)
                        S[u].thread_elements()[e] += exchange[(other * KT + u) * 64 + fm * 8 + fn + e];
            }
        }
        float best[2] = {-INFINITY, -INFINITY};
        for (int u = 0; u < KT; ++u) {
            const int j = tile + (key_slice * KT + u) * 8 + fm;
            for (int e = 0; e < 2; ++e) {
                const int distance = n + position[e] - j;   // negative: a later row of the block
                const bool near = WINDOW == 0 || (distance < WINDOW && distance > -WINDOW);
                const bool seen = j < end && near && (!CAUSAL || distance >= 0);
                S[u].thread_elements()[e] = seen ? S[u].thread_elements()[e] : -INFINITY;
                best[e] = max(best[e], S[u].thread_elements()[e]);
            }
        }
        float fade[2];                                      // what the partial results so far shrink by
        for (int e = 0; e < 2; ++e) {
            best[e] = max(best[e], simd_shuffle_xor(best[e], 2));
            best[e] = max(best[e], simd_shuffle_xor(best[e], 4));
            best[e] = max(best[e], simd_shuffle_xor(best[e], 16));
            best[e] = max(top[e], best[e]);
            fade[e] = fast::exp2(top[e] - best[e]);
            top[e] = best[e];
            sum[e] *= fade[e];
            for (int u = 0; u < KT; ++u) {
                const float p = fast::exp2(S[u].thread_elements()[e] - top[e]);
                S[u].thread_elements()[e] = p;
                sum[e] += p;
            }
        }
        const bool unchanged = simd_all(fade[0] == 1.0f && fade[1] == 1.0f);
        const bool odd = (lane >> 1) & 1;
        if (!unchanged) {
            // this lane's O is of row fm, whose factor is in the lane `owner`, as one of its rows fn, fn + 1
            const int owner = (((lane >> 4) & 1) << 3) | ((lane >> 2) & 1) | (odd ? 2 : 0);
            const float factor = simd_shuffle(odd ? fade[1] : fade[0], ushort(owner));
            for (int t = 0; t < DT; ++t)
                for (int e = 0; e < 2; ++e) O[t].thread_elements()[e] *= factor;
        }
        const int across = (((lane >> 3) & 1) << 4) | (((lane >> 4) & 1) << 3) | ((lane & 1) << 2) | ((lane >> 2) & 1);
        for (int u = 0; u < KT; ++u) {                      // transpose the probabilities in registers, then O += P V
            const float p0 = S[u].thread_elements()[0], p1 = S[u].thread_elements()[1];
            const float q0 = simd_shuffle(odd ? p1 : p0, ushort(across | (odd ? 2 : 0)));
            const float q1 = simd_shuffle(odd ? p0 : p1, ushort(across | (odd ? 0 : 2)));
            simdgroup_matrix<float, 8, 8> P;
            P.thread_elements()[0] = odd ? q1 : q0;
            P.thread_elements()[1] = odd ? q0 : q1;
            const int staged = ((key_slice * KT + u) * 8 + fm) * LD + d0 + fn;
            const threadgroup T* value = (const threadgroup T*)staged_values + staged;
            for (int t = 0; t < DT; ++t) {
                simdgroup_matrix<float, 8, 8> V;
                V.thread_elements()[0] = float(value[t * 8]);
                V.thread_elements()[1] = float(value[t * 8 + 1]);
                simdgroup_multiply_accumulate(O[t], P, V, O[t]);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    const int rows = groups * RTG * 8;
    const long slot = (long(b * heads + head) * splits + split) * KS + key_slice;
    for (int e = 0; e < 2; ++e) {
        sum[e] += simd_shuffle_xor(sum[e], 2);
        sum[e] += simd_shuffle_xor(sum[e], 4);
        sum[e] += simd_shuffle_xor(sum[e], 16);
        if (fm == 0 && d_slice == 0) {
            maximum[slot * rows + row0 + fn + e] = top[e];
            total[slot * rows + row0 + fn + e] = sum[e];
        }
    }
    device float* out = partial + (slot * rows + row0 + fm) * D + d0 + fn;
    for (int t = 0; t < DT; ++t)
        for (int e = 0; e < 2; ++e) out[t * 8 + e] = O[t].thread_elements()[e];
