// SPDX-License-Identifier: Apache-2.0
// The arithmetic of kernels/host/executor/, exported for tests/test_layouts.py.
#include "executor/boxes.h"
#include "executor/layouts.h"
#include "executor/products.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace host;

namespace {

Major major_of(int transposed) { return transposed ? Major::kMn : Major::kK; }

// Room for one wgmma; too much for the stack of a fiber.
struct Workspace {
    float a[4 * kSlab * kDepth], b[kMaxColumns * kDepth], product[kSlab * kMaxColumns];
};

// wgmma m64nNk16 for the four warps, once `room` holds the operands: d[thread][0 to n / 2 - 1], to
// which the product is added, or which it replaces.
inline void wgmma(Workspace& room, int n, bool add, float* const* d) {
    for (int warp = 0; warp < 4; ++warp) {
        float* const* const mine = d + 32 * warp;
        multiply(room.a + warp * kSlab * kDepth, room.b, n, room.product);
        accumulate(room.product, n, add ? mine : nullptr, mine);
    }
}

Workspace room;

// One array for all lanes or threads becomes a pointer for each.
template <class T, int count = 32>
struct Rows {
    T* at[count];

    Rows(T* first, int stride) {
        for (int i = 0; i < count; ++i) at[i] = first + i * stride;
    }
};

template <class Element>
void run_wgmma(const unsigned char* memory,
               uint64_t a,
               int a_transposed,
               const uint32_t* a_registers,
               uint64_t b,
               int b_transposed,
               int n,
               int add,
               float* const* d) {
    const auto fetch = [=](uint32_t address) { return memory + address; };
    if (a_registers) {
        for (int warp = 0; warp < 4; ++warp) {
            const Rows<const uint32_t> mine(a_registers + warp * 32 * 4, 4);
            gather_a<Element>(mine.at, room.a + warp * kSlab * kDepth);
        }
    } else {
        // Warp by warp, as an executor may do.
        for (int m = 0; m < 64; m += kSlab) {
            float* const rows = room.a + m * kDepth;
            gather_a<Element>(decode_descriptor(a), major_of(a_transposed), m, kSlab, fetch, rows);
        }
    }
    gather_b<Element>(decode_descriptor(b), major_of(b_transposed), n, fetch, room.b);
    wgmma(room, n, add, d);
}

}  // namespace

EXPORT const char* descriptor(uint64_t bits, uint32_t* fields) {
    const Descriptor d = decode_descriptor(bits);
    fields[0] = d.start;
    fields[1] = d.leading;
    fields[2] = d.stride;
    fields[3] = d.span;
    return d.problem;
}

EXPORT void addresses(uint64_t bits, int transposed, int count, uint32_t* out) {
    const Descriptor d = decode_descriptor(bits);
    for (int mn = 0; mn < count; ++mn) {
        for (int k = 0; k < kDepth; ++k) *out++ = operand_address(d, major_of(transposed), mn, k);
    }
}

// For each thread, register and half: row and column.
EXPORT void a_cells(int threads, Cell* out) {
    for (int thread = 0; thread < threads; ++thread) {
        for (int i = 0; i < 8; ++i) *out++ = a_cell(thread, i / 2, i % 2);
    }
}

EXPORT void b_cells(Cell* out) {
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) *out++ = b_cell(lane, i / 2, i % 2);
    }
}

EXPORT void accumulator_cells(int threads, int n, Cell* out) {
    for (int thread = 0; thread < threads; ++thread) {
        for (int i = 0; i < n / 2; ++i) *out++ = accumulator_cell(thread, i);
    }
}

EXPORT void accumulator_registers(int n, Register* out) {
    for (int row = 0; row < 64; ++row) {
        for (int column = 0; column < n; ++column) *out++ = accumulator_register(row, column);
    }
}

// rows: for each lane, which row of 8 elements of `memory` it points to.
EXPORT void ldmatrix(
    int count, int transposed, uint16_t* memory, const int* rows, uint32_t* registers) {
    const void* at[32];
    for (int lane = 0; lane < 32; ++lane) at[lane] = lane < 8 * count ? memory + rows[lane] * 8 : 0;
    load_matrices(count, transposed, at, Rows<uint32_t>(registers, count).at);
}

EXPORT void stmatrix(
    int count, int transposed, uint16_t* memory, const int* rows, const uint32_t* registers) {
    void* at[32];
    for (int lane = 0; lane < 32; ++lane) at[lane] = lane < 8 * count ? memory + rows[lane] * 8 : 0;
    store_matrices(count, transposed, at, Rows<const uint32_t>(registers, count).at);
}

EXPORT void to_floats(int bfloat16, const uint16_t* from, int count, float* to) {
    for (int i = 0; i < count; i += 8) {
        bfloat16 ? widen<Bfloat16, 1>(from + i, to + i) : widen<Float16, 1>(from + i, to + i);
    }
}

EXPORT void mma_product(
    int bfloat16, const uint32_t* a, const uint32_t* b, const float* c, float* d) {
    const Rows<const uint32_t> as(a, 4), bs(b, 2);
    const Rows<const float> cs(c, 4);
    const Rows<float> ds(d, 4);
    const auto run = bfloat16 ? mma<Bfloat16> : mma<Float16>;
    run(as.at, bs.at, c ? cs.at : nullptr, ds.at);
}

EXPORT void wgmma_product(int bfloat16,
                          const unsigned char* memory,
                          uint64_t a,
                          int a_transposed,
                          const uint32_t* a_registers,
                          uint64_t b,
                          int b_transposed,
                          int n,
                          int add,
                          float* d) {
    const auto run = bfloat16 ? run_wgmma<Bfloat16> : run_wgmma<Float16>;
    run(memory, a, a_transposed, a_registers, b, b_transposed, n, add,
        Rows<float, 128>(d, n / 2).at);
}

EXPORT const char* problem_of_box(const TensorMap* map, uint32_t shared) {
    return box_problem(*map, shared);
}

// The pieces; returns their number. sizes: bytes of the box, and of shared memory that it spans.
EXPORT int box_pieces(
    const TensorMap* map, const int32_t* coordinates, uint32_t shared, size_t* sizes, Piece* out) {
    sizes[0] = box_bytes(*map);
    sizes[1] = box_rows(*map) * row_pitch(*map);
    int count = 0;
    for_each_piece(*map, coordinates, shared, [&](const Piece& piece) { out[count++] = piece; });
    return count;
}

// Stands for the driver: a map that says what it was asked for.
EXPORT int cuTensorMapEncodeTiled(void* map,
                                  int type,
                                  uint32_t rank,
                                  void* address,
                                  const uint64_t* dims,
                                  const uint64_t* strides,
                                  const uint32_t* box,
                                  const uint32_t* steps,
                                  int interleave,
                                  int swizzle_mode,
                                  int promotion,
                                  int fill) {
    if (reinterpret_cast<uintptr_t>(map) % 64) return 1;
    uint64_t said[16] = {reinterpret_cast<uintptr_t>(address)};
    int32_t small[8] = {type, static_cast<int>(rank), interleave, swizzle_mode, promotion, fill};
    for (uint32_t i = 0; i < rank; ++i) {
        said[1 + i] = dims[i];
        if (i + 1 < rank) said[6 + i] = strides[i];
        small[6] = small[6] * 256 + static_cast<int>(box[i]);
        small[7] += static_cast<int>(steps[i]);
    }
    memcpy(said + 10, small, sizeof small);
    memcpy(map, said, sizeof said);
    return static_cast<int>(box[0] == 256) * 700;
}
