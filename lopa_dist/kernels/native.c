/* A forward's operations on a CPU, whose bits do not depend on the batch (native.py compiles and calls them). With
-DBF16, tensors (of type T) are in bf16: all arithmetic is in fp32, so numbers are widened to it, and results rounded.
Else tensors are in fp32.

Every number of a row is computed by one chain of operations, in an order that depends on the row alone: no tile, thread
or other row can change it. Products sum over the inputs, from first to last, with one rounding each (fused
multiply-add; in bf16 two inputs at once, by the CPU's own instruction if it has one). Attention sums over the tokens
that a row sees, from first to last. Other sums consist of L partial sums, each of every L-th number. Compile with
-ffp-contract=off: only `fused` may fuse a product and a sum.

Every parallel region has one thread, or as many as the caller asks for. With GCC's OpenMP, a smaller region would end
the other threads, and the next would start them again, which takes longer than many a product. Threads without a part
of the work wait.

Matrices are stored by row; ptrdiff_t ld... is the distance between rows, in numbers. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ---- vectors of L numbers; MOST_ROWS: rows of a product that fit into registers beside two vectors of weights ---- */

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
static inline V add_1(V a, V b) { return _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b); }
static inline V add_2(V a, V b) {
    __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) + _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
}
static inline V add_4(V a, V b) { return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd); }
static inline V add_8(V a, V b) { return add_4(a, b); }
static inline V between(V x, float low, float high) { return _mm512_min_ps(all(high), _mm512_max_ps(all(low), x)); }
#define TIMES_L TIMES_16
#define SUMS(s) SUMS_16(s)
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
enum { L = 8, MOST_ROWS = 6 };
typedef __m256 V;
static inline V load(const float *p) { return _mm256_loadu_ps(p); }
static inline void store(float *p, V x) { _mm256_storeu_ps(p, x); }
static inline V all(float x) { return _mm256_set1_ps(x); }
static inline V fused(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
static inline V add_1(V a, V b) { return _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b); }
static inline V add_2(V a, V b) {
    __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    return _mm256_castpd_ps(_mm256_unpacklo_pd(x, y)) + _mm256_castpd_ps(_mm256_unpackhi_pd(x, y));
}
static inline V add_4(V a, V b) { return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31); }
static inline V between(V x, float low, float high) { return _mm256_min_ps(all(high), _mm256_max_ps(all(low), x)); }
#define TIMES_L TIMES_8
#define SUMS(s) SUMS_8(s)
#elif defined(__aarch64__)
#include <arm_neon.h>
enum { L = 4, MOST_ROWS = 8 };
typedef float32x4_t V;
static inline V load(const float *p) { return vld1q_f32(p); }
static inline void store(float *p, V x) { vst1q_f32(p, x); }
static inline V all(float x) { return vdupq_n_f32(x); }
static inline V fused(V a, V b, V c) { return vfmaq_f32(c, a, b); }
static inline V add_1(V a, V b) { return vpaddq_f32(a, b); }
static inline V add_2(V a, V b) { return vpaddq_f32(a, b); }
static inline V between(V x, float low, float high) { return vminq_f32(all(high), vmaxq_f32(all(low), x)); }
#define TIMES_L TIMES_4
#define SUMS(s) SUMS_4(s, 0, 1, 2, 3)
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

/* SUMS: a vector of the sums over each of the vectors s0 ... s(L - 1), all summed in the same order */
#define SUMS_4(s, A, B, C, D) add_2(add_1(s##A, s##B), add_1(s##C, s##D))
#define SUMS_8(s) add_4(SUMS_4(s, 0, 1, 2, 3), SUMS_4(s, 4, 5, 6, 7))
#define SUMS_16(s) add_8(SUMS_8(s), add_4(SUMS_4(s, 8, 9, 10, 11), SUMS_4(s, 12, 13, 14, 15)))

/* integers of a vector's width; in masks, an integer has all bits set where a condition holds */
typedef int32_t I __attribute__((vector_size(sizeof(V))));
typedef uint32_t U __attribute__((vector_size(sizeof(V))));
static inline V where(I marks, V yes, V no) { return (V)((marks & (I)yes) | (~marks & (I)no)); }
static inline I counting(void) {
    I numbers;
    for (int j = 0; j < L; j++) numbers[j] = j;
    return numbers;
}

/* ---- tensors: `get` widens to fp32 and `put` rounds; `load` and `store` are for fp32 ---- */

#if defined(BF16)
typedef uint16_t T;
typedef uint16_t Halves __attribute__((vector_size(sizeof(V) / 2)));
static inline V get(const T *p) {
    Halves numbers;
    memcpy(&numbers, p, sizeof numbers);
    return (V)(__builtin_convertvector(numbers, U) << 16);
}
static inline void put(T *p, V x) { /* to nearest, ties to even */
    U bits = (U)x;
    bits = (U)where(x == x, (V)(bits + 0x7fff + ((bits >> 16) & 1)), (V)(bits | 0x400000)) >> 16;
    Halves numbers = __builtin_convertvector(bits, Halves);
    memcpy(p, &numbers, sizeof numbers);
}
static inline V get_some(const T *p, int n) {
    T some[L] = {0};
    for (int i = 0; i < n; i++) some[i] = p[i];
    return get(some);
}
static inline void put_some(T *p, V x, int n) {
    T some[L];
    put(some, x);
    for (int i = 0; i < n; i++) p[i] = some[i];
}
#else
typedef float T;
static inline V get(const T *p) { return load(p); }
static inline void put(T *p, V x) { store(p, x); }
static inline V get_some(const T *p, int n) { return load_some(p, n); }
static inline void put_some(T *p, V x, int n) { store_some(p, x, n); }
#endif

/* EVERY(n): loops over n numbers by vectors, from number `i` on; `some`: numbers of a partial last vector, else 0 */
#define EVERY(n) ptrdiff_t i = 0, some; some = (n) - i < L ? (n) - i : 0, i < (n); i += L
#define GET(p) (some ? get_some(p, (int)some) : get(p))
#define PUT(p, x) do { if (some) put_some(p, x, (int)some); else put(p, x); } while (0)
#define AT(p) (some ? load_some(p, (int)some) : load(p))

/* TIMES_n(F, x): F(0, x) ... F(n - 1, x), and EACH_n(F, m): F(m, 0) ... F(m, n - 1). What must stay in registers is in
variables: a compiler keeps an array in memory. */
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
#define TIMES_15(F, x) TIMES_14(F, x) F(14, x)
#define TIMES_16(F, x) TIMES_15(F, x) F(15, x)
#define EACH_1(F, m) F(m, 0)
#define EACH_2(F, m) EACH_1(F, m) F(m, 1)
#define EACH_3(F, m) EACH_2(F, m) F(m, 2)
#define EACH_4(F, m) EACH_3(F, m) F(m, 3)
#define EACH_5(F, m) EACH_4(F, m) F(m, 4)
#define EACH_6(F, m) EACH_5(F, m) F(m, 5)
#define EACH_7(F, m) EACH_6(F, m) F(m, 6)
#define EACH_8(F, m) EACH_7(F, m) F(m, 7)

/* ---- products ---- */

/* Pack: numbers of consecutive inputs that are multiplied at once, as many as fit into 32 bits. */
#if defined(BF16)
enum { PACK = 2 };
static inline V pack(const T *x) {
    float both;
    memcpy(&both, x, sizeof both);
    return all(both);
}
#if defined(__AVX512BF16__)
static inline V fused_packs(V a, V b, V c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#else
static inline V fused_packs(V a, V b, V c) {
    c = fused((V)((U)a << 16), (V)((U)b << 16), c);
    return fused((V)((U)a & 0xffff0000), (V)((U)b & 0xffff0000), c);
}
#endif
static inline V packed(const T *w, ptrdiff_t ldw, int some) { /* weights of two inputs */
    V first = some ? get_some(w, some) : get(w), second = some ? get_some(w + ldw, some) : get(w + ldw);
    return (V)((U)first >> 16 | (U)second);
}
#else
enum { PACK = 1 };
static inline V pack(const T *x) { return all(*x); }
static inline V fused_packs(V a, V b, V c) { return fused(a, b, c); }
static inline V packed(const T *w, ptrdiff_t ldw, int some) { (void)ldw; return some ? load_some(w, some) : load(w); }
#endif

/* Computes y = init + x w for a block of rows, K packs of inputs and a few vectors of columns; without init, from 0. Of
the last vector only `some` numbers exist; 0: all. */
typedef void Block(const T *x, ptrdiff_t ldx, const float *w, ptrdiff_t ldw, ptrdiff_t K, const float *init,
                   ptrdiff_t ldi, float *y, ptrdiff_t ldy, int some);

#define LOAD(p, v) (some ? load_some((p) + v * L, some) : load((p) + v * L))
#define FIRST(m, v) V s##m##_##v = init ? LOAD(init + m * ldi, v) : all(0);
#define FIRSTS(m, NV) EACH_##NV(FIRST, m)
#define WEIGHT(m, v) V w##v = LOAD(w, v);
#define ADD(m, v) s##m##_##v = fused_packs(x##m, w##v, s##m##_##v);
#define ADDS(m, NV) V x##m = pack(x + m * ldx + k * PACK); EACH_##NV(ADD, m)
#define LAST(m, v) if (some) store_some(y + m * ldy + v * L, s##m##_##v, some); else store(y + m * ldy + v * L, s##m##_##v);
#define LASTS(m, NV) EACH_##NV(LAST, m)
#define AHEAD 8 /* rows of weights to prefetch: they are too far apart for the processor to predict */
#define BODY(MR, NV) \
    TIMES_##MR(FIRSTS, NV) \
    for (ptrdiff_t k = 0; k < K; k++, w += ldw) { \
        EACH_##NV(WEIGHT, 0) \
        TIMES_##MR(ADDS, NV) \
    } \
    TIMES_##MR(LASTS, NV)
#define BLOCK(MR, NV) \
    static void block_##MR##_##NV(const T *x, ptrdiff_t ldx, const float *w, ptrdiff_t ldw, ptrdiff_t K, \
                                  const float *init, ptrdiff_t ldi, float *y, ptrdiff_t ldy, int partial) { \
        if (NV == 1 && partial) { const int some = partial; BODY(MR, NV) } else { const int some = 0; BODY(MR, NV) } \
    }
#define BLOCKS(MR) BLOCK(MR, 1) BLOCK(MR, 2)
#define ROW(MR) {block_##MR##_1, block_##MR##_2}

/* BY_ROWS[rows]: the blocks for one and for two vectors of columns */
BLOCKS(1) BLOCKS(2) BLOCKS(3) BLOCKS(4) BLOCKS(5) BLOCKS(6)
#if !defined(__AVX2__) || defined(__AVX512F__)
BLOCKS(7) BLOCKS(8)
#endif
#if defined(__AVX512F__)
BLOCKS(9) BLOCKS(10) BLOCKS(11) BLOCKS(12) BLOCKS(13) BLOCKS(14)
#endif
static Block *const BY_ROWS[][2] = {
    {0}, ROW(1), ROW(2), ROW(3), ROW(4), ROW(5), ROW(6),
#if !defined(__AVX2__) || defined(__AVX512F__)
    ROW(7), ROW(8),
#endif
#if defined(__AVX512F__)
    ROW(9), ROW(10), ROW(11), ROW(12), ROW(13), ROW(14),
#endif
};

enum {
    FEW = MOST_ROWS / 2, /* up to this many rows, copying weights does not pay */
    STREAMED = 6144,     /* sums of a few rows: they fit into the L1 cache */
    DEPTH = 256, PANEL = 16, /* weights copied at once into adjacent memory: packs, and vectors of outputs */
    COLUMNS = PANEL * L,
    UNIT = 4 * L, /* columns that are never split among threads */
    CHUNK = 512, /* rows whose sums are rounded together */
    SPLIT = 1 << 18, /* multiplications that make a thread worthwhile */
};

/* A product's tensors: y [M, N] = x [M, K] w [K, N] (+ bias [N]); y is in fp32 if `wide` */
typedef struct {
    const T *x, *w, *bias;
    void *y;
    ptrdiff_t ldx, ldw, ldy, K;
    int wide;
} Product;

/* STREAM: y += x w for a few rows, N packs of inputs at once; w is read once, in the order of its storage. */
#define X_OF(m, b) V x##m##_##b = pack(x + m * ldx + (k + b) * PACK);
#define XS_OF(m, N) EACH_##N(X_OF, m)
#define SUM_OF(m, N) V s##m = AT(y + m * ldy + i);
#define PASS(b, m) s##m = fused_packs(x##m##_##b, w##b, s##m);
#define PASSES(b, MR) V w##b = packed(w + (k + b) * PACK * ldw + i, ldw, (int)some); EACH_##MR(PASS, b)
#define SUM_TO(m, N) if (some) store_some(y + m * ldy + i, s##m, (int)some); else store(y + m * ldy + i, s##m);
#define STREAM(MR, N) { \
    TIMES_##MR(XS_OF, N) \
    for (EVERY(wide)) { TIMES_##MR(SUM_OF, N) TIMES_##N(PASSES, MR) TIMES_##MR(SUM_TO, N) } }
#define STREAMS(MR, MANY) \
    static void stream_##MR(const T *x, ptrdiff_t ldx, const T *w, ptrdiff_t ldw, ptrdiff_t packs, float *y, \
                            ptrdiff_t ldy, ptrdiff_t wide) { \
        ptrdiff_t k = 0; \
        for (; k + MANY <= packs; k += MANY) STREAM(MR, MANY) \
        for (; k < packs; k++) STREAM(MR, 1) \
    }
typedef void Stream(const T *, ptrdiff_t, const T *, ptrdiff_t, ptrdiff_t, float *, ptrdiff_t, ptrdiff_t);
#if defined(__AVX2__) && !defined(__AVX512F__)
STREAMS(1, 8) STREAMS(2, 4) STREAMS(3, 3)
static Stream *const STREAM_OF[] = {0, stream_1, stream_2, stream_3};
#else
STREAMS(1, 8) STREAMS(2, 8) STREAMS(3, 8) STREAMS(4, 5) STREAMS(5, 5) STREAMS(6, 4) STREAMS(7, 3)
static Stream *const STREAM_OF[] = {0, stream_1, stream_2, stream_3, stream_4, stream_5, stream_6, stream_7};
#endif

static void bias_of(const Product *of, ptrdiff_t n, ptrdiff_t wide, float *sums) { /* sets sums to the bias, or 0 */
    for (EVERY(wide)) {
        V numbers = of->bias ? GET(of->bias + n + i) : all(0);
        if (some) store_some(sums + i, numbers, (int)some);
        else store(sums + i, numbers);
    }
}

static void round_sums(const Product *of, ptrdiff_t row, ptrdiff_t n, const float *sums, ptrdiff_t wide) {
    ptrdiff_t at = row * of->ldy + n;
    if (of->wide) memcpy((float *)of->y + at, sums, wide * sizeof *sums);
    else for (EVERY(wide)) PUT((T *)of->y + at + i, AT(sums + i));
}

/* Computes the product for a few rows, from `first` on, and the columns [begin, end). */
static void multiply_few(const Product *of, ptrdiff_t first, ptrdiff_t rows, ptrdiff_t begin, ptrdiff_t end) {
    float sums[STREAMED];
    ptrdiff_t most = STREAMED / rows / L * L;
    for (ptrdiff_t n = begin; n < end; n += most) {
        ptrdiff_t wide = end - n < most ? end - n : most;
        for (ptrdiff_t m = 0; m < rows; m++) bias_of(of, n, wide, sums + m * most);
        STREAM_OF[rows](of->x + first * of->ldx, of->ldx, of->w + n, of->ldw, of->K / PACK, sums, most, wide);
        for (ptrdiff_t m = 0; m < rows; m++) round_sums(of, first + m, n, sums + m * most, wide);
    }
}

/* Computes the product for the rows from `first` on, and the columns [begin, end). */
static void multiply(const Product *of, ptrdiff_t first, ptrdiff_t rows, ptrdiff_t begin, ptrdiff_t end) {
    if (rows <= FEW) {
        multiply_few(of, first, rows, begin, end);
        return;
    }
#if defined(BF16)
    float room[CHUNK * COLUMNS];
    for (; rows > CHUNK; first += CHUNK, rows -= CHUNK) multiply(of, first, CHUNK, begin, end);
#endif
    ptrdiff_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS, ldx = of->ldx, ldw = of->ldw, packs = of->K / PACK;
    const T *x = of->x + first * ldx;
    float copy[DEPTH * COLUMNS] __attribute__((aligned(64))); /* pairs of vectors; all packs of a pair are adjacent */
    T in[MOST_ROWS * DEPTH * PACK];
    for (ptrdiff_t n = begin; n < end; n += COLUMNS) {
        ptrdiff_t wide = end - n < COLUMNS ? end - n : COLUMNS;
#if defined(BF16)
        float *y = room, bias[COLUMNS];
        ptrdiff_t ldy = COLUMNS;
        bias_of(of, n, wide, bias);
#else
        float *y = (float *)of->y + first * of->ldy + n;
        const float *bias = of->bias + n;
        ptrdiff_t ldy = of->ldy;
#endif
        for (ptrdiff_t k = 0; k < packs; k += DEPTH) {
            ptrdiff_t depth = packs - k < DEPTH ? packs - k : DEPTH;
            const T *from = of->w + k * PACK * ldw + n;
            for (ptrdiff_t i = 0; i < depth; i++, from += PACK * ldw) {
                for (int v = 0; v < PANEL; v++)
                    for (int p = 0; p < PACK; p++) __builtin_prefetch(from + (AHEAD * PACK + p) * ldw + v * L);
                for (int v = 0; v < PANEL; v++) {
                    ptrdiff_t left = wide - v * L;
                    V numbers = left > 0 ? packed(from + v * L, ldw, left < L ? (int)left : 0) : all(0);
                    store(copy + ((v / 2) * DEPTH + i) * 2 * L + (v % 2) * L, numbers);
                }
            }
            for (ptrdiff_t b = 0; b < blocks; b++) {
                ptrdiff_t m = rows * b / blocks, count = rows * (b + 1) / blocks - m;
                for (ptrdiff_t i = 0; i < count; i++) /* rows of x may map to the same place in the cache */
                    memcpy(in + i * DEPTH * PACK, x + (m + i) * ldx + k * PACK, depth * PACK * sizeof *in);
                for (ptrdiff_t v = 0; v * L < wide; v += 2) {
                    float *to = y + m * ldy + v * L;
                    const float *weights = copy + v * DEPTH * L, *init = k ? to : of->bias ? bias + v * L : 0;
                    ptrdiff_t ldi = k ? ldy : 0, left = wide - v * L;
                    if (left >= 2 * L) {
                        BY_ROWS[count][1](in, DEPTH * PACK, weights, 2 * L, depth, init, ldi, to, ldy, 0);
                        continue;
                    }
                    BY_ROWS[count][0](in, DEPTH * PACK, weights, 2 * L, depth, init, ldi, to, ldy,
                                      left < L ? (int)left : 0);
                    if (left > L)
                        BY_ROWS[count][0](in, DEPTH * PACK, weights + L, 2 * L, depth, init ? init + L : 0, ldi,
                                          to + L, ldy, (int)(left - L));
                }
            }
        }
#if defined(BF16)
        for (ptrdiff_t m = 0; m < rows; m++) round_sums(of, first + m, n, room + m * COLUMNS, wide);
#endif
    }
}

/* Computes y [M, N] = x [M, K] w [K, N] (+ bias [N]); `wide`: y is in fp32. K is a multiple of PACK. */
void product(const T *x, ptrdiff_t ldx, const T *w, ptrdiff_t ldw, const T *bias, void *y, ptrdiff_t ldy, ptrdiff_t M,
             ptrdiff_t K, ptrdiff_t N, int wide, int threads) {
    if (!M) return;
    const Product of = {x, w, bias, y, ldx, ldw, ldy, K, wide};
    ptrdiff_t parts = M * K * N / SPLIT;
    parts = parts < threads ? parts : threads;
    if (parts <= 1) {
        multiply(&of, 0, M, 0, N);
        return;
    }
    ptrdiff_t units = (N + UNIT - 1) / UNIT, across = units < parts ? units : parts;
    ptrdiff_t down = M >= 2 * MOST_ROWS ? parts / across : 1;
    down = down < M ? down : M; /* no part is without rows */
    across = down * across;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (ptrdiff_t part = 0; part < across; part++) {
        ptrdiff_t among = across / down, i = part / among, j = part % among, m = M * i / down;
        ptrdiff_t begin = units * j / among * UNIT, end = units * (j + 1) / among * UNIT;
        multiply(&of, m, M * (i + 1) / down - m, begin, end < N ? end : N);
    }
}

/* ---- between products ---- */

enum { MANY_NUMBERS = 1 << 16 };

static inline float total(V lanes) {
    float some[L];
    store(some, lanes);
    for (int half = L / 2; half; half /= 2)
        for (int i = 0; i < half; i++) some[i] += some[i + half];
    return some[0];
}

static inline float greatest_of(V lanes) { /* of numbers without NaN */
    float some[L];
    store(some, lanes);
    for (int half = L / 2; half; half /= 2)
        for (int i = 0; i < half; i++) some[i] = some[i + half] > some[i] ? some[i + half] : some[i];
    return some[0];
}

/* e^x, within 2 units in the last place; x is first clamped to -87 ... 88 */
static inline V exponentials(V x) {
    x = between(x, -87.0f, 88.0f);
    V shifted = fused(x, all(1.44269504f), all(12582912.0f)), n = shifted - all(12582912.0f); /* to the nearest integer */
    V r = fused(n, all(-0.693145752f), x);
    r = fused(n, all(-1.42860677e-6f), r);
    V p = fused(r, all(1.98756915e-4f), all(1.39819995e-3f));
    p = fused(p, r, all(8.33345205e-3f));
    p = fused(p, r, all(4.16657962e-2f));
    p = fused(p, r, all(1.66666657e-1f));
    p = fused(p, r, all(0.5f));
    p = fused(p, r * r, r) + all(1.0f);
    return p * (V)((__builtin_convertvector(n, I) + 127) << 23);
}

static inline float exponential(float x) { return exponentials(all(x))[0]; }

/* the natural logarithm of normal numbers above 0, within 2 units in the last place */
static inline V logarithms(V x) {
    I power = ((I)x - 0x3f3504f3) >> 23; /* x = 2^power m, with m at least sqrt(1/2) */
    V f = (V)((I)x - (power << 23)) - all(1.0f), square = f * f, n = __builtin_convertvector(power, V);
    V p = fused(f, all(7.0376836e-2f), all(-1.1514610e-1f));
    p = fused(p, f, all(1.1676998e-1f));
    p = fused(p, f, all(-1.2420141e-1f));
    p = fused(p, f, all(1.4249323e-1f));
    p = fused(p, f, all(-1.6668057e-1f));
    p = fused(p, f, all(2.0000714e-1f));
    p = fused(p, f, all(-2.4999994e-1f));
    p = fused(p, f, all(3.3333331e-1f));
    p = fused(p * f, square, n * all(-2.12194440e-4f));
    p = fused(square, all(-0.5f), p);
    return fused(n, all(0.693359375f), f + p);
}

static inline float logarithm(float x) { return logarithms(all(x))[0]; }

static void normalise(const T *x, const T *weight, T *y, ptrdiff_t d, float eps, V squares) {
    V scale = all(1.0f / sqrtf(total(squares) / (float)d + eps));
    for (EVERY(d)) PUT(y + i, GET(x + i) * scale * GET(weight + i));
}

/* Computes y, the norm of x; with `residual`, it is added to x first, in place. */
void norm(T *x, const T *residual, const T *weight, T *y, ptrdiff_t R, ptrdiff_t d, float eps, int threads) {
    if (R * d < MANY_NUMBERS) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (ptrdiff_t r = 0; r < R; r++) {
        T *row = x + r * d;
        V squares = all(0);
        for (EVERY(d)) {
            if (residual) PUT(row + i, GET(row + i) + GET(residual + r * d + i));
            V numbers = GET(row + i);
            squares = fused(numbers, numbers, squares);
        }
        normalise(row, weight, y + r * d, d, eps, squares);
    }
}

/* Computes y [R, I] = silu(gate) * up of x [R, 2 I]. */
void swiglu(const T *x, T *y, ptrdiff_t R, ptrdiff_t I, int threads) {
    if (R * I < MANY_NUMBERS) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (ptrdiff_t r = 0; r < R; r++) {
        const T *gate = x + r * 2 * I, *up = gate + I;
        T *to = y + r * I;
        for (EVERY(I)) {
            V numbers = GET(gate + i);
            PUT(to + i, numbers / (all(1.0f) + exponentials(-numbers)) * GET(up + i));
        }
    }
}

static V squares_of(const T *x, ptrdiff_t d) {
    V squares = all(0);
    for (EVERY(d)) squares = fused(GET(x + i), GET(x + i), squares);
    return squares;
}

/* Computes q [R, H, D] of qkv [R, (H + 2 Hkv) D]: normed if there are weights, then rotated. Does the same to k, and
stores k and v: those of row r in slots[r], or without slots in slot `first` + r. Row r's angles are row positions[r] of
the tables [..., D], or without positions row r. */
void rotate_and_store(const T *qkv, T *q, const T *cos, const T *sin, const int64_t *positions, T *keys, T *values,
                      const int64_t *slots, int64_t first, const T *q_norm, const T *k_norm, float eps, ptrdiff_t R,
                      ptrdiff_t H, ptrdiff_t Hkv, ptrdiff_t D, int threads) {
    ptrdiff_t width = (H + 2 * Hkv) * D, half = D / 2;
    if (R * width < MANY_NUMBERS) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (ptrdiff_t r = 0; r < R; r++) {
        ptrdiff_t angle = (positions ? positions[r] : r) * D;
        const T *row = qkv + r * width, *c = cos + angle, *s = sin + angle;
        int64_t slot = slots ? slots[r] : first + r;
        for (ptrdiff_t h = 0; h < H + Hkv; h++) {
            const T *from = row + h * D;
            T *x = h < H ? q + (r * H + h) * D : keys + (slot * Hkv + h - H) * D;
            if (q_norm) {
                normalise(from, h < H ? q_norm : k_norm, x, D, eps, squares_of(from, D));
                from = x;
            }
            for (EVERY(half)) {
                V low = GET(from + i), high = GET(from + half + i);
                PUT(x + i, fused(high, GET(s + i), low * GET(c + i)));
                PUT(x + half + i, fused(low, GET(s + half + i), high * GET(c + half + i)));
            }
        }
        memcpy(values + slot * Hkv * D, row + (H + Hkv) * D, Hkv * D * sizeof *row);
    }
}

/* ---- the record head, after its product, whose logits are in fp32 ---- */

#if !defined(BF16)

#define LOWEST -3.40282347e38f /* of tokens that are left out; finite: 0 x -inf would be NaN */

typedef uint64_t W __attribute__((vector_size(sizeof(V)))); /* half as many numbers as in V */
typedef int32_t Narrow __attribute__((vector_size(sizeof(V) / 2)));

static inline W mix(W x) { /* as in random.py */
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* noise of L counters, `counter` and those after it; `key` is mixed already */
static inline V gumbel(uint64_t key, uint64_t counter) {
    const uint64_t golden = 0x9E3779B97F4A7C15u;
    Narrow bits[2];
    W at;
    for (int j = 0; j < L / 2; j++) at[j] = (uint64_t)j * golden;
    at += key + counter * golden;
    bits[0] = __builtin_convertvector(mix(at) >> 41, Narrow);
    bits[1] = __builtin_convertvector(mix(at + L / 2 * golden) >> 41, Narrow);
    I both;
    memcpy(&both, bits, sizeof both);
    V uniform = (__builtin_convertvector(both, V) + all(0.5f)) * all(0x1p-23f);
    return -logarithms(-logarithms(uniform));
}

/* Returns the first index of the greatest of n numbers, leaving out index `without`; -1 if there is none. */
static ptrdiff_t greatest(const float *x, ptrdiff_t n, ptrdiff_t without) {
    V most = all(-INFINITY);
    I at = counting(), place = at * 0 - 1;
    for (EVERY(n)) {
        V numbers = AT(x + i);
        I better = (numbers > most) & (at != (int32_t)without);
        if (some) better &= at < (int32_t)n;
        most = where(better, numbers, most);
        place = (better & at) | (~better & place);
        at += L;
    }
    ptrdiff_t found = -1;
    for (int j = 0; j < L; j++)
        if (place[j] >= 0 && (found < 0 || most[j] > x[found] || (most[j] == x[found] && place[j] < found)))
            found = place[j];
    return found;
}

/* integers in the order of the numbers; NaN comes last, so that no filter hides it */
static inline I ordered(V x) {
    I bits = (I)(x + all(0)); /* -0 becomes 0 */
    bits = (I)where(x == x, (V)bits, (V)(bits * 0 + 0x7fffffff));
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

/* Returns the greatest integer t such that all numbers x with ordered(x) >= t together weigh more than `enough`, or the
least integer if there is none. weights 0: each number weighs 1. Each pass cuts the range of integers in four. */
static int32_t least_kept(const float *x, const float *weights, ptrdiff_t n, float enough) {
    int64_t low = INT32_MIN, high = (int64_t)INT32_MAX + 1; /* low <= the result < high */
    while (high - low > 1) {
        int64_t quarter = (high - low + 3) / 4, cuts[3] = {low + quarter, low + 2 * quarter, low + 3 * quarter};
        V sums[3] = {all(0), all(0), all(0)};
        for (EVERY(n)) {
            I at = ordered(AT(x + i));
            V weight = weights ? AT(weights + i) : all(1);
            if (some) weight = where(counting() < (int32_t)some, weight, all(0));
            for (int c = 0; c < 3; c++) sums[c] += where(at > (int32_t)(cuts[c] - 1), weight, all(0));
        }
        int c = 3;
        while (c && !(cuts[c - 1] < high && total(sums[c - 1]) > enough)) c--;
        high = c < 3 && cuts[c] < high ? cuts[c] : high;
        low = c ? cuts[c - 1] : low;
    }
    return (int32_t)low;
}

/* Sets numbers to the lowest one unless their integers (`ordered`) are at least `least`. */
static void keep_from(float *x, ptrdiff_t n, int32_t least) {
    for (EVERY(n)) {
        V numbers = AT(x + i), kept = where(ordered(numbers) < least, all(LOWEST), numbers);
        PUT(x + i, kept);
    }
}

/* Filters logits as `record_head.filter_logits` does; overwrites `room` [n]. */
static void filter(float *x, float *room, ptrdiff_t n, float top_p, int64_t top_k) {
    if (top_k > 0 && top_k < n) keep_from(x, n, least_kept(x, 0, n, (float)top_k - 0.5f));
    if (top_p >= 1) return;
    ptrdiff_t first = greatest(x, n, -1);
    V top = all(first < 0 ? NAN : x[first]), sum = all(0);
    for (EVERY(n)) {
        V below = AT(x + i) - top, e = where(below < all(-87.0f), all(0), exponentials(below));
        if (some) e = where(counting() < (int32_t)some, e, all(0));
        sum += e;
        PUT(room + i, e);
    }
    keep_from(x, n, least_kept(x, room, n, top_p * total(sum)));
}

/* Computes sums [7 or 10, R, C / width] of logits [R, C] from token `low` on, as `record_head._reduce` says; overwrites
logits and preferences [R, C]. temperature 0: greedy, without keys, preferences and filters. */
void reduce(float *logits, float *preferences, ptrdiff_t R, ptrdiff_t C, int64_t low, ptrdiff_t width, int64_t mask,
            float temperature, float top_p, int64_t top_k, const int64_t *keys, int margin, int entropy,
            int second_choices, float *sums, int threads) {
    ptrdiff_t tiles = C / width, step = R * tiles;
    if (R * C < MANY_NUMBERS) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (ptrdiff_t r = 0; r < R; r++) {
        float *row = logits + r * C, *wish = row;
        if (temperature > 0)
            for (ptrdiff_t i = 0; i < C; i++) row[i] /= temperature;
        if (low <= mask && mask < low + C) row[mask - low] = LOWEST;
        if (temperature > 0) {
            uint64_t key = mix((W){0} + (uint64_t)keys[r])[0];
            wish = preferences + r * C;
            filter(row, wish, C, top_p, top_k);
            int filtered = top_p < 1 || top_k > 0;
            for (EVERY(C)) {
                V wished = AT(row + i);
                if (!filtered || greatest_of(wished) > LOWEST) wished += gumbel(key, (uint64_t)(low + i));
                PUT(wish + i, wished);
            }
        }
        for (ptrdiff_t t = 0; t < tiles; t++) {
            const float *x = row + t * width, *wished = wish + t * width;
            ptrdiff_t first = greatest(x, width, -1);
            float top = first < 0 ? NAN : x[first];
            V sum = all(0), moment = all(0);
            for (EVERY(width)) {
                V below = AT(x + i) - all(top);
                I counts = ~(below < all(-87.0f)); /* NaN counts */
                if (some) counts &= counting() < (int32_t)some;
                V e = where(counts, exponentials(below), all(0));
                sum += e;
                if (entropy) moment = fused(e, where(counts, below, all(0)), moment);
            }
            ptrdiff_t choice = wished == x ? first : greatest(wished, width, -1), at = r * tiles + t;
            choice = choice < 0 ? 0 : choice;
            ptrdiff_t next = margin ? greatest(x, width, first) : -1;
            sums[at] = top;
            sums[step + at] = !margin ? top : next < 0 ? LOWEST : x[next];
            sums[2 * step + at] = total(sum);
            sums[3 * step + at] = entropy ? total(moment) : top;
            sums[4 * step + at] = wished[choice];
            sums[5 * step + at] = x[choice];
            sums[6 * step + at] = (float)(low + t * width + choice);
            if (second_choices) {
                next = greatest(wished, width, choice);
                ptrdiff_t of = next < 0 ? 0 : next;
                sums[7 * step + at] = next < 0 ? LOWEST : wished[next];
                sums[8 * step + at] = x[of];
                sums[9 * step + at] = (float)(low + t * width + of);
            }
        }
    }
}

/* Computes records [R, 3 or 5] of all tiles' sums [7 or 10, R, T], as `record_head._records` says. confidence 0:
probability, 1: margin, 2: negative entropy. */
void records(const float *sums, ptrdiff_t R, ptrdiff_t T, int confidence, int second_choices, int32_t *out) {
    ptrdiff_t step = R * T;
    for (ptrdiff_t r = 0; r < R; r++, out += second_choices ? 5 : 3) {
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
        if (second_choices) { /* the best of the other tiles' choices and this tile's second choice */
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

#endif

/* ---- attention ---- */

/* Where a segment's rows are, and what they see: cached tokens in two ranges of slots, and own rows in a third. */
typedef struct {
    int64_t start, rows, base, cached, tail_base, tail, own_base;
} Segment;

enum {
    QUERIES = 4, PART = 32, /* queries that are computed together, and queries of a task */
    FETCHED = 1 << 15, /* numbers to prefetch: twice as many, keys and values, fit into a core's cache */
};

/* What to prefetch for the next segment, which the processor cannot predict: `left` numbers of keys and of values. */
typedef struct {
    const T *keys, *values;
    ptrdiff_t left;
} Ahead;

static inline void fetch(Ahead *next, ptrdiff_t numbers) {
    enum { LINE = 64 / sizeof(T) };
    for (; numbers > 0 && next->left > 0; numbers -= LINE, next->left -= LINE) {
        __builtin_prefetch(next->keys, 0, 2);
        __builtin_prefetch(next->values, 0, 2);
        next->keys += LINE;
        next->values += LINE;
    }
}

/* Sets where the first `count` columns of a segment begin in `numbers`, whose slots are `stride` numbers long. */
static void begins_of(const T **columns, const Segment *s, int64_t count, const T *numbers, ptrdiff_t stride) {
    const int64_t base[] = {s->base, s->tail_base, s->own_base}, size[] = {s->cached, s->tail, s->rows};
    for (int part = 0; part < 3; part++) {
        int64_t some = size[part] < count ? size[part] : count;
        const T *first = numbers + base[part] * stride;
        for (int64_t j = 0; j < some; j++) columns[j] = first + j * stride;
        columns += some;
        count -= some;
    }
}

/* SCORES(N): computes scores[n][j ...] of N queries and the L / N columns k[0 ...]. */
#define NONE(n, N) V s##n = all(0);
#define DOT(n, N) s##n = fused(load(q[n / (L / N)] + i), get(k[n % (L / N)] + i), s##n);
#define DOT_SOME(n, N) s##n = fused(load_some(q[n / (L / N)] + i, left), get_some(k[n % (L / N)] + i, left), s##n);
#define SCORES(N) \
    static inline void scores_##N(const float *const *q, const T *const *k, ptrdiff_t D, float scale, \
                                  float *const *scores, int64_t j) { \
        ptrdiff_t i = 0; \
        TIMES_L(NONE, N) \
        for (; i + L <= D; i += L) { TIMES_L(DOT, N) } \
        if (i < D) { const int left = (int)(D - i); TIMES_L(DOT_SOME, N) } \
        float found[L]; \
        store(found, SUMS(s) * all(scale)); \
        for (int n = 0; n < N; n++) memcpy(scores[n] + j, found + n * (L / N), L / N * sizeof *found); \
    }
SCORES(1)
SCORES(2)
SCORES(4)

/* Turns the scores of `count` columns into softmax weights before the division by their sum, which is returned. */
static float soften(float *scores, int64_t count) {
    int64_t padded = (count + L - 1) / L * L;
    for (int64_t j = count; j < padded; j++) scores[j] = -INFINITY;
    V most = all(-INFINITY), sum = all(0);
    for (int64_t j = 0; j < padded; j += L) {
        V numbers = load(scores + j);
        most = where(numbers > most, numbers, most);
    }
    most = all(greatest_of(most));
    for (int64_t j = 0; j < padded; j += L) {
        V below = load(scores + j) - most, weights = where(below < all(-87.0f), all(0), exponentials(below));
        store(scores + j, weights);
        sum += weights;
    }
    return total(sum);
}

/* WEIGHTED(N, NV): out[n] += weights[n][j] * v[j] over the columns [begin, end), for NV vectors of their D numbers. */
#define TAKE(n, v) V o##n##_##v = some ? load_some(out[n] + i + v * L, some) : load(out[n] + i + v * L);
#define TAKES(n, NV) EACH_##NV(TAKE, n)
#define VALUE(n, v) V value##v = some ? get_some(from + v * L, some) : get(from + v * L);
#define WEIGH(n, v) o##n##_##v = fused(p##n, value##v, o##n##_##v);
#define WEIGHS(n, NV) V p##n = all(weights[n][j]); EACH_##NV(WEIGH, n)
#define GIVE(n, v) if (some) store_some(out[n] + i + v * L, o##n##_##v, some); else store(out[n] + i + v * L, o##n##_##v);
#define GIVES(n, NV) EACH_##NV(GIVE, n)
#define WEIGHTED(N, NV) { \
    TIMES_##N(TAKES, NV) \
    for (int64_t j = begin; j < end; j++) { \
        const T *from = columns[j] + i; \
        EACH_##NV(VALUE, 0) \
        TIMES_##N(WEIGHS, NV) \
    } \
    TIMES_##N(GIVES, NV) }
#define WEIGHTED_SUM(N) \
    static void weighted_sum_##N(float *const *out, float *const *weights, const T *const *columns, int64_t begin, \
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
WEIGHTED_SUM(2)
WEIGHTED_SUM(4)

/* Computes attention out[n] of up to QUERIES queries (rows of a segment with their stacked heads) of one K/V head. q
and weights always have QUERIES entries. k has L more after the last column that is seen: they are read, too, and their
scores are not used. */
static void attend_some(const float *const *q, float *const *out, const int64_t *seen, const int64_t *depth,
                        const int64_t *until, int64_t cached, int queries, const T *const *k, const T *const *v,
                        Ahead *next, ptrdiff_t D, float scale, float *const *weights) {
    int64_t least = seen[0], most = seen[0];
    float sums[QUERIES];
    for (int n = 1; n < queries; n++) {
        least = seen[n] < least ? seen[n] : least;
        most = seen[n] > most ? seen[n] : most;
    }
    int many = queries > 2 ? 4 : queries;
    for (int64_t j = 0; j < most; j += L / many) {
        fetch(next, L / many * D);
        if (many == 1) scores_1(q, k + j, D, scale, weights, j);
        else if (many == 2) scores_2(q, k + j, D, scale, weights, j);
        else scores_4(q, k + j, D, scale, weights, j);
    }
    for (int n = 0; n < queries; n++) {
        if (until)
            for (int64_t j = cached; j < seen[n]; j++)
                if (depth[n] >= until[j - cached]) weights[n][j] = -INFINITY;
        sums[n] = soften(weights[n], seen[n]);
        memset(out[n], 0, D * sizeof *out[n]);
    }
    if (queries == 4) weighted_sum_4(out, weights, v, 0, least, D);
    else if (queries == 2) weighted_sum_2(out, weights, v, 0, least, D);
    else least = 0;
    for (int n = 0; n < queries; n++) {
        weighted_sum_1(out + n, weights + n, v, least, seen[n], D);
        for (ptrdiff_t i = 0; i < D; i++) out[n][i] /= sums[n];
    }
}

static Ahead ahead_of(const Segment *s, const T *keys, const T *values, ptrdiff_t stride) {
    int64_t first = (s->tail ? s->tail_base : s->base) * stride, numbers = (s->tail ? s->tail : s->cached) * stride;
    return (Ahead){keys + first, values + first, numbers < FETCHED ? numbers : FETCHED};
}

static int64_t tasks_of(const Segment *s, ptrdiff_t group) { return (s->rows * group + PART - 1) / PART; }

/* Computes attention out [R, H, D] of q [R, H, D]. Row r sees the first seen[r] columns of its segment, at most `most`;
with `until`, it sees columns that are own rows only where depth[r] < until[column's row].

q: rows are ldq numbers apart. keys, values: [slots, Hkv, D]. Rows in no segment are not written. Returns 0, or 1 if
memory is short. */
int attend(const T *q, ptrdiff_t ldq, T *out, const T *keys, const T *values, const Segment *segments, ptrdiff_t count,
            const int64_t *seen, const int64_t *depth, const int64_t *until, ptrdiff_t H, ptrdiff_t Hkv,
           ptrdiff_t D, float scale, int64_t most, int threads) {
    ptrdiff_t group = H / Hkv;
    int64_t *begins = malloc((count + 1) * sizeof *begins), work = 0;
    if (!begins) return 1;
    begins[0] = 0;
    for (ptrdiff_t g = 0; g < count; g++) {
        begins[g + 1] = begins[g] + tasks_of(segments + g, group) * Hkv;
        work += segments[g].rows * (segments[g].cached + segments[g].tail + segments[g].rows) * H * D;
    }
    int workers = threads;
    int64_t room = most + 2 * L, taken = 0;
    if (work / SPLIT < workers) workers = work / SPLIT < 1 ? 1 : (int)(work / SPLIT);
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (workers > 1)
    for (int worker = 0; worker < workers; worker++) {
        float *scores = malloc(QUERIES * (room + 2 * D) * sizeof *scores);
        const T **columns = malloc(2 * room * sizeof *columns);
        int there = scores && columns;
        ptrdiff_t g = 0, before = -1;
        Ahead next = {0};
        while (there) {
            int64_t task;
#pragma omp atomic capture
            task = taken++;
            if (task >= begins[count]) break;
            while (task >= begins[g + 1]) g++;
            const Segment *s = segments + g;
            if (g != before && g + 1 < count) next = ahead_of(s + 1, keys, values, Hkv * D);
            before = g;
            int64_t parts = tasks_of(s, group), head = (task - begins[g]) / parts, part = (task - begins[g]) % parts;
            int64_t end = (part + 1) * PART, cached = s->cached + s->tail, last = 0;
            end = end < s->rows * group ? end : s->rows * group;
            for (int64_t i = part * PART; i < end; i++) {
                int64_t of = seen[s->start + i / group];
                last = of > last ? of : last;
            }
            const T **k = columns, **v = columns + room;
            begins_of(k, s, last, keys + head * D, Hkv * D);
            begins_of(v, s, last, values + head * D, Hkv * D);
            for (int64_t j = last; last && j < last + L; j++) k[j] = k[last - 1];
            for (int64_t i = part * PART; i < end; i += QUERIES) {
                int queries = end - i < QUERIES ? (int)(end - i) : QUERIES;
                const float *wide[QUERIES];
                float *sums[QUERIES], *weights[QUERIES], *space = scores + QUERIES * room;
                T *to[QUERIES];
                int64_t columns_seen[QUERIES] = {0}, depths[QUERIES] = {0};
                for (int n = 0; n < QUERIES; n++, space += 2 * D) {
                    weights[n] = scores + n * room;
                    wide[n] = n < queries ? space : wide[0];
                    sums[n] = space + D;
                    if (n >= queries) continue;
                    int64_t row = s->start + (i + n) / group, h = head * group + (i + n) % group;
                    const T *of = q + row * ldq + h * D;
                    for (EVERY(D)) {
                        if (some) store_some(space + i, GET(of + i), (int)some);
                        else store(space + i, get(of + i));
                    }
                    to[n] = out + (row * H + h) * D;
                    columns_seen[n] = seen[row];
                    if (until) depths[n] = depth[row];
                }
                attend_some(wide, sums, columns_seen, depths, until ? until + s->start : 0, cached, queries, k, v,
                            &next, D, scale, weights);
                for (int n = 0; n < queries; n++)
                    for (EVERY(D)) PUT(to[n] + i, AT(sums[n] + i));
            }
        }
        free(scores);
        free(columns);
    }
    int undone = taken < begins[count]; /* no thread had memory */
    free(begins);
    return undone;
}

/* ---- all layers ---- */

/* Weights of a layer, each [inputs, outputs]; those that it lacks are 0. */
typedef struct {
    const T *before, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *after, *gate_up, *gate_up_bias, *down, *down_bias;
} Layer;

/* What rows see, in every layer; arguments of `attend`. */
typedef struct {
    const Segment *segments;
    const int64_t *seen, *depth, *until;
    int64_t count, most, rows; /* number of segments; most columns of a row; rows in all segments */
} Seen;

/* What an adapter for rows that draft has for one projection: A [inputs, rank] and B [rank, outputs], or 0 and 0. */
typedef struct {
    const T *a, *b;
    int64_t rank, outputs;
} Pair;

enum { Q_K_V = 0, OUT = 3, GATE_UP = 4, DOWN = 6, PAIRS = 7 }; /* where a product's pairs begin, and those of a layer */

/* The rows that draft, and the adapter that acts only on them. */
typedef struct {
    const Pair *pairs;           /* [layers, PAIRS] */
    const unsigned char *drafts; /* [R] whether each row drafts */
    int64_t *rows;               /* room for the numbers of the rows that draft */
    T *room;                     /* for each of them, room for a projection's inputs, rank and outputs */
} Drafting;

enum { AT_ONCE = 512 }; /* rows of the feed-forward, so that its intermediate results stay small */

static void gather(T *to, const T *from, const int64_t *rows, ptrdiff_t count, ptrdiff_t wide) {
    for (ptrdiff_t r = 0; r < count; r++) memcpy(to + r * wide, from + rows[r] * wide, wide * sizeof *to);
}

/* Copies the tokens' rows [R, d] of the embedding, which is stored by row, or by column with `tokens_of_column` tokens. */
static void embed(T *to, const T *embedding, ptrdiff_t tokens_of_column, const int64_t *tokens, ptrdiff_t R, ptrdiff_t d) {
    if (!tokens_of_column) gather(to, embedding, tokens, R, d);
    else
        for (ptrdiff_t r = 0; r < R; r++)
            for (ptrdiff_t i = 0; i < d; i++) to[r * d + i] = embedding[i * tokens_of_column + tokens[r]];
}

/* Writes the numbers of the rows of `of` [R] that draft, all of them without `of`, and returns how many there are. */
static ptrdiff_t drafting(const Drafting *adapter, const int64_t *of, ptrdiff_t R) {
    ptrdiff_t count = 0;
    for (ptrdiff_t r = 0; r < R; r++)
        if (adapter->drafts[of ? of[r] : r]) adapter->rows[count++] = r;
    return count;
}

/* Adds the output of `count` pairs, side by side, for x [R, K] to y [R, N], in the M rows that draft. `rows` has the
numbers of these rows, counted from `first`. */
static void adapt(const Pair *pairs, int count, const int64_t *rows, ptrdiff_t M, ptrdiff_t first, const T *x,
                  ptrdiff_t K, T *y, ptrdiff_t N, T *room, int threads) {
    T *narrow = room + M * K;
    for (ptrdiff_t m = 0; m < M; m++) memcpy(room + m * K, x + (rows[m] - first) * K, K * sizeof *x);
    for (const Pair *pair = pairs; pair < pairs + count; y += pair++->outputs) {
        ptrdiff_t rank = pair->rank, outputs = pair->outputs;
        T *added = narrow + M * rank;
        if (!rank) continue;
        product(room, K, pair->a, rank, 0, narrow, rank, M, K, rank, 0, threads);
        product(narrow, rank, pair->b, outputs, 0, added, outputs, M, rank, outputs, 0, threads);
        for (ptrdiff_t m = 0; m < M; m++, added += outputs) {
            T *to = y + (rows[m] - first) * N;
            for (EVERY(outputs)) PUT(to + i, GET(to + i) + GET(added + i));
        }
    }
}

/* Computes y [R, d], the feed-forward of x; in the M rows that draft, the output of `pairs` is added. room has
min(R, AT_ONCE) x 3 I numbers. */
static void feed_forward(const Layer *layer, const Pair *pairs, const Drafting *adapter, ptrdiff_t M, const T *x, T *y,
                         ptrdiff_t R, ptrdiff_t d, ptrdiff_t I, T *room, int threads) {
    for (ptrdiff_t r = 0, from = 0; r < R; r += AT_ONCE) {
        ptrdiff_t rows = R - r < AT_ONCE ? R - r : AT_ONCE, some = 0;
        const int64_t *drafts = M ? adapter->rows + from : 0;
        while (from + some < M && drafts[some] < r + rows) some++;
        T *gate = room + rows * 2 * I;
        product(x + r * d, d, layer->gate_up, 2 * I, layer->gate_up_bias, room, 2 * I, rows, d, 2 * I, 0, threads);
        if (some) adapt(pairs + GATE_UP, 2, drafts, some, r, x + r * d, d, room, 2 * I, adapter->room, threads);
        swiglu(room, gate, rows, I, threads);
        product(gate, I, layer->down, d, layer->down_bias, y + r * d, d, rows, I, d, 0, threads);
        if (some) adapt(pairs + DOWN, 1, drafts, some, r, gate, I, y + r * d, d, adapter->room, threads);
        from += some;
    }
}

/* Computes y, the hidden states of R tokens after all layers and the last norm: [W, d] of the W rows `wanted`, the only
ones that are computed after the last layer's attention; if W is below 0, [R, d] of all.

cos, sin: tables [..., D] by position. keys, values: [layers, slots, Hkv, D], with layers `apart` numbers apart; row r's
go to slots[r], or without slots to slot `first` + r. embedding: as in `embed`. adapter: 0 if no row drafts with one. room: memory for `room_of`
numbers. Returns 0, or 1 if memory is short. */
int layers(const Layer *all_layers, ptrdiff_t count, const T *embedding, ptrdiff_t tokens_of_column, const T *last,
           const int64_t *tokens, const int64_t *positions, const T *cos, const T *sin, T *keys, T *values, ptrdiff_t apart,
           const int64_t *slots, int64_t first, const Seen *sees, const Drafting *adapter, const int64_t *wanted,
           ptrdiff_t W, ptrdiff_t R, ptrdiff_t d, ptrdiff_t H, ptrdiff_t Hkv, ptrdiff_t D, ptrdiff_t I, float eps,
           float scale, T *room, T *y, int threads) {
    ptrdiff_t most = W > R ? W : R, width = (H + 2 * Hkv) * D, M = adapter ? drafting(adapter, 0, R) : 0;
    T *x = room, *other = x + most * d, *normed = other + most * d, *q = normed + most * d;
    T *attended = q + most * H * D, *between = attended + most * H * D; /* qkv, then the feed-forward's results */
    embed(x, embedding, tokens_of_column, tokens, R, d);
    norm(x, 0, all_layers->before, normed, R, d, eps, threads);
    for (ptrdiff_t number = 0; number < count; number++, keys += apart, values += apart) {
        const Layer *layer = all_layers + number;
        const Pair *pairs = M ? adapter->pairs + number * PAIRS : 0;
        int at_end = number == count - 1, some = at_end && W >= 0;
        product(normed, d, layer->qkv, width, layer->qkv_bias, between, width, R, d, width, 0, threads);
        if (M) adapt(pairs + Q_K_V, 3, adapter->rows, M, 0, normed, d, between, width, adapter->room, threads);
        rotate_and_store(between, q, cos, sin, positions, keys, values, slots, first, layer->q_norm, layer->k_norm, eps,
                         R, H, Hkv, D, threads);
        if (sees->rows < R) memset(attended, 0, R * H * D * sizeof *attended);
        if (attend(q, H * D, attended, keys, values, sees->segments, sees->count, sees->seen, sees->depth, sees->until,
                   H, Hkv, D, scale, sees->most, threads))
            return 1;
        if (some) {
            T *whole = x;
            R = W;
            gather(q, attended, wanted, R, H * D);
            gather(other, x, wanted, R, d);
            x = other, other = whole;
            if (M) M = drafting(adapter, wanted, W);
        }
        const T *heads = some ? q : attended;
        product(heads, H * D, layer->out, d, layer->out_bias, other, d, R, H * D, d, 0, threads);
        if (M) adapt(pairs + OUT, 1, adapter->rows, M, 0, heads, H * D, other, d, adapter->room, threads);
        norm(other, x, layer->after, normed, R, d, eps, threads);
        feed_forward(layer, pairs, adapter, M, normed, x, R, d, I, between, threads);
        norm(x, other, at_end ? last : layer[1].before, at_end ? y : normed, R, d, eps, threads);
    }
    return 0;
}

/* Returns how many numbers of room `layers` needs for `rows` rows, the greater of R and W. */
int64_t room_of(ptrdiff_t rows, ptrdiff_t d, ptrdiff_t H, ptrdiff_t Hkv, ptrdiff_t D, ptrdiff_t I) {
    ptrdiff_t qkv = rows * (H + 2 * Hkv) * D, parts = (rows < AT_ONCE ? rows : AT_ONCE) * 3 * I;
    return rows * (3 * d + 2 * H * D) + (qkv > parts ? qkv : parts);
}
