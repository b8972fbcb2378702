// Enough of CUDA to run a prefill product's source on a CPU: a block's threads are fibers. Warps run in a random order and
// for a random while; copies into shared memory land late and in any order, on even seeds only when nothing else can go
// on; products of wgmma read shared memory when they are waited for. So a wait that is missing shows in the numbers.
// Instructions have the meaning of the PTX manual's fragment tables and descriptors.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#define __device__
#define __global__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
struct uint4 { u32 x, y, z, w; };
struct dim { u32 x; };

namespace host {
const u32 BASE = 0x480;                 // where shared memory begins: aligned to 128 and no more
using Work = std::function<void()>;
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    u32 thread;
    bool done = false;
    std::vector<Work> copies;           // begun, with no barrier to arrive at yet
};
struct Product { float* sums[32]; u32 a[32][4]; u64 b; int accumulate; };
struct Warp {
    u32 here = 0, turn = 0, words[32][6];
    Product begun;
    std::vector<Product> open;
};
struct Barrier { int count, missing; long bytes = 0; u32 phase = 0; };
struct Late { std::vector<Work> copies; u32 barrier; long bytes; };
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Warp everyone;
inline Fiber* current;
inline ucontext_t scheduler;
inline dim block, grid;
inline std::vector<u8> shared;
inline std::map<u32, Barrier> barriers;
inline std::vector<Late> late;
inline long steps;                      // grows with whatever happens
inline u64 state;

inline u32 random() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (u32)(state >> 11);
}
inline void fail(const char* what) {
    fprintf(stderr, "%s\n", what);
    abort();
}
inline void give_way() { swapcontext(&current->context, &scheduler); }
inline u8* at(u32 address, u32 bytes) {
    if (address % bytes && bytes <= 16) fail("misaligned shared address");
    if (address < BASE || address + bytes > BASE + shared.size()) fail("outside of shared memory");
    return shared.data() + (address - BASE);
}
template <typename T> T get(u32 address) {
    T value;
    memcpy(&value, at(address, sizeof(T)), sizeof(T));
    return value;
}
inline void meet(Warp& warp, u32 size) {
    const u32 turn = warp.turn;
    ++steps;
    if (++warp.here == size) {
        warp.here = 0, ++warp.turn;
        return;
    }
    while (warp.turn == turn) give_way();
}
inline Warp& mine() { return warps[current->thread / 32]; }
inline u32 lane() { return current->thread % 32; }
inline void arrive(u32 address, int arrivals, long bytes) {
    Barrier& barrier = barriers.at(address);
    barrier.missing -= arrivals, barrier.bytes += bytes;
    ++steps;
    if (barrier.missing < 0) fail("more arrivals than the barrier counts");
    if (barrier.missing == 0 && barrier.bytes == 0) barrier.missing = barrier.count, barrier.phase ^= 1;
}
inline void land() {
    if (late.empty()) return;
    std::swap(late[random() % late.size()], late.back());
    const Late copy = late.back();
    late.pop_back();
    for (auto& work : copy.copies) work();
    arrive(copy.barrier, copy.bytes ? 0 : 1, -copy.bytes);
}
inline float value(u32 word, u32 half) {
    const u32 bits = (word >> 16 * half) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
// Row and column of 16 x 16 fragments that the lanes of a warp hold.
template <int N> float left(const u32 (&lanes)[32][N], u32 row, u32 k) {
    return value(lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
}
inline std::function<void()> body;
inline void enter() {
    body();
    current->done = true;
    ++steps;
    give_way();
}
// False if some thread waits for what never comes.
inline bool run(u32 blocks, u32 threads, u32 bytes, u64 seed, Work kernel) {
    body = kernel, state = seed * 77777 + 12345, grid.x = blocks;
    for (block.x = 0; block.x < blocks; ++block.x) {
        shared.assign(bytes, 0xff), barriers.clear(), late.clear(), everyone = Warp();
        fibers.assign(threads, Fiber()), warps.assign(threads / 32, Warp());
        for (u32 t = 0; t < threads; ++t) {
            Fiber& fiber = fibers[t];
            fiber.thread = t;
            fiber.stack.resize(1 << 16);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            makecontext(&fiber.context, enter, 0);
        }
        u32 left = threads;
        for (int idle = 0; left;) {
            const long before = steps;
            const u32 warp = random() % warps.size();
            for (int turns = random() % 40; turns >= 0; --turns) {
                const long seen = steps;
                for (u32 t = warp * 32; t < warp * 32 + 32; ++t) {
                    if (fibers[t].done) continue;
                    current = &fibers[t];
                    swapcontext(&scheduler, &current->context);
                    left -= current->done;
                }
                if (steps == seen) break;
            }
            if (seed % 2 && random() % 3 == 0)
                for (int copies = random() % 120; copies > 0; --copies) land();
            idle = steps == before ? idle + 1 : 0;
            if (idle > 60) land();
            if (idle > 2000) return false;
        }
        if (!late.empty()) fail("a block ended before its copies");
    }
    return true;
}
}  // namespace host

#define threadIdx (dim{host::current->thread})
#define blockIdx host::block
#define gridDim host::grid

inline int __clz(u32 v) { return __builtin_clz(v); }
inline void __syncwarp() { host::meet(host::mine(), 32); }
inline void __syncthreads() { host::meet(host::everyone, host::fibers.size()); }
inline u32 smem_address(const void* p) { return host::BASE + (u32)((const u8*)p - host::shared.data()); }
inline uint4 load_shared(u32 a) { return host::get<uint4>(a); }
inline u32 load_word(u32 a) { return host::get<u32>(a); }
inline u32 load_half(u32 a) { return host::get<u16>(a); }
inline void copy16(u32 to, const void* from, int bytes) {
    if ((u64)from % 16) host::fail("misaligned source");
    host::current->copies.push_back([=] {
        memset(host::at(to, 16), 0, 16);
        memcpy(host::at(to, 16), from, bytes);
    });
}
inline void barrier_init(u32 a, u32 count) {
    host::at(a, 8);
    host::barriers[a] = {(int)count, (int)count};
}
inline void barriers_visible() {}
inline void barrier_arrive(u32 a) { host::arrive(a, 1, 0); }
inline void barrier_expect(u32 a, u32 bytes) { host::arrive(a, 1, bytes); }
inline void barrier_arrive_on_copies(u32 a) {
    host::late.push_back({host::current->copies, a, 0});
    host::current->copies.clear();
}
inline void barrier_wait(u32 a, u32 parity) {
    while (host::barriers.at(a).phase == parity) host::give_way();
}
inline void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    if ((u64)from % 16 || to % 16 || bytes % 16) host::fail("misaligned bulk copy");
    host::late.push_back({{[=] { memcpy(host::at(to, bytes), from, bytes); }}, barrier, (long)bytes});
}

inline u16 to_bf16(float f) {
    u32 b;
    memcpy(&b, &f, 4);
    return (u16)(b + 0x7fff + (b >> 16 & 1) >> 16);
}
inline u32 decode(u32 word, u32 minus) {
    const u32 v = (word & 0x000f000f) | 0x43004300;
    u32 out = 0;
    for (u32 i = 0; i < 2; ++i) out |= (u32)to_bf16(host::value(v, i) + host::value(minus, i)) << 16 * i;
    return out;
}
inline float scale_value(u16 s) {
#if SCALE_BF16
    return host::value(s, 0);
#else
    _Float16 h;
    memcpy(&h, &s, 2);
    return (float)h;
#endif
}
inline float ratio(u16 last, u16 now) { return scale_value(last) / scale_value(now); }

inline uint4 load_fragments(u32 address) {
    host::Warp& warp = host::mine();
    const u32 lane = host::lane();
    warp.words[lane][0] = address;
    __syncwarp();
    u32 v[4];
    for (u32 m = 0; m < 4; ++m) memcpy(&v[m], host::at(warp.words[m * 8 + lane / 4][0], 16) + lane % 4 * 4, 4);
    __syncwarp();
    return {v[0], v[1], v[2], v[3]};
}
inline void mma(float* c, const u32* a, u32 b0, u32 b1) {
    host::Warp& warp = host::mine();
    const u32 lane = host::lane();
    memcpy(warp.words[lane], a, 16);
    warp.words[lane][4] = b0, warp.words[lane][5] = b1;
    __syncwarp();
    for (u32 e = 0; e < 4; ++e) {
        const u32 row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        for (u32 k = 0; k < 16; ++k)
            c[e] += host::left(warp.words, row, k) * host::value(warp.words[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
    }
    __syncwarp();
}

inline void products_fence() {}
inline void products_commit() {}
inline void proxy_fence() {}
inline void products(float* sums, const u32* a, u64 b, int accumulate) {
    host::Warp& warp = host::mine();
    const u32 lane = host::lane();
    warp.begun.sums[lane] = sums, warp.begun.b = b, warp.begun.accumulate = accumulate;
    memcpy(warp.begun.a[lane], a, 16);
    __syncwarp();
    if (lane == 0) warp.open.push_back(warp.begun);
    __syncwarp();
}
// The 64 sums a thread has of [64 columns of weight, 128 rows]; B in the 128-byte swizzle, eight rows every `stride`.
inline void products_wait(float*) {
    host::Warp& warp = host::mine();
    const u32 lane = host::lane();
    __syncwarp();
    for (const host::Product& p : warp.open) {
        const u32 start = (p.b & 0x3fff) << 4, stride = (p.b >> 32 & 0x3fff) << 4;
        if (p.b >> 62 != 1) host::fail("not the 128-byte swizzle");
        for (u32 e = 0; e < 64; ++e) {
            const u32 row = lane / 4 + e / 2 % 2 * 8, column = e / 4 * 8 + lane % 4 * 2 + e % 2;
            float sum = p.accumulate ? p.sums[lane][e] : 0.f;
            for (u32 k = 0; k < 16; ++k) {
                const u32 plain = start + column / 8 * stride + column % 8 * 128 + k * 2;
                sum += host::left(p.a, row, k) * host::value(host::get<u16>(plain ^ (plain >> 7 & 7) << 4), 0);
            }
            p.sums[lane][e] = sum;
        }
    }
    __syncwarp();
    if (lane == 0) warp.open.clear();
    __syncwarp();
}
