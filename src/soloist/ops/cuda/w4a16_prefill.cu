// The prefill product: y = x W^T for any number of rows, one tile shape and one K order for every M.
//
// A CTA computes 128 rows x 256 columns over all of K in 64-wide units, codes as exact bf16 integers, the scale
// applied in fp32 after each unit. Rows past M are zero in shared memory and never written. Warps: 4 along N
// (64 columns each) x 2 along M (64 rows each). Weight layout as in w4a16.cu.
//
// No two warps meet inside the loop: a stage of the ring is full when every thread's copies into it have landed and
// empty when every warp has read it, so that one warp's fragment loads and scales run beside another's products. A warp
// works ahead of itself too. Its products come in blocks of 16 columns; a block's sums are scaled one octet of rows at
// a time, each right before the next block begins its sums in the same registers, and the rows' fragments of the next
// unit replace those of this one behind the last products that read them.
//
// Compile-time: STAGES, HAS_ZEROS, SCALE_BF16.

#define UNIT_K 64
#define THREADS 256
#define TILE_M 128
#define TILE_N 256
#define BAND 16                         // row tiles that run side by side, so that their rows stay in the L2 cache
#define W_BYTES (TILE_N * UNIT_K / 2)
#define X_BYTES (TILE_M * UNIT_K * 2)   // rows of 128 bytes; 16-byte chunk c of row r lies at c ^ (r % 8): no conflicts
#define S_BYTES (TILE_N * 2)
#define Z_BYTES (HAS_ZEROS ? TILE_N : 0)
#define S_AT (W_BYTES + X_BYTES)
#define Z_AT (S_AT + S_BYTES)
#define STAGE_BYTES (Z_AT + Z_BYTES)
#define OUT_STRIDE 264                  // bf16 per row of the output tile in shared memory

struct Block {                          // what a block of 16 columns needs of a stage besides the rows
    uint4 codes;
    u32 scales, zeros;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
w4a16_prefill(const u8* __restrict__ w, const u8* __restrict__ scales, const u8* __restrict__ zeros,
              const u8* __restrict__ x, u16* __restrict__ y, int rows, int n_out, int x_stride, int y_stride,
              int m_tiles, int per_tile, int group_units, int paired) {
    extern __shared__ __align__(128) u8 smem[];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int warp_n = warp % 4, warp_m = warp / 4;
    const int n_tiles = gridDim.x / m_tiles, band = blockIdx.x / (BAND * n_tiles);
    const int in_band = blockIdx.x - band * BAND * n_tiles, wide = min(BAND, m_tiles - band * BAND);
    const int m_tile = band * BAND + in_band % wide, n_tile = in_band / wide;
    const int group_shift = 31 - __clz(group_units), groups = (per_tile + group_units - 1) >> group_shift;
    const u32 ring = smem_address(smem), full = ring + STAGES * STAGE_BYTES, empty = full + STAGES * 8;

    if (thread < STAGES) {
        barrier_init(full + thread * 8, THREADS);
        barrier_init(empty + thread * 8, THREADS / 32);
    }
    __syncthreads();

    auto fetch = [&](int unit, int slot) {
        const u32 stage = ring + slot * STAGE_BYTES;
        const u8* weight = w + ((u64)n_tile * per_tile + unit) * W_BYTES + thread * 16;
        copy16(stage + thread * 16, weight, 16);
        copy16(stage + W_BYTES / 2 + thread * 16, weight + W_BYTES / 2, 16);
        const u32 target = stage + W_BYTES + thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = m_tile * TILE_M + thread / 8 + i * 32;
            const u8* from = x + ((u64)min(row, rows - 1) * x_stride + unit * UNIT_K + thread % 8 * 8) * 2;
            copy16(target + i * 32 * 128, from, row < rows ? 16 : 0);
        }
        const u64 group = (u64)n_tile * groups + (unit >> group_shift);
        if (thread < 32) copy16(stage + S_AT + thread * 16, scales + group * S_BYTES + thread * 16, 16);
#if HAS_ZEROS
        if (thread >= 32 && thread < 48)
            copy16(stage + Z_AT + (thread - 32) * 16, zeros + group * TILE_N + (thread - 32) * 16, 16);
#endif
        barrier_arrive_on_copies(full + slot * 8);
    };
    const u32 codes_at = (warp_n * 128 + lane) * 16, row_at = W_BYTES + (warp_m * 64 + lane % 8) * 128;
    const u32 x_at = row_at + (lane / 8 ^ lane % 8) * 16;  // chunk c + 4 lies 64 bytes to either side
    const u32 scales_at = S_AT + (warp_n * 32 + g * 2) * 4, zeros_at = Z_AT + (warp_n * 32 + g * 2) * 2;
    auto block_of = [&](u32 stage, int m) {
        Block block;
        block.codes = load_shared(stage + codes_at + m * 512);
        block.scales = load_word(stage + scales_at + (m / 2 * 16 + m % 2) * 4);
#if HAS_ZEROS
        block.zeros = load_half(stage + zeros_at + (m / 2 * 16 + m % 2) * 2);
#endif
        return block;
    };

    float total[4][8][4], part[8][4], s0 = 0.f, s1 = 0.f;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) part[n][i] = total[0][n][i] = total[1][n][i] = total[2][n][i] = total[3][n][i] = 0.f;
    auto finish = [&](int m, int n) {   // the block before this one, one octet of rows
        total[m][n][0] = fmaf(part[n][0], s0, total[m][n][0]);
        total[m][n][1] = fmaf(part[n][1], s0, total[m][n][1]);
        total[m][n][2] = fmaf(part[n][2], s1, total[m][n][2]);
        total[m][n][3] = fmaf(part[n][3], s1, total[m][n][3]);
    };

    for (int s = 0; s < STAGES - 1; ++s)
        if (s < per_tile) fetch(s, s);
    uint4 b[2][8];                      // [32 columns of K][octet of rows]
    barrier_wait(full, 0);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int n = 0; n < 8; ++n) b[h][n] = load_fragments(ring + (x_at ^ h * 64) + n * 1024);
    Block block = block_of(ring, 0);

    int slot = 0, turn = 0;             // of unit k; turn: how often the ring has gone round, mod 2
    for (int k = 0; k < per_tile; ++k) {
        const u32 stage = ring + slot * STAGE_BYTES;
        const int before = slot == 0 ? STAGES - 1 : slot - 1, after = slot + 1 == STAGES ? 0 : slot + 1;
        const int after_turn = after == 0 ? turn ^ 1 : turn;
        const u32 next_stage = ring + after * STAGE_BYTES;
        const bool more = k + 1 < per_tile;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const uint4 q = block.codes;
            const u32 scale_pair = block.scales;
#if HAS_ZEROS
            const u32 minus0 = 0xc300c300u | (block.zeros & 0xf) * 0x00010001u;
            const u32 minus1 = 0xc300c300u | (block.zeros >> 8 & 0xf) * 0x00010001u;
#else
            const u32 minus0 = 0xc308c308u, minus1 = 0xc308c308u;
#endif
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 above = j < 2 ? q.x : q.y, below = j < 2 ? q.z : q.w;
                const int shift = (j % 2) * 8;
                const u32 a[4] = {decode(above >> shift, minus0), decode(below >> shift, minus1),
                                  decode(above >> (shift + 4), minus0), decode(below >> (shift + 4), minus1)};
#pragma unroll
                for (int n = 0; n < 8; ++n) {
                    if (j == 0) part[n][0] = part[n][1] = part[n][2] = part[n][3] = 0.f;
                    const uint4 f = b[j / 2][n];
                    mma(part[n], a, j % 2 ? f.z : f.x, j % 2 ? f.w : f.y);
                }
                if (m == 0 && j == 0) {
#pragma unroll
                    for (int n = 0; n < 8; ++n) b[1][n] = load_fragments(stage + (x_at ^ 64) + n * 1024);
                }
                if (m < 3 && j == 1) block = block_of(stage, m + 1);
                if (m == 3 && j == 1) {
                    if (more) barrier_wait(full + after * 8, after_turn);
#pragma unroll
                    for (int n = 0; n < 8; ++n) b[0][n] = load_fragments(next_stage + x_at + n * 1024);
                }
            }
            s0 = scale_value((u16)scale_pair), s1 = scale_value((u16)(scale_pair >> 16));
#pragma unroll
            for (int n = 0; n < 8; ++n) finish(m, n);
            if (m == 1 && k + STAGES - 1 < per_tile) {  // into the stage of the unit before, which all have long left
                if (k > 0) barrier_wait(empty + before * 8, slot == 0 ? turn ^ 1 : turn);
                fetch(k + STAGES - 1, before);
            }
            if (m == 2) {               // nothing of this stage is read any more
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + slot * 8);
            }
        }
        block = block_of(next_stage, 0);
        slot = after, turn = after_turn;
    }
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
    store_tile<TILE_M, TILE_N, OUT_STRIDE, THREADS>(tile, y, rows, n_out, y_stride, m_tile, n_tile, paired, thread);
}
