// y[m, n] = sum_k x[m, k] * scale[n, k / group] * (code[n, k] - zero[n, k / group]),  1 <= m <= MT rows of bf16.
//
// The weight is the A operand of mma.m16n8k16 and the activations are the B operand, so a row of y is a
// column of the tile: its bits depend neither on the other rows nor on how many there are. The K order is
// fixed by (N, K, number of CTAs) alone: the U = (N / 256) x (K / 64) units are dealt to the CTAs in contiguous runs
// of equal length (`Deal`); a CTA's K groups share every segment of its run that lies in one N tile. CTAs that share a
// tile add their parts of it in CTA order: where they are few the first of them does so, whose part came last; else they
// all hand over theirs and each finishes its share of the tile's quarters. All CTAs run at once (at most one per
// multiprocessor), so the wait ends. Shared tiles are the first and the last of a run at most, finished at the run's end.
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
#define MAX_PARTS 128 // sums of squares a row comes with at most
#define SHARED_ITEMS (MT == 32 ? 2 : 1) // m-tiles of eight rows that a warp finishes at a time of shares
#define GATHER 3                        // so many CTAs at most are few
#define PART_CELLS (TILE_N / 16 * NT * 32) // float4 of a part: [m-tile][octet][lane]
#define QUARTERS 4    // of a tile: what is finished by one CTA, and what a sum of squares is over
#define QUARTER 4     // m-tiles in one
#define BULK (__CUDA_ARCH__ >= 900)
#define EXCHANGE_BYTES (MT * TILE_N * 4)
#define ALL_WARPS (K_GROUPS * WARPS)

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

// Unit runs: CTA c begins at c * length + min(c, extra), or at the edge of a tile that lies within `snap` units of it:
// a segment costs more than a few units.
struct Deal {
    int length, extra, per_tile, snap;
    __device__ __forceinline__ int begin(int cta) const {
        const int at = cta * length + min(cta, extra), behind = at % per_tile;
        return behind <= snap ? at - behind : per_tile - behind <= snap ? at - behind + per_tile : at;
    }
    __device__ __forceinline__ int owner(int unit) const {
        const int longer = extra * (length + 1);
        const int cta = unit < longer ? unit / (length + 1) : extra + (unit - longer) / length;
        return unit < begin(cta) ? cta - 1 : unit >= begin(cta + 1) ? cta + 1 : cta;
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
    // Rows that come in without their RMS norm's root: `parts_in` sums of squares a row give it. Null: rows as they are.
    const float* squares_in;
    int parts_in;
    float width_in, eps;
    // A paired weight has gate and up rows in turn, 8 of each: 0 n_out columns of y; 1 gate columns, up columns;
    // 2 y = silu(gate) * up, half as wide. Any other weight: 0; 3 residual += y, y = residual * factor (an RMS norm without
    // its root), squares_out[row][quarter] = the sum of the residual's squares over a quarter tile's 64 columns.
    int epilogue;
    u16* residual;
    const float* factor;
    float* squares_out;
    int squares_stride;
};

__device__ __forceinline__ float round_bf16(float v) { return bf16_value(to_bf16(v)); }

// A tile and its CTAs, first .. last. Tile -1: there is none, and the rest says nothing.
struct Shared {
    int tile, first, last;
    bool gathered;                      // the first finishes it whole; else each its share
    // How many hand over a part, and how many of them and of those who take are counted: the last sets the count to zero.
    __device__ __forceinline__ u32 parts() const { return last - first + !gathered; }
    __device__ __forceinline__ u32 steps() const { return gathered ? parts() + 1 : 2 * parts(); }
};

// One m-tile of eight rows: lane 4 g + t holds rows 2 t and 2 t + 1 of columns g and g + 8.
struct Item {
    int tile, m_tile, row, g;   // row: the first of the lane's two
    bool real[2][2];            // [row][column]
    bool any, second;           // rows of this octet; of the second tile
    u16 residual[2][2];
    float factor[2];

    __device__ __forceinline__ void open(const Finish& out, int tile_, int m_tile_, int n, int lane, int rows) {
        tile = tile_; m_tile = m_tile_; g = lane / 4; row = n * 8 + lane % 4 * 2; any = n * 8 < rows;
        const int column = tile * TILE_N + m_tile * 16 + g;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) real[i][j] = row + i < rows && column + 8 * j < out.n_out;
        }
        if (out.epilogue == 3 && any) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                factor[j] = column + 8 * j < out.n_out ? out.factor[column + 8 * j] : 0.f;
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    residual[i][j] = real[i][j] ? out.residual[(u64)(row + i) * out.y_stride + column + 8 * j] : (u16)0;
            }
        }
    }
    // v [row][column]. Sums of squares of an m-tile's row go to `squares` [m-tile][MT].
    __device__ __forceinline__ void close(const Finish& out, float (*v)[2], const float* root, float* squares) const {
        if (out.squares_in)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                v[i][0] *= root[row + i];
                v[i][1] *= root[row + i];
            }
        u16* y = out.y + (u64)row * out.y_stride;
        if (out.epilogue == 1 || out.epilogue == 2) {
            const int at = tile * (TILE_N / 2) + m_tile * 8 + g, half = out.n_out / 2;
#pragma unroll
            for (int i = 0; i < 2; ++i, y += out.y_stride) {
                const float gate = round_bf16(v[i][0]), silu = round_bf16(gate / (1.f + __expf(-gate)));
                const bool mine = real[i][0] && at < half;
                if (out.epilogue == 2) v[i][0] = silu * round_bf16(v[i][1]);
                if (mine) y[at] = to_bf16(v[i][0]);
                if (mine && out.epilogue == 1) y[half + at] = to_bf16(v[i][1]);
            }
            return;
        }
        const int column = tile * TILE_N + m_tile * 16 + g;
        float sum[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 2; ++i, y += out.y_stride)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int at = column + 8 * j;
                if (out.epilogue == 3) {
                    const u16 h = to_bf16(bf16_value(residual[i][j]) + round_bf16(v[i][j]));
                    if (real[i][j]) out.residual[(u64)(row + i) * out.y_stride + at] = h;
                    const float f = real[i][j] ? bf16_value(h) : 0.f;
                    v[i][j] = f * factor[j];
                    sum[i] = fmaf(f, f, sum[i]);
                }
                if (real[i][j]) y[at] = to_bf16(v[i][j]);
            }
        if (out.epilogue == 3) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int step = 4; step < 32; step *= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], step);
                if (g == 0) squares[m_tile * MT + row + i] = sum[i];
            }
        }
    }
};

// This CTA's quarters of one tile or two, by m-tiles of eight rows. Its own part of a gathered tile lies in `sums`
// [m-tile][octet][lane]; `parts` are those handed over. A warp has ITEMS of them at a time, PARTS_AHEAD parts of each on
// their way. Seldom met, so one copy of it for each kind of end, and out of the way of the loop.
template <int ITEMS, int PARTS_AHEAD>
__device__ __noinline__ void finish(const Finish& out, const Shared a, const Shared b, int cta, int thread, int rows,
                                    const float4* sums, const float4* parts, const float* root, float* squares) {
    const int lane = thread % 32;
    auto from = [&](const Shared& at, int place) {
        if (at.gathered) return QUARTERS * place;
        const int peers = at.last - at.first + 1;
        return (QUARTERS * (cta - at.first + place) + peers - 1) / peers;
    };
    const int from_a = from(a, 0), count_a = (from(a, 1) - from_a) * QUARTER * NT;
    const int from_b = b.tile < 0 ? 0 : from(b, 0), count_b = b.tile < 0 ? 0 : (from(b, 1) - from_b) * QUARTER * NT;
    const int most = max(a.last - a.first + !a.gathered, b.tile < 0 ? 0 : b.last - b.first + !b.gathered);
#pragma unroll 1
    for (int i = thread / 32; i < count_a + count_b; i += ITEMS * ALL_WARPS) {
        Item item[ITEMS];
        float4 sum[ITEMS];
        int first[ITEMS], last[ITEMS], at[ITEMS], slot[ITEMS];
#pragma unroll
        for (int e = 0; e < ITEMS; ++e) {
            const int j = i + e * ALL_WARPS;
            const bool of_a = j < count_a;
            const int place = of_a ? j : j - count_a, m_tile = (of_a ? from_a : from_b) * QUARTER + place / NT;
            // Of a tile that is gathered here the own part is the first and lies in `sums`.
            const bool gathered = (of_a ? a : b).gathered;
            first[e] = (of_a ? a.first : b.first) + gathered;
            last[e] = of_a ? a.last : b.last;
            at[e] = (m_tile * NT + place % NT) * 32 + lane;
            item[e].open(out, of_a ? a.tile : b.tile, m_tile, place % NT, lane, j < count_a + count_b ? rows : 0);
            item[e].second = !of_a;
            if (!item[e].any) last[e] = first[e] - 1;
            sum[e] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (gathered && item[e].any) sum[e] = sums[at[e]];
            slot[e] = !gathered;
        }
#pragma unroll 1
        for (int c = 0; c < most; c += PARTS_AHEAD) {
            float4 v[ITEMS][PARTS_AHEAD];
#pragma unroll
            for (int j = 0; j < PARTS_AHEAD; ++j)
#pragma unroll
                for (int e = 0; e < ITEMS; ++e)
                    if (first[e] + c + j <= last[e])
                        v[e][j] = __ldcg(parts + (u64)(u32)((first[e] + c + j) * 2 + (c + j == 0 ? slot[e] : 0)) * PART_CELLS + at[e]);
#pragma unroll
            for (int j = 0; j < PARTS_AHEAD; ++j)
#pragma unroll
                for (int e = 0; e < ITEMS; ++e)
                    if (first[e] + c + j <= last[e]) {
                        sum[e].x += v[e][j].x; sum[e].y += v[e][j].y;
                        sum[e].z += v[e][j].z; sum[e].w += v[e][j].w;
                    }
        }
#pragma unroll
        for (int e = 0; e < ITEMS; ++e) {
            float v[2][2] = {{sum[e].x, sum[e].z}, {sum[e].y, sum[e].w}};
            if (item[e].any) item[e].close(out, v, root, squares + (item[e].second ? TILE_N / 16 * MT : 0));
        }
    }
    if (out.epilogue != 3) return;
    // Over the columns of an m-tile, then over the quarter's m-tiles, both in one order whatever MT and WM.
    __syncthreads();
    const int sums_a = count_a / (QUARTER * NT) * MT, sums_b = count_b / (QUARTER * NT) * MT;
    for (int i = thread; i < sums_a + sums_b; i += THREADS) {
        const bool of_a = i < sums_a;
        const int place = of_a ? i : i - sums_a, quarter = (of_a ? from_a : from_b) + place / MT, row = place % MT;
        const int at = (of_a ? a.tile : b.tile) * QUARTERS + quarter;
        const float* of = squares + (of_a ? 0 : TILE_N / 16 * MT) + quarter * QUARTER * MT + row;
        if (row < rows && at * (QUARTER * 16) < out.n_out)
            out.squares_out[(u64)row * out.squares_stride + at] = of[0] + of[MT] + of[2 * MT] + of[3 * MT];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
w4a16(const u8* __restrict__ w, const u8* __restrict__ scales, const u8* __restrict__ zeros,
      const u8* __restrict__ x, float* partials, u32* arrivals, int rows, int x_stride, int per_tile, int group_shift, int length,
      int extra, u16* y, int n_out, int y_stride, const float* squares_in, int parts_in, float width_in, float eps,
      int epilogue, u16* residual, const float* factor, float* squares_out, int squares_stride) {
    extern __shared__ __align__(128) u8 smem[];
    __shared__ __align__(8) u64 barriers[2 * K_GROUPS * STAGES];
    __shared__ Shared shared[2];        // the tile that the CTA before this one begins, the tile that this one does
    __shared__ Finish out;
    const int thread = threadIdx.x, lane = thread % 32, cta = blockIdx.x;
    const int part = thread / (WARPS * 32), warp = thread / 32 % WARPS, g = lane / 4;
    const Deal deal = {length, extra, per_tile, min(3, length / 24)};
    const int begin = deal.begin(cta), end = deal.begin(cta + 1);
    const u32 ring = smem_address(smem) + part * STAGES * STAGE_BYTES;
    const u32 full = smem_address(barriers) + part * STAGES * 16, empty = full + 8;   // + 16 per slot
    float4* exchange = reinterpret_cast<float4*>(smem + K_GROUPS * STAGES * STAGE_BYTES);
    float* root = reinterpret_cast<float*>(smem + K_GROUPS * STAGES * STAGE_BYTES + EXCHANGE_BYTES);
    float* squares = root + MT;         // [2 tiles][m-tiles][MT]

#if !BULK
    if (thread < K_GROUPS * STAGES) {
        barrier_init(smem_address(barriers) + thread * 16, WARPS * 32);
        barrier_init(smem_address(barriers) + thread * 16 + 8, WARPS);
    }
    __syncthreads();
#endif

    Inputs in = {w, scales, zeros, x, rows, x_stride, per_tile, group_shift,
                 (per_tile - 1 >> group_shift) + 1, warp, lane, 0};
#if BULK
    in.policy = stream_policy();
#endif
    Walk ahead;                         // the block that is fetched next
    ahead.segment = begin; ahead.end = end; ahead.per_tile = per_tile; ahead.part = part;
    ahead.open();
    // Weights do not depend on the kernel before this one: the first stages are on their way before it has ended, each
    // ordered by a warp of its own.
#if BULK
    static_assert(STAGES <= WARPS, "a warp orders one of the first stages at most");
    Walk mine;
    bool has = false;
#pragma unroll 1
    for (int s = 0; s < STAGES && ahead.valid(); ++s) {
        if (warp == s) {
            has = true;
            mine = ahead;
            if (lane == 0) {
                barrier_init(full + s * 16, 33);
                barrier_init(empty + s * 16, WARPS);
                barriers_visible();
            }
            in.fetch_weight(mine, ring + s * STAGE_BYTES, full + s * 16);
        }
        ahead.next();
    }
#else
    Walk behind = ahead;
#pragma unroll 1
    for (int s = 0; s < STAGES && ahead.valid(); ++s) {
        in.fetch_weight(ahead, ring + s * STAGE_BYTES, full + s * 16);
        ahead.next();
    }
#endif
    if (thread >= THREADS - 2) {
        // A run inside one tile shares it in the first place only.
        const int i = thread - (THREADS - 2), tile = (i == 0 ? begin : end - 1) / per_tile, lo = tile * per_tile, hi = lo + per_tile;
        const bool open = begin < end && (i == 0 ? lo < begin : lo >= begin && hi > end);
        shared[i].tile = open ? tile : -1;
        if (open) {
            shared[i].first = deal.owner(lo); shared[i].last = deal.owner(hi - 1);
            shared[i].gathered = shared[i].last - shared[i].first < GATHER;
        }
        if (i == 0)
            out = {y, n_out, y_stride, squares_in, parts_in, width_in, eps, epilogue, residual, factor, squares_out, squares_stride};
    }
    __syncthreads();
#if PDL
    wait_for_grid();
    release_grid();
#endif
    if (begin >= end) return;
#if BULK
    if (has) in.fetch_rows(mine, ring + warp * STAGE_BYTES, full + warp * 16);
#else
#pragma unroll 1
    for (int s = 0; s < STAGES && behind.valid(); ++s) {
        in.fetch_rows(behind, ring + s * STAGE_BYTES, full + s * 16);
        behind.next();
    }
#endif
    // Sums of squares wait where parts will be exchanged.
    if (squares_in)
        for (int i = thread; i < rows * MAX_PARTS / 4; i += THREADS) {
            const int row = i / (MAX_PARTS / 4), at = i % (MAX_PARTS / 4) * 4;
            if (at < parts_in)
                copy16(smem_address(exchange) + i * 16, squares_in + (u64)row * squares_stride + at, min(16, (parts_in - at) * 4));
        }

    int turn = 0;
    u32 parity = 0;
    bool started = false;
    int slot = 0;
    const float4* handed = reinterpret_cast<const float4*>(partials);
    bool rooted = !squares_in;
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
            // Codes of all units of the stage at once: a second one that is not there is read and not used.
            uint4 q[U][WM];
#pragma unroll
            for (int u = 0; u < U; ++u)
#pragma unroll
                for (int m = 0; m < WM; ++m) q[u][m] = load_shared(stage + u * UNIT_BYTES + (warp * WM * 32 + lane) * 16 + m * 512);
#pragma unroll
            for (int u = 0; u < U; ++u) {
                if (u == 0 || k + u < k_end) {
#pragma unroll
                    for (int h = 0; h < PM; ++h) {      // two m-tiles, 32 columns, at a time
                        const uint2 s = load_pair(stage + S_AT + u * (TILE_N * 2) + ((warp * PM + h) * 8 + g) * 8);
#if HAS_ZEROS
                        const u32 z = load_word(stage + Z_AT + u * TILE_N + ((warp * PM + h) * 8 + g) * 4);
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
                            const uint4 codes = q[u][2 * h + m];
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
                        const float s00 = scale_value((u16)s.x), s01 = scale_value((u16)(s.x >> 16));
                        const float s10 = scale_value((u16)s.y), s11 = scale_value((u16)(s.y >> 16));
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

        // K group p adds up m-tiles PM p .. of every warp; the other hands over its part of them.
        auto cell = [&](int m, int n) { return ((warp * WM + m) * NT + n) * 32 + lane; };
        if (!rooted) wait_copies();
        __syncthreads();
        if (!rooted) {
            for (int row = thread / 32; row < rows; row += ALL_WARPS) {
                const float* of_row = reinterpret_cast<const float*>(exchange) + row * MAX_PARTS;
                float squared = 0.f;
                for (int i = lane; i < parts_in; i += 32) squared += of_row[i];
#pragma unroll
                for (int step = 16; step > 0; step /= 2) squared += __shfl_xor_sync(0xffffffffu, squared, step);
                if (lane == 0) root[row] = rsqrtf(squared / width_in + eps);
            }
            rooted = true;
            __syncthreads();
        }
#pragma unroll
        for (int m = 0; m < PM; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float give[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) give[i] = part ? total[m][n][i] : total[PM + m][n][i];
                exchange[cell((1 - part) * PM + m, n)] = make_float4(give[0], give[1], give[2], give[3]);
            }
        __syncthreads();
        // The parts of a gathered tile come to the CTA that begins it.
        const bool continued = first > 0, whole = count == per_tile, kept = whole || (!continued && shared[1].gathered);
        float4* parts = reinterpret_cast<float4*>(partials) + (u64)(u32)(cta * 2 + !continued) * PART_CELLS;
#pragma unroll
        for (int m = 0; m < PM; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float keep[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) keep[i] = part ? total[PM + m][n][i] : total[m][n][i];
                const int at = cell(part * PM + m, n);
                const float4 v = exchange[at];
                const float4 sum = make_float4(keep[0] + v.x, keep[1] + v.y, keep[2] + v.z, keep[3] + v.w);
                if (kept) exchange[at] = sum;
                else __stcg(parts + at, sum);
            }
        __syncthreads();
        segment = tile * per_tile + last;
        const Shared alone = {tile, cta, cta, true}, none = {-1, 0, 0, false};
        if (whole) finish<2, 2>(out, alone, none, cta, thread, rows, exchange, handed, root, squares);
        else if (thread == 0 && !kept)
            count_release(arrivals + tile, shared[!continued].steps() - 1);
    }
    Shared a = shared[0], b = shared[1];
    if (a.gathered) a.tile = -1;
    if (a.tile < 0) { a = b; b.tile = -1; }
    if (a.tile < 0) return;
    if (thread < 2) {
        const Shared with = thread == 0 ? a : b;
        if (with.tile >= 0) {
            while (count_acquire(arrivals + with.tile) < with.parts());
            count_relaxed(arrivals + with.tile, with.steps() - 1);
        }
    }
    __syncthreads();
    if (a.gathered && (b.tile < 0 || b.gathered)) finish<2, 2>(out, a, b, cta, thread, rows, exchange, handed, root, squares);
    else finish<SHARED_ITEMS, 8 / SHARED_ITEMS>(out, a, b, cta, thread, rows, exchange, handed, root, squares);
}
