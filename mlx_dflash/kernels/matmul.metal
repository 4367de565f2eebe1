// y = x W^T for the few rows of a verified block and a quantized W: each packed weight is read once for all rows.
//
// A threadgroup owns NT * 8 output features; its SG simdgroups take turns at 64-wide slices of K and are added at the
// end. The products are of the raw integers; scale and bias of a group are applied to its sums. In a slice, column c of
// the t-th fragment is k = 8 * c + t, so that a lane's weights are whole words and its x are 16 consecutive bytes.
//
// Template: T element type; BITS 4 or 8; GROUP weights per scale, a multiple of 64; MT row tiles of 8; NT; SG.
    // x: [M, K], K contiguous; w: [N, K * BITS / 32]; scales, biases: [N, K / GROUP]; y: [M, N]
    const int M = x_shape[0], K = x_shape[1], N = w_shape[0];
    const int lane = int(thread_index_in_simdgroup);
    const int sg = int(simdgroup_index_in_threadgroup);
    const int n0 = int(threadgroup_position_in_grid.x) * NT * 8;
    // a lane holds elements (fm, fn) and (fm, fn + 1) of an 8x8 fragment
    const int fm = ((lane >> 4) << 2) | ((lane >> 1) & 3);
    const int fn = (((lane >> 3) & 1) << 2) | ((lane & 1) << 1);
    constexpr int WORDS = BITS / 4;                         // packed words of one column of a slice

    threadgroup float sums[SG * NT * MT * 64];

    simdgroup_matrix<float, 8, 8> Y[NT][MT];                // [feature][row]
    for (int u = 0; u < NT; ++u)
        for (int r = 0; r < MT; ++r) Y[u][r] = simdgroup_matrix<float, 8, 8>(0.0f);
    for (int k0 = sg * 64; k0 < K; k0 += SG * 64) {
        simdgroup_matrix<float, 8, 8> X[MT][8];             // [k][row]
        float x_sum[MT][2];                                 // of my two rows, over the slice
        for (int r = 0; r < MT; ++r)
            for (int e = 0; e < 2; ++e) {
                const int m = min(r * 8 + fn + e, M - 1);   // rows past the end repeat the last one
                const device vec<T, 4>* from = (const device vec<T, 4>*)(x + m * x_strides[0] + k0 + fm * 8);
                const vec<T, 4> low = from[0], high = from[1];
                float sum = 0.0f;
                for (int t = 0; t < 4; ++t) {
                    X[r][t].thread_elements()[e] = float(low[t]);
                    X[r][t + 4].thread_elements()[e] = float(high[t]);
                    sum += float(low[t]) + float(high[t]);
                }
                sum += simd_shuffle_xor(sum, 2);
                sum += simd_shuffle_xor(sum, 4);
                sum += simd_shuffle_xor(sum, 16);
                x_sum[r][e] = sum;
            }
        for (int u = 0; u < NT; ++u) {
            const long n = min(n0 + u * 8 + fm, N - 1);
            const device uint32_t* from = w + n * (K * BITS / 32) + (k0 / 8 + fn) * WORDS;
            const vec<uint, 2 * WORDS> packed = *(const device vec<uint, 2 * WORDS>*)from;
            simdgroup_matrix<float, 8, 8> P[MT];            // sums of integer weights times x
            for (int r = 0; r < MT; ++r) P[r] = simdgroup_matrix<float, 8, 8>(0.0f);
            for (int t = 0; t < 8; ++t) {
                simdgroup_matrix<float, 8, 8> W;
                for (int e = 0; e < 2; ++e) {
                    const int bit = t * BITS;
                    W.thread_elements()[e] = float((packed[e * WORDS + bit / 32] >> (bit % 32)) & ((1 << BITS) - 1));
                }
                for (int r = 0; r < MT; ++r) simdgroup_multiply_accumulate(P[r], W, X[r][t], P[r]);
            }
            const float scale = float(scales[n * (K / GROUP) + k0 / GROUP]);
            const float bias = float(biases[n * (K / GROUP) + k0 / GROUP]);
            for (int r = 0; r < MT; ++r)
                for (int e = 0; e < 2; ++e)
                    Y[u][r].thread_elements()[e] += scale * P[r].thread_elements()[e] + bias * x_sum[r][e];
        }
    }
    for (int u = 0; u < NT; ++u)
        for (int r = 0; r < MT; ++r)
            for (int e = 0; e < 2; ++e)
                sums[((sg * MT + r) * 8 + fn + e) * NT * 8 + u * 8 + fm] = Y[u][r].thread_elements()[e];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = int(thread_index_in_threadgroup); i < MT * NT * 64; i += SG * 32) {
        const int m = i / (NT * 8), n = n0 + i % (NT * 8);
        float sum = 0.0f;
        for (int s = 0; s < SG; ++s) sum += sums[s * MT * NT * 64 + i];
        if (m < M && n < N) y[long(m) * N + n] = static_cast<T>(sum);
    }
