// y[m, n] = sum_k x[m, k] * scale[n, k / group] * (code[n, k] - zero[n, k / group]),  1 <= m <= MT rows of bf16.
//
// The weight is the A operand of mma.m16n8k16 and the activations are the B operand, so a row of y is a
// column of the tile: its bits depend neither on the other rows nor on how many there are. The K order is
// fixed by (N, K, number of CTAs) alone: CTA c owns units [c U / G, (c + 1) U / G) of the U = (N / 256) x (K / 64)
// units; its two K groups halve every segment, and partial tiles are summed in CTA order.
//
// Codes enter the MMA as exact integers in bf16 and the scale is applied in fp32 after each 64-wide unit.
//
// Compile-time: MT (8, 16, 32, 64 rows), STAGES (ring depth per K group), HAS_ZEROS, SCALE_BF16, PDL.
// Layouts (made by linear_cuda.pack): w [N/256][K/64][16 m-tiles][32 lanes][4 words], nibbles i and i + 4 of a word
// hold elements 2 i and 2 i + 1; scales and zeros [N/256][K/group][8 warps][8 rows][2 m-tiles][2 halves].

#define TILE_N 256
#define UNIT_K 64
#define KG 2
#define GROUP_THREADS 256
#define THREADS 512
#define X_STRIDE 144                    // bytes per activation row in a stage: 128 + 16 keeps 16-byte reads conflict free
#define W_BYTES (TILE_N * UNIT_K / 2)
#define X_BYTES (MT * X_STRIDE)
#define S_BYTES (TILE_N * 2)
#define Z_BYTES (HAS_ZEROS ? TILE_N : 0)
#define STAGE_BYTES (W_BYTES + X_BYTES + S_BYTES + Z_BYTES)
#define OUT_STRIDE 260                  // floats per row of the exchange tile
#define NT (MT / 8)

__device__ __forceinline__ void group_barrier(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(GROUP_THREADS) : "memory");
}

// The units one K group walks, segment by segment: its half of each of the CTA's runs inside one N tile.
struct Walk {
    int segment, end, per_tile, half;   // the CTA's remaining units [segment, end), units per tile
    int tile, k, k_end;
    __device__ __forceinline__ void open() {
        while (segment < end) {
            tile = segment / per_tile;
            int first = segment - tile * per_tile;
            int last = min(end - tile * per_tile, per_tile);
            int length = last - first;
            k = first + (half ? length / 2 : 0);
            k_end = half ? last : first + length / 2;
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

__device__ __forceinline__ int first_unit(int cta, int units, int ctas) { return (int)((u64)cta * units / ctas); }

extern "C" __global__ void __launch_bounds__(THREADS, 1)
w4a16(const u8* __restrict__ w, const u8* __restrict__ scales, const u8* __restrict__ zeros,
      const u8* __restrict__ x, u16* __restrict__ y, float* __restrict__ partials, u32* __restrict__ arrivals,
      int rows, int n_out, int k_in, int x_stride, int y_stride, int tiles, int per_tile, int group_units) {
    extern __shared__ __align__(128) u8 smem[];
    __shared__ u32 is_last;
    const int thread = threadIdx.x, half = thread / GROUP_THREADS, member = thread % GROUP_THREADS;
    const int warp = member / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int units = tiles * per_tile, ctas = gridDim.x, cta = blockIdx.x;
    const int begin = first_unit(cta, units, ctas), end = first_unit(cta + 1, units, ctas);
    const int groups = (per_tile + group_units - 1) / group_units;
    const u32 ring = smem_address(smem) + half * STAGES * STAGE_BYTES;
    float* exchange = reinterpret_cast<float*>(smem + KG * STAGES * STAGE_BYTES);
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

    Walk ahead;
    ahead.segment = begin; ahead.end = end; ahead.per_tile = per_tile; ahead.half = half;
    ahead.open();

    auto fetch_weight = [&](const Walk& at, u32 stage) {
        const u8* source = w + ((u64)at.tile * per_tile + at.k) * W_BYTES;
        copy16_stream(stage + member * 16, source + member * 16, policy);
        copy16_stream(stage + 4096 + member * 16, source + 4096 + member * 16, policy);
        const u64 group = (u64)at.tile * groups + at.k / group_units;
        if (member >= 128 && member < 160)
            copy16(stage + W_BYTES + X_BYTES + (member - 128) * 16, scales + group * S_BYTES + (member - 128) * 16, 16);
#if HAS_ZEROS
        if (member >= 160 && member < 176)
            copy16(stage + W_BYTES + X_BYTES + S_BYTES + (member - 160) * 16, zeros + group * TILE_N + (member - 160) * 16, 16);
#endif
    };
    auto fetch_rows = [&](const Walk& at, u32 stage) {
#pragma unroll
        for (int i = member; i < MT * 8; i += GROUP_THREADS) {
            const int row = i / 8, column = at.k * UNIT_K + (i % 8) * 8;
            const bool inside = row < rows && column < k_in;
            const u8* source = x + (inside ? ((u64)row * x_stride + column) * 2 : 0);
            copy16(stage + W_BYTES + row * X_STRIDE + (i % 8) * 16, source, inside ? 16 : 0);
        }
    };

    // Weights do not depend on the kernel before this one: they are on their way before its output is waited for.
    {
        Walk rows_at = ahead;
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) {
            if (ahead.valid()) { fetch_weight(ahead, ring + s * STAGE_BYTES); ahead.next(); }
        }
#if PDL
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) {
            if (rows_at.valid()) { fetch_rows(rows_at, ring + s * STAGE_BYTES); rows_at.next(); }
            commit();
        }
    }

    int slot = 0;
    for (int segment = begin; segment < end;) {
        const int tile = segment / per_tile, first = segment - tile * per_tile;
        const int last = min(end - tile * per_tile, per_tile), length = last - first;
        const int steps = half ? length - length / 2 : length / 2;
        float total[2][NT][4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) total[m][n][i] = 0.f;

        for (int step = 0; step < steps; ++step) {
            wait_group<STAGES - 2>();
            group_barrier(half + 1);
            {
                const int free_slot = slot == 0 ? STAGES - 1 : slot - 1;
                if (ahead.valid()) {
                    fetch_weight(ahead, ring + free_slot * STAGE_BYTES);
                    fetch_rows(ahead, ring + free_slot * STAGE_BYTES);
                    ahead.next();
                }
                commit();
            }
            const u32 stage = ring + slot * STAGE_BYTES;
            slot = slot + 1 == STAGES ? 0 : slot + 1;

            u32 packed_scales[2];
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(packed_scales[0]), "=r"(packed_scales[1])
                         : "r"(stage + W_BYTES + X_BYTES + (warp * 8 + g) * 8));
#if HAS_ZEROS
            u32 packed_zeros;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(packed_zeros)
                         : "r"(stage + W_BYTES + X_BYTES + S_BYTES + (warp * 8 + g) * 4));
#endif
            const u32 x_at = stage + W_BYTES + g * X_STRIDE + t * 32;
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
                    const u32 upper = j < 2 ? q.x : q.y, lower = j < 2 ? q.z : q.w;
                    const int shift = (j % 2) * 8;
                    a[j][0] = decode(upper >> shift, minus0);
                    a[j][1] = decode(lower >> shift, minus1);
                    a[j][2] = decode(upper >> (shift + 4), minus0);
                    a[j][3] = decode(lower >> (shift + 4), minus1);
                }
                const float s0 = scale_value((u16)packed_scales[m]), s1 = scale_value((u16)(packed_scales[m] >> 16));
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4 b0 = load_shared(x_at + n * 8 * X_STRIDE);
                    const uint4 b1 = load_shared(x_at + n * 8 * X_STRIDE + 16);
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

        if (length == per_tile) {
            for (int i = thread; i < rows * TILE_N; i += THREADS) {
                const int row = i / TILE_N, n = tile * TILE_N + i % TILE_N;
                if (n < n_out) y[(u64)row * y_stride + n] = to_bf16(exchange[row * OUT_STRIDE + i % TILE_N]);
            }
        } else {
            float* mine = partials + (u64)(cta * 2 + (segment == begin ? 0 : 1)) * MT * TILE_N;
            for (int i = thread; i < rows * (TILE_N / 4); i += THREADS) {
                const float4 v = *reinterpret_cast<const float4*>(exchange + (i / 64) * OUT_STRIDE + (i % 64) * 4);
                __stcg(reinterpret_cast<float4*>(mine) + i, v);
            }
            const int lo = tile * per_tile, hi = lo + per_tile - 1;
            const int first_cta = (int)(((u64)(lo + 1) * ctas - 1) / units), last_cta = (int)(((u64)(hi + 1) * ctas - 1) / units);
            __threadfence();
            __syncthreads();
            if (thread == 0) {
                const u32 before = atomicAdd(arrivals + tile, 1u);
                is_last = before == (u32)(last_cta - first_cta);
                if (is_last) arrivals[tile] = 0;
            }
            __syncthreads();
            if (is_last) {
                __threadfence();
                for (int i = thread; i < rows * (TILE_N / 4); i += THREADS) {
                    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
                    for (int c = first_cta; c <= last_cta; ++c) {
                        const int which = first_unit(c, units, ctas) >= lo ? 0 : 1;
                        const float4 v = __ldcg(reinterpret_cast<const float4*>(partials + (u64)(c * 2 + which) * MT * TILE_N) + i);
                        sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
                    }
                    const int n = tile * TILE_N + (i % 64) * 4;
                    if (n < n_out) {
                        const u64 packed = (u64)to_bf16(sum.x) | (u64)to_bf16(sum.y) << 16 | (u64)to_bf16(sum.z) << 32 | (u64)to_bf16(sum.w) << 48;
                        *reinterpret_cast<u64*>(y + (u64)(i / 64) * y_stride + n) = packed;
                    }
                }
            }
        }
        segment = tile * per_tile + last;
    }
    wait_group<0>();
}
