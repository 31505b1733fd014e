/* Attention over a prompt. */
#include <omp.h>

#include "common.h"

/* A vector that the compiler splits where the processor's are shorter; WIDE of them a row keep its registers busy. */
#ifdef __AVX512F__
#define LANES 16
#define WIDE 4
#else
#define LANES 8
#define WIDE 2
#endif
#define STRIP 6 /* rows of a product at once */
#define KEYS 64 /* keys that a block of causal attention covers: a multiple of WIDE * LANES */
#define QUERIES 512 /* rows of queries that share a block of keys */
typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

/* c [STRIP, wide * LANES] = a [STRIP, depth] b [depth, wide * LANES], or added to it. */
INLINE void tile(const float *a, int64_t a_row, const float *b, int64_t b_row, float *c, int64_t c_row, int64_t depth,
                 int wide, int added) {
    vec sum[STRIP][WIDE] = {0};
    for (int row = 0; added && row < STRIP; row++)
        for (int at = 0; at < wide; at++) sum[row][at] = *(const vec *)(c + row * c_row + at * LANES);
    for (int64_t i = 0; i < depth; i++)
        for (int at = 0; at < wide; at++) {
            const vec right = *(const vec *)(b + i * b_row + at * LANES);
            for (int row = 0; row < STRIP; row++) sum[row][at] += a[row * a_row + i] * right;
        }
    for (int row = 0; row < STRIP; row++)
        for (int at = 0; at < wide; at++) *(vec *)(c + row * c_row + at * LANES) = sum[row][at];
}

INLINE int64_t up_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* Positions whose queries share a block of keys; rows of queries that this makes. */
INLINE int64_t positions_of(int64_t group) { return group < QUERIES ? QUERIES / group : 1; }
INLINE int64_t rows_of(int64_t group) { return up_to(positions_of(group) * group, STRIP); }

/* Tasks of causal_attention: blocks of positions, by KV head. */
int64_t causal_tasks(int64_t n, int64_t kv_heads, int64_t group) {
    const int64_t each = positions_of(group);
    return (n + each - 1) / each * kv_heads;
}

/* Floats that causal_attention needs a thread. */
int64_t causal_scratch(int64_t group, int64_t d) {
    return (rows_of(group) + KEYS) * (d + up_to(d, LANES)) + 2 * rows_of(group);
}

/* out [n, heads, d] = softmax(q.k * scale) v, each position over itself and those before it. q [n, heads, d] and k, v
 * [n, kv_heads, d] have rows of their own lengths. The tasks from first_task up to last_task are done, which write apart. */
void causal_attention(const float *q, int64_t q_row, const float *k, int64_t k_row, const float *v, int64_t v_row,
                      float *out, int64_t n, int64_t kv_heads, int64_t group, int64_t d, float scale, float *scratch,
                      int threads, int64_t first_task, int64_t last_task) {
    const int64_t wide = up_to(d, LANES), each = positions_of(group), blocks = (n + each - 1) / each;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t task = first_task; task < last_task; task++) { /* the longest first */
        const int64_t head = task % kv_heads, first = (blocks - 1 - task / kv_heads) * each;
        const int64_t end = first + each < n ? first + each : n, rows = up_to((end - first) * group, STRIP);
        float *queries = scratch + omp_get_thread_num() * causal_scratch(group, d), *mixed = queries + rows * d;
        float *keys = mixed + rows * wide, *values = keys + KEYS * d, *most = values + KEYS * wide, *total = most + rows;
        for (int64_t row = 0; row < rows; row++) {
            const int64_t at = first + row / group;
            const float *from = q + at * q_row + (head * group + row % group) * d;
            for (int64_t i = 0; i < d; i++) queries[row * d + i] = at < end ? from[i] * scale : 0;
            most[row] = -INFINITY;
            total[row] = 0;
        }
        memset(mixed, 0, (size_t)(rows * wide) * sizeof(float));
        for (int64_t start = 0; start < end; start += KEYS) {
            const int64_t here = end - start < KEYS ? end - start : KEYS;
            for (int64_t key = 0; key < KEYS; key++) {
                const float *from = k + (start + key) * k_row + head * d, *value = v + (start + key) * v_row + head * d;
                for (int64_t i = 0; i < d; i++) keys[i * KEYS + key] = key < here ? from[i] : 0;
                for (int64_t i = 0; i < wide; i++) values[key * wide + i] = key < here && i < d ? value[i] : 0;
            }
            for (int64_t strip = 0; strip < rows; strip += STRIP) {
                if (first + (strip + STRIP - 1) / group < start) continue;
                float weight[STRIP][KEYS];
                for (int64_t at = 0; at < KEYS; at += WIDE * LANES)
                    tile(queries + strip * d, d, keys + at, KEYS, weight[0] + at, KEYS, d, WIDE, 0);
                for (int64_t row = 0; row < STRIP; row++) {
                    const int64_t seen = first + (strip + row) / group - start + 1;
                    float *own = weight[row], *to = mixed + (strip + row) * wide, above = most[strip + row], sum = 0;
                    for (int64_t key = seen > 0 ? seen : 0; key < KEYS; key++) own[key] = -INFINITY;
#pragma omp simd reduction(max : above)
                    for (int64_t key = 0; key < KEYS; key++) above = own[key] > above ? own[key] : above;
                    if (above > most[strip + row]) {
                        const float fade = exponential(most[strip + row] - above);
                        most[strip + row] = above;
                        total[strip + row] *= fade;
                        for (int64_t i = 0; i < wide; i++) to[i] *= fade;
                    }
                    const float least = above == -INFINITY ? 0 : above;
#pragma omp simd reduction(+ : sum)
                    for (int64_t key = 0; key < KEYS; key++) {
                        own[key] = exponential(own[key] - least);
                        sum += own[key];
                    }
                    total[strip + row] += sum;
                }
                int64_t at = 0;
                for (; at + WIDE * LANES <= wide; at += WIDE * LANES)
                    tile(weight[0], KEYS, values + at, wide, mixed + strip * wide + at, wide, KEYS, WIDE, 1);
                for (; at < wide; at += LANES)
                    tile(weight[0], KEYS, values + at, wide, mixed + strip * wide + at, wide, KEYS, 1, 1);
            }
        }
        for (int64_t row = 0; row < (end - first) * group; row++) {
            float *to = out + ((first + row / group) * kv_heads * group + head * group + row % group) * d;
            for (int64_t i = 0; i < d; i++) to[i] = mixed[row * wide + i] / total[row];
        }
    }
}
