// The Gated DeltaNet recurrence over the rows of a step (walk) and over accepted rows (fold): one kernel, one `advance`.
//
// A block holds 32 columns of one head's state, a warp eight of them, four lanes a column: lane p of a column has rows
// 16 i + 4 p .. + 3 of its state in registers, so a dot product is 32 (DK / 4) fused multiply-adds in four chains and two
// shuffles. Rows' inputs come through shared memory, sixteen rows at a time. The state is rounded to its storage type after
// every row, so a fold gives the bits of a walk.
//
// Walk: starts from the settled state, leaves it alone, goes through a request's rows in depth-first order; a row whose
// parent is not the row before continues from the settled state or from where the parent left its own (`keep`). The last
// block of a head to finish applies the gated norm over the head's columns to the request's rows.
// Fold: goes through the rows of `path` and writes the state.
//
// The state is read before the wait of a dependent launch: no kernel of a step writes it, and the kernel in front of the walk
// must itself have waited for its own predecessor.
//
// Compile-time: HK, HV, DK, DV, STATE (0 fp32, 1 fp16, 2 bf16), FOLD, SIGMOID, PDL.
// Shared memory: [16 rows][k DK | q DK | v 32 | decay, beta, parent, keep].

#define CHUNK 16
#define WARPS 4
#define COLUMNS 32
#define THREADS (WARPS * 32)
#define PER (DK / 4)
#define ROW_FLOATS (2 * DK + COLUMNS + 4)
#define BLOCKS_PER_HEAD (DV / COLUMNS)

#if STATE == 0
typedef float stored;
__device__ __forceinline__ float load_state(stored v) { return v; }
__device__ __forceinline__ stored store_state(float v) { return v; }
#elif STATE == 1
typedef u16 stored;
__device__ __forceinline__ float load_state(stored v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
}
__device__ __forceinline__ stored store_state(float v) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}
#else
typedef u16 stored;
__device__ __forceinline__ float load_state(stored v) { return bf16_value(v); }
__device__ __forceinline__ stored store_state(float v) { return to_bf16(v); }
#endif

// sum_k s[k] x[k] over the four lanes of a column, always in this order.
__device__ __forceinline__ float dot(const float* s, const float4* x) {
    float a[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < PER / 4; ++i) {
        const float4 v = x[i * 4];
        a[0] = __fmaf_rn(s[4 * i], v.x, a[0]);
        a[1] = __fmaf_rn(s[4 * i + 1], v.y, a[1]);
        a[2] = __fmaf_rn(s[4 * i + 2], v.z, a[2]);
        a[3] = __fmaf_rn(s[4 * i + 3], v.w, a[3]);
    }
    float total = __fadd_rn(__fadd_rn(a[0], a[1]), __fadd_rn(a[2], a[3]));
    total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, 1));
    return __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, 2));
}

// S <- decay S; d = beta (v - S^T k); S <- S + k d^T, rounded to the storage type.
__device__ __forceinline__ void advance(float* s, const float4* k, float v, float decay, float beta) {
#pragma unroll
    for (int i = 0; i < PER; ++i) s[i] = __fmul_rn(s[i], decay);
    const float d = __fmul_rn(__fadd_rn(v, -dot(s, k)), beta);
#pragma unroll
    for (int i = 0; i < PER / 4; ++i) {
        const float4 x = k[i * 4];
        s[4 * i] = load_state(store_state(__fmaf_rn(x.x, d, s[4 * i])));
        s[4 * i + 1] = load_state(store_state(__fmaf_rn(x.y, d, s[4 * i + 1])));
        s[4 * i + 2] = load_state(store_state(__fmaf_rn(x.z, d, s[4 * i + 2])));
        s[4 * i + 3] = load_state(store_state(__fmaf_rn(x.w, d, s[4 * i + 3])));
    }
}

__device__ __forceinline__ void read_state(float* s, const stored* from, int p) {
#pragma unroll
    for (int i = 0; i < PER; ++i) s[i] = load_state(from[(16 * (i / 4) + 4 * p + i % 4) * DV]);
}
__device__ __forceinline__ void write_state(const float* s, stored* to, int p) {
#pragma unroll
    for (int i = 0; i < PER; ++i) to[(16 * (i / 4) + 4 * p + i % 4) * DV] = store_state(s[i]);
}


extern "C" __global__ void __launch_bounds__(THREADS)
delta(stored* states, const float* q, const float* k, const float* v, const float* decay, const float* beta,
      const int* slots, const int* starts, const int* counts, const int* path, int path_stride,
      u64 state_layer, u64 k_layer, u64 v_layer, u64 gate_layer, int requests,
      const int* parent, const int* keep, stored* scratch, float* walked, u32* arrivals,
      const u16* z, int z_stride, const float* norm, float eps, u16* mixed) {
    __shared__ __align__(16) float rows[CHUNK * ROW_FLOATS];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, p = lane % 4;
    const int block = blockIdx.x % (HV * BLOCKS_PER_HEAD), request = blockIdx.x / (HV * BLOCKS_PER_HEAD) % requests;
    const u64 layer = blockIdx.x / (HV * BLOCKS_PER_HEAD) / requests;
    const int head = block / BLOCKS_PER_HEAD, first_column = block % BLOCKS_PER_HEAD * COLUMNS;
    const int column = first_column + warp * 8 + lane / 4;
    const int count = counts[request];
    stored* settled = states + layer * state_layer + ((u64)slots[request] * HV + head) * (DK * DV) + column;
    float s[PER];
    if (count > 0) read_state(s, settled, p);
#if PDL
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    if (count <= 0) return;
    const float* at_k = k + layer * k_layer + head / (HV / HK) * DK;
    const float* at_q = q + head / (HV / HK) * DK;
    const float* at_v = v + layer * v_layer + head * DV + first_column;
    const int first = FOLD ? 0 : starts[request];
    const int* steps = path + (u64)request * path_stride;
    for (int base = 0; base < count; base += CHUNK) {
        const int here = min(CHUNK, count - base);
        __syncthreads();
        for (int i = thread; i < here * (ROW_FLOATS / 4); i += THREADS) {
            const int r = i / (ROW_FLOATS / 4), piece = i % (ROW_FLOATS / 4) * 4;
            const u64 row = FOLD ? steps[base + r] : first + base + r;
            const u32 to = smem_address(rows + r * ROW_FLOATS + piece);
            if (piece < DK) copy16(to, at_k + row * (HK * DK) + piece, 16);
            else if (piece < 2 * DK) { if (!FOLD) copy16(to, at_q + row * (HK * DK) + piece - DK, 16); }
            else if (piece < 2 * DK + COLUMNS) copy16(to, at_v + row * (HV * DV) + piece - 2 * DK, 16);
            else {
                rows[r * ROW_FLOATS + piece] = decay[layer * gate_layer + row * HV + head];
                rows[r * ROW_FLOATS + piece + 1] = beta[layer * gate_layer + row * HV + head];
                if (!FOLD) {
                    rows[r * ROW_FLOATS + piece + 2] = __int_as_float(parent[row]);
                    rows[r * ROW_FLOATS + piece + 3] = __int_as_float(keep[row]);
                }
            }
        }
        commit();
        wait_group<0>();
        __syncthreads();
        for (int r = 0; r < here; ++r) {
            const float* x = rows + r * ROW_FLOATS;
#if !FOLD
            const int row = first + base + r;
            const int above = __float_as_int(x[2 * DK + COLUMNS + 2]), entry = __float_as_int(x[2 * DK + COLUMNS + 3]);
            if (row != first && above != row - 1) {
                if (above < 0) read_state(s, settled, p);
                else read_state(s, scratch + ((u64)keep[above] * HV + head) * (DK * DV) + column, p);
            }
#endif
            advance(s, reinterpret_cast<const float4*>(x) + p, x[2 * DK + warp * 8 + lane / 4], x[2 * DK + COLUMNS],
                    x[2 * DK + COLUMNS + 1]);
#if !FOLD
            const float o = dot(s, reinterpret_cast<const float4*>(x + DK) + p);
            if (p == 0) __stcg(walked + ((u64)row * HV + head) * DV + column, o);
            if (entry > 0) write_state(s, scratch + ((u64)entry * HV + head) * (DK * DV) + column, p);
#endif
        }
    }
#if FOLD
    write_state(s, settled, p);
#else
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        u32* arrived = arrivals + request * HV + head;
        last = atomicAdd(arrived, 1) == BLOCKS_PER_HEAD - 1;
        if (last) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    float weight[DV / 32];
#pragma unroll
    for (int i = 0; i < DV / 32; ++i) weight[i] = norm[lane + 32 * i];
    // A warp a row; four rows' inputs are fetched before the first is stored.
    for (int r0 = warp; r0 < count; r0 += 4 * WARPS) {
        float o[4][DV / 32];
        u16 gates[4][DV / 32];
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < DV / 32; ++i)
                if (r0 + j * WARPS < count) {
                    const u64 row = first + r0 + j * WARPS;
                    o[j][i] = __ldcg(walked + (row * HV + head) * DV + lane + 32 * i);
                    gates[j][i] = z[row * z_stride + head * DV + lane + 32 * i];
                }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (r0 + j * WARPS >= count) break;
            float total = 0.f;
#pragma unroll
            for (int i = 0; i < DV / 32; ++i) total = __fmaf_rn(o[j][i], o[j][i], total);
#pragma unroll
            for (int step = 1; step < 32; step *= 2) total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, step));
            const float root = rsqrtf(total / DV + eps);
#pragma unroll
            for (int i = 0; i < DV / 32; ++i) {
                const float gate = bf16_value(gates[j][i]), sigmoid = 1.f / (1.f + __expf(-gate));
                const float scaled = o[j][i] * root * weight[i];
                mixed[((u64)(first + r0 + j * WARPS) * HV + head) * DV + lane + 32 * i] =
                    to_bf16(scaled * (SIGMOID ? sigmoid : gate * sigmoid));
            }
        }
    }
#endif
}
