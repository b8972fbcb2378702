// The Gated DeltaNet recurrence over the rows of a step (walk) and over accepted rows (fold): one kernel, one `advance`.
//
// A block holds 64 (or 32) columns of one head's state, a warp 16 of them, four lanes a pair of columns: lane p of a pair has
// rows 16 i + 4 p .. + 3 of its state in registers. Rows' inputs come through shared memory, sixteen rows at a time. The state
// is rounded to its storage type after every row, so a fold gives the bits of a walk.
//
// States in fp16 stay packed and are the A operand of the tensor-core product (m16n8k16, fp32 sums); a vector is the B
// operand, 256 x in two fp16 parts (22 bits of it, |x| < 255), one part in the even columns of the tile and the other in the
// odd ones. So every lane of a pair ends up with both sums and nothing is shuffled. Other states are fp32 in registers; a dot
// product is DK / 4 fused multiply-adds in four chains and two shuffles.
//
// What a row gives out, S^T q, is computed beside the next row's S^T k from the same state: it is off the chain from row to
// row. Of that chain the next row's k is fetched ahead too.
//
// Walk: starts from the settled state, leaves it alone, goes through a request's rows in depth-first order; a row whose
// parent is not the row before continues from the settled state or from where the parent left its own (`keep`). The last
// block of a head to finish applies the gated norm over the head's columns to the request's rows.
// Fold: goes through the rows of `path` and writes the state.
//
// State and tables are read before the wait of a dependent launch: no kernel of a step writes them, and the kernel in front of
// the walk must itself have waited for its own predecessor.
//
// Compile-time: HK, HV, DK, DV, STATE (0 fp32, 1 fp16, 2 bf16), FOLD, SIGMOID, PDL.
// Shared memory: [16 rows][k DK | parts of k DK | parts of q DK, or: k DK | q DK | v | decay, beta, parent, keep].

#define CHUNK 16
#define COLUMNS (DV % 64 ? 32 : 64)
#define WARPS (COLUMNS / 16)
#define THREADS (WARPS * 32)
#define STEPS (DK / 16)
#define TENSOR (STATE == 1 && DK % 32 == 0)
#define K_AT (TENSOR ? DK : 0)
#define Q_AT (K_AT + DK)
#define V_AT (Q_AT + DK)
#define GATES_AT (V_AT + COLUMNS)
#define ROW_WORDS (GATES_AT + 4)
#define BLOCKS_PER_HEAD (DV / COLUMNS)

__device__ __forceinline__ float half_value(u16 v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
}
// Two floats, rounded: a in the low half.
__device__ __forceinline__ u32 to_halves(float a, float b) {
    u32 h;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(b), "f"(a));
    return h;
}
__device__ __forceinline__ void mma_f16(float* c, const u32* a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Counts a block whose threads have met at a barrier: what they wrote is seen by whom a later one's barrier lets go on.
__device__ __forceinline__ u32 arrive(u32* count) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return before;
}

#if STATE == 0
typedef float stored;
#else
typedef u16 stored;
#endif
#if STATE == 2
__device__ __forceinline__ float low(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float a, float b) { return (u32)to_bf16(a) | (u32)to_bf16(b) << 16; }
#else
__device__ __forceinline__ float low(u32 w) { return half_value((u16)w); }
__device__ __forceinline__ float high(u32 w) { return half_value((u16)(w >> 16)); }
__device__ __forceinline__ u32 pack(float a, float b) { return to_halves(a, b); }
#endif

#if TENSOR
// Fragments of S^T: a step's words are (pair's first column, rows 0 1), (second, 0 1), (first, 2 3), (second, 2 3).
struct State {
    u32 s[STEPS][4];
};

__device__ __forceinline__ void read_state(State& state, const stored* from, int p) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const u32 even = *reinterpret_cast<const u32*>(from + (16 * i + 4 * p + e) * DV);
            const u32 odd = *reinterpret_cast<const u32*>(from + (16 * i + 4 * p + e + 1) * DV);
            state.s[i][e] = __byte_perm(even, odd, 0x5410);
            state.s[i][e + 1] = __byte_perm(even, odd, 0x7632);
        }
}
__device__ __forceinline__ void write_state(const State& state, stored* to, int p) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const u32 first = state.s[i][e], second = state.s[i][e + 1];
            *reinterpret_cast<u32*>(to + (16 * i + 4 * p + e) * DV) = __byte_perm(first, second, 0x5410);
            *reinterpret_cast<u32*>(to + (16 * i + 4 * p + e + 1) * DV) = __byte_perm(first, second, 0x7632);
        }
}

// Numbers 4 piece .. + 3 of a vector in parts. [pair of steps][part][p][step][4]: what a lane needs of two steps is 16 bytes.
__device__ __forceinline__ void place_parts(float* at, int piece, float4 x) {
    const float a = x.x * 256.f, b = x.y * 256.f, c = x.z * 256.f, d = x.w * 256.f;
    const u32 ab = to_halves(a, b), cd = to_halves(c, d);
    u32* to = reinterpret_cast<u32*>(at) + piece / 8 * 32 + piece % 4 * 4 + piece / 4 % 2 * 2;
    *reinterpret_cast<uint2*>(to) = make_uint2(ab, cd);
    *reinterpret_cast<uint2*>(to + 16) =
        make_uint2(to_halves(a - low(ab), b - high(ab)), to_halves(c - low(cd), d - high(cd)));
}

// A lane's share of a vector in parts.
struct Vector {
    uint4 steps[STEPS / 2];
};
__device__ __forceinline__ Vector fetch(const float* x, int lane) {
    const uint4* parts = reinterpret_cast<const uint4*>(x) + lane / 4 % 2 * 4 + lane % 4;
    Vector v;
#pragma unroll
    for (int i = 0; i < STEPS / 2; ++i) v.steps[i] = parts[i * 8];
    return v;
}

// S^T x of the lane's two columns, always in this order.
__device__ __forceinline__ float2 product(const State& state, const Vector& x, int lane) {
    constexpr int chains = STEPS < 4 ? STEPS : 4;
    float c[chains][4];
#pragma unroll
    for (int i = 0; i < chains; ++i) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.f;
#pragma unroll
    for (int i = 0; i < STEPS; i += 2) {
        const uint4 b = x.steps[i / 2];
        mma_f16(c[i % chains], state.s[i], b.x, b.y);
        mma_f16(c[(i + 1) % chains], state.s[i + 1], b.z, b.w);
    }
#pragma unroll
    for (int width = chains / 2; width > 0; width /= 2)
#pragma unroll
        for (int i = 0; i < width; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) c[i][e] = __fadd_rn(c[i][e], c[i + width][e]);
    return make_float2(__fmul_rn(__fadd_rn(c[0][0], c[0][1]), 1.f / 256.f),
                       __fmul_rn(__fadd_rn(c[0][2], c[0][3]), 1.f / 256.f));
}

// S <- decay S + k d^T, rounded to the storage type.
__device__ __forceinline__ void update(State& state, const float* k, float2 d, float decay, int p) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const float4 x = reinterpret_cast<const float4*>(k)[i * 4 + p];
        u32* s = state.s[i];
        s[0] = pack(__fmaf_rn(x.x, d.x, __fmul_rn(low(s[0]), decay)), __fmaf_rn(x.y, d.x, __fmul_rn(high(s[0]), decay)));
        s[1] = pack(__fmaf_rn(x.x, d.y, __fmul_rn(low(s[1]), decay)), __fmaf_rn(x.y, d.y, __fmul_rn(high(s[1]), decay)));
        s[2] = pack(__fmaf_rn(x.z, d.x, __fmul_rn(low(s[2]), decay)), __fmaf_rn(x.w, d.x, __fmul_rn(high(s[2]), decay)));
        s[3] = pack(__fmaf_rn(x.z, d.y, __fmul_rn(low(s[3]), decay)), __fmaf_rn(x.w, d.y, __fmul_rn(high(s[3]), decay)));
    }
}

#else
struct State {
    float s[2][4 * STEPS];
};

__device__ __forceinline__ void read_state(State& state, const stored* from, int p) {
#pragma unroll
    for (int i = 0; i < 4 * STEPS; ++i) {
        const stored* at = from + (16 * (i / 4) + 4 * p + i % 4) * DV;
#if STATE == 0
        const float2 pair = *reinterpret_cast<const float2*>(at);
        state.s[0][i] = pair.x, state.s[1][i] = pair.y;
#else
        const u32 pair = *reinterpret_cast<const u32*>(at);
        state.s[0][i] = low(pair), state.s[1][i] = high(pair);
#endif
    }
}
__device__ __forceinline__ void write_state(const State& state, stored* to, int p) {
#pragma unroll
    for (int i = 0; i < 4 * STEPS; ++i) {
        stored* at = to + (16 * (i / 4) + 4 * p + i % 4) * DV;
#if STATE == 0
        *reinterpret_cast<float2*>(at) = make_float2(state.s[0][i], state.s[1][i]);
#else
        *reinterpret_cast<u32*>(at) = pack(state.s[0][i], state.s[1][i]);
#endif
    }
}

struct Vector {
    const float* in_memory;
};
__device__ __forceinline__ Vector fetch(const float* x, int lane) { return {x}; }

// S^T x of the lane's two columns over their four lanes, always in this order.
__device__ __forceinline__ float2 product(const State& state, const Vector& x, int lane) {
    float a[2][4], total[2];
#pragma unroll
    for (int e = 0; e < 4; ++e) a[0][e] = a[1][e] = 0.f;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const float4 v = reinterpret_cast<const float4*>(x.in_memory)[i * 4 + lane % 4];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            a[c][0] = __fmaf_rn(state.s[c][4 * i], v.x, a[c][0]);
            a[c][1] = __fmaf_rn(state.s[c][4 * i + 1], v.y, a[c][1]);
            a[c][2] = __fmaf_rn(state.s[c][4 * i + 2], v.z, a[c][2]);
            a[c][3] = __fmaf_rn(state.s[c][4 * i + 3], v.w, a[c][3]);
        }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        total[c] = __fadd_rn(__fadd_rn(a[c][0], a[c][1]), __fadd_rn(a[c][2], a[c][3]));
        total[c] = __fadd_rn(total[c], __shfl_xor_sync(0xffffffffu, total[c], 1));
        total[c] = __fadd_rn(total[c], __shfl_xor_sync(0xffffffffu, total[c], 2));
    }
    return make_float2(total[0], total[1]);
}

// S <- decay S + k d^T, rounded to the storage type.
__device__ __forceinline__ void update(State& state, const float* k, float2 d, float decay, int p) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const float4 v = reinterpret_cast<const float4*>(k)[i * 4 + p];
        const float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float &first = state.s[0][4 * i + e], &second = state.s[1][4 * i + e];
            first = __fmaf_rn(x[e], d.x, __fmul_rn(first, decay));
            second = __fmaf_rn(x[e], d.y, __fmul_rn(second, decay));
#if STATE != 0
            const u32 pair = pack(first, second);
            first = low(pair), second = high(pair);
#endif
        }
    }
}
#endif

// One row: d = beta (v - decay S^T k); S <- decay S + k d^T. x: the row's inputs, old: S^T k, v: its inputs at these columns.
__device__ __forceinline__ void advance(State& state, const float* x, float2 old, float2 v, int lane) {
    const float decay = x[GATES_AT], beta = x[GATES_AT + 1];
    const float2 d = make_float2(__fmul_rn(__fmaf_rn(-decay, old.x, v.x), beta),
                                 __fmul_rn(__fmaf_rn(-decay, old.y, v.y), beta));
    update(state, x, d, decay, lane % 4);
}

// `here` rows of a request into shared memory, from row `first` on or, in a fold, rows steps[0], steps[1], ..
__device__ __forceinline__ void stage(float* rows, u32 here, u32 thread, const int* steps, int first, const float* k,
                                      const float* q, const float* v, const float* decay, const float* beta,
                                      const int* parent, const int* keep) {
    constexpr u32 pieces = DK / 4;
    for (u32 i = thread; i < here * (FOLD ? pieces : 2 * pieces); i += THREADS) {
        const u32 r = i / (FOLD ? pieces : 2 * pieces), of_q = FOLD ? 0 : i / pieces % 2, piece = i % pieces * 4;
        const u64 row = FOLD ? steps[r] : first + r;
        copy16(smem_address(rows + r * ROW_WORDS + of_q * Q_AT + piece), (of_q ? q : k) + row * (HK * DK) + piece, 16);
    }
    for (u32 i = thread; i < here * (COLUMNS / 4); i += THREADS) {
        const u32 r = i / (COLUMNS / 4), piece = i % (COLUMNS / 4) * 4;
        const u64 row = FOLD ? steps[r] : first + r;
        copy16(smem_address(rows + r * ROW_WORDS + V_AT + piece), v + row * (HV * DV) + piece, 16);
    }
    if (thread < here * 4) {
        const u32 r = thread / 4, word = thread % 4;
        const u64 row = FOLD ? steps[r] : first + r;
        const void* from = word == 0 ? (const void*)(decay + row * HV) : (const void*)(beta + row * HV);
        if (!FOLD && word >= 2) from = word == 2 ? parent + row : keep + row;
        if (!FOLD || word < 2) copy4(smem_address(rows + r * ROW_WORDS + GATES_AT + word), from);
    }
    commit();
    wait_group<0>();
    __syncthreads();
#if TENSOR
    // A warp takes a row apart; q's parts take the place of q.
    const u32 lane = thread % 32;
    for (u32 r = thread / 32; r < here; r += WARPS) {
        float* row = rows + r * ROW_WORDS;
        float4 key, query;
        if (lane < pieces) {
            key = reinterpret_cast<const float4*>(row)[lane];
            if (!FOLD) query = reinterpret_cast<const float4*>(row + Q_AT)[lane];
        }
        __syncwarp();
        if (lane < pieces) {
            place_parts(row + K_AT, lane, key);
            if (!FOLD) place_parts(row + Q_AT, lane, query);
        }
    }
    __syncthreads();
#endif
}

#if !FOLD
// mixed = norm * o / rms(o) * act(z) for one head's rows, a warp a row, four rows of a warp side by side. Where there are fewer
// the last one is computed again, to the same bits.
__device__ __forceinline__ void gated_norm(const float* walked, const u16* z, int z_stride, const float* norm, float eps,
                                           u16* mixed, int count, int warp, int lane) {
    constexpr int own = DV / 32;
    float weight[own];
#pragma unroll
    for (int i = 0; i < own; ++i) weight[i] = norm[lane + 32 * i];
    for (int r0 = warp; r0 < count; r0 += 4 * WARPS) {
        float o[4][own], total[4];
        u16 gates[4][own];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u64 row = min(r0 + j * WARPS, count - 1);
#pragma unroll
            for (int i = 0; i < own; ++i) {
                o[j][i] = __ldcg(walked + row * (HV * DV) + lane + 32 * i);
                gates[j][i] = z[row * z_stride + lane + 32 * i];
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            total[j] = 0.f;
#pragma unroll
            for (int i = 0; i < own; ++i) total[j] = __fmaf_rn(o[j][i], o[j][i], total[j]);
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                total[j] = __fadd_rn(total[j], __shfl_xor_sync(0xffffffffu, total[j], step));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u64 row = min(r0 + j * WARPS, count - 1);
            const float root = rsqrtf(total[j] * (1.f / DV) + eps);
#pragma unroll
            for (int i = 0; i < own; ++i) {
                const float gate = bf16_value(gates[j][i]), sigmoid = __fdividef(1.f, 1.f + __expf(-gate));
                mixed[row * (HV * DV) + lane + 32 * i] =
                    to_bf16(o[j][i] * root * weight[i] * (SIGMOID ? sigmoid : gate * sigmoid));
            }
        }
    }
}
#endif

// Registers for three blocks of 128 threads; widening bf16 states takes more.
extern "C" __global__ void __launch_bounds__(THREADS, (STATE == 2 ? 256 : 384) / THREADS)
delta(stored* states, const float* q, const float* k, const float* v, const float* decay, const float* beta,
      const int* slots, const int* starts, const int* counts, const int* path, int path_stride,
      u64 state_layer, u64 k_layer, u64 v_layer, u64 gate_layer, int requests,
      const int* parent, const int* keep, stored* scratch, float* walked, u32* arrivals,
      const u16* z, int z_stride, const float* norm, float eps, u16* mixed) {
    __shared__ __align__(16) float rows[CHUNK * ROW_WORDS];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, p = lane % 4;
    const int block = blockIdx.x % (HV * BLOCKS_PER_HEAD), request = blockIdx.x / (HV * BLOCKS_PER_HEAD) % requests;
    const u64 layer = blockIdx.x / (HV * BLOCKS_PER_HEAD) / requests;
    const int head = block / BLOCKS_PER_HEAD, first_column = block % BLOCKS_PER_HEAD * COLUMNS;
    const int own = warp * 16 + lane / 4 * 2, column = first_column + own;
    const int count = counts[request], first = FOLD ? 0 : starts[request];
    stored* settled = states + layer * state_layer + ((u64)slots[request] * HV + head) * (DK * DV) + column;
    State state;
    if (count > 0) read_state(state, settled, p);
#if PDL
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    if (count <= 0) return;
    const float* at_k = k + layer * k_layer + head / (HV / HK) * DK;
    const float* at_q = q + head / (HV / HK) * DK;
    const float* at_v = v + layer * v_layer + head * DV + first_column;
    const u64 gates = layer * gate_layer + head;
    const int* steps = path + (u64)request * path_stride;
    for (int base = 0; base < count; base += CHUNK) {
        const int here = min(CHUNK, count - base);
        __syncthreads();
        stage(rows, here, thread, steps + base, first + base, at_k, at_q, at_v, decay + gates, beta + gates, parent, keep);
#if !FOLD
        // A bit a row: it does not continue from the row before; its state is kept. Known without a load in the loop.
        const float* own_row = rows + min(lane, here - 1) * ROW_WORDS + GATES_AT;
        const int parent_of_mine = __float_as_int(own_row[2]);
        const u32 jumps = __ballot_sync(0xffffffffu, base + lane > 0 && parent_of_mine != first + base + lane - 1);
        const u32 keeps = __ballot_sync(0xffffffffu, __float_as_int(own_row[3]) > 0);
#endif
        Vector key = fetch(rows + K_AT, lane);
        for (int r = 0; r < here; ++r) {
            const float* x = rows + r * ROW_WORDS;
            const float2 fresh = *reinterpret_cast<const float2*>(x + V_AT + own);
            const Vector mine = key;
            key = fetch(rows + min(r + 1, here - 1) * ROW_WORDS + K_AT, lane);  // on its way while row r is computed
#if FOLD
            advance(state, x, product(state, mine, lane), fresh, lane);
#else
            float2* out = reinterpret_cast<float2*>(walked + ((u64)(first + base + r) * HV + head) * DV + column);
            const float* before = r > 0 ? x - ROW_WORDS : x;
            bool owes = r > 0;  // the row before has not given its output yet; if its state is replaced, that comes first
            if (jumps >> r & 1) {
                const float2 o = product(state, fetch(before + Q_AT, lane), lane);
                if (owes && p == 0) __stcg(out - HV * DV / 2, o);
                owes = false;
                const int above = __float_as_int(x[GATES_AT + 2]);
                if (above < 0) read_state(state, settled, p);
                else read_state(state, scratch + ((u64)keep[above] * HV + head) * (DK * DV) + column, p);
            }
            const float2 old = product(state, mine, lane), o = product(state, fetch(before + Q_AT, lane), lane);
            advance(state, x, old, fresh, lane);
            if (owes && p == 0) __stcg(out - HV * DV / 2, o);
            if (keeps >> r & 1)
                write_state(state, scratch + ((u64)__float_as_int(x[GATES_AT + 3]) * HV + head) * (DK * DV) + column, p);
            if (r == here - 1) {
                const float2 last = product(state, fetch(x + Q_AT, lane), lane);
                if (p == 0) __stcg(out, last);
            }
#endif
        }
    }
#if FOLD
    write_state(state, settled, p);
#else
    __shared__ bool last;
    __syncthreads();
    if (thread == 0) {
        u32* arrived = arrivals + request * HV + head;
        last = arrive(arrived) == BLOCKS_PER_HEAD - 1;
        if (last) *arrived = 0;
    }
    __syncthreads();
    if (!last) return;
    gated_norm(walked + ((u64)first * HV + head) * DV, z + (u64)first * z_stride + head * DV, z_stride, norm, eps,
               mixed + ((u64)first * HV + head) * DV, count, warp, lane);
#endif
}
