// y[m, n] = sum_k x[m, k] * scale[n, k / group] * (code[n, k] - zero[n, k / group]),  1 <= m <= MT rows of bf16.
//
// The weight is the A operand of mma.m16n8k16 and the activations are the B operand, so a row of y is a
// column of the tile: its bits depend neither on the other rows nor on how many there are. The K order is
// fixed by (N, K, number of CTAs) alone: the U = (N / 256) x (K / 64) units are dealt to the CTAs in contiguous runs
// of equal length (the first `extra` runs are one longer); a CTA's two K groups halve every segment of its run that
// lies in one N tile, and tiles shared by several CTAs are summed in CTA order by the last to arrive.
//
// Codes enter the MMA as exact integers in bf16 and the scale is applied in fp32 after each 64-wide unit.
// Weights, scales and rows arrive in a ring of stages guarded by barriers; on sm_90+ one warp in turn orders a stage's
// bulk copies, before that every warp copies its eighth.
//
// Compile-time: MT (8, 16, 32, 64 rows), STAGES (ring depth per K group), HAS_ZEROS, SCALE_BF16, PDL.
// Layouts (made by linear_cuda.pack): w [N/256][K/64][16 m-tiles][32 lanes][4 words]; lane 4 g + t holds rows g (words
// 0, 1) and g + 8 (words 2, 3); word w of a row holds steps 2 w and 2 w + 1 of 16 columns; its nibbles i and i + 4 are
// columns c and c + 1 with c = 16 (2 w + i / 2) + 2 t + 8 (i % 2). scales, zeros [N/256][K/group][8 warps][8 g][2][2].

#define TILE_N 256
#define UNIT_K 64
#define K_GROUPS 2
#define WARPS 8                         // per K group
#define THREADS (K_GROUPS * WARPS * 32)
#define X_STRIDE 144                    // bytes per activation row in a stage: 128 + 16 keeps ldmatrix conflict free
#define W_BYTES (TILE_N * UNIT_K / 2)
#define X_BYTES (MT * X_STRIDE)
#define S_BYTES (TILE_N * 2)
#define Z_BYTES (HAS_ZEROS ? TILE_N : 0)
#define STAGE_BYTES (W_BYTES + X_BYTES + S_BYTES + Z_BYTES)
#define OUT_STRIDE 260                  // floats per row of the exchange tile
#define NT (MT / 8)
#define BULK (__CUDA_ARCH__ >= 900)

// A CTA's run of units, segment by segment, as one K group sees it: its half of every segment.
struct Walk {
    int segment, end, per_tile, half;
    int tile, k, k_end;
    __device__ __forceinline__ void open() {
        while (segment < end) {
            tile = segment / per_tile;
            const int first = segment - tile * per_tile, last = min(end - tile * per_tile, per_tile);
            const int middle = first + (last - first) / 2;
            k = half ? middle : first;
            k_end = half ? last : middle;
            if (k < k_end) return;
            segment = tile * per_tile + last;
        }
    }
    __device__ __forceinline__ bool valid() const { return segment < end; }
    __device__ __forceinline__ void next() {
        if (++k < k_end) return;
        segment = min(end, (tile + 1) * per_tile);
        open();
    }
};

struct Deal {                           // unit runs: CTA c begins at c * length + min(c, extra)
    int length, extra;
    __device__ __forceinline__ int begin(int cta) const { return cta * length + min(cta, extra); }
    __device__ __forceinline__ int owner(int unit) const {
        const int longer = extra * (length + 1);
        return unit < longer ? unit / (length + 1) : extra + (unit - longer) / length;
    }
};

struct Inputs {
    const u8 *w, *scales, *zeros, *x;
    int rows, x_stride, per_tile, group_units, groups, warp, lane;
    u64 policy;

    // BULK: called by one warp. Otherwise by all eight of the K group.
    __device__ __forceinline__ void fetch_weight(const Walk& at, u32 stage, u32 full) const {
        const u8* source = w + (u64)(at.tile * per_tile + at.k) * W_BYTES;
        const u64 group = (u32)(at.tile * groups + at.k / group_units);
#if BULK
        if (lane == 0) {
            barrier_expect(full, W_BYTES + S_BYTES + Z_BYTES + rows * (2 * UNIT_K));
            bulk_copy_stream(stage, source, W_BYTES, full, policy);
            bulk_copy(stage + W_BYTES + X_BYTES, scales + group * S_BYTES, S_BYTES, full);
#if HAS_ZEROS
            bulk_copy(stage + W_BYTES + X_BYTES + S_BYTES, zeros + group * TILE_N, TILE_N, full);
#endif
        }
        __syncwarp();
#else
        const int at16 = warp * 512 + lane * 16;
        copy16(stage + at16, source + at16, 16);
        copy16(stage + W_BYTES / 2 + at16, source + W_BYTES / 2 + at16, 16);
        if (warp == 6) copy16(stage + W_BYTES + X_BYTES + lane * 16, scales + group * S_BYTES + lane * 16, 16);
#if HAS_ZEROS
        if (warp == 7 && lane < 16)
            copy16(stage + W_BYTES + X_BYTES + S_BYTES + lane * 16, zeros + group * TILE_N + lane * 16, 16);
#endif
#endif
    }
    __device__ __forceinline__ void fetch_rows(const Walk& at, u32 stage, u32 full) const {
        const u8* source = x + at.k * (2 * UNIT_K);
#if BULK
#pragma unroll
        for (int row = lane; row < MT; row += 32)
            if (row < rows) bulk_copy(stage + W_BYTES + row * X_STRIDE, source + (u64)row * x_stride * 2, 2 * UNIT_K, full);
#else
#pragma unroll
        for (int i = warp * 32 + lane; i < MT * 8; i += WARPS * 32)
            if (i < rows * 8)
                copy16(stage + W_BYTES + i / 8 * X_STRIDE + i % 8 * 16, source + (u64)(i / 8) * x_stride * 2 + i % 8 * 16, 16);
        barrier_arrive_on_copies(full);
#endif
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
w4a16(const u8* __restrict__ w, const u8* __restrict__ scales, const u8* __restrict__ zeros,
      const u8* __restrict__ x, u16* __restrict__ y, float* __restrict__ partials, u32* __restrict__ arrivals,
      int rows, int n_out, int x_stride, int y_stride, int per_tile, int group_units, int length, int extra) {
    extern __shared__ __align__(128) u8 smem[];
    __shared__ __align__(8) u64 barriers[2 * K_GROUPS * STAGES];
    __shared__ u32 is_last;
    const int thread = threadIdx.x, lane = thread % 32, cta = blockIdx.x;
    const int half = thread / (WARPS * 32), warp = thread / 32 % WARPS, g = lane / 4, t = lane % 4;
    const Deal deal = {length, extra};
    const int begin = deal.begin(cta), end = deal.begin(cta + 1);
    const u32 ring = smem_address(smem) + half * STAGES * STAGE_BYTES;
    const u32 full = smem_address(barriers) + half * STAGES * 16, empty = full + 8;   // + 16 per slot
    float* exchange = reinterpret_cast<float*>(smem + K_GROUPS * STAGES * STAGE_BYTES);

    if (thread < K_GROUPS * STAGES) {
        barrier_init(smem_address(barriers) + thread * 16, BULK ? 1 : WARPS * 32);
        barrier_init(smem_address(barriers) + thread * 16 + 8, WARPS);
#if BULK
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();

    Inputs in = {w, scales, zeros, x, rows, x_stride, per_tile, group_units,
                 (per_tile + group_units - 1) / group_units, warp, lane, 0};
#if BULK
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(in.policy));
#endif
    Walk ahead;
    ahead.segment = begin; ahead.end = end; ahead.per_tile = per_tile; ahead.half = half;
    ahead.open();
    {
        // Weights do not depend on the kernel before this one: the first stages are on their way before it has ended.
        Walk behind = ahead;
#pragma unroll 1
        for (int s = 0; s < STAGES; ++s)
            if (ahead.valid()) {
                if (!BULK || warp == 0) in.fetch_weight(ahead, ring + s * STAGE_BYTES, full + s * 16);
                ahead.next();
            }
#if PDL
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
        if (!BULK || warp == 0)
#pragma unroll 1
            for (int s = 0; s < STAGES; ++s)
                if (behind.valid()) {
                    in.fetch_rows(behind, ring + s * STAGE_BYTES, full + s * 16);
                    behind.next();
                }
    }

    int slot = 0, turn = 0;
    u32 parity = 0;
    for (int segment = begin; segment < end;) {
        const int tile = segment / per_tile, first = segment - tile * per_tile;
        const int last = min(end - tile * per_tile, per_tile), count = last - first;
        const int steps = half ? count - count / 2 : count / 2;
        float total[2][NT][4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) total[m][n][i] = 0.f;

        for (int step = 0; step < steps; ++step) {
            const u32 stage = ring + slot * STAGE_BYTES;
            barrier_wait(full + slot * 16, parity);
            u32 packed_scales[2];
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(packed_scales[0]), "=r"(packed_scales[1])
                         : "r"(stage + W_BYTES + X_BYTES + (warp * 8 + g) * 8));
#if HAS_ZEROS
            u32 packed_zeros;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(packed_zeros)
                         : "r"(stage + W_BYTES + X_BYTES + S_BYTES + (warp * 8 + g) * 4));
#endif
            const u32 x_at = stage + W_BYTES + lane % 8 * X_STRIDE + lane / 8 * 16;
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const uint4 q = load_shared(stage + ((warp * 2 + m) * 32 + lane) * 16);
#if HAS_ZEROS
                const u32 minus0 = 0xc300c300u | ((packed_zeros >> (16 * m)) & 0xf) * 0x00010001u;
                const u32 minus1 = 0xc300c300u | ((packed_zeros >> (16 * m + 8)) & 0xf) * 0x00010001u;
#else
                const u32 minus0 = 0xc308c308u, minus1 = 0xc308c308u;
#endif
                u32 a[4][4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const u32 above = j < 2 ? q.x : q.y, below = j < 2 ? q.z : q.w;
                    const int shift = (j % 2) * 8;
                    a[j][0] = decode(above >> shift, minus0);
                    a[j][1] = decode(below >> shift, minus1);
                    a[j][2] = decode(above >> (shift + 4), minus0);
                    a[j][3] = decode(below >> (shift + 4), minus1);
                }
                const float s0 = scale_value((u16)packed_scales[m]), s1 = scale_value((u16)(packed_scales[m] >> 16));
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4 b0 = load_fragments(x_at + n * 8 * X_STRIDE);
                    const uint4 b1 = load_fragments(x_at + n * 8 * X_STRIDE + 64);
                    float part[4] = {0.f, 0.f, 0.f, 0.f};
                    mma(part, a[0], b0.x, b0.y);
                    mma(part, a[1], b0.z, b0.w);
                    mma(part, a[2], b1.x, b1.y);
                    mma(part, a[3], b1.z, b1.w);
                    total[m][n][0] = fmaf(part[0], s0, total[m][n][0]);
                    total[m][n][1] = fmaf(part[1], s0, total[m][n][1]);
                    total[m][n][2] = fmaf(part[2], s1, total[m][n][2]);
                    total[m][n][3] = fmaf(part[3], s1, total[m][n][3]);
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + slot * 16);
            if (ahead.valid()) {
                if (!BULK || warp == turn) {
                    barrier_wait(empty + slot * 16, parity);
                    in.fetch_weight(ahead, stage, full + slot * 16);
                    in.fetch_rows(ahead, stage, full + slot * 16);
                }
                ahead.next();
            }
            turn = (turn + 1) % WARPS;
            if (++slot == STAGES) { slot = 0; parity ^= 1; }
        }

        // K group 1 lays its sums down, K group 0 adds its own.
        __syncthreads();
        const int column = warp * 32 + g;
#pragma unroll
        for (int pass = 1; pass >= 0; --pass) {
            if (half == pass) {
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            float* cell = exchange + (n * 8 + 2 * t + i % 2) * OUT_STRIDE + column + m * 16 + (i / 2) * 8;
                            *cell = pass ? total[m][n][i] : total[m][n][i] + *cell;
                        }
            }
            __syncthreads();
        }

        const int quads = rows * (TILE_N / 4);
        auto store = [&](int i, float4 v) {
            const int n = tile * TILE_N + i % (TILE_N / 4) * 4;
            if (n < n_out)
                *reinterpret_cast<u64*>(y + (u64)(i / (TILE_N / 4)) * y_stride + n) =
                    (u64)to_bf16(v.x) | (u64)to_bf16(v.y) << 16 | (u64)to_bf16(v.z) << 32 | (u64)to_bf16(v.w) << 48;
        };
        auto mine = [&](int i) {
            return *reinterpret_cast<const float4*>(exchange + i / (TILE_N / 4) * OUT_STRIDE + i % (TILE_N / 4) * 4);
        };
        if (count == per_tile) {
            for (int i = thread; i < quads; i += THREADS) store(i, mine(i));
        } else {
            float4* slab = reinterpret_cast<float4*>(partials);
            const int slab_quads = MT * (TILE_N / 4), here = cta * 2 + (segment == begin ? 0 : 1);
            for (int i = thread; i < quads; i += THREADS) __stcg(slab + (u64)here * slab_quads + i, mine(i));
            const int lo = tile * per_tile, first_cta = deal.owner(lo), last_cta = deal.owner(lo + per_tile - 1);
            __threadfence();
            __syncthreads();
            if (thread == 0) {
                is_last = atomicAdd(arrivals + tile, 1u) == (u32)(last_cta - first_cta);
                if (is_last) arrivals[tile] = 0;
            }
            __syncthreads();
            if (is_last) {
                __threadfence();
                // The first contributor may have begun an earlier tile: its part of this one is its second slab.
                const int first_slab = first_cta * 2 + (deal.begin(first_cta) >= lo ? 0 : 1);
                for (int i = thread; i < quads; i += THREADS) {
                    float4 sum = __ldcg(slab + (u64)first_slab * slab_quads + i);
                    for (int c = first_cta + 1; c <= last_cta; c += 8) {
                        float4 v[8];
#pragma unroll
                        for (int j = 0; j < 8; ++j)
                            if (c + j <= last_cta) v[j] = __ldcg(slab + (u64)(c + j) * 2 * slab_quads + i);
#pragma unroll
                        for (int j = 0; j < 8; ++j)
                            if (c + j <= last_cta) { sum.x += v[j].x; sum.y += v[j].y; sum.z += v[j].z; sum.w += v[j].w; }
                    }
                    store(i, sum);
                }
            }
        }
        segment = tile * per_tile + last;
    }
}
