/* A decode step: what every layer repeats. */
#include "common.h"

#define PART 64                     /* slots that one part of attention covers */
#define HEADS 8                     /* query heads that it works on at once */
#define AHEAD 16                    /* slots that its reads run ahead of their use */
#define CACHE_LINE 16               /* floats */
#define WORTH_THREADS (1 << 13)     /* numbers; waking threads for fewer takes longer than it saves */

/* One layer of the ring: see LayerRing in layer.py. group = query heads a KV head. */
typedef struct {
    float *k, *v, *v_range, *queries;
    int32_t *position;
    const int32_t *order, *count, *evictions;
    const int64_t *seen;
    const uint8_t *active;
    int64_t lanes, kv_heads, group, slots, window, d;
} Ring;

INLINE float inverse_rms(const float *x, int64_t n, float eps) {
    double squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < n; i++) squares += (double)x[i] * x[i];
    return 1 / sqrtf((float)(squares / (double)n) + eps);
}

/* x += delta, unless that is NULL; out = the RMSNorm of x. */
void add_rms_norm(float *x, const float *delta, const float *weight, float *out, int64_t rows, int64_t width, float eps,
                  int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        float *own = x + row * width, *to = out + row * width;
        if (delta) {
            const float *more = delta + row * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) own[i] += more[i];
        }
        const float scale = inverse_rms(own, width, eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) to[i] = own[i] * scale * weight[i];
    }
}

/* out [rows, width] = silu(gate) * up of [rows, 2 * width]. */
void silu_mul(const float *gate_up, float *out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * width, *up = gate + width;
        float *to = out + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) to[i] = gate[i] / (1 + exponential(-gate[i])) * up[i];
    }
}

/* A head's norm, where it has one, and rotation in halves. */
INLINE void norm_rotate(const float *x, const float *weight, float eps, const float *cosine, const float *sine,
                        float *out, int64_t d) {
    const int64_t half = d / 2;
    const float scale = weight ? inverse_rms(x, d, eps) : 1;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        if (weight) {
            first *= scale * weight[i];
            second *= scale * weight[half + i];
        }
        out[i] = first * cosine[i] - second * sine[i];
        out[half + i] = second * cosine[i] + first * sine[i];
    }
}

/* Write what a step writes of each active lane; out [lanes, heads, d] are the queries. */
static void append(const float *qkv, const float *q_norm, const float *k_norm, const float *cosine, const float *sine,
                   float *out, const Ring *ring, float eps) {
    const int64_t d = ring->d, heads = ring->kv_heads * ring->group;
    for (int64_t lane = 0; lane < ring->lanes; lane++) {
        if (!ring->active[lane]) continue;
        const int64_t seen = ring->seen[lane];
        const float *q = qkv + lane * (heads + 2 * ring->kv_heads) * d, *k = q + heads * d, *v = k + ring->kv_heads * d;
        const float *c = cosine + lane * (d / 2), *s = sine + lane * (d / 2);
        for (int64_t head = 0; head < heads; head++) {
            const int64_t own = lane * heads + head;
            norm_rotate(q + head * d, q_norm, eps, c, s, out + own * d, d);
            float *recent = ring->queries + (own * ring->window + seen % ring->window) * d;
            memcpy(recent, out + own * d, (size_t)d * sizeof(float));
        }
        for (int64_t head = 0; head < ring->kv_heads; head++) {
            const int64_t base = (lane * ring->kv_heads + head) * ring->slots;
            const int64_t slot = base + ring->order[base + ring->count[lane]];
            norm_rotate(k + head * d, k_norm, eps, c, s, ring->k + slot * d, d);
            const float *value = v + head * d;
            float high = -INFINITY, low = INFINITY;
#pragma omp simd reduction(max : high) reduction(min : low)
            for (int64_t i = 0; i < d; i++) {
                high = value[i] > high ? value[i] : high;
                low = value[i] < low ? value[i] : low;
            }
            memcpy(ring->v + slot * d, value, (size_t)d * sizeof(float));
            ring->v_range[slot] = high - low;
            ring->position[slot] = (int32_t)seen;
        }
    }
}

/* Slots of a lane that may hold something, the new token included: it fills them in order until its first eviction. */
INLINE int64_t span_of(const Ring *ring, int64_t lane) {
    if (!ring->active[lane]) return 0;
    const int64_t next = ring->count[lane] + 1;
    return ring->evictions[lane] > 0 || next > ring->slots ? ring->slots : next;
}

/* n <= PART slots of a KV head: for each of its query heads, up to HEADS, the weighted values, mixed [group, d]; stats
 * [group, 2] are the greatest product and the sum of the weights relative to it. */
INLINE void attend_part(const float *q, const float *k, const float *v, const int32_t *position, int64_t n,
                        int64_t group, int64_t d, float scale, float *mixed, float *stats) {
    int64_t visible[PART], count = 0;
    float weight[HEADS][PART];
    for (int64_t slot = 0; slot < n; slot++)
        if (position[slot] >= 0) visible[count++] = slot * d;
    for (int64_t at = 0; at < count; at++) {
        const float *key = k + visible[at];
        for (int64_t i = 0; i < d; i += CACHE_LINE) {
            __builtin_prefetch(v + visible[at] + i);
            __builtin_prefetch(key + AHEAD * d + i);
        }
        for (int64_t head = 0; head < group; head++) {
            float product = 0;
#pragma omp simd reduction(+ : product)
            for (int64_t i = 0; i < d; i++) product += q[head * d + i] * key[i];
            weight[head][at] = product;
        }
    }
    for (int64_t head = 0; head < group; head++) {
        float most = -INFINITY, total = 0;
#pragma omp simd reduction(max : most)
        for (int64_t at = 0; at < count; at++) most = weight[head][at] > most ? weight[head][at] : most;
        const float least = most == -INFINITY ? 0 : most; /* products may overflow below */
#pragma omp simd reduction(+ : total)
        for (int64_t at = 0; at < count; at++) {
            weight[head][at] = exponential((weight[head][at] - least) * scale);
            total += weight[head][at];
        }
        stats[2 * head] = most;
        stats[2 * head + 1] = total;
    }
    memset(mixed, 0, (size_t)(group * d) * sizeof(float));
    for (int64_t at = 0; at < count; at++) {
        const float *value = v + visible[at];
        for (int64_t head = 0; head < group; head++) {
#pragma omp simd
            for (int64_t i = 0; i < d; i++) mixed[head * d + i] += weight[head][at] * value[i];
        }
    }
}

/* out [lanes, heads, d] = softmax(q.k * scale) v over the visible slots, 0 where there are none. scratch: d + 2 floats
 * for every PART slots of a lane and query head. */
static void decode_attention(const float *q, float *out, const Ring *ring, float scale, float *scratch, int threads) {
    const int64_t d = ring->d, group = ring->group, slots = ring->slots, heads = ring->lanes * ring->kv_heads;
    const int64_t parts = (slots + PART - 1) / PART, tasks = heads * parts;
    float *mixed = scratch, *stats = scratch + tasks * group * d;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t head = task / parts, start = task % parts * PART, slot = head * slots + start;
        const int64_t left = span_of(ring, head / ring->kv_heads) - start, n = left < PART ? left : PART;
        for (int64_t first = 0; n > 0 && first < group; first += HEADS) {
            const int64_t some = group - first < HEADS ? group - first : HEADS, row = task * group + first;
            const float *own = q + (head * group + first) * d, *k = ring->k + slot * d, *v = ring->v + slot * d;
            const int32_t *position = ring->position + slot;
            float *to = mixed + row * d, *stat = stats + row * 2;
            switch (d) { /* a width that the compiler knows makes much better code */
                case 64: attend_part(own, k, v, position, n, some, 64, scale, to, stat); break;
                case 128: attend_part(own, k, v, position, n, some, 128, scale, to, stat); break;
                default: attend_part(own, k, v, position, n, some, d, scale, to, stat);
            }
        }
    }
    for (int64_t row = 0; row < heads * group; row++) {
        const int64_t head = row / group, own = (span_of(ring, head / ring->kv_heads) + PART - 1) / PART;
        float *to = out + row * d, most = -INFINITY, total = 0;
        memset(to, 0, (size_t)d * sizeof(float));
        for (int64_t part = 0; part < own; part++) {
            const float *stat = stats + ((head * parts + part) * group + row % group) * 2;
            most = stat[0] > most ? stat[0] : most;
        }
        for (int64_t part = 0; part < own; part++) {
            const int64_t at = (head * parts + part) * group + row % group;
            if (stats[at * 2 + 1] == 0) continue; /* nothing visible, and no greatest product */
            const float weight = exponential((stats[at * 2] - most) * scale);
            total += weight * stats[at * 2 + 1];
#pragma omp simd
            for (int64_t i = 0; i < d; i++) to[i] += weight * mixed[at * d + i];
        }
        for (int64_t i = 0; total != 0 && i < d; i++) to[i] /= total;
    }
}

/* Floats that attend needs beside its result: the queries; of each part d + 2 for every query head. */
int64_t scratch_size(const Ring *ring) {
    const int64_t parts = (ring->slots + PART - 1) / PART;
    return ring->lanes * ring->kv_heads * ring->group * (ring->d + parts * (ring->d + 2));
}

/* A step in one layer: write the token, attend to what is live. out [lanes, heads, d]. 0, and nothing is written, where an
 * active lane has no free slot. */
int attend(const float *qkv, const float *q_norm, const float *k_norm, const float *cosine, const float *sine,
           float *out, const Ring *ring, float eps, float scale, float *scratch, int threads) {
    for (int64_t lane = 0; lane < ring->lanes; lane++)
        if (ring->active[lane] && ring->count[lane] >= ring->slots) return 0;
    float *queries = scratch;
    append(qkv, q_norm, k_norm, cosine, sine, queries, ring, eps);
    decode_attention(queries, out, ring, scale, queries + ring->lanes * ring->kv_heads * ring->group * ring->d, threads);
    return 1;
}
