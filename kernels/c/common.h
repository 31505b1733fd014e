/* The operations of a CPU in float32: what the Triton kernels are on a GPU.
 *
 * Compiled where ringkv runs (compiled.py), called by native.py. Arrays are contiguous where nothing else is said. Loops
 * are written for the compiler to make vectors of. Work is split in parts of a fixed size, so no result depends on the
 * number of threads or on another lane. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* A number and what stores it: any float has a pattern, where a NaN has no integer. */
typedef union {
    float value;
    uint32_t pattern;
} bits;

/* e^x to about an ulp, in a form that becomes vectors. NaN stays NaN. */
INLINE float exponential(float x) {
    x = x < -88 ? -88 : x > 89 ? 89 : x; /* where the power of two below is already 0 or infinite */
    const bits whole = {x * 1.44269504f + 0x1.8p23f}; /* a sum without a fraction: its low bits are the integer */
    const float n = whole.value - 0x1.8p23f;
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f; /* ln 2 in two parts: n times the first is exact */
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1;
    const bits power = {.pattern = (whole.pattern + 127) << 23};
    return p * power.value;
}
