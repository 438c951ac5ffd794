// SPDX-License-Identifier: Apache-2.0
// Instructions of a whole warp on matrices. ldmatrix, stmatrix and mma.sync are done at once; a
// wgmma is under way until its warp waits for it. Its accumulators hold poison meanwhile; what it
// reads is read when it is waited for or, in some schedules, when it is issued.
//
// Each warp does its 16 rows by itself, so that the four of a warpgroup are not synchronised by
// accident; that they issue the same products is checked.
#pragma once
#include "host/executor/copies.h"
#include "host/executor/products.h"

namespace host {
namespace {

const char* fetch_shared(
    Worker& w, Block& block, uint32_t offset, size_t bytes, Place place, int fiber) {
    static const char nothing[128] = {};
    const unsigned char* const pointer = block.shared + offset;
    if (!check_shared(w, block, Access::kLoad, pointer, bytes, bytes, place, fiber)) return nothing;
    return reinterpret_cast<const char*>(pointer);
}

// --- At once -------------------------------------------------------------------------------------

struct MatrixRows {
    unsigned int* registers;
    void* row;
};

void check_rows(Worker& w,
                const Fiber* fibers,
                const MatrixRows* const* lanes,
                int count,
                Access access,
                Place place) {
    for (int lane = 0; lane < 8 * count; ++lane) {
        const int fiber = static_cast<int>(&fibers[lane] - w.fibers);
        const uintptr_t address = reinterpret_cast<uintptr_t>(lanes[lane]->row);
        if (!check_shared(w, *fibers[lane].block, access, lanes[lane]->row, kPieceBytes,
                          kPieceBytes, place, fiber)) {
            return;
        }
        watch_thread(w, static_cast<unsigned int>(fiber), access, address, kPieceBytes, place);
        if (access == Access::kStore) tag_written(w, fibers[lane], address, kPieceBytes, place);
    }
}

void ldmatrix(Place place, unsigned int* registers, const void* row, int count, bool transposed) {
    const MatrixRows mine = {registers, const_cast<void*>(row)};
    const auto work = [&](Worker& w, Fiber* fibers, const MatrixRows* const* lanes) {
        check_rows(w, fibers, lanes, count, Access::kLoad, place);
        if (w.failure.fault != Fault::kNone) return;
        const void* rows[kWarpSize];
        uint32_t* to[kWarpSize];
        for (int i = 0; i < kWarpSize; ++i) {
            rows[i] = lanes[i]->row;
            to[i] = lanes[i]->registers;
        }
        load_matrices(count, transposed, rows, to);
    };
    warp_together(place, mine, work);
}

void stmatrix(Place place, void* row, const unsigned int* registers, int count, bool transposed) {
    const MatrixRows mine = {const_cast<unsigned int*>(registers), row};
    const auto work = [&](Worker& w, Fiber* fibers, const MatrixRows* const* lanes) {
        check_rows(w, fibers, lanes, count, Access::kStore, place);
        if (w.failure.fault != Fault::kNone) return;
        void* rows[kWarpSize];
        const uint32_t* from[kWarpSize];
        for (int i = 0; i < kWarpSize; ++i) {
            rows[i] = lanes[i]->row;
            from[i] = lanes[i]->registers;
        }
        store_matrices(count, transposed, rows, from);
    };
    warp_together(place, mine, work);
}

struct MmaCall {
    float* d;
    const unsigned int *a, *b;
};

void mma_sync(
    Place place, float* d, const unsigned int* a, const unsigned int* b, Element element) {
    const MmaCall mine = {d, a, b};
    warp_together(place, mine, [&](Worker&, Fiber*, const MmaCall* const* lanes) {
        const uint32_t *as[kWarpSize], *bs[kWarpSize];
        float* ds[kWarpSize];
        for (int i = 0; i < kWarpSize; ++i) {
            as[i] = lanes[i]->a;
            bs[i] = lanes[i]->b;
            ds[i] = lanes[i]->d;
        }
        if (element == Element::kFloat16) {
            mma<Float16>(as, bs, ds, ds);
        } else {
            mma<Bfloat16>(as, bs, ds, ds);
        }
    });
}

// --- wgmma ---------------------------------------------------------------------------------------

constexpr unsigned int kWarpsInGroup = 4;
constexpr int kMaxAccumulators = kMaxColumns / 2;
// A signalling NaN: arithmetic makes it a quiet one, so that accumulators which were touched
// differ.
constexpr uint32_t kAccumulatorPoison = 0xffbfffff;

// A product of one warp under way.
struct Wgmma {
    Wgmma* next;
    WgmmaCall call;  // of lane 0
    Place place;
    unsigned int group;
    int fiber;       // of lane 0
    Actor actor;     // as it is issued
    bool continues;  // adds to what an earlier product under way leaves in the accumulators
    bool computed;   // at its issue: `product` is there
    float* d[kWarpSize];
    const unsigned int* a[kWarpSize];
    float before[kWarpSize][kMaxAccumulators];  // of the accumulators
    float product[kWarpSize * kMaxAccumulators];
};

// With Proxy::kRead, as the product is issued; with kReadLate, later.
template <class T>
void gather_operands(Worker& w, const Wgmma& it, Proxy proxy, float* a, float* b) {
    Block& block = *w.fibers[it.fiber].block;
    const bool watched = w.races.on() && proxy == Proxy::kRead;
    const Source source = watched ? w.races.source(it.place) : 0;
    const auto fetch = [&](uint32_t offset) -> const void* {
        const void* const piece = fetch_shared(w, block, offset, kPieceBytes, it.place, it.fiber);
        const uintptr_t address = reinterpret_cast<uintptr_t>(block.shared + offset);
        if (watched) watch(w, it.actor, Access::kLoad, address, kPieceBytes, source);
        check_proxy(w, block, it.fiber, proxy, address, kPieceBytes, it.place);
        return piece;
    };
    const WgmmaCall& call = it.call;
    if (call.a) {
        gather_a<T>(it.a, a);
    } else {
        const unsigned int warp = thread_of(w.fibers[it.fiber]) / kWarpSize % kWarpsInGroup;
        gather_a<T>(decode_descriptor(call.a_descriptor),
                    call.a_transposed ? Major::kMn : Major::kK, static_cast<int>(warp) * kSlab,
                    kSlab, fetch, a);
    }
    gather_b<T>(decode_descriptor(call.b_descriptor), call.b_transposed ? Major::kMn : Major::kK,
                call.n, fetch, b);
}

__thread float columns_of_b[kMaxColumns * kDepth];  // too much for the stack of a fiber

void compute_product(Worker& w, Wgmma& it, Proxy proxy) {
    float a[kSlab * kDepth];
    if (it.call.element == Element::kFloat16) {
        gather_operands<Float16>(w, it, proxy, a, columns_of_b);
    } else {
        gather_operands<Bfloat16>(w, it, proxy, a, columns_of_b);
    }
    multiply(a, columns_of_b, it.call.n, it.product);
    it.computed = true;
}

// For a product that will be computed later: what is fenced by then may not be fenced now.
void check_operands(Worker& w, const Wgmma& it) {
    float a[kSlab * kDepth];
    gather_operands<Bfloat16>(w, it, Proxy::kRead, a, columns_of_b);
}

// What all lanes of a warp, and all warps of a warpgroup, must issue alike.
uint64_t mark_of(const WgmmaCall& call) {
    const uint64_t rest =
        static_cast<uint64_t>(call.n) << 4 | static_cast<uint64_t>(call.element) << 3 |
        static_cast<uint64_t>(call.a_transposed) << 2 |
        static_cast<uint64_t>(call.b_transposed) << 1 | static_cast<uint64_t>(call.accumulate);
    const uint64_t parts[] = {call.a ? 1 : call.a_descriptor * 2, call.b_descriptor, rest};
    uint64_t mark = 0;
    for (const uint64_t part : parts) {
        mark = (mark ^ part) * 0x9e3779b97f4a7c15;
        mark ^= mark >> 29;
    }
    return mark;
}

// Leaves poison where a product will bring its results.
void take_accumulators(Wgmma& it) {
    const int count = it.call.n / 2;
    for (int i = 0; i < kWarpSize; ++i) {
        memcpy(it.before[i], it.d[i], static_cast<size_t>(count) * sizeof(float));
        for (int j = 0; j < count; ++j) {
            memcpy(&it.d[i][j], &kAccumulatorPoison, sizeof(kAccumulatorPoison));
        }
    }
    it.continues = false;
}

// Notes what is wrong with a call that a warp makes.
void check_wgmma(Worker& w, Place place, const Fiber* fibers, const WgmmaCall* const* lanes) {
    const WgmmaCall& call = *lanes[0];
    const unsigned int thread = thread_of(fibers[0]);
    Warp& warp = w.warps_of[warp_of(static_cast<unsigned int>(&fibers[0] - w.fibers))];
    if (thread / 128 * 128 + 128 > w.launch->block) {
        return note_misuse(w, place, -1, "needs a warpgroup of 128 threads");
    }
    if (!warp.fenced) {
        return note_misuse(w, place, -1,
                           "needs wgmma_fence() before it: registers may have changed");
    }
    const uint64_t mark = mark_of(call);
    for (int i = 1; i < kWarpSize; ++i) {
        if (mark_of(*lanes[i]) != mark) {
            return note_misuse(w, place, -1, "lane %d passes another operand than lane 0", i);
        }
    }
    ProductMark& first = fibers[0].block->marks[thread / 128][warp.products % kProductMarks];
    if (first.number == warp.products + 1 && first.mark != mark) {
        return note_misuse(w, place, -1,
                           "the warps of a warpgroup issue different products: number %u",
                           warp.products);
    }
    if (first.number < warp.products + 1) first = {warp.products + 1, mark};
    const char* problem = call.a ? nullptr : decode_descriptor(call.a_descriptor).problem;
    if (problem) return note_misuse(w, place, -1, "operand a: %s", problem);
    problem = decode_descriptor(call.b_descriptor).problem;
    if (problem) return note_misuse(w, place, -1, "operand b: %s", problem);
}

void wgmma_issue(Place place, const WgmmaCall& mine) {
    warp_together(place, mine, [&](Worker& w, Fiber* fibers, const WgmmaCall* const* lanes) {
        check_wgmma(w, place, fibers, lanes);
        if (w.failure.fault != Fault::kNone) return;
        Wgmma* it = w.spare_products;
        if (it) {
            w.spare_products = it->next;
        } else {
            it = static_cast<Wgmma*>(malloc(sizeof(Wgmma)));
            if (!it) return note_misuse(w, place, -1, "not enough memory on the CPU");
        }
        Warp& warp = w.warps_of[warp_of(static_cast<unsigned int>(&fibers[0] - w.fibers))];
        it->next = nullptr;
        it->call = *lanes[0];
        it->place = place;
        it->group = warp.product_groups;
        it->fiber = static_cast<int>(&fibers[0] - w.fibers);
        it->continues = it->computed = false;
        for (int i = 0; i < kWarpSize; ++i) {
            it->d[i] = lanes[i]->d;
            it->a[i] = lanes[i]->a;
        }
        for (const Wgmma* other = warp.first_product; other; other = other->next) {
            it->continues |= other->d[0] == it->d[0];
        }
        if (!it->continues) take_accumulators(*it);
        (warp.first_product ? warp.last_product->next : warp.first_product) = it;
        warp.last_product = it;
        ++warp.products;
        if (w.races.on()) {
            it->actor =
                w.races.product(static_cast<unsigned int>(it->fiber), time_of_group(it->group));
        }
        if (w.schedule.choose(2)) {
            compute_product(w, *it, Proxy::kRead);
        } else if (fibers[0].block->tagged || w.races.on()) {
            check_operands(w, *it);
        }
    });
}

// The first product under way of a warp is done.
void finish_product(Worker& w, Warp& warp) {
    Wgmma& it = *warp.first_product;
    if (!it.computed) compute_product(w, it, Proxy::kReadLate);
    const int count = it.call.n / 2;
    const float* before[kWarpSize];
    for (int i = 0; i < kWarpSize; ++i) {
        before[i] = it.continues ? it.d[i] : it.before[i];
        for (int j = 0; j < count && !it.continues; ++j) {
            uint32_t bits;
            memcpy(&bits, &it.d[i][j], sizeof(bits));
            if (bits != kAccumulatorPoison) {
                note_misuse(w, it.place, it.fiber + i,
                            "accumulator %d was written while the product was under way", j);
            }
        }
    }
    accumulate(it.product, it.call.n, it.call.accumulate ? before : nullptr, it.d);
    if (w.races.on()) {
        const unsigned int first = static_cast<unsigned int>(it.fiber);
        const unsigned int number = thread_of(w.fibers[first]) / kWarpSize;
        for (unsigned int lane = first; lane < first + kWarpSize; ++lane) {
            w.races.finished(lane, Engine::kProduct, number, time_of_group(it.group));
        }
    }
    warp.first_product = it.next;
    it.next = w.spare_products;
    w.spare_products = &it;
}

Warp& warp_of_lanes(Worker& w, const Fiber* fibers) {
    return w.warps_of[warp_of(static_cast<unsigned int>(&fibers[0] - w.fibers))];
}

void wgmma_fence(Place place) {
    warp_together(place, 0, [](Worker& w, Fiber* fibers, const int* const*) {
        warp_of_lanes(w, fibers).fenced = true;
    });
}

void wgmma_commit(Place place) {
    warp_together(place, 0, [](Worker& w, Fiber* fibers, const int* const*) {
        ++warp_of_lanes(w, fibers).product_groups;
    });
}

void wgmma_wait(Place place, int pending) {
    warp_together(place, pending, [&](Worker& w, Fiber* fibers, const int* const*) {
        Warp& warp = warp_of_lanes(w, fibers);
        const unsigned int group = warp.product_groups - static_cast<unsigned int>(pending);
        while (warp.first_product && static_cast<int>(group - warp.first_product->group) > 0) {
            finish_product(w, warp);
        }
        // Sums that a product still under way goes on with are nobody's to read.
        for (Wgmma* it = warp.first_product; it; it = it->next) {
            bool first = it->continues;
            for (const Wgmma* other = warp.first_product; other != it; other = other->next) {
                first = first && other->d[0] != it->d[0];
            }
            if (first) take_accumulators(*it);
        }
        warp.fenced = false;
    });
}

// The running thread returns.
void check_no_product(Worker& w) {
    const Warp& warp = w.warps_of[warp_of(static_cast<unsigned int>(w.running))];
    if (!warp.first_product) return;
    note_misuse(w, warp.first_product->place, -1,
                "the thread returned while this product was under way; wait with wgmma_wait");
}

}  // namespace
}  // namespace host
