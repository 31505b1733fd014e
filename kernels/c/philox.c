/* Counter-based noise: see philox.py. */
#include "common.h"

#define WORTH_THREADS (1 << 12)

/* out [4, n]: the four words of Philox4x32-10 under each of n keys and counters. */
void philox(const int64_t *seed, const int64_t *c0, const int64_t *c1, const int64_t *c2, const int64_t *c3, int64_t n,
            int64_t *out, int threads) {
#pragma omp parallel for num_threads(threads) if (n > WORTH_THREADS)
    for (int64_t i = 0; i < n; i++) {
        uint32_t key_a = (uint32_t)seed[i], key_b = (uint32_t)((uint64_t)seed[i] >> 32);
        uint32_t x0 = (uint32_t)c0[i], x1 = (uint32_t)c1[i], x2 = (uint32_t)c2[i], x3 = (uint32_t)c3[i];
        for (int round = 0; round < 10; round++) {
            const uint64_t a = (uint64_t)x0 * 0xD2511F53u, b = (uint64_t)x2 * 0xCD9E8D57u;
            x0 = (uint32_t)(b >> 32) ^ x1 ^ key_a;
            x1 = (uint32_t)b;
            x2 = (uint32_t)(a >> 32) ^ x3 ^ key_b;
            x3 = (uint32_t)a;
            key_a += 0x9E3779B9u;
            key_b += 0xBB67AE85u;
        }
        out[i] = x0;
        out[n + i] = x1;
        out[2 * n + i] = x2;
        out[3 * n + i] = x3;
    }
}
