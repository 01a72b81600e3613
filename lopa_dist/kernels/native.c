/* A forward's operations on a CPU in fp32, in bits that do not depend on the batch (native.py compiles and calls them).

Every number of a row is computed by one chain of operations, in an order that follows from the row alone: no tile, no
thread and no other row can change it. Products add up over the inputs, the first one first, with one rounding each
(fused multiply-add). Attention adds up over the tokens that a row sees, the first one first. Other sums have LANES
partial sums, of every LANES-th number. No sum is contracted but where `fused` says so: compile with -ffp-contract=off.

Matrices are by rows; ptrdiff_t ld... is the distance of rows in numbers. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ---- vectors of L numbers, and how many rows of a product fit into the registers beside two vectors of weights ---- */

#if defined(__AVX512F__)
#include <immintrin.h>
enum { L = 16, MOST_ROWS = 14 };
typedef __m512 V;
static inline V load(const float *p) { return _mm512_loadu_ps(p); }
static inline void store(float *p, V x) { _mm512_storeu_ps(p, x); }
static inline V load_some(const float *p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
static inline void store_some(float *p, V x, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), x); }
static inline V all(float x) { return _mm512_set1_ps(x); }
static inline V fused(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
static inline __m128 sum_of_halves(V x) {
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
enum { L = 8, MOST_ROWS = 6 };
typedef __m256 V;
static inline V load(const float *p) { return _mm256_loadu_ps(p); }
static inline void store(float *p, V x) { _mm256_storeu_ps(p, x); }
static inline V all(float x) { return _mm256_set1_ps(x); }
static inline V fused(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
static inline __m128 sum_of_halves(V x) { return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); }
#elif defined(__aarch64__)
#include <arm_neon.h>
enum { L = 4, MOST_ROWS = 8 };
typedef float32x4_t V;
static inline V load(const float *p) { return vld1q_f32(p); }
static inline void store(float *p, V x) { vst1q_f32(p, x); }
static inline V all(float x) { return vdupq_n_f32(x); }
static inline V fused(V a, V b, V c) { return vfmaq_f32(c, a, b); }
#else
#error "a CPU without fused multiply-add: neither AVX2 with FMA, nor AVX-512, nor 64-bit ARM"
#endif

#if !defined(__AVX512F__)
static inline V load_some(const float *p, int n) {
    float some[16] = {0};
    memcpy(some, p, n * sizeof *p);
    return load(some);
}
static inline void store_some(float *p, V x, int n) {
    float some[16];
    store(some, x);
    memcpy(p, some, n * sizeof *p);
}
#endif

#if defined(__aarch64__)
static inline void four_sums(float *y, V a, V b, V c, V d) { store(y, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d))); }
#else
static inline void four_sums(float *y, V a, V b, V c, V d) { /* of the numbers of four vectors */
    __m128 ab = _mm_hadd_ps(sum_of_halves(a), sum_of_halves(b)), cd = _mm_hadd_ps(sum_of_halves(c), sum_of_halves(d));
    _mm_storeu_ps(y, _mm_hadd_ps(ab, cd));
}
#endif

/* TIMES_n(F, x): F(0, x) ... F(n - 1, x), and EACH_n(F, m): F(m, 0) ... F(m, n - 1). What is to stay in registers has to
be variables: a compiler keeps an array in memory. */
#define TIMES_1(F, x) F(0, x)
#define TIMES_2(F, x) TIMES_1(F, x) F(1, x)
#define TIMES_3(F, x) TIMES_2(F, x) F(2, x)
#define TIMES_4(F, x) TIMES_3(F, x) F(3, x)
#define TIMES_5(F, x) TIMES_4(F, x) F(4, x)
#define TIMES_6(F, x) TIMES_5(F, x) F(5, x)
#define TIMES_7(F, x) TIMES_6(F, x) F(6, x)
#define TIMES_8(F, x) TIMES_7(F, x) F(7, x)
#define TIMES_9(F, x) TIMES_8(F, x) F(8, x)
#define TIMES_10(F, x) TIMES_9(F, x) F(9, x)
#define TIMES_11(F, x) TIMES_10(F, x) F(10, x)
#define TIMES_12(F, x) TIMES_11(F, x) F(11, x)
#define TIMES_13(F, x) TIMES_12(F, x) F(12, x)
#define TIMES_14(F, x) TIMES_13(F, x) F(13, x)
#define EACH_1(F, m) F(m, 0)
#define EACH_2(F, m) EACH_1(F, m) F(m, 1)
#define EACH_3(F, m) EACH_2(F, m) F(m, 2)
#define EACH_4(F, m) EACH_3(F, m) F(m, 3)
#define EACH_8(F, m) EACH_4(F, m) F(m, 4) F(m, 5) F(m, 6) F(m, 7)

/* ---- products ---- */

/* y = init + x w for a block of rows and a few vectors of columns; of the last vector only `some` numbers, 0: all */
typedef void Block(const float *x, ptrdiff_t ldx, const float *w, ptrdiff_t ldw, ptrdiff_t K, const float *init,
                   ptrdiff_t ldi, float *y, ptrdiff_t ldy, int some);

#define LOAD(p, v) (some ? load_some((p) + v * L, some) : load((p) + v * L))
#define FIRST(m, v) V s##m##_##v = init ? LOAD(init + m * ldi, v) : all(0);
#define FIRSTS(m, NV) EACH_##NV(FIRST, m)
#define WEIGHT(m, v) V w##v = LOAD(w, v);
#define ADD(m, v) s##m##_##v = fused(x##m, w##v, s##m##_##v);
#define ADDS(m, NV) V x##m = all(x[m * ldx + k]); EACH_##NV(ADD, m)
#define LAST(m, v) if (some) store_some(y + m * ldy + v * L, s##m##_##v, some); else store(y + m * ldy + v * L, s##m##_##v);
#define LASTS(m, NV) EACH_##NV(LAST, m)
#define AHEAD 8 /* rows of weights: they lie too far apart for the processor to see them coming */
#define BODY(MR, NV) \
    TIMES_##MR(FIRSTS, NV) \
    for (ptrdiff_t k = 0; k < K; k++, w += ldw) { \
        if (NV > 2) for (int v = 0; v < NV; v++) __builtin_prefetch(w + AHEAD * ldw + v * L); \
        EACH_##NV(WEIGHT, 0) \
        TIMES_##MR(ADDS, NV) \
    } \
    TIMES_##MR(LASTS, NV)
#define BLOCK(MR, NV) \
    static void block_##MR##_##NV(const float *x, ptrdiff_t ldx, const float *w, ptrdiff_t ldw, ptrdiff_t K, \
                                  const float *init, ptrdiff_t ldi, float *y, ptrdiff_t ldy, int partial) { \
        if (NV == 1 && partial) { const int some = partial; BODY(MR, NV) } else { const int some = 0; BODY(MR, NV) } \
    }
#define BLOCKS(MR, MANY) BLOCK(MR, 1) BLOCK(MR, 2) BLOCK(MR, MANY)
#define ROW(MR, MANY) {block_##MR##_1, block_##MR##_2, block_##MR##_##MANY}

/* BY_ROWS[rows]: blocks of one, two and MANY[rows] vectors */
#if defined(__AVX2__) && !defined(__AVX512F__)
BLOCKS(1, 8) BLOCKS(2, 4) BLOCKS(3, 3) BLOCK(4, 1) BLOCK(4, 2) BLOCK(5, 1) BLOCK(5, 2) BLOCK(6, 1) BLOCK(6, 2)
static Block *const BY_ROWS[][3] = {{0}, ROW(1, 8), ROW(2, 4), ROW(3, 3), ROW(4, 2), ROW(5, 2), ROW(6, 2)};
static const int MANY[] = {0, 8, 4, 3, 2, 2, 2};
#else
BLOCKS(1, 8) BLOCKS(2, 8) BLOCKS(3, 4) BLOCKS(4, 4) BLOCKS(5, 4) BLOCKS(6, 4) BLOCKS(7, 4) BLOCK(8, 1) BLOCK(8, 2)
#if !defined(__aarch64__)
BLOCK(9, 1) BLOCK(9, 2) BLOCK(10, 1) BLOCK(10, 2) BLOCK(11, 1) BLOCK(11, 2) BLOCK(12, 1) BLOCK(12, 2)
BLOCK(13, 1) BLOCK(13, 2) BLOCK(14, 1) BLOCK(14, 2)
#endif
static Block *const BY_ROWS[][3] = {
    {0}, ROW(1, 8), ROW(2, 8), ROW(3, 4), ROW(4, 4), ROW(5, 4), ROW(6, 4), ROW(7, 4), ROW(8, 2),
#if !defined(__aarch64__)
    ROW(9, 2), ROW(10, 2), ROW(11, 2), ROW(12, 2), ROW(13, 2), ROW(14, 2),
#endif
};
static const int MANY[] = {0, 8, 8, 4, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2, 2};
#endif

enum {
    FEW = MOST_ROWS / 2, /* rows for which it does not pay to copy weights */
    DEPTH = 256, PANEL = 4, /* weights that are copied at once, to lie side by side: inputs, and vectors of outputs */
    COLUMNS = PANEL * L,
    SPLIT = 1 << 18, /* multiplications that are worth a thread */
};

/* of the columns [begin, end) of a product with few rows */
static void multiply_few(const float *x, ptrdiff_t ldx, const float *w, ptrdiff_t ldw, const float *bias, float *y,
                         ptrdiff_t ldy, int rows, ptrdiff_t K, ptrdiff_t begin, ptrdiff_t end) {
    for (ptrdiff_t n = begin; n < end;) {
        int vectors = end - n >= MANY[rows] * L ? MANY[rows] : end - n >= 2 * L ? 2 : 1;
        Block *block = BY_ROWS[rows][vectors > 2 ? 2 : vectors - 1];
        block(x, ldx, w + n, ldw, K, bias ? bias + n : 0, 0, y + n, ldy, end - n < L ? (int)(end - n) : 0);
        n += vectors * L;
    }
}

static void multiply(const float *x, ptrdiff_t ldx, const float *w, ptrdiff_t ldw, const float *bias, float *y,
                     ptrdiff_t ldy, ptrdiff_t rows, ptrdiff_t K, ptrdiff_t begin, ptrdiff_t end) {
    if (rows <= FEW) {
        multiply_few(x, ldx, w, ldw, bias, y, ldy, (int)rows, K, begin, end);
        return;
    }
    ptrdiff_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    float copy[DEPTH * COLUMNS] __attribute__((aligned(64))); /* pairs of vectors, all inputs of one pair first */
    for (ptrdiff_t n = begin; n < end; n += COLUMNS) {
        ptrdiff_t wide = end - n < COLUMNS ? end - n : COLUMNS;
        for (ptrdiff_t k = 0; k < K; k += DEPTH) {
            ptrdiff_t depth = K - k < DEPTH ? K - k : DEPTH;
            const float *from = w + k * ldw + n;
            for (ptrdiff_t i = 0; i < depth; i++, from += ldw) {
                for (int v = 0; v < PANEL; v++) __builtin_prefetch(from + AHEAD * ldw + v * L);
                for (int v = 0; v < PANEL; v++) {
                    ptrdiff_t left = wide - v * L;
                    V numbers = left >= L ? load(from + v * L) : left > 0 ? load_some(from + v * L, (int)left) : all(0);
                    store(copy + ((v / 2) * DEPTH + i) * 2 * L + (v % 2) * L, numbers);
                }
            }
            for (ptrdiff_t b = 0; b < blocks; b++) {
                ptrdiff_t m = rows * b / blocks, count = rows * (b + 1) / blocks - m;
                const float *in = x + m * ldx + k;
                for (ptrdiff_t v = 0; v * L < wide; v += 2) {
                    float *to = y + m * ldy + n + v * L;
                    const float *weights = copy + v * DEPTH * L, *init = k ? to : bias ? bias + n + v * L : 0;
                    ptrdiff_t ldi = k ? ldy : 0, left = wide - v * L;
                    if (left >= 2 * L) {
                        BY_ROWS[count][1](in, ldx, weights, 2 * L, depth, init, ldi, to, ldy, 0);
                        continue;
                    }
                    BY_ROWS[count][0](in, ldx, weights, 2 * L, depth, init, ldi, to, ldy, left < L ? (int)left : 0);
                    if (left > L)
                        BY_ROWS[count][0](in, ldx, weights + L, 2 * L, depth, init ? init + L : 0, ldi, to + L, ldy,
                                          (int)(left - L));
                }
            }
        }
    }
}

/* y [M, N] = x [M, K] w [K, N] (+ bias [N]) */
void product(const float *x, ptrdiff_t ldx, const float *w, ptrdiff_t ldw, const float *bias, float *y, ptrdiff_t ldy,
             ptrdiff_t M, ptrdiff_t K, ptrdiff_t N, int threads) {
    if (!M) return;
    ptrdiff_t parts = M * K * N / SPLIT;
    parts = parts < threads ? parts : threads;
    if (parts <= 1) {
        multiply(x, ldx, w, ldw, bias, y, ldy, M, K, 0, N);
        return;
    }
    ptrdiff_t panels = (N + COLUMNS - 1) / COLUMNS, across = panels < parts ? panels : parts;
    ptrdiff_t down = M >= 2 * MOST_ROWS ? parts / across : 1;
    across = down * across;
#pragma omp parallel for num_threads(parts) schedule(static)
    for (ptrdiff_t part = 0; part < across; part++) {
        ptrdiff_t of = across / down, i = part / of, j = part % of;
        ptrdiff_t m = M * i / down, begin = panels * j / of * COLUMNS, end = panels * (j + 1) / of * COLUMNS;
        multiply(x + m * ldx, ldx, w, ldw, bias, y + m * ldy, ldy, M * (i + 1) / down - m, K, begin, end < N ? end : N);
    }
}

/* ---- between products ---- */

enum { LANES = 16, MANY_NUMBERS = 1 << 16 };

static inline float total(const float *lanes) {
    float some[8];
    for (int i = 0; i < 8; i++) some[i] = lanes[i] + lanes[i + 8];
    for (int i = 0; i < 4; i++) some[i] += some[i + 4];
    return (some[0] + some[2]) + (some[1] + some[3]);
}

/* e^x, within 2 units in the last place; below -87 as e^-87, above 88 as e^88 */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float shifted = __builtin_fmaf(x, 1.44269504f, 12582912.0f), n = shifted - 12582912.0f; /* to the nearest integer */
    float r = __builtin_fmaf(n, -0.693145752f, x);
    r = __builtin_fmaf(n, -1.42860677e-6f, r);
    float p = __builtin_fmaf(r, 1.98756915e-4f, 1.39819995e-3f);
    p = __builtin_fmaf(p, r, 8.33345205e-3f);
    p = __builtin_fmaf(p, r, 4.16657962e-2f);
    p = __builtin_fmaf(p, r, 1.66666657e-1f);
    p = __builtin_fmaf(p, r, 0.5f);
    p = __builtin_fmaf(p, r * r, r) + 1.0f;
    union { float number; int32_t bits; } power = {.bits = ((int32_t)n + 127) << 23};
    return p * power.number;
}

/* the natural logarithm of a normal number above 0, within 2 units in the last place */
static inline float logarithm(float x) {
    union { float number; int32_t bits; } of = {.number = x};
    int32_t shifted = of.bits - 0x3f3504f3, power = shifted >> 23; /* x = 2^power m, m from sqrt(1/2) on */
    of.bits -= power * (1 << 23);
    float f = of.number - 1.0f, square = f * f, n = (float)power;
    float p = __builtin_fmaf(f, 7.0376836e-2f, -1.1514610e-1f);
    p = __builtin_fmaf(p, f, 1.1676998e-1f);
    p = __builtin_fmaf(p, f, -1.2420141e-1f);
    p = __builtin_fmaf(p, f, 1.4249323e-1f);
    p = __builtin_fmaf(p, f, -1.6668057e-1f);
    p = __builtin_fmaf(p, f, 2.0000714e-1f);
    p = __builtin_fmaf(p, f, -2.4999994e-1f);
    p = __builtin_fmaf(p, f, 3.3333331e-1f);
    p = __builtin_fmaf(p * f, square, n * -2.12194440e-4f);
    p = __builtin_fmaf(square, -0.5f, p);
    return __builtin_fmaf(n, 0.693359375f, f + p);
}

static void normalise(const float *x, const float *weight, float *y, ptrdiff_t d, float eps) {
    float squares[LANES] = {0};
    ptrdiff_t i = 0;
    for (; i + LANES <= d; i += LANES)
        for (int j = 0; j < LANES; j++) squares[j] = __builtin_fmaf(x[i + j], x[i + j], squares[j]);
    for (int j = 0; i + j < d; j++) squares[j] = __builtin_fmaf(x[i + j], x[i + j], squares[j]);
    float scale = 1.0f / sqrtf(total(squares) / (float)d + eps);
    for (i = 0; i < d; i++) y[i] = x[i] * scale * weight[i];
}

/* y = the norm of x; with `residual`, x becomes the sum of both before */
void norm(float *x, const float *residual, const float *weight, float *y, ptrdiff_t R, ptrdiff_t d, float eps,
          int threads) {
    if (R * d < MANY_NUMBERS) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (ptrdiff_t r = 0; r < R; r++) {
        float *row = x + r * d;
        if (residual)
            for (ptrdiff_t i = 0; i < d; i++) row[i] += residual[r * d + i];
        normalise(row, weight, y + r * d, d, eps);
    }
}

/* y [R, I] = silu(gate) * up of x [R, 2 I] */
void swiglu(const float *x, float *y, ptrdiff_t R, ptrdiff_t I, int threads) {
    if (R * I < MANY_NUMBERS) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (ptrdiff_t r = 0; r < R; r++) {
        const float *gate = x + r * 2 * I, *up = gate + I;
        float *to = y + r * I;
        for (ptrdiff_t i = 0; i < I; i++) to[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
    }
}

/* q [R, H, D] of qkv [R, (H + 2 Hkv) D], rotated, and normed before if there are weights; so is k, which is stored, as v
is */
void rotate_and_store(const float *qkv, float *q, const float *cos, const float *sin, float *keys, float *values, const int64_t *slots,
                      int64_t first, const float *q_norm, const float *k_norm, float eps, ptrdiff_t R, ptrdiff_t H,
                      ptrdiff_t Hkv, ptrdiff_t D, int threads) {
    ptrdiff_t width = (H + 2 * Hkv) * D, half = D / 2;
    if (R * width < MANY_NUMBERS) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (ptrdiff_t r = 0; r < R; r++) {
        const float *row = qkv + r * width;
        const float *c = cos + r * D, *s = sin + r * D;
        int64_t slot = slots ? slots[r] : first + r;
        for (ptrdiff_t h = 0; h < H + Hkv; h++) {
            float *x = h < H ? q + (r * H + h) * D : keys + (slot * Hkv + h - H) * D;
            if (q_norm) normalise(row + h * D, h < H ? q_norm : k_norm, x, D, eps);
            else memcpy(x, row + h * D, D * sizeof *x);
            for (ptrdiff_t i = 0; i < half; i++) {
                float low = x[i], high = x[i + half];
                x[i] = __builtin_fmaf(high, s[i], low * c[i]);
                x[i + half] = __builtin_fmaf(low, s[i + half], high * c[i + half]);
            }
        }
        memcpy(values + slot * Hkv * D, row + (H + Hkv) * D, Hkv * D * sizeof *row);
    }
}

/* ---- the record head, behind its product ---- */

static inline uint64_t mix(uint64_t x) { /* as of random.py */
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static inline float gumbel(uint64_t key, uint64_t counter) { /* of a key that is mixed */
    float uniform = ((float)(int32_t)(mix(key + counter * 0x9E3779B97F4A7C15u) >> 41) + 0.5f) * 0x1p-23f;
    return -logarithm(-logarithm(uniform));
}

/* the first of the greatest of n numbers but for number `without`, -1 if there is none */
static ptrdiff_t greatest(const float *x, ptrdiff_t n, ptrdiff_t without) {
    float best[LANES];
    int32_t where[LANES];
    for (int j = 0; j < LANES; j++) best[j] = -INFINITY, where[j] = -1;
    ptrdiff_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            int better = (x[i + j] > best[j]) & (i + j != without);
            best[j] = better ? x[i + j] : best[j];
            where[j] = better ? (int32_t)(i + j) : where[j];
        }
    for (int j = 0; i + j < n; j++)
        if (x[i + j] > best[j] && i + j != without) best[j] = x[i + j], where[j] = (int32_t)(i + j);
    ptrdiff_t found = -1;
    for (int j = 0; j < LANES; j++)
        if (where[j] >= 0 && (found < 0 || best[j] > x[found] || (best[j] == x[found] && where[j] < found)))
            found = where[j];
    return found;
}

/* sums [7 or 10, R, C / width] of logits [R, C] from token `low` on, as `record_head._reduce` says; logits and the
preferences [R, C] are changed. temperature 0: greedy, without keys and preferences. */
void reduce(float *logits, float *preferences, ptrdiff_t R, ptrdiff_t C, int64_t low, ptrdiff_t width, int64_t mask,
            float temperature, const int64_t *keys, int margin, int entropy, int runner_up, float *sums, int threads) {
    ptrdiff_t tiles = C / width, step = R * tiles;
    if (R * C < MANY_NUMBERS) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (ptrdiff_t r = 0; r < R; r++) {
        float *row = logits + r * C, *wish = row;
        if (temperature > 0)
            for (ptrdiff_t i = 0; i < C; i++) row[i] /= temperature;
        if (low <= mask && mask < low + C) row[mask - low] = -3.40282347e38f; /* finite: 0 x -inf would be NaN */
        if (temperature > 0) {
            uint64_t key = mix((uint64_t)keys[r]);
            wish = preferences + r * C;
            for (ptrdiff_t i = 0; i < C; i++) wish[i] = row[i] + gumbel(key, (uint64_t)(low + i));
        }
        for (ptrdiff_t t = 0; t < tiles; t++) {
            const float *x = row + t * width, *wished = wish + t * width;
            ptrdiff_t first = greatest(x, width, -1);
            float top = first < 0 ? NAN : x[first], total_of[LANES] = {0}, moment[LANES] = {0};
            ptrdiff_t i = 0;
            for (; i + LANES <= width; i += LANES)
                for (int j = 0; j < LANES; j++) {
                    float below = x[i + j] - top, e = exponential(below);
                    e = below < -87.0f ? 0.0f : e;
                    total_of[j] += e;
                    moment[j] = __builtin_fmaf(e, below < -87.0f ? 0.0f : below, moment[j]);
                }
            for (int j = 0; i + j < width; j++) {
                float below = x[i + j] - top, e = exponential(below);
                e = below < -87.0f ? 0.0f : e;
                total_of[j] += e;
                moment[j] = __builtin_fmaf(e, below < -87.0f ? 0.0f : below, moment[j]);
            }
            ptrdiff_t choice = wished == x ? first : greatest(wished, width, -1), at = r * tiles + t;
            choice = choice < 0 ? 0 : choice;
            ptrdiff_t next = margin ? greatest(x, width, first) : -1;
            sums[at] = top;
            sums[step + at] = !margin ? top : next < 0 ? -3.40282347e38f : x[next];
            sums[2 * step + at] = total(total_of);
            sums[3 * step + at] = entropy ? total(moment) : top;
            sums[4 * step + at] = wished[choice];
            sums[5 * step + at] = x[choice];
            sums[6 * step + at] = (float)(low + t * width + choice);
            if (runner_up) {
                next = greatest(wished, width, choice);
                ptrdiff_t of = next < 0 ? 0 : next;
                sums[7 * step + at] = next < 0 ? -3.40282347e38f : wished[next];
                sums[8 * step + at] = x[of];
                sums[9 * step + at] = (float)(low + t * width + of);
            }
        }
    }
}

/* records [R, 3 or 5] of all tiles' sums [7 or 10, R, T], as `record_head._records` says; confidence 0: probability,
1: margin, 2: negative entropy */
void records(const float *sums, ptrdiff_t R, ptrdiff_t T, int confidence, int runner_up, int32_t *out) {
    ptrdiff_t step = R * T;
    for (ptrdiff_t r = 0; r < R; r++, out += runner_up ? 5 : 3) {
        const float *tops = sums + r * T, *wished = tops + 4 * step, *logits = tops + 5 * step, *tokens = tops + 6 * step;
        ptrdiff_t choice = greatest(wished, T, -1), first = greatest(tops, T, -1);
        choice = choice < 0 ? 0 : choice;
        float top = first < 0 ? NAN : tops[first], whole = 0, moment = 0, second = -INFINITY;
        for (ptrdiff_t t = 0; t < T; t++) {
            float below = tops[t] - top, scale = below < -87.0f ? 0.0f : exponential(below);
            whole += tops[2 * step + t] * scale;
            below = below < -87.0f ? -87.0f : below;
            moment += (tops[3 * step + t] + tops[2 * step + t] * below) * scale;
            if (t != first && tops[t] > second) second = tops[t];
            if (tops[step + t] > second) second = tops[step + t];
        }
        float values[2] = {exponential(logits[choice] - top) / whole, 0};
        if (confidence == 0) values[1] = values[0];
        else if (confidence == 1) values[1] = (1.0f - exponential(second - top)) / whole;
        else values[1] = moment / whole - logarithm(whole);
        if (whole != whole) values[1] = whole;
        out[0] = (int32_t)tokens[choice];
        memcpy(out + 1, values, sizeof values);
        if (runner_up) { /* the best of what the other tiles choose, and of what comes second in this one */
            ptrdiff_t other = greatest(wished, T, choice), of = choice;
            const float *rest = tops + 7 * step;
            if (other >= 0 && (wished[other] > rest[choice] || (wished[other] == rest[choice] && other < choice)))
                of = other;
            float probability = exponential((of == choice ? rest[step + of] : logits[of]) - top) / whole;
            out[3] = (int32_t)(of == choice ? rest[2 * step + of] : tokens[of]);
            memcpy(out + 4, &probability, sizeof probability);
        }
    }
}

/* ---- attention ---- */

/* Where a segment's rows, and what they see, lie: cached tokens in two ranges of slots, and own rows in a third. */
typedef struct {
    int64_t start, rows, base, cached, tail_base, tail, own_base;
} Segment;

enum { QUERIES = 4, PART = 32 /* queries of a task */ };

static inline int64_t slot_of(const Segment *s, int64_t column) {
    if (column < s->cached) return s->base + column;
    column -= s->cached;
    return column < s->tail ? s->tail_base + column : s->own_base + column - s->tail;
}

/* scores[0 .. 3] of four columns for one query */
static inline void score_four(const float *q, const float *const *k, ptrdiff_t D, float *scores) {
    V a = all(0), b = all(0), c = all(0), d = all(0);
    for (ptrdiff_t i = 0; i < D; i += L) {
        int some = D - i < L ? (int)(D - i) : 0;
        V x = some ? load_some(q + i, some) : load(q + i);
        a = fused(x, some ? load_some(k[0] + i, some) : load(k[0] + i), a);
        b = fused(x, some ? load_some(k[1] + i, some) : load(k[1] + i), b);
        c = fused(x, some ? load_some(k[2] + i, some) : load(k[2] + i), c);
        d = fused(x, some ? load_some(k[3] + i, some) : load(k[3] + i), d);
    }
    four_sums(scores, a, b, c, d);
}

/* the scores of `count` columns become weights before they are divided by their sum, which is returned */
static float soften(float *scores, int64_t count) {
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t j = count; j < padded; j++) scores[j] = -INFINITY;
    float best[LANES], sums[LANES] = {0}, most = -INFINITY;
    for (int j = 0; j < LANES; j++) best[j] = -INFINITY;
    for (int64_t i = 0; i < padded; i += LANES)
        for (int j = 0; j < LANES; j++) best[j] = scores[i + j] > best[j] ? scores[i + j] : best[j];
    for (int j = 0; j < LANES; j++) most = best[j] > most ? best[j] : most;
    for (int64_t i = 0; i < padded; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float below = scores[i + j] - most, weight = exponential(below);
            scores[i + j] = weight = below < -87.0f ? 0.0f : weight;
            sums[j] += weight;
        }
    return total(sums);
}

/* out[n] += the sum of weights[n][j] * v[j] for the columns [begin, end) and some vectors of their D numbers */
#define TAKE(n, v) V o##n##_##v = some ? load_some(out[n] + i + v * L, some) : load(out[n] + i + v * L);
#define TAKES(n, NV) EACH_##NV(TAKE, n)
#define VALUE(n, v) V value##v = some ? load_some(from + v * L, some) : load(from + v * L);
#define WEIGH(n, v) o##n##_##v = fused(p##n, value##v, o##n##_##v);
#define WEIGHS(n, NV) V p##n = all(weights[n][j]); EACH_##NV(WEIGH, n)
#define PUT(n, v) if (some) store_some(out[n] + i + v * L, o##n##_##v, some); else store(out[n] + i + v * L, o##n##_##v);
#define PUTS(n, NV) EACH_##NV(PUT, n)
#define WEIGHTED(N, NV) { \
    TIMES_##N(TAKES, NV) \
    for (int64_t j = begin; j < end; j++) { \
        const float *from = columns[j] + i; \
        EACH_##NV(VALUE, 0) \
        TIMES_##N(WEIGHS, NV) \
    } \
    TIMES_##N(PUTS, NV) }
#define WEIGHTED_SUM(N) \
    static void weighted_sum_##N(float *const *out, float *const *weights, const float *const *columns, int64_t begin, \
                                 int64_t end, ptrdiff_t D) { \
        for (ptrdiff_t i = 0; i < D;) { \
            if (D - i >= 4 * L) { const int some = 0; WEIGHTED(N, 4) i += 4 * L; } \
            else if (D - i >= 3 * L) { const int some = 0; WEIGHTED(N, 3) i += 3 * L; } \
            else if (D - i >= 2 * L) { const int some = 0; WEIGHTED(N, 2) i += 2 * L; } \
            else if (D - i >= L) { const int some = 0; WEIGHTED(N, 1) i += L; } \
            else { const int some = (int)(D - i); WEIGHTED(N, 1) i += L; } \
        } \
    }
WEIGHTED_SUM(1)
WEIGHTED_SUM(4)

/* up to QUERIES queries (rows of a segment with their stacked heads) of one K/V head */
static void attend_some(const float *const *q, float *const *out, const int64_t *seen, const uint8_t *const *hidden,
                        int queries, const float *const *k, const float *const *v, ptrdiff_t D, float scale,
                        float *const *weights) {
    int64_t least = seen[0];
    float sums[QUERIES];
    for (int n = 0; n < queries; n++) {
        least = seen[n] < least ? seen[n] : least;
        for (int64_t j = 0; j < seen[n]; j += 4) {
            const float *four[4] = {k[j], k[j + 1], k[j + 2], k[j + 3]}; /* behind the last column stand others */
            score_four(q[n], four, D, weights[n] + j);
        }
        for (int64_t j = 0; j < seen[n]; j++) weights[n][j] *= scale;
        if (hidden)
            for (int64_t j = 0; j < seen[n]; j++)
                if (hidden[n][j]) weights[n][j] = -INFINITY;
        sums[n] = soften(weights[n], seen[n]);
        memset(out[n], 0, D * sizeof *out[n]);
    }
    if (queries == QUERIES) weighted_sum_4(out, weights, v, 0, least, D);
    else least = 0;
    for (int n = 0; n < queries; n++) {
        weighted_sum_1(out + n, weights + n, v, least, seen[n], D);
        for (ptrdiff_t i = 0; i < D; i++) out[n][i] /= sums[n];
    }
}

static int64_t tasks_of(const Segment *s, ptrdiff_t group) { return (s->rows * group + PART - 1) / PART; }

/* out [R, H, D] of q [R, H, D]: row r sees the first seen[r] columns of its segment; with `until`, columns among them
that are own rows only where depth[r] < until[column's row]

q: rows lie ldq numbers apart. keys, values: [slots, Hkv, D]. Rows of no segment are not written. Returns 0, or 1 where
memory is short. */
int attend(const float *q, ptrdiff_t ldq, float *out, const float *keys, const float *values, const Segment *segments,
           ptrdiff_t count, const int64_t *seen, const int64_t *depth, const int64_t *until, ptrdiff_t H, ptrdiff_t Hkv,
           ptrdiff_t D, float scale, int64_t most, int threads) {
    ptrdiff_t group = H / Hkv;
    int64_t *begins = malloc((count + 1) * sizeof *begins), work = 0;
    if (!begins) return 1;
    begins[0] = 0;
    for (ptrdiff_t g = 0; g < count; g++) {
        begins[g + 1] = begins[g] + tasks_of(segments + g, group) * Hkv;
        work += segments[g].rows * (segments[g].cached + segments[g].tail + segments[g].rows) * H * D;
    }
    int short_of_memory = 0;
    int64_t room = (most + LANES) / LANES * LANES + LANES;
    if (work / SPLIT < threads) threads = work / SPLIT < 1 ? 1 : (int)(work / SPLIT);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *scores = malloc(QUERIES * room * sizeof *scores);
        const float **columns = malloc(2 * room * sizeof *columns);
        uint8_t *unseen = until ? malloc(QUERIES * room) : 0;
        int there = scores && columns && (!until || unseen);
        if (!there) short_of_memory = 1;
        ptrdiff_t g = 0;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < begins[count]; task++) {
            if (!there) continue; /* all threads must come by here */
            while (task < begins[g]) g--;
            while (task >= begins[g + 1]) g++;
            const Segment *s = segments + g;
            int64_t parts = tasks_of(s, group), head = (task - begins[g]) / parts, part = (task - begins[g]) % parts;
            int64_t end = (part + 1) * PART, cached = s->cached + s->tail, last = 0;
            end = end < s->rows * group ? end : s->rows * group;
            for (int64_t i = part * PART; i < end; i++) {
                int64_t of = seen[s->start + i / group];
                last = of > last ? of : last;
            }
            const float **k = columns, **v = columns + room;
            for (int64_t j = 0; j < last; j++) {
                int64_t offset = (slot_of(s, j) * Hkv + head) * D;
                k[j] = keys + offset;
                v[j] = values + offset;
            }
            for (int64_t j = last; last && j < last + 3; j++) k[j] = k[last - 1];
            for (int64_t i = part * PART; i < end; i += QUERIES) {
                int queries = end - i < QUERIES ? (int)(end - i) : QUERIES;
                const float *of[QUERIES];
                float *to[QUERIES], *weights[QUERIES];
                int64_t columns_seen[QUERIES];
                const uint8_t *hidden[QUERIES];
                for (int n = 0; n < queries; n++) {
                    int64_t row = s->start + (i + n) / group, h = head * group + (i + n) % group;
                    of[n] = q + row * ldq + h * D;
                    to[n] = out + (row * H + h) * D;
                    weights[n] = scores + n * room;
                    columns_seen[n] = seen[row];
                    if (until) {
                        uint8_t *marks = unseen + n * room;
                        for (int64_t j = 0; j < seen[row]; j++)
                            marks[j] = j >= cached && depth[row] >= until[s->start + j - cached];
                        hidden[n] = marks;
                    }
                }
                attend_some(of, to, columns_seen, until ? hidden : 0, queries, k, v, D, scale, weights);
            }
        }
        free(scores);
        free(columns);
        free(unseen);
    }
    free(begins);
    return short_of_memory;
}
