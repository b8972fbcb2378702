// Shared device helpers: asynchronous copies, 4-bit decode, the bf16 tensor-core product. No headers are needed.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

__device__ __forceinline__ u32 smem_address(const void* p) {
    u32 a;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
    return a;
}
__device__ __forceinline__ void copy16(u32 dst, const void* src, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy4(u32 dst, const void* src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
template <int n> __device__ __forceinline__ void wait_group() { asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory"); }
__device__ __forceinline__ uint4 load_shared(u32 a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
__device__ __forceinline__ uint2 load_pair(u32 a) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
    return v;
}
__device__ __forceinline__ u32 load_word(u32 a) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
    return v;
}
__device__ __forceinline__ u32 load_half(u32 a) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a));
    return v;
}
// Two 8 x 8 bf16 matrix pairs: the B fragments of two m16n8k16 steps. Lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ uint4 load_fragments(u32 a) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(a));
    return v;
}
// Two codes at nibbles s and s + 4 as bf16: 128 + code, exactly.
__device__ __forceinline__ u32 raw_codes(u32 word) {
    u32 v;
    asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(v) : "r"(word));
    return v;
}
// The same minus (128 + zero).
__device__ __forceinline__ u32 decode(u32 word, u32 minus) {
    const u32 v = raw_codes(word);
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(v), "r"(0x3f803f80u), "r"(minus));
    return out;
}
__device__ __forceinline__ float scale_value(u16 s) {
    float f;
#if SCALE_BF16
    f = __int_as_float((u32)s << 16);
#else
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(s));
#endif
    return f;
}
__device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u16 to_bf16(float f) {
    u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
__device__ __forceinline__ float bf16_value(u16 h) { return __uint_as_float((u32)h << 16); }

// A prefill product's output tile [M][STRIDE] of bf16 from shared memory to y, 8 bytes a thread: real rows and columns.
template <int M, int N, int STRIDE, int THREADS_>
__device__ __forceinline__ void store_tile(const u16* tile, u16* y, int rows, int n_out, int y_stride, int m_tile, int n_tile,
                                           int paired, int thread) {
    for (int i = thread; i < M * (N / 4); i += THREADS_) {
        const int row = i / (N / 4), inside = i % (N / 4) * 4;
        int n = n_tile * N + inside, limit = n_out;
        if (paired) {                   // 8 gate columns, 8 up columns in turn: gate columns first, then up columns
            n = n_tile * (N / 2) + inside / 16 * 8 + inside % 8;
            limit = n_out / 2;
        }
        const bool real = n < limit;
        if (paired && inside / 8 % 2) n += n_out / 2;
        if (m_tile * M + row < rows && real)
            *reinterpret_cast<u64*>(y + (u64)(m_tile * M + row) * y_stride + n) =
                *reinterpret_cast<const u64*>(tile + row * STRIDE + (i % (N / 4)) * 4);
    }
}

// Barriers in shared memory: a stage is full when its bytes have landed, empty when every warp has read it.
__device__ __forceinline__ void barrier_init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
#if __CUDA_ARCH__ >= 900
#define TEST_WAIT "mbarrier.try_wait"
#else
#define TEST_WAIT "mbarrier.test_wait"
#endif
    asm volatile("{ .reg .pred p; WAIT_%=: " TEST_WAIT
                 ".parity.shared.b64 p, [%0], %1; @p bra DONE_%=; bra WAIT_%=; DONE_%=: }" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}
// The barrier's count drops by one per lane when the lane's copies so far have landed.
__device__ __forceinline__ void barrier_arrive_on_copies(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
#if __CUDA_ARCH__ >= 900
// Barriers just initialised become visible to the bulk copies that count on them.
__device__ __forceinline__ void barriers_visible() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_copy(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void bulk_copy_stream(u32 dst, const void* src, u32 bytes, u32 bar, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            dst),
        "l"(src), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
}
// What is read once should not push out what is read often.
__device__ __forceinline__ u64 stream_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// Of grids launched with programmatic serialization: the one before has ended; the next may start.
__device__ __forceinline__ void wait_for_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void release_grid() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif

// Counters in global memory, that CTAs wait at. One more; a counter at `last` returns to zero.
__device__ __forceinline__ void count_release(u32* counter, u32 last) {
    asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(counter), "r"(last) : "memory");
}
__device__ __forceinline__ void count_relaxed(u32* counter, u32 last) {
    asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(counter), "r"(last) : "memory");
}
__device__ __forceinline__ u32 count_acquire(const u32* counter) {
    u32 seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    return seen;
}
