// The prefill product on Hopper: y = x W^T for any number of rows, one tile shape and one K order for every M.
//
// A CTA computes 128 rows x 256 columns over all of K in 64-wide units, codes as exact bf16 integers, the scale applied in
// fp32 after each unit. Two warpgroups, 128 columns each, in two blocks of 64: a block's weights are decoded into the
// registers that wgmma takes as its A operand, each weight once; the rows are its B operand, in shared memory. A block's
// weights are decoded while the products of the block before run, and the sums of one warpgroup are scaled while the
// other's products run. Rows past M are zero in shared memory and never written. Weight layout as in w4a16.cu.
//
// A stage of the ring is full when every thread's copies of rows and the bulk copy of the weight have landed, and empty
// when both warpgroups have used it. It is filled two units after it was read, so that neither waits for the other.
//
// Compile-time: STAGES, HAS_ZEROS, SCALE_BF16. Compile for sm_90a.

#define UNIT_K 64
#define THREADS 256
#define TILE_M 128
#define TILE_N 256
#define BAND 16                         // row tiles that run side by side, so that their rows stay in the L2 cache
#define AHEAD (STAGES - 2)
#define W_BYTES (TILE_N * UNIT_K / 2)
#define X_BYTES (TILE_M * UNIT_K * 2)   // rows of 128 bytes, 16-byte chunk c of row r at c ^ (r % 8): the 128-byte swizzle
#define S_BYTES (TILE_N * 2)
#define Z_BYTES (HAS_ZEROS ? TILE_N : 0)
#define REST_BYTES (W_BYTES + S_BYTES + Z_BYTES)    // of a stage besides its rows, which need an alignment of 1,024
#define OUT_STRIDE 264                  // bf16 per row of the output tile in shared memory

__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// What threads have written to shared memory becomes visible to wgmma.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// A warp group's sums as operands: 64 columns of weight, 128 rows of x.
#define SUMS(d) \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
    "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
    "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
    "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
    "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
    "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
    "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), \
    "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
    "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
// d [64 columns of weight, 128 rows of x] (+)= a [64, 16] b [16, 128]; runs on until products_wait.
__device__ __forceinline__ void products(float* d, const u32* a, u64 b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
        : SUMS(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
__device__ __forceinline__ void products_wait(float* d) {
    asm volatile("wgmma.wait_group.sync.aligned 0;"
        : SUMS(d) :: "memory");
}
// A tile of rows of 128 bytes in the 128-byte swizzle, eight rows every 1,024 bytes. Its next 16 columns: + 2.
__device__ __forceinline__ u64 tile_descriptor(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
w4a16_prefill(const u8* __restrict__ w, const u8* __restrict__ scales, const u8* __restrict__ zeros,
              const u8* __restrict__ x, u16* __restrict__ y, int rows, int n_out, int x_stride, int y_stride,
              int m_tiles, int per_tile, int group_units, int paired) {
    extern __shared__ __align__(1024) u8 smem[];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int tile16 = warp / 4 * 8 + warp % 4;     // the first block's 16 columns of this warp; the second's: + 4
    const int n_tiles = gridDim.x / m_tiles, band = blockIdx.x / (BAND * n_tiles);
    const int in_band = blockIdx.x - band * BAND * n_tiles, wide = min(BAND, m_tiles - band * BAND);
    const int m_tile = band * BAND + in_band % wide, n_tile = in_band / wide;
    const int group_shift = 31 - __clz(group_units), groups = (per_tile + group_units - 1) >> group_shift;
    const u32 row_ring = smem_address(smem) + 1023 & ~1023u, rest_ring = row_ring + STAGES * X_BYTES;
    const u32 full = rest_ring + STAGES * REST_BYTES, empty = full + STAGES * 8;

    if (thread < STAGES) {
        barrier_init(full + thread * 8, THREADS + 1);
        barrier_init(empty + thread * 8, THREADS / 32);
        barriers_visible();
    }
    __syncthreads();

    auto fetch = [&](int unit, int slot) {
        const u32 target = row_ring + slot * X_BYTES + thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = m_tile * TILE_M + thread / 8 + i * 32;
            const u8* from = x + ((u64)min(row, rows - 1) * x_stride + unit * UNIT_K + thread % 8 * 8) * 2;
            copy16(target + i * 32 * 128, from, row < rows ? 16 : 0);
        }
        const u32 bar = full + slot * 8;
        barrier_arrive_on_copies(bar);
        if (thread == 0) {
            const u32 rest = rest_ring + slot * REST_BYTES;
            const u64 group = (u64)n_tile * groups + (unit >> group_shift);
            barrier_expect(bar, REST_BYTES);
            bulk_copy(rest, w + ((u64)n_tile * per_tile + unit) * W_BYTES, W_BYTES, bar);
            bulk_copy(rest + W_BYTES, scales + group * S_BYTES, S_BYTES, bar);
#if HAS_ZEROS
            bulk_copy(rest + W_BYTES + S_BYTES, zeros + group * TILE_N, TILE_N, bar);
#endif
        }
    };

    float total[2][64], part[64], s0, s1;
#pragma unroll
    for (int i = 0; i < 64; ++i) part[i] = total[0][i] = total[1][i] = 0.f;
    u32 a[2][4][4];                     // [block][16 columns of K]
    u32 scale_pair[2];
    auto prepare = [&](int m, u32 rest) {
        const uint4 q = load_shared(rest + ((tile16 + m * 4) * 32 + lane) * 16);
        const int at = ((tile16 + m * 4) / 2 * 8 + g) * 2 + tile16 % 2;
        scale_pair[m] = load_word(rest + W_BYTES + at * 4);
#if HAS_ZEROS
        const u32 pair = load_half(rest + W_BYTES + S_BYTES + at * 2);
        const u32 minus0 = 0xc300c300u | (pair & 0xf) * 0x00010001u, minus1 = 0xc300c300u | (pair >> 8 & 0xf) * 0x00010001u;
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
    };
    auto start = [&](int m, u64 tile) {
        products_fence();
#pragma unroll
        for (int j = 0; j < 4; ++j) products(part, a[m][j], tile + 2 * j, j > 0);
        products_commit();
        s0 = scale_value((u16)scale_pair[m]), s1 = scale_value((u16)(scale_pair[m] >> 16));
    };
    auto finish = [&](int m) {
#pragma unroll
        for (int i = 0; i < 64; ++i) total[m][i] = fmaf(part[i], i / 2 % 2 ? s1 : s0, total[m][i]);
    };

    for (int s = 0; s < AHEAD; ++s)
        if (s < per_tile) fetch(s, s);
    barrier_wait(full, 0);
    proxy_fence();
    prepare(0, rest_ring);

    int slot = 0, turn = 0, fill = AHEAD, fill_turn = 1;    // fill: where unit k + AHEAD goes; its empty barrier's phase
    for (int k = 0; k < per_tile; ++k) {
        const u64 tile = tile_descriptor(row_ring + slot * X_BYTES);
        start(0, tile);
        prepare(1, rest_ring + slot * REST_BYTES);
        if (k + AHEAD < per_tile) {
            if (k >= STAGES - AHEAD) barrier_wait(empty + fill * 8, fill_turn);
            fetch(k + AHEAD, fill);
        }
        products_wait(part);
        finish(0);

        start(1, tile);
        const int after = slot + 1 == STAGES ? 0 : slot + 1, after_turn = after == 0 ? turn ^ 1 : turn;
        if (k + 1 < per_tile) {
            barrier_wait(full + after * 8, after_turn);
            proxy_fence();
            prepare(0, rest_ring + after * REST_BYTES);
        }
        products_wait(part);
        if (lane == 0) barrier_arrive(empty + slot * 8);
        finish(1);
        slot = after, turn = after_turn;
        if (++fill == STAGES) fill = 0, fill_turn ^= 1;
    }
    __syncthreads();

    u16* tile = reinterpret_cast<u16*>(smem);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 64; ++i)
            tile[(i / 4 * 8 + 2 * t + i % 2) * OUT_STRIDE + (tile16 + m * 4) * 16 + i / 2 % 2 * 8 + g] =
                to_bf16(total[m][i]);
    __syncthreads();
    store_tile<TILE_M, TILE_N, OUT_STRIDE, THREADS>(tile, y, rows, n_out, y_stride, m_tile, n_tile, paired, thread);
}
