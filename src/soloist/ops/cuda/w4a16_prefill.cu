// The prefill product: y = x W^T for any number of rows, one tile shape and one K order for every M.
//
// A CTA computes 128 rows x 256 columns over all of K in 64-wide units, codes as exact bf16 integers, the scale
// applied in fp32 after each unit. Rows past M are zero in shared memory and never written. Warps: 4 along N
// (64 columns each) x 2 along M (64 rows each). Weight layout as in w4a16.cu.
//
// Compile-time: STAGES, HAS_ZEROS, SCALE_BF16.

#define UNIT_K 64
#define THREADS 256
#define TILE_M 128
#define TILE_N 256
#define X_STRIDE 144
#define W_BYTES (TILE_N * UNIT_K / 2)
#define X_BYTES (TILE_M * X_STRIDE)
#define S_BYTES (TILE_N * 2)
#define Z_BYTES (HAS_ZEROS ? TILE_N : 0)
#define STAGE_BYTES (W_BYTES + X_BYTES + S_BYTES + Z_BYTES)
#define OUT_STRIDE 264                  // bf16 per row of the output tile in shared memory

extern "C" __global__ void __launch_bounds__(THREADS, 1)
w4a16_prefill(const u8* __restrict__ w, const u8* __restrict__ scales, const u8* __restrict__ zeros,
              const u8* __restrict__ x, u16* __restrict__ y, int rows, int n_out, int x_stride, int y_stride,
              int m_tiles, int per_tile, int group_units, int paired) {
    extern __shared__ __align__(128) u8 smem[];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int warp_n = warp % 4, warp_m = warp / 4;
    const int m_tile = blockIdx.x % m_tiles, n_tile = blockIdx.x / m_tiles;
    const int groups = (per_tile + group_units - 1) / group_units;
    const u32 ring = smem_address(smem);

    // A thread always copies the same 16 bytes of a weight unit and the same chunk of four rows.
    const u8* w_at = w + (u64)n_tile * per_tile * W_BYTES + thread * 16;
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
    const u8* s_at = scales + (u64)n_tile * groups * S_BYTES + thread % 32 * 16;
#if HAS_ZEROS
    const u8* z_at = zeros + (u64)n_tile * groups * TILE_N + thread % 16 * 16;
#endif
    auto fetch = [&](int slot) {        // the next unit, in order
        const u32 stage = ring + slot * STAGE_BYTES;
        copy16(stage + thread * 16, w_at, 16);
        copy16(stage + W_BYTES / 2 + thread * 16, w_at + W_BYTES / 2, 16);
        w_at += W_BYTES;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            copy16(stage + x_to + i * 32 * X_STRIDE, x_from[i], x_bytes[i]);
            x_from[i] += 2 * UNIT_K;
        }
        if (thread < 32) copy16(stage + W_BYTES + X_BYTES + thread * 16, s_at, 16);
#if HAS_ZEROS
        if (thread >= 32 && thread < 48) copy16(stage + W_BYTES + X_BYTES + S_BYTES + (thread - 32) * 16, z_at, 16);
#endif
        if (--group_left == 0) {
            group_left = group_units;
            s_at += S_BYTES;
#if HAS_ZEROS
            z_at += TILE_N;
#endif
        }
    };

    float total[4][8][4];
#pragma unroll
    for (int m = 0; m < 4; ++m)
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

        const u32 x_at = stage + W_BYTES + (warp_m * 64 + lane % 8) * X_STRIDE + lane / 8 * 16;
        uint4 b[8][2];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            b[n][0] = load_fragments(x_at + n * 8 * X_STRIDE);
            b[n][1] = load_fragments(x_at + n * 8 * X_STRIDE + 64);
        }
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int tile16 = warp_n * 4 + m;
            u32 scale_pair;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scale_pair)
                         : "r"(stage + W_BYTES + X_BYTES + ((tile16 / 2 * 8 + g) * 2 + tile16 % 2) * 4));
            const uint4 q = load_shared(stage + (tile16 * 32 + lane) * 16);
#if HAS_ZEROS
            u16 zero_pair;
            asm volatile("ld.shared.u16 %0, [%1];" : "=h"(zero_pair)
                         : "r"(stage + W_BYTES + X_BYTES + S_BYTES + ((tile16 / 2 * 8 + g) * 2 + tile16 % 2) * 2));
            const u32 minus0 = 0xc300c300u | (zero_pair & 0xf) * 0x00010001u;
            const u32 minus1 = 0xc300c300u | (zero_pair >> 8 & 0xf) * 0x00010001u;
#else
            const u32 minus0 = 0xc308c308u, minus1 = 0xc308c308u;
#endif
            float part[8][4];
#pragma unroll
            for (int n = 0; n < 8; ++n) part[n][0] = part[n][1] = part[n][2] = part[n][3] = 0.f;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 above = j < 2 ? q.x : q.y, below = j < 2 ? q.z : q.w;
                const int shift = (j % 2) * 8;
                const u32 a[4] = {decode(above >> shift, minus0), decode(below >> shift, minus1),
                                  decode(above >> (shift + 4), minus0), decode(below >> (shift + 4), minus1)};
#pragma unroll
                for (int n = 0; n < 8; ++n) {
                    const uint4 f = b[n][j / 2];
                    mma(part[n], a, j % 2 ? f.z : f.x, j % 2 ? f.w : f.y);
                }
            }
            const float s0 = scale_value((u16)scale_pair), s1 = scale_value((u16)(scale_pair >> 16));
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                total[m][n][0] = fmaf(part[n][0], s0, total[m][n][0]);
                total[m][n][1] = fmaf(part[n][1], s0, total[m][n][1]);
                total[m][n][2] = fmaf(part[n][2], s1, total[m][n][2]);
                total[m][n][3] = fmaf(part[n][3], s1, total[m][n][3]);
            }
        }
    }
    wait_group<0>();
    __syncthreads();

    u16* tile = reinterpret_cast<u16*>(smem);
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                tile[(warp_m * 64 + n * 8 + 2 * t + i % 2) * OUT_STRIDE + warp_n * 64 + m * 16 + (i / 2) * 8 + g] =
                    to_bf16(total[m][n][i]);
    __syncthreads();
    for (int i = thread; i < TILE_M * (TILE_N / 4); i += THREADS) {
        const int row = i / (TILE_N / 4), inside = i % (TILE_N / 4) * 4;
        int n = n_tile * TILE_N + inside, limit = n_out;
        if (paired) {                   // 8 gate columns, 8 up columns in turn: gate columns first, then up columns
            n = n_tile * (TILE_N / 2) + inside / 16 * 8 + inside % 8;
            limit = n_out / 2;
        }
        const bool real = n < limit;
        if (paired && inside / 8 % 2) n += n_out / 2;
        if (m_tile * TILE_M + row < rows && real)
            *reinterpret_cast<u64*>(y + (u64)(m_tile * TILE_M + row) * y_stride + n) =
                *reinterpret_cast<const u64*>(tile + row * OUT_STRIDE + (i % (TILE_N / 4)) * 4);
    }
}
