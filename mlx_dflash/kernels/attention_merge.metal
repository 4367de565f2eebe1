// Attention, second pass: weigh the partial results of the slices and divide. One thread per output element.
// Template: T element type; G query heads per key/value head; D head size; SINKS: each head has one more logit, which
// has no value.
    // partial: [B, Hk, P, RP, D]; maximum, total: [B, Hk, P, RP]; sinks: [Hk * G]
    // out: [B, Hk * G, L, D], the rows of one key/value head in order
    const int d = int(thread_position_in_grid.x);
    const int r = int(thread_position_in_grid.y);
    const int bh = int(thread_position_in_grid.z);
    const int R = int(threads_per_grid.y);
    const int P = maximum_shape[2], rows = maximum_shape[3];
    float top = -1e30f;
    for (int p = 0; p < P; ++p) top = max(top, maximum[(long(bh) * P + p) * rows + r]);
    float denominator = 0.0f, numerator = 0.0f;
    for (int p = 0; p < P; ++p) {
        const long row = (long(bh) * P + p) * rows + r;
        const float weight = fast::exp2(maximum[row] - top);
        denominator += weight * total[row];
        numerator += weight * partial[row * D + d];
    }
    if (SINKS)
        denominator += fast::exp2(float(sinks[bh % maximum_shape[1] * G + r / (R / G)]) * M_LOG2E_F - top);
    out[(long(bh) * R + r) * D + d] = static_cast<T>(denominator > 0.0f ? numerator / denominator : 0.0f);
