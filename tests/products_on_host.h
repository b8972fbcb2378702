// Enough of CUDA to run the products' sources on a CPU, as carelessly as a card. A thread is a fiber. All blocks of a grid
// are alive at once, some of them slow, and those of the next grid too once they may be; warps run in a random order and
// for a random while. Copies into shared memory land late and in any order, on even seeds only when nothing else can go on;
// stores that another block reads land when their block releases them; products of wgmma read when they are waited for. So
// a wait that is missing shows in the numbers. Instructions have the meaning of the PTX manual's tables and descriptors.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#define __device__
#define __global__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __restrict__
using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct dim { u32 x; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace host {
const u32 BASE = 0x480;                 // where shared memory begins: aligned to 128 and no more
const u32 STATIC = 2048, GUARD = 64, STACK = 1 << 15;
using Work = std::function<void()>;
struct Copy {
    u32 to, bytes, room;                // room: what is set, with zeros behind the bytes
    const u8* from;
    std::vector<u8> early;              // what was there when it began, for the half of them that read then
};
struct Late { std::vector<Copy> copies; u32 barrier; long bytes; u32 thread; };
struct Block;
struct Fiber {
    jmp_buf context;
    ucontext_t first;
    std::unique_ptr<char[]> stack;
    Block* block;
    u32 thread, waited;
    const u32* waits;                   // not run while *waits is `waited`
    bool begun, done;
    std::vector<Copy> copies;           // begun, with no barrier to arrive at yet
};
struct Product { float* sums[32]; u32 a[32][4]; u64 b; int accumulate; };
struct Warp {
    u32 here = 0, turn = 0, words[2][32][6];    // what lanes show, in turn
    float values[2][32][12];
    Product begun;
    std::vector<Product> open;
};
struct Barrier { int count, missing; long bytes; u32 phase; };
struct Store { u32 thread, turn; std::vector<u8> value; };
struct Grid;
struct Block {
    Grid* grid;
    u32 index, left, fixed_bytes = 0;
    bool slow, released = false;
    std::vector<u8> shared;
    std::vector<Fiber*> fibers;
    std::vector<Warp> warps;
    Warp everyone;
    std::map<u32, Barrier> barriers;
    std::map<int, u32> fixed;
    std::vector<Late> late;
    std::unordered_map<u8*, Store> stores;
};
struct Grid {
    u32 blocks, threads, bytes;
    bool dependent;                     // launched with programmatic serialization
    Work body;
    u32 left = 0, unreleased = 0;
    Grid* before = nullptr;
};
inline std::vector<std::unique_ptr<Fiber>> pool;
inline std::vector<std::unique_ptr<Grid>> grids;
inline Fiber* current;
inline jmp_buf scheduler;
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
inline Block& block() { return *current->block; }
inline Warp& mine() { return block().warps[current->thread / 32]; }
inline u32 lane() { return current->thread % 32; }
inline void give_way() {
    if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}
inline void wait_while(const u32& at, u32 value) {
    current->waits = &at, current->waited = value;
    while (at == value) give_way();
    current->waits = nullptr;
}
inline u8* at(Block& of, u32 address, u32 bytes) {
    if (address % bytes && bytes <= 16) fail("misaligned shared address");
    if (address < BASE || address + bytes > BASE + of.shared.size()) fail("outside of shared memory");
    return of.shared.data() + (address - BASE);
}
template <typename T> T get(u32 address) {
    T value;
    memcpy(&value, at(block(), address, sizeof(T)), sizeof(T));
    return value;
}
// A variable of the block's static shared memory.
template <typename T> T& fixed(int id) {
    Block& of = block();
    const auto place = of.fixed.try_emplace(id, of.fixed_bytes);
    if (place.second) of.fixed_bytes += (sizeof(T) + 15) / 16 * 16;
    if (of.fixed_bytes > STATIC) fail("more static shared memory than the plan leaves");
    return *reinterpret_cast<T*>(of.shared.data() + of.grid->bytes + GUARD + place.first->second);
}
inline void meet(Warp& warp, u32 size) {
    const u32 turn = warp.turn;
    ++steps;
    if (++warp.here == size) {
        warp.here = 0, ++warp.turn;
        return;
    }
    wait_while(warp.turn, turn);
}
inline void arrive(Block& of, u32 address, int arrivals, long bytes) {
    Barrier& barrier = of.barriers.at(address);
    barrier.missing -= arrivals, barrier.bytes += bytes;
    ++steps;
    if (barrier.missing < 0) fail("more arrivals than the barrier counts");
    if (barrier.missing == 0 && barrier.bytes == 0) barrier.missing = barrier.count, barrier.phase ^= 1;
}
inline Copy begin(u32 to, const void* from, u32 bytes, u32 room) {
    const u8* source = (const u8*)from;
    if ((u64)source % 16) fail("misaligned source");
    Copy copy = {to, bytes, room, source, {}};
    at(block(), to, room);
    if (random() % 2) copy.early.assign(source, source + bytes);
    return copy;
}
inline void land(Block& of, const Copy& copy) {
    u8* to = at(of, copy.to, copy.room);
    memcpy(to, copy.early.empty() ? copy.from : copy.early.data(), copy.bytes);
    memset(to + copy.bytes, 0, copy.room - copy.bytes);
}
inline void land(Block& of, size_t which) {
    std::swap(of.late[which], of.late.back());
    const Late late = std::move(of.late.back());
    of.late.pop_back();
    for (const Copy& copy : late.copies) land(of, copy);
    arrive(of, late.barrier, late.bytes ? 0 : 1, -late.bytes);
}
inline void land(Block& of) {
    if (!of.late.empty()) land(of, random() % of.late.size());
}
// Stores that come before what `thread` does now: its own, and the block's from before its last barrier.
inline bool before(const Block& of, const Store& store, u32 thread) {
    return store.thread == thread || store.turn != of.everyone.turn;
}
template <typename Which> void publish(Block& of, Which which) {
    for (auto store = of.stores.begin(); store != of.stores.end();)
        if (which(store->second)) {
            memcpy(store->first, store->second.value.data(), store->second.value.size());
            store = of.stores.erase(store);
        } else {
            ++store;
        }
}
inline void count(u32* counter, u32 last) {
    *counter = *counter >= last ? 0 : *counter + 1;
    ++steps;
}
inline float value(u32 word, u32 half) {
    const u32 bits = (word >> 16 * half) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
inline float half_value(u16 bits) {
    _Float16 h;
    memcpy(&h, &bits, 2);
    return (float)h;
}
// Row and column of 16 x 16 fragments that the lanes of a warp hold.
template <int N> float left(const u32 (&lanes)[32][N], u32 row, u32 k) {
    return value(lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
}

inline void release(Block& of) {
    of.grid->unreleased -= !of.released;
    of.released = true;
    ++steps;
}
inline void end(Block& of) {
    publish(of, [](const Store&) { return true; });
    if (!of.late.empty()) fail("a block ended before its copies");
    for (u32 i = 0; i < GUARD; ++i)
        if (of.shared[of.grid->bytes + i] != 0xff) fail("a block wrote behind its shared memory");
    release(of);
    --of.grid->left;
}
inline void enter() {
    block().grid->body();
    current->done = true;
    ++steps;
    _longjmp(scheduler, 1);
}
inline void resume(Fiber* fiber) {
    current = fiber;
    if (_setjmp(scheduler)) return;
    if (current->begun) _longjmp(current->context, 1);
    current->begun = true;
    setcontext(&current->first);
}
inline void begin(Block& of, Grid& grid, u32 index) {
    of.grid = &grid, of.index = index, of.left = grid.threads, of.slow = random() % 3 == 0;
    of.shared.assign(grid.bytes + GUARD + STATIC, 0xff);
    of.warps.resize(grid.threads / 32);
    for (u32 t = 0; t < grid.threads; ++t) {
        if (pool.empty()) {
            pool.push_back(std::make_unique<Fiber>());
            pool.back()->stack.reset(new char[STACK]);
        }
        Fiber& fiber = *pool.back().release();
        pool.pop_back();
        fiber.block = &of, fiber.thread = t, fiber.waits = nullptr, fiber.begun = fiber.done = false;
        fiber.copies.clear();
        getcontext(&fiber.first);
        fiber.first.uc_stack.ss_sp = fiber.stack.get();
        fiber.first.uc_stack.ss_size = STACK;
        makecontext(&fiber.first, enter, 0);
        of.fibers.push_back(&fiber);
    }
}
inline void turn_of(Block& of, u32 warp) {
    for (int turns = random() % 40; turns >= 0; --turns) {
        const long seen = steps;
        for (u32 t = warp * 32; t < warp * 32 + 32; ++t) {
            Fiber* fiber = of.fibers[t];
            if (fiber->done || (fiber->waits && *fiber->waits == fiber->waited)) continue;
            resume(fiber);
            of.left -= fiber->done;
        }
        if (steps == seen) return;
    }
}
inline bool may_begin(const Grid& grid) {
    return !grid.before || (grid.dependent ? grid.before->unreleased : grid.before->left) == 0;
}
// Runs all grids that were added. False if some thread waits for what never comes.
inline bool run(u64 seed) {
    state = seed * 77777 + 12345;
    for (int i = 0; i < 4; ++i) random();
    std::vector<std::unique_ptr<Block>> alive;
    u32 begun = 0, warps = 0;
    for (size_t g = 0; g < grids.size(); ++g) {
        grids[g]->before = g ? grids[g - 1].get() : nullptr;
        grids[g]->left = grids[g]->unreleased = grids[g]->blocks;
    }
    for (u32 idle = 0, stuck = 0; begun < grids.size() || !alive.empty();) {
        if (begun < grids.size() && may_begin(*grids[begun])) {
            Grid& grid = *grids[begun++];
            for (u32 b = 0; b < grid.blocks; ++b) {
                alive.push_back(std::make_unique<Block>());
                begin(*alive.back(), grid, b);
            }
            warps += grid.blocks * grid.threads / 32;
        }
        const size_t which = random() % alive.size();
        Block& of = *alive[which];
        if (of.slow && idle == 0 && random() % 16) continue;
        const long before = steps;
        turn_of(of, random() % of.warps.size());
        if (seed % 2 && random() % 3 == 0)
            for (int copies = random() % 120; copies > 0; --copies) land(of);
        if (random() % 64 == 0) publish(of, [](const Store&) { return random() % 4 == 0; });
        idle = steps == before ? idle + 1 : 0;
        stuck = idle ? stuck + 1 : 0;
        if (idle > 3 * warps && !of.late.empty()) {
            land(of);
            stuck = 0;
        }
        if (stuck > 100 * warps + 2000) return false;
        if (of.left == 0) {
            end(of);
            warps -= of.warps.size();
            for (Fiber* fiber : of.fibers) pool.emplace_back(fiber);
            std::swap(alive[which], alive.back());
            alive.pop_back();
        }
    }
    grids.clear();
    return true;
}
inline void add(u32 blocks, u32 threads, u32 bytes, bool dependent, Work body) {
    grids.push_back(std::make_unique<Grid>());
    Grid& grid = *grids.back();
    grid.blocks = blocks, grid.threads = threads, grid.bytes = bytes, grid.dependent = dependent, grid.body = body;
}
}  // namespace host

#define threadIdx (dim{host::current->thread})
#define blockIdx (dim{host::block().index})
#define gridDim (dim{host::block().grid->blocks})

inline int __clz(u32 v) { return __builtin_clz(v); }
inline float __expf(float a) { return std::exp(a); }
inline float rsqrtf(float a) { return 1.f / std::sqrt(a); }
inline void __syncwarp() { host::meet(host::mine(), 32); }
inline void __syncthreads() { host::meet(host::block().everyone, host::block().grid->threads); }
inline float __shfl_xor_sync(u32, float value, u32 mask) {
    host::Warp& warp = host::mine();
    const u32 lane = host::lane(), turn = warp.turn % 2;
    warp.values[turn][lane][0] = value;
    __syncwarp();
    return warp.values[turn][lane ^ mask][0];
}
// Between blocks.
template <typename T> void __stcg(T* to, T value) {
    host::Block& of = host::block();
    host::Store& store = of.stores[(u8*)to];
    store.thread = host::current->thread, store.turn = of.everyone.turn;
    store.value.assign((u8*)&value, (u8*)&value + sizeof(T));
}
template <typename T> T __ldcg(const T* from) {
    host::Block& of = host::block();
    const auto own = of.stores.find((u8*)from);
    T value = *from;
    if (own != of.stores.end() && host::before(of, own->second, host::current->thread))
        memcpy(&value, own->second.value.data(), sizeof(T));
    return value;
}
inline void count_release(u32* counter, u32 last) {
    const u32 thread = host::current->thread;
    host::Block& of = host::block();
    host::publish(of, [&](const host::Store& store) { return host::before(of, store, thread); });
    host::count(counter, last);
}
inline void count_relaxed(u32* counter, u32 last) { host::count(counter, last); }
inline u32 count_acquire(const u32* counter) {
    host::give_way();
    return *counter;
}
inline void wait_for_grid() {
    if (host::block().grid->before)
        while (host::block().grid->before->left) host::give_way();
}
inline void release_grid() { host::release(host::block()); }

inline u32 smem_address(const void* p) { return host::BASE + (u32)((const u8*)p - host::block().shared.data()); }
inline uint4 load_shared(u32 a) { return host::get<uint4>(a); }
inline uint2 load_pair(u32 a) { return host::get<uint2>(a); }
inline u32 load_word(u32 a) { return host::get<u32>(a); }
inline u32 load_half(u32 a) { return host::get<u16>(a); }
inline void copy16(u32 to, const void* from, int bytes) {
    host::current->copies.push_back(host::begin(to, from, bytes, 16));
}
inline void wait_copies() {
    host::Block& of = host::block();
    for (const host::Copy& copy : host::current->copies) host::land(of, copy);
    host::current->copies.clear();
    for (size_t i = of.late.size(); i-- > 0;)
        if (of.late[i].bytes == 0 && of.late[i].thread == host::current->thread) host::land(of, i);
}
inline void barrier_init(u32 a, u32 count) {
    host::at(host::block(), a, 8);
    host::block().barriers[a] = {(int)count, (int)count, 0, 0};
}
inline void barriers_visible() {}
inline void barrier_arrive(u32 a) { host::arrive(host::block(), a, 1, 0); }
inline void barrier_expect(u32 a, u32 bytes) { host::arrive(host::block(), a, 1, bytes); }
inline void barrier_arrive_on_copies(u32 a) {
    host::block().late.push_back({std::move(host::current->copies), a, 0, host::current->thread});
    host::current->copies.clear();
}
inline void barrier_wait(u32 a, u32 parity) { host::wait_while(host::block().barriers.at(a).phase, parity); }
inline u64 stream_policy() { return 0; }
inline void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    if (to % 16 || bytes % 16) host::fail("misaligned bulk copy");
    host::block().late.push_back({{host::begin(to, from, bytes, bytes)}, barrier, (long)bytes, 0});
}
inline void bulk_copy_stream(u32 to, const void* from, u32 bytes, u32 barrier, u64) { bulk_copy(to, from, bytes, barrier); }

inline float bf16_value(u16 h) { return host::value(h, 0); }
inline float __uint_as_float(u32 b) { float f; memcpy(&f, &b, 4); return f; }
inline u16 to_bf16(float f) {
    u32 b;
    memcpy(&b, &f, 4);
    return f != f ? 0x7fff : (u16)(b + 0x7fff + (b >> 16 & 1) >> 16);
}
inline u32 decode(u32 word, u32 minus) {
    const u32 v = (word & 0x000f000f) | 0x43004300;
    u32 out = 0;
    for (u32 i = 0; i < 2; ++i) out |= (u32)to_bf16(host::value(v, i) + host::value(minus, i)) << 16 * i;
    return out;
}
inline uint4 load_fragments(u32 address) {
    host::Warp& warp = host::mine();
    const u32 lane = host::lane(), turn = warp.turn % 2;
    warp.words[turn][lane][0] = address;
    __syncwarp();
    u32 v[4];
    for (u32 m = 0; m < 4; ++m)
        memcpy(&v[m], host::at(host::block(), warp.words[turn][m * 8 + lane / 4][0], 16) + lane % 4 * 4, 4);
    return {v[0], v[1], v[2], v[3]};
}
__attribute__((optimize("O2"))) inline void mma(float* c, const u32* a, u32 b0, u32 b1) {
    host::Warp& warp = host::mine();
    const u32 lane = host::lane(), turn = warp.turn % 2;
    float(&of)[32][12] = warp.values[turn];
    for (u32 i = 0; i < 8; ++i) of[lane][i] = host::value(a[i / 2], i % 2);
    for (u32 i = 0; i < 4; ++i) of[lane][8 + i] = host::value(i < 2 ? b0 : b1, i % 2);
    __syncwarp();
    for (u32 e = 0; e < 4; ++e) {
        const u32 row = lane / 4 * 4, column = (lane % 4 * 2 + e % 2) * 4;
        for (u32 k = 0; k < 16; ++k)
            c[e] += of[row + k % 8 / 2][(e / 2 + k / 8 * 2) * 2 + k % 2] * of[column + k % 8 / 2][8 + k / 8 * 2 + k % 2];
    }
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
__attribute__((optimize("O2"))) inline void products_wait(float*) {
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
