// y[m, n] = sum_k x[m, k] * scale[n, k / group] * (code[n, k] - zero[n, k / group]),  1 <= m <= MT rows of bf16.
//
// The weight is the A operand of mma.m16n8k16 and the activations are the B operand, so a row of y is a
// column of the tile: its bits depend neither on the other rows nor on how many there are. The K order is
// fixed by (N, K, number of CTAs) alone: the U = (N / 256) x (K / 64) units are dealt to the CTAs in contiguous runs
// of equal length (the first `extra` runs are one longer); a CTA's K groups share every segment of its run that lies
// in one N tile. Of the CTAs that share a tile the first waits for the others and adds their parts in CTA order; all
// CTAs run at once (at most one per multiprocessor), so the wait ends.
//
// Codes enter the MMA as exact integers in bf16 and the scale is applied in fp32 after each 64-wide unit.
// A stage of the ring holds U units of weight, scales and rows. On sm_90+ one warp in turn orders it (bulk copies for the
// weight, 16-byte ones for the rows), before that every warp copies its part. It is refilled one step after it was
// read, when all warps have long left it. A warp computes 32 columns, 64 where 32 rows would not fit its registers.
//
// Compile-time: MT (8, 16, 32 rows), WM (m-tiles of 16 columns a warp computes), U (1 or 2 units a stage), STAGES (ring
// depth per K group), HAS_ZEROS, SCALE_BF16, PDL.
// Layouts (made by linear_cuda.pack): w [N/256][K/64][16 m-tiles][32 lanes][4 words]; lane 4 g + t holds rows g (words
// 0, 1) and g + 8 (words 2, 3); word w of a row holds steps 2 w and 2 w + 1 of 16 columns; its nibbles i and i + 4 are
// columns c and c + 1 with c = 16 (2 w + i / 2) + 2 t + 8 (i % 2). scales, zeros [N/256][K/group][8 warps][8 g][2][2].

#define TILE_N 256
#define UNIT_K 64
#define K_GROUPS 2
#define WARPS (16 / WM)                  // per K group, WM m-tiles of 16 columns each
#define PM (WM / 2)                     // m-tiles of a warp that one K group finishes
#define THREADS (K_GROUPS * WARPS * 32)
#define UNIT_BYTES (TILE_N * UNIT_K / 2)
#define X_STRIDE (U * 2 * UNIT_K + 16)  // bytes per row in a stage; the 16 keep ldmatrix conflict free
#define X_AT (U * UNIT_BYTES)
#define S_AT (X_AT + MT * X_STRIDE)
#define Z_AT (S_AT + U * TILE_N * 2)
#define STAGE_BYTES (Z_AT + (HAS_ZEROS ? U * TILE_N : 0))
#define NT (MT / 8)
#define NB (NT < 4 ? NT : 4) // row octets whose MMA chains run side by side, for two m-tiles
#define PEERS (NT == 1 ? 8 : NT == 2 ? 4 : 1) // parts of other CTAs in flight while a tile is summed
#define BULK (__CUDA_ARCH__ >= 900)
#define EXCHANGE_BYTES (MT * TILE_N * 4)

// The blocks of one K group: its share of every segment of the CTA's run, U units at a time.
struct Walk {
    int segment, end, per_tile, part;
    int tile, k, k_end;
    __device__ __forceinline__ void open() {
        while (segment < end) {
            tile = segment / per_tile;
            const int first = segment - tile * per_tile, last = min(end - tile * per_tile, per_tile);
            k = first + (last - first) * part / K_GROUPS;
            k_end = first + (last - first) * (part + 1) / K_GROUPS;
            if (k < k_end) return;
            segment = tile * per_tile + last;
        }
    }
    __device__ __forceinline__ bool valid() const { return segment < end; }
    __device__ __forceinline__ void next() {
        k += U;
        if (k < k_end) return;
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
    int rows, x_stride, per_tile, group_shift, groups, warp, lane;
    u64 policy;

    // BULK: called by one warp. Otherwise by all warps of the K group.
    __device__ __forceinline__ void fetch_weight(const Walk& at, u32 stage, u32 full) const {
        const u8* source = w + (u64)(u32)(at.tile * per_tile + at.k) * UNIT_BYTES;
        const int units = min(U, at.k_end - at.k);
#if BULK
        if (lane == 0) {
            barrier_expect(full, units * (UNIT_BYTES + TILE_N * 2 + (HAS_ZEROS ? TILE_N : 0)));
            bulk_copy_stream(stage, source, units * UNIT_BYTES, full, policy);
        }
#else
        for (int u = 0; u < units; ++u)
#pragma unroll
            for (int i = warp * 512 + lane * 16; i < UNIT_BYTES; i += WARPS * 512)
                copy16(stage + u * UNIT_BYTES + i, source + u * UNIT_BYTES + i, 16);
#endif
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (u < units) {
                const u64 group = (u32)(at.tile * groups + (at.k + u >> group_shift));
#if BULK
                if (lane == 0) {
                    bulk_copy(stage + S_AT + u * (TILE_N * 2), scales + group * (TILE_N * 2), TILE_N * 2, full);
#if HAS_ZEROS
                    bulk_copy(stage + Z_AT + u * TILE_N, zeros + group * TILE_N, TILE_N, full);
#endif
                }
#else
                if (warp == 2) copy16(stage + S_AT + u * (TILE_N * 2) + lane * 16, scales + group * (TILE_N * 2) + lane * 16, 16);
#if HAS_ZEROS
                if (warp == 3 && lane < 16)
                    copy16(stage + Z_AT + u * TILE_N + lane * 16, zeros + group * TILE_N + lane * 16, 16);
#endif
#endif
            }
        __syncwarp();
    }
    __device__ __forceinline__ void fetch_rows(const Walk& at, u32 stage, u32 full) const {
        const int member = BULK ? lane : warp * 32 + lane, by = (BULK ? 32 : WARPS * 32) / (8 * U);
        const int piece = member % (8 * U), first = member / (8 * U);
        const u8* source = x + at.k * (2 * UNIT_K) + first * x_stride * 2 + piece * 16;
        const u32 target = stage + X_AT + first * X_STRIDE + piece * 16;
        if (piece < (at.k_end - at.k) * 8)
#pragma unroll
            for (int i = 0; i < MT; i += by)
                if (first + i < rows) copy16(target + i * X_STRIDE, source + (u64)(i * x_stride) * 2, 16);
        barrier_arrive_on_copies(full);
    }
};

// What becomes of a finished tile, and of the rows' own scale.
struct Finish {
    u16* y;
    int n_out, y_stride;
    // Rows that come in without their RMS norm's root: `tiles_in` sums of squares a row give it. Null: rows as they are.
    const float* squares_in;
    int tiles_in;
    float width_in, eps;
    // A paired weight has gate and up rows in turn, 8 of each: 0 n_out columns of y; 1 gate columns, up columns;
    // 2 y = silu(gate) * up, half as wide. Any other weight: 0; 3 residual += y, y = residual * factor (an RMS norm without
    // its root), squares_out[tile][row] = the sum of the residual's squares.
    int epilogue;
    u16* residual;
    const float* factor;
    float* squares_out;
    int squares_stride;
};

__device__ __forceinline__ float round_bf16(float v) { return bf16_value(to_bf16(v)); }

// What a residual epilogue adds to, fetched before anything is stored: [m-tile][octet][row of two, column of two].
struct Addend {
    u16 residual[PM][NT][4];
    float factor[PM][2];
    __device__ __forceinline__ void fetch(const Finish& out, int tile, int warp, int part, int g, int t, int rows) {
#pragma unroll
        for (int m = 0; m < PM; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int at = tile * TILE_N + (warp * WM + part * PM + m) * 16 + g + j * 8;
                factor[m][j] = at < out.n_out ? out.factor[at] : 0.f;
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int row = n * 8 + 2 * t + i;
                        const bool real = row < rows && at < out.n_out;
                        residual[m][n][2 * i + j] = real ? out.residual[(u64)row * out.y_stride + at] : (u16)0;
                    }
            }
    }
};

// The finished m-tiles of one thread: rows 2 t and 2 t + 1 of every octet, columns g and g + 8 of each m-tile.
__device__ __forceinline__ void finish(float4 (*sum)[NT], const Addend& addend, int tile, int warp, int part, int g, int t, int thread, int rows,
                                       u8* smem, const Finish& out) {
    float* shared = reinterpret_cast<float*>(smem + K_GROUPS * STAGES * STAGE_BYTES);
    const float* root = shared + MT * TILE_N;
    if (out.epilogue == 0 && !out.squares_in) {
#pragma unroll
        for (int m = 0; m < PM; ++m) {
            const int column = tile * TILE_N + (warp * WM + part * PM + m) * 16 + g;
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const float v[4] = {sum[m][n].x, sum[m][n].y, sum[m][n].z, sum[m][n].w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = n * 8 + 2 * t + i % 2, at = column + i / 2 * 8;
                    if (row < rows && at < out.n_out) out.y[(u64)row * out.y_stride + at] = to_bf16(v[i]);
                }
            }
        }
        return;
    }
    float squares[PM][NT][2];
#pragma unroll
    for (int m = 0; m < PM; ++m) {
        const int m_tile = warp * WM + part * PM + m;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float v[4] = {sum[m][n].x, sum[m][n].y, sum[m][n].z, sum[m][n].w};
            if (out.squares_in) {
                const float r0 = root[n * 8 + 2 * t], r1 = root[n * 8 + 2 * t + 1];
                v[0] *= r0; v[1] *= r1; v[2] *= r0; v[3] *= r1;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                squares[m][n][i] = 0.f;
                const int row = n * 8 + 2 * t + i;
                if (row >= rows) continue;
                u16* y = out.y + (u64)row * out.y_stride;
                if (out.epilogue == 1 || out.epilogue == 2) {
                    const int at = tile * (TILE_N / 2) + m_tile * 8 + g;
                    if (at >= out.n_out / 2) continue;
                    if (out.epilogue == 1) {
                        y[at] = to_bf16(v[i]);
                        y[out.n_out / 2 + at] = to_bf16(v[i + 2]);
                    } else {
                        const float gate = round_bf16(v[i]), silu = round_bf16(gate / (1.f + __expf(-gate)));
                        y[at] = to_bf16(silu * round_bf16(v[i + 2]));
                    }
                    continue;
                }
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int at = tile * TILE_N + m_tile * 16 + g + j * 8;
                    if (at >= out.n_out) continue;
                    if (out.epilogue == 0) {
                        y[at] = to_bf16(v[i + 2 * j]);
                    } else {
                        const u16 h = to_bf16(bf16_value(addend.residual[m][n][2 * i + j]) + round_bf16(v[i + 2 * j]));
                        out.residual[(u64)row * out.y_stride + at] = h;
                        const float f = bf16_value(h);
                        y[at] = to_bf16(f * addend.factor[m][j]);
                        squares[m][n][i] = fmaf(f, f, squares[m][n][i]);
                    }
                }
            }
        }
    }
    if (out.epilogue == 3) {
        // Over the columns of an m-tile, then over the tile's m-tiles, both in one order whatever MT and WM.
        __syncthreads();
#pragma unroll
        for (int m = 0; m < PM; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int step = 4; step < 32; step *= 2)
                        squares[m][n][i] += __shfl_xor_sync(0xffffffffu, squares[m][n][i], step);
                    if (g == 0) shared[(warp * WM + part * PM + m) * MT + n * 8 + 2 * t + i] = squares[m][n][i];
                }
        __syncthreads();
        if (thread < rows) {
            float total = 0.f;
#pragma unroll
            for (int m = 0; m < TILE_N / 16; ++m) total += shared[m * MT + thread];
            out.squares_out[tile * out.squares_stride + thread] = total;
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
w4a16(const u8* __restrict__ w, const u8* __restrict__ scales, const u8* __restrict__ zeros,
      const u8* __restrict__ x, float* partials, u32* arrivals, int rows, int x_stride, int per_tile, int group_shift, int length,
      int extra, u16* y, int n_out, int y_stride, const float* squares_in, int tiles_in, float width_in, float eps,
      int epilogue, u16* residual, const float* factor, float* squares_out, int squares_stride) {
    extern __shared__ __align__(128) u8 smem[];
    __shared__ __align__(8) u64 barriers[2 * K_GROUPS * STAGES];
    const int thread = threadIdx.x, lane = thread % 32, cta = blockIdx.x;
    const int part = thread / (WARPS * 32), warp = thread / 32 % WARPS, g = lane / 4, t = lane % 4;
    const Deal deal = {length, extra};
    const int begin = deal.begin(cta), end = deal.begin(cta + 1);
    const u32 ring = smem_address(smem) + part * STAGES * STAGE_BYTES;
    const u32 full = smem_address(barriers) + part * STAGES * 16, empty = full + 8;   // + 16 per slot
    const int member = thread % (WARPS * 32);
    const Finish out = {y, n_out, y_stride, squares_in, tiles_in, width_in, eps, epilogue, residual, factor, squares_out,
                        squares_stride};
    float4* exchange = reinterpret_cast<float4*>(smem + K_GROUPS * STAGES * STAGE_BYTES);
    float* root = reinterpret_cast<float*>(smem + K_GROUPS * STAGES * STAGE_BYTES + EXCHANGE_BYTES);
    float* sums = root + MT;            // [tiles_in][MT]

    if (thread < K_GROUPS * STAGES) {
        barrier_init(smem_address(barriers) + thread * 16, BULK ? 33 : WARPS * 32);
        barrier_init(smem_address(barriers) + thread * 16 + 8, WARPS);
#if BULK
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();

    Inputs in = {w, scales, zeros, x, rows, x_stride, per_tile, group_shift,
                 (per_tile - 1 >> group_shift) + 1, warp, lane, 0};
#if BULK
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(in.policy));
#endif
    Walk ahead;                         // the block that is fetched next
    ahead.segment = begin; ahead.end = end; ahead.per_tile = per_tile; ahead.part = part;
    ahead.open();
    {
        // Weights do not depend on the kernel before this one: the first stages are on their way before it has ended.
        Walk behind = ahead;
#pragma unroll 1
        for (int s = 0; s < STAGES && ahead.valid(); ++s) {
            if (!BULK || warp == 0) in.fetch_weight(ahead, ring + s * STAGE_BYTES, full + s * 16);
            ahead.next();
        }
#if PDL
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
#pragma unroll 1
        for (int s = 0; s < STAGES && behind.valid(); ++s) {
            if (!BULK || warp == s % WARPS) in.fetch_rows(behind, ring + s * STAGE_BYTES, full + s * 16);
            behind.next();
        }
        if (squares_in)
            for (int i = thread; i < tiles_in * MT; i += THREADS)
                if (i % MT < rows) copy4(smem_address(sums + i), squares_in + i / MT * squares_stride + i % MT);
    }

    int turn = 0;
    u32 parity = 0;
    bool started = false;
    int slot = 0;
    for (int segment = begin; segment < end;) {
        const int tile = segment / per_tile, first = segment - tile * per_tile;
        const int last = min(end - tile * per_tile, per_tile), count = last - first;
        float total[WM][NT][4];
#pragma unroll
        for (int m = 0; m < WM; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) total[m][n][i] = 0.f;

        const int k_end = first + count * (part + 1) / K_GROUPS;
        for (int k = first + count * part / K_GROUPS; k < k_end; k += U) {
            const u32 stage = ring + slot * STAGE_BYTES;
            barrier_wait(full + slot * 16, parity);
            const u32 x_at = stage + X_AT + lane % 8 * X_STRIDE + lane / 8 * 16;
#pragma unroll
            for (int u = 0; u < U; ++u) {
                if (u == 0 || k + u < k_end) {
                    const u32 at = stage + u * UNIT_BYTES + (warp * WM * 32 + lane) * 16;
                    uint4 q[WM];
#pragma unroll
                    for (int m = 0; m < WM; ++m) q[m] = load_shared(at + m * 512);
#pragma unroll
                    for (int h = 0; h < PM; ++h) {      // two m-tiles, 32 columns, at a time
                        u32 s[2];
                        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(s[0]), "=r"(s[1])
                                     : "r"(stage + S_AT + u * (TILE_N * 2) + ((warp * PM + h) * 8 + g) * 8));
#if HAS_ZEROS
                        u32 z;
                        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(z)
                                     : "r"(stage + Z_AT + u * TILE_N + ((warp * PM + h) * 8 + g) * 4));
#endif
                        u32 a[2][4][4];
#pragma unroll
                        for (int m = 0; m < 2; ++m) {
#if HAS_ZEROS
                            const u32 minus0 = 0xc300c300u | ((z >> (16 * m)) & 0xf) * 0x00010001u;
                            const u32 minus1 = 0xc300c300u | ((z >> (16 * m + 8)) & 0xf) * 0x00010001u;
#else
                            const u32 minus0 = 0xc308c308u, minus1 = 0xc308c308u;
#endif
                            const uint4 codes = q[2 * h + m];
#pragma unroll
                            for (int j = 0; j < 4; ++j) {
                                const u32 above = j < 2 ? codes.x : codes.y, below = j < 2 ? codes.z : codes.w;
                                const int shift = (j % 2) * 8;
                                a[m][j][0] = decode(above >> shift, minus0);
                                a[m][j][1] = decode(below >> shift, minus1);
                                a[m][j][2] = decode(above >> (shift + 4), minus0);
                                a[m][j][3] = decode(below >> (shift + 4), minus1);
                            }
                        }
                        const float s00 = scale_value((u16)s[0]), s01 = scale_value((u16)(s[0] >> 16));
                        const float s10 = scale_value((u16)s[1]), s11 = scale_value((u16)(s[1] >> 16));
#pragma unroll
                        for (int block = 0; block < NT; block += NB) {
                            float part[2][NB][4];
#pragma unroll
                            for (int n = 0; n < NB; ++n)
#pragma unroll
                                for (int i = 0; i < 4; ++i) part[0][n][i] = part[1][n][i] = 0.f;
#pragma unroll
                            for (int pair = 0; pair < 2; ++pair) {
                                uint4 b[NB];
#pragma unroll
                                for (int n = 0; n < NB; ++n)
                                    b[n] = load_fragments(x_at + (block + n) * 8 * X_STRIDE + u * 128 + pair * 64);
#pragma unroll
                                for (int n = 0; n < NB; ++n)
#pragma unroll
                                    for (int m = 0; m < 2; ++m) mma(part[m][n], a[m][2 * pair], b[n].x, b[n].y);
#pragma unroll
                                for (int n = 0; n < NB; ++n)
#pragma unroll
                                    for (int m = 0; m < 2; ++m) mma(part[m][n], a[m][2 * pair + 1], b[n].z, b[n].w);
                            }
#pragma unroll
                            for (int n = 0; n < NB; ++n)
#pragma unroll
                                for (int i = 0; i < 4; ++i) {
                                    float* sum = total[2 * h][block + n] + i;
                                    *sum = fmaf(part[0][n][i], i < 2 ? s00 : s01, *sum);
                                    sum = total[2 * h + 1][block + n] + i;
                                    *sum = fmaf(part[1][n][i], i < 2 ? s10 : s11, *sum);
                                }
                        }
                    }
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + slot * 16);
            if (started && ahead.valid()) {
                if (!BULK || warp == turn) {
                    const int old = slot == 0 ? STAGES - 1 : slot - 1;
                    barrier_wait(empty + old * 16, parity ^ (slot == 0));
                    in.fetch_weight(ahead, ring + old * STAGE_BYTES, full + old * 16);
                    in.fetch_rows(ahead, ring + old * STAGE_BYTES, full + old * 16);
                }
                ahead.next();
            }
            started = true;
            turn = (turn + 1) % WARPS;
            if (++slot == STAGES) { slot = 0; parity ^= 1; }
        }

        // K group p finishes m-tiles PM p .. of every warp; the other hands over its part of them.
        if (squares_in) wait_copies();
        __syncthreads();
        if (squares_in && thread < rows) {
            float total = 0.f;
#pragma unroll 4
            for (int i = 0; i < tiles_in; ++i) total += sums[i * MT + thread];
            root[thread] = rsqrtf(total / width_in + eps);
        }
#pragma unroll
        for (int m = 0; m < PM; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float give[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) give[i] = part ? total[m][n][i] : total[PM + m][n][i];
                exchange[((part * PM + m) * NT + n) * (WARPS * 32) + member] = make_float4(give[0], give[1], give[2], give[3]);
            }
        __syncthreads();
        float4 sum[PM][NT];
#pragma unroll
        for (int m = 0; m < PM; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float keep[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) keep[i] = part ? total[PM + m][n][i] : total[m][n][i];
                const float4 v = exchange[(((1 - part) * PM + m) * NT + n) * (WARPS * 32) + member];
                sum[m][n] = make_float4(keep[0] + v.x, keep[1] + v.y, keep[2] + v.z, keep[3] + v.w);
            }

        const int octets = (rows + 7) / 8;
        auto slab = [&](int of_cta, int m, int n) {
            return reinterpret_cast<float4*>(partials) + (((u64)(u32)(of_cta * 2 + part) * PM + m) * NT + n) * (WARPS * 32) + member;
        };
        const int lo = tile * per_tile, first_cta = deal.owner(lo), last_cta = deal.owner(lo + per_tile - 1);
        if (cta != first_cta) {
#pragma unroll
            for (int m = 0; m < PM; ++m)
#pragma unroll
                for (int n = 0; n < NT; ++n)
                    if (n < octets) __stcg(slab(cta, m, n), sum[m][n]);
            __syncthreads();
            if (thread == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals + tile) : "memory");
        } else {
            Addend addend;
            if (epilogue == 3) addend.fetch(out, tile, warp, part, g, t, rows);
            if (first_cta != last_cta) {
                if (thread == 0) {
                    u32 seen;
                    do {
                        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrivals + tile) : "memory");
                    } while (seen != (u32)(last_cta - first_cta));
                    arrivals[tile] = 0;
                }
                __syncthreads();
            }
            for (int c = first_cta + 1; c <= last_cta; c += PEERS) {
                float4 v[PEERS][PM][NT];
#pragma unroll
                for (int j = 0; j < PEERS; ++j)
#pragma unroll
                    for (int m = 0; m < PM; ++m)
#pragma unroll
                        for (int n = 0; n < NT; ++n)
                            if (c + j <= last_cta && n < octets) v[j][m][n] = __ldcg(slab(c + j, m, n));
#pragma unroll
                for (int j = 0; j < PEERS; ++j)
#pragma unroll
                    for (int m = 0; m < PM; ++m)
#pragma unroll
                        for (int n = 0; n < NT; ++n)
                            if (c + j <= last_cta && n < octets) {
                                sum[m][n].x += v[j][m][n].x; sum[m][n].y += v[j][m][n].y;
                                sum[m][n].z += v[j][m][n].z; sum[m][n].w += v[j][m][n].w;
                            }
            }
            finish(sum, addend, tile, warp, part, g, t, thread, rows, smem, out);
        }
        segment = tile * per_tile + last;
    }
}
