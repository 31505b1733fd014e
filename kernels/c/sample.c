/* The draw of a token. */
#include <omp.h>

#include "common.h"

#define DIGIT 10 /* bits of a probability that one pass of a search looks at; three passes see all */

/* 1 where they are counted, else a probability in units of 2^-40: sums of integers do not depend on their order. */
INLINE int64_t weight_of(float p, int counted) { return counted ? 1 : (int64_t)(p * 0x1p40f); }

/* Floats that are not negative order as their bits do. */
INLINE int32_t key_of(float p) { return (int32_t)((const bits){p}).pattern; }

/* Leave of p [n], probabilities, the smallest set of largest whose weight reaches wanted, ties to the lower id; zero the
 * rest. */
INLINE void keep_largest(float *p, int64_t n, int counted, int64_t wanted) {
    int32_t last = 0;
    for (int shift = 2 * DIGIT; shift >= 0; shift -= DIGIT) {
        int64_t histogram[1 << DIGIT] = {0};
        for (int64_t i = 0; i < n; i++) {
            const int32_t key = key_of(p[i]);
            if (key >> shift >> DIGIT == last) histogram[key >> shift & ((1 << DIGIT) - 1)] += weight_of(p[i], counted);
        }
        int32_t digit = (1 << DIGIT) - 1;
        for (; digit > 0 && histogram[digit] < wanted; digit--) wanted -= histogram[digit];
        last = last << DIGIT | digit;
    }
    for (int64_t i = 0; i < n; i++) {
        const int32_t key = key_of(p[i]);
        if (key > last) continue;
        if (key == last && wanted > 0) wanted -= weight_of(p[i], counted);
        else p[i] = 0;
    }
}

/* See sample.sample; p [n] is scratch. */
static int64_t sample_row(const float *logits, int64_t n, float temperature, int64_t top_k, float top_p, float min_p,
                          float uniform, float *p) {
    float top = -INFINITY;
    int wrong = 0;
#pragma omp simd reduction(max : top) reduction(| : wrong)
    for (int64_t i = 0; i < n; i++) {
        top = logits[i] > top ? logits[i] : top;
        wrong |= !(logits[i] < INFINITY);
    }
    if (wrong || top == -INFINITY) return -1;
    if (temperature == 0) {
        int64_t at = 0;
        while (logits[at] != top) at++;
        return at;
    }
    double total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < n; i++) {
        p[i] = exponential((logits[i] - top) / temperature);
        total += p[i];
    }
    float scale = (float)(1 / total), most = 0;
    for (int64_t i = 0; i < n; i++) p[i] *= scale;
    if (top_k > 0 && top_k < n) {
        keep_largest(p, n, 1, top_k);
        total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < n; i++) total += p[i];
        scale = (float)(1 / total);
        for (int64_t i = 0; i < n; i++) p[i] *= scale;
    }
    int64_t all = 0;
#pragma omp simd reduction(+ : all) reduction(max : most)
    for (int64_t i = 0; i < n; i++) {
        all += weight_of(p[i], 0);
        most = p[i] > most ? p[i] : most;
    }
    if (top_p < 1) {
        const int64_t wanted = (int64_t)ceil((double)top_p * (double)all);
        keep_largest(p, n, 0, wanted > 1 ? wanted : 1);
    }
    all = 0;
#pragma omp simd reduction(+ : all)
    for (int64_t i = 0; i < n; i++) {
        p[i] = p[i] >= min_p * most ? p[i] : 0;
        all += weight_of(p[i], 0);
    }
    int64_t target = (int64_t)((double)uniform * (double)all), at = 0;
    while (at < n - 1 && (target -= weight_of(p[at], 0)) >= 0) at++;
    return at;
}

/* token [rows] from logits, whose rows lie stride apart; the filters may be NULL, without a temperature it is argmax.
 * scratch: n floats a thread. */
void sample(const float *logits, int64_t *token, int64_t rows, int64_t n, int64_t stride, const float *temperature,
            const int64_t *top_k, const float *top_p, const float *min_p, const float *uniform, float greedy_below,
            float *scratch, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const int greedy = !temperature || temperature[row] < greedy_below;
        token[row] = sample_row(logits + row * stride, n, greedy ? 0 : temperature[row], top_k ? top_k[row] : 0,
                                top_p ? top_p[row] : 1, min_p ? min_p[row] : 0, greedy ? 0 : uniform[row],
                                scratch + omp_get_thread_num() * n);
    }
}
