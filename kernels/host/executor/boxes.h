// SPDX-License-Identifier: Apache-2.0
// What the TMA unit moves: a box of a tensor in global memory, and where it lies in shared memory.
//
// Pure arithmetic, the same for loads, stores and reductions: it names pieces, the caller moves
// them.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "layouts.h"

namespace host {

constexpr uint64_t kTensorMapMagic = 0x50414d464c554331;
constexpr int kMaxRank = 5;

// Stands where a GPU has its opaque map of a tensor. TensorMap.encode_cpu of cuflash/tensormap.py
// writes it, and has checked it; axes beyond the rank have size, box and stride 1, 1 and 0.
struct TensorMap {
    uint64_t magic;
    uint64_t address;                // of the tensor in global memory
    uint64_t dims[kMaxRank];         // innermost first
    uint64_t strides[kMaxRank - 1];  // in bytes, of axis 1 and on
    uint32_t box[kMaxRank];
    uint32_t rank;
    uint32_t type;  // as the driver numbers them: CU_TENSOR_MAP_DATA_TYPE_...
    uint32_t element_bytes;
    uint32_t swizzle_bytes;  // 0: none
    uint32_t unused;
};
static_assert(sizeof(TensorMap) == 128, "the size of CUtensorMap");

// Shared memory that a box takes up. Swizzled rows are a swizzle apart even where they are shorter;
// what is between them is neither read nor written.
inline uint32_t row_pitch(const TensorMap& map) {
    return map.swizzle_bytes ? map.swizzle_bytes : map.box[0] * map.element_bytes;
}

inline size_t box_rows(const TensorMap& map) {
    return static_cast<size_t>(map.box[1]) * map.box[2] * map.box[3] * map.box[4];
}

// The bytes that a load reports to its barrier: all of the box, in the tensor or not.
inline size_t box_bytes(const TensorMap& map) {
    return box_rows(map) * map.box[0] * map.element_bytes;
}

// Why a box must not be moved to or from a shared address, or null.
inline const char* box_problem(const TensorMap& map, uint32_t shared) {
    if (map.magic != kTensorMapMagic) return "there is no tensor map";
    if (shared % 128) return "the shared address is not a multiple of 128";
    // The driver makes such maps, but an H200 took all copies with them for illegal instructions.
    if (map.rank == 1 && map.swizzle_bytes == 0) {
        return "a box of a tensor of one axis must be swizzled; a bulk copy moves the same bytes";
    }
    return nullptr;
}

// 16 bytes of shared memory. Those from `begin` to before `end` are in the tensor, from `global`
// on; the others are not. A load makes them zero, a store or a reduction leaves them out.
struct Piece {
    uint32_t shared;
    int begin, end;
    uint64_t global;
};

// Calls visit(Piece) for each piece of the box whose first element has the given coordinates
// (`rank` of them, innermost first), row after row.
template <class Visit>
void for_each_piece(const TensorMap& map,
                    const int32_t* coordinates,
                    uint32_t shared,
                    Visit visit) {
    const uint32_t pitch = row_pitch(map);
    const uint32_t span = map.swizzle_bytes ? map.swizzle_bytes : kPieceBytes;
    const int64_t row_bytes = static_cast<int64_t>(map.box[0]) * map.element_bytes;
    const int64_t first_byte = static_cast<int64_t>(coordinates[0]) * map.element_bytes;
    const int64_t dim_bytes = static_cast<int64_t>(map.dims[0]) * map.element_bytes;
    const auto clamp = [](int64_t x) { return static_cast<int>(x < 0 ? 0 : x > 16 ? 16 : x); };

    uint32_t at[kMaxRank] = {};  // of the row, in the box
    for (size_t row = 0; row < box_rows(map); ++row) {
        bool inside = true;
        uint64_t row_address = map.address;
        for (uint32_t axis = 1; axis < map.rank; ++axis) {
            const int64_t index = static_cast<int64_t>(coordinates[axis]) + at[axis];
            const uint64_t place = static_cast<uint64_t>(index);  // huge if negative
            inside = inside && place < map.dims[axis];
            row_address += place * map.strides[axis - 1];
        }
        for (int64_t offset = 0; offset < row_bytes; offset += kPieceBytes) {
            const int64_t byte = first_byte + offset;  // of the row of the tensor
            Piece piece = {};
            const uint32_t place = shared + static_cast<uint32_t>(row * pitch + offset);
            piece.shared = swizzle(place, span);
            piece.begin = clamp(-byte);
            piece.end = clamp(dim_bytes - byte);
            if (inside && piece.begin < piece.end) {
                piece.global = row_address + static_cast<uint64_t>(byte + piece.begin);
            } else {
                piece.begin = piece.end = 0;
            }
            visit(piece);
        }
        for (int axis = 1; axis < kMaxRank && ++at[axis] == map.box[axis]; ++axis) at[axis] = 0;
    }
}

}  // namespace host
