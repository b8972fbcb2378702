// The prefill product: y = x W^T for any number of rows, one tile shape and one K order for every M.
//
// A CTA computes 128 rows x 128 columns over all of K in 64-wide units, codes as exact bf16 integers, the scale
// applied in fp32 after each unit. Rows past M are zero in shared memory and never written. Warps: 4 along N
// (32 columns each) x 2 along M (64 rows each). Weight layout as in w4a16.cu (half a 256-column tile per CTA).
//
// Compile-time: STAGES, HAS_ZEROS, SCALE_BF16.

#define UNIT_K 64
#define THREADS 256
#define TILE_M 128
#define TILE_N 128
#define X_STRIDE 144
#define W_BYTES (TILE_N * UNIT_K / 2)
#define X_BYTES (TILE_M * X_STRIDE)
#define S_BYTES (TILE_N * 2)
#define Z_BYTES (HAS_ZEROS ? TILE_N : 0)
#define STAGE_BYTES (W_BYTES + X_BYTES + S_BYTES + Z_BYTES)
#define OUT_STRIDE 136                  // bf16 per row of the output tile in shared memory

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
w4a16_prefill(const u8* __restrict__ w, const u8* __restrict__ scales, const u8* __restrict__ zeros,
              const u8* __restrict__ x, u16* __restrict__ y, int rows, int n_out, int x_stride, int y_stride,
              int m_tiles, int per_tile, int group_units) {
    extern __shared__ __align__(128) u8 smem[];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int warp_n = warp % 4, warp_m = warp / 4;
    const int m_tile = blockIdx.x % m_tiles, n_tile = blockIdx.x / m_tiles;
    const int tile256 = n_tile / 2, upper = n_tile % 2;
    const int groups = (per_tile + group_units - 1) / group_units;
    const u32 ring = smem_address(smem);

    // A thread always copies the same 16 bytes of a weight unit and the same chunk of four rows.
    const u8* w_at = w + (u64)tile256 * per_tile * 8192 + upper * W_BYTES + thread * 16;
    const u8* x_from[4];
    int x_bytes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = m_tile * TILE_M + thread / 8 + i * 32;
        x_bytes[i] = row < rows ? 16 : 0;
        x_from[i] = x + ((u64)(row < rows ? row : 0) * x_stride + thread % 8 * 8) * 2;
    }
    const u32 x_to = W_BYTES + thread / 8 * X_STRIDE + thread % 8 * 16;
    int group_left = group_units;
    const u8* s_at = scales + (u64)tile256 * groups * 512 + upper * S_BYTES + thread % 16 * 16;
#if HAS_ZEROS
    const u8* z_at = zeros + (u64)tile256 * groups * 256 + upper * TILE_N + thread % 8 * 16;
#endif
    auto fetch = [&](int slot) {        // the next unit, in order
        const u32 stage = ring + slot * STAGE_BYTES;
        copy16(stage + thread * 16, w_at, 16);
        w_at += 8192;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            copy16(stage + x_to + i * 32 * X_STRIDE, x_from[i], x_bytes[i]);
            x_from[i] += 2 * UNIT_K;
        }
        if (thread < 16) copy16(stage + W_BYTES + X_BYTES + thread * 16, s_at, 16);
#if HAS_ZEROS
        if (thread >= 32 && thread < 40) copy16(stage + W_BYTES + X_BYTES + S_BYTES + (thread - 32) * 16, z_at, 16);
#endif
        if (--group_left == 0) {
            group_left = group_units;
            s_at += 512;
#if HAS_ZEROS
            z_at += 256;
#endif
        }
    };

    float total[2][8][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) total[m][n][i] = 0.f;

#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < per_tile) fetch(s);
        commit();
    }
    int slot = 0;
    for (int k = 0; k < per_tile; ++k) {
        wait_group<STAGES - 2>();
        __syncthreads();
        if (k + STAGES - 1 < per_tile) fetch(slot == 0 ? STAGES - 1 : slot - 1);
        commit();
        const u32 stage = ring + slot * STAGE_BYTES;
        slot = slot + 1 == STAGES ? 0 : slot + 1;

        u32 packed_scales[2];
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(packed_scales[0]), "=r"(packed_scales[1])
                     : "r"(stage + W_BYTES + X_BYTES + (warp_n * 8 + g) * 8));
#if HAS_ZEROS
        u32 packed_zeros;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(packed_zeros)
                     : "r"(stage + W_BYTES + X_BYTES + S_BYTES + (warp_n * 8 + g) * 4));
#endif
        u32 a[2][4][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const uint4 q = load_shared(stage + ((warp_n * 2 + m) * 32 + lane) * 16);
#if HAS_ZEROS
            const u32 minus0 = 0xc300c300u | ((packed_zeros >> (16 * m)) & 0xf) * 0x00010001u;
            const u32 minus1 = 0xc300c300u | ((packed_zeros >> (16 * m + 8)) & 0xf) * 0x00010001u;
#else
            const u32 minus0 = 0xc308c308u, minus1 = 0xc308c308u;
#endif
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 above = j < 2 ? q.x : q.y, below = j < 2 ? q.z : q.w;
                const int shift = (j % 2) * 8;
                a[m][j][0] = decode(above >> shift, minus0);
                a[m][j][1] = decode(below >> shift, minus1);
                a[m][j][2] = decode(above >> (shift + 4), minus0);
                a[m][j][3] = decode(below >> (shift + 4), minus1);
            }
        }
        const float s00 = scale_value((u16)packed_scales[0]), s01 = scale_value((u16)(packed_scales[0] >> 16));
        const float s10 = scale_value((u16)packed_scales[1]), s11 = scale_value((u16)(packed_scales[1] >> 16));
        const u32 x_at = stage + W_BYTES + (warp_m * 64 + lane % 8) * X_STRIDE + lane / 8 * 16;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const uint4 b0 = load_fragments(x_at + n * 8 * X_STRIDE);
            const uint4 b1 = load_fragments(x_at + n * 8 * X_STRIDE + 64);
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                float part[4] = {0.f, 0.f, 0.f, 0.f};
                mma(part, a[m][0], b0.x, b0.y);
                mma(part, a[m][1], b0.z, b0.w);
                mma(part, a[m][2], b1.x, b1.y);
                mma(part, a[m][3], b1.z, b1.w);
                const float s0 = m ? s10 : s00, s1 = m ? s11 : s01;
                total[m][n][0] = fmaf(part[0], s0, total[m][n][0]);
                total[m][n][1] = fmaf(part[1], s0, total[m][n][1]);
                total[m][n][2] = fmaf(part[2], s1, total[m][n][2]);
                total[m][n][3] = fmaf(part[3], s1, total[m][n][3]);
            }
        }
    }
    wait_group<0>();
    __syncthreads();

    u16* tile = reinterpret_cast<u16*>(smem);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                tile[(warp_m * 64 + n * 8 + 2 * t + i % 2) * OUT_STRIDE + warp_n * 32 + m * 16 + (i / 2) * 8 + g] =
                    to_bf16(total[m][n][i]);
    __syncthreads();
    for (int i = thread; i < TILE_M * (TILE_N / 4); i += THREADS) {
        const int row = i / (TILE_N / 4), n = n_tile * TILE_N + (i % (TILE_N / 4)) * 4;
        if (m_tile * TILE_M + row < rows && n < n_out)
            *reinterpret_cast<u64*>(y + (u64)(m_tile * TILE_M + row) * y_stride + n) =
                *reinterpret_cast<const u64*>(tile + row * OUT_STRIDE + (i % (TILE_N / 4)) * 4);
    }
}
