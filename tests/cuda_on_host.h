// Enough of CUDA to run a kernel's source on a CPU: a block's threads are fibers that give way at barriers, in lane order.
// Semantics, not speed. Tensor-core products follow the fragment tables of the PTX manual (mma.m16n8k16, 16-bit operands).
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
using std::max;
using std::min;

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct dim { u32 x; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }

namespace host {
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    dim thread;
    bool done = false;
};
struct Meeting {
    u32 here = 0, turn = 0;
};
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline std::vector<Meeting> warps;
inline Meeting all;
inline Fiber* current;
inline ucontext_t scheduler;
inline dim block;
inline std::function<void()> body;
inline u32 words[1024][16];  // what a thread shows to its warp

inline void meet(Meeting& meeting, u32 size) {
    const u32 turn = meeting.turn;
    if (++meeting.here == size) {
        meeting.here = 0;
        ++meeting.turn;
        return;
    }
    while (meeting.turn == turn) swapcontext(&current->context, &scheduler);
}
inline void meet_warp() { meet(warps[current->thread.x / 32], 32); }
inline void enter() {
    body();
    current->done = true;
    swapcontext(&current->context, &scheduler);
}
// One block after the other; false if some threads of a block wait for a barrier that the others never reach.
inline bool run(u32 grid, u32 threads, const u32* order, std::function<void()> kernel) {
    body = kernel;
    for (u32 b = 0; b < grid; ++b) {
        block.x = order[b];
        fibers.clear();
        warps.assign(threads / 32, Meeting());
        all = Meeting();
        for (u32 t = 0; t < threads; ++t) {
            fibers.push_back(std::make_unique<Fiber>());
            Fiber& fiber = *fibers.back();
            fiber.thread.x = t;
            fiber.stack.resize(1 << 16);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            makecontext(&fiber.context, enter, 0);
        }
        for (u32 idle = 0, left = threads; left;) {
            const u32 before = left;
            u32 turns = all.turn + all.here;
            for (auto& w : warps) turns += w.turn * 32 + w.here;
            for (auto& fiber : fibers) {
                if (fiber->done) continue;
                current = fiber.get();
                swapcontext(&scheduler, &fiber->context);
                left -= fiber->done;
            }
            u32 now = all.turn + all.here;
            for (auto& w : warps) now += w.turn * 32 + w.here;
            idle = left == before && now == turns ? idle + 1 : 0;
            if (idle > 2) return false;
        }
    }
    return true;
}
inline float bits_float(u32 b) { float f; memcpy(&f, &b, 4); return f; }
inline u32 float_bits(float f) { u32 b; memcpy(&b, &f, 4); return b; }
}  // namespace host

#define threadIdx (host::current->thread)
#define blockIdx (host::block)

inline void __syncwarp() { host::meet_warp(); }
inline void __syncthreads() { host::meet(host::all, host::fibers.size()); }
template <typename T> T shown(T value, u32 lane) {
    const u32 self = threadIdx.x;
    memcpy(host::words[self], &value, sizeof(T));
    host::meet_warp();
    T out;
    memcpy(&out, host::words[self / 32 * 32 + lane], sizeof(T));
    host::meet_warp();
    return out;
}
template <typename T> T __shfl_xor_sync(u32, T value, u32 mask) { return shown(value, threadIdx.x % 32 ^ mask); }
inline u32 __ballot_sync(u32, bool value) {
    u32 out = 0;
    for (u32 lane = 0; lane < 32; ++lane) out |= (u32)shown(value, lane) << lane;
    return out;
}

inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __expf(float a) { return std::exp(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float a) { return 1.f / std::sqrt(a); }
inline int __float_as_int(float f) { return (int)host::float_bits(f); }
inline float __uint_as_float(u32 b) { return host::bits_float(b); }
template <typename T> T __ldcg(const T* at) { return *at; }
template <typename T> void __stcg(T* at, T value) { *at = value; }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    const u64 both = (u64)b << 32 | a;
    u32 out = 0;
    for (int i = 0; i < 4; ++i) out |= (u32)(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return out;
}

// Shared addresses are distances, so that they fit 32 bits.
inline char shared_base;
inline u32 smem_address(const void* p) { return (u32)((const char*)p - &shared_base); }
inline char* smem_pointer(u32 a) { return &shared_base + (int)a; }
inline void copy16(u32 to, const void* from, int bytes) {
    memset(smem_pointer(to), 0, 16);
    memcpy(smem_pointer(to), from, bytes);
}
inline void copy4(u32 to, const void* from) { memcpy(smem_pointer(to), from, 4); }
inline void commit() {}
template <int n> void wait_group() {}

inline float bf16_value(u16 h) { return host::bits_float((u32)h << 16); }
inline u16 to_bf16(float f) {
    const u32 b = host::float_bits(f);
    return f != f ? 0x7fff : (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
inline float half_value(u16 v) { _Float16 h; memcpy(&h, &v, 2); return (float)h; }
inline u16 to_half(float f) { const _Float16 h = (_Float16)f; u16 v; memcpy(&v, &h, 2); return v; }
inline u32 to_halves(float a, float b) { return to_half(a) | (u32)to_half(b) << 16; }
inline void mma_f16(float* c, const u32* a, u32 b0, u32 b1) {
    const u32 self = threadIdx.x, first = self / 32 * 32, lane = self % 32;
    u32* mine = host::words[self];
    memcpy(mine, a, 16);
    mine[4] = b0, mine[5] = b1;
    host::meet_warp();
    for (u32 e = 0; e < 4; ++e) {
        const u32 row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        double sum = 0;
        for (u32 k = 0; k < 16; ++k) {
            const u32 left = host::words[first + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const u32 right = host::words[first + column * 4 + k % 8 / 2][4 + k / 8];
            sum += (double)half_value(left >> k % 2 * 16) * half_value(right >> k % 2 * 16);
        }
        c[e] = (float)(c[e] + sum);
    }
    host::meet_warp();
}
inline u32 arrive(u32* count) { return (*count)++; }
