// SPDX-License-Identifier: Apache-2.0
// Attention forward on Hopper, by TMA and wgmma, for float16 and bfloat16. What it computes is in
// forward_simt.cu.
//
// A block stays on its multiprocessor and takes one job after the other: kTileQ queries of a head,
// 64 of them for each of kGroups warpgroups that compute. The warps of a further warpgroup have a
// role each: one takes jobs and loads Q, one loads K, one V, and one looks through V where a job is
// done again.
//
//     take     q0        q1                       as soon as a place is free
//     load         k0 k1     k2 | k0 k1 ..
//     load         v0 v1     v2 | v0 v1 ..
//     compute        s0  s1 o0   s2 o1 | s0 o2 store  s1 o0 ..
//
// The product with V of a tile is started together with the scores of the next tile, also where
// that one is the first of the next job, and runs while the exponentials of these scores are
// computed. With one place for Q a job ends before the next begins. Keys come from the last to the
// first, so that causal order meets its diagonal first. More than two warpgroups start their
// products in turns.
//
// Where V is infinite or NaN and a row does not see it, 0 * inf spoils its results. Warps find that
// in the end, keep the results to themselves, and the job is done again: then the one who looks
// searches all tiles that hide something, and the others wait for him. When there is no more work,
// a pause has all jobs finished; if results of some are spoilt, the taker goes around the slots,
// with jobs that are to be done again and pauses between them.
//
// Barriers, and who arrives (lanes are one of a warp):
//   job_full[slot]    the taker
//   job_empty[slot]   lanes of all other warps: who computes, once its results are on their way
//   q_full[place]     the taker, once it has told the job, and the bytes of Q
//   q_empty[place]    lanes of the computing warps
//   k_full, v_full    the loader, and the bytes of a tile
//   k_empty, v_empty  lanes of the computing warps; of V also the one who looks
//   v_seen            the one who looks
//   special_added     lanes of the computing warps, and then
//   v_cleared         the one who looks: see add_special()
//
// Budget: a computing thread holds (kTileKv + kDimV) / 2 accumulators and kTileKv / 4 weights, of
// the 112 to 255 registers that it has.
//
// This file has the main loop. Beside it, and each behind those it needs: forward_sm90_smem.cuh
// (jobs and shared memory), _tiles (loading), _jobs (who takes which), _rows (what a thread knows),
// _values (the product with V) and _results (how they leave).
#include "attention/forward_sm90_jobs.cuh"
#include "attention/forward_sm90_results.cuh"
#include "attention/forward_sm90_rows.cuh"
#include "attention/forward_sm90_smem.cuh"
#include "attention/forward_sm90_tiles.cuh"
#include "attention/forward_sm90_values.cuh"
#include "attention/params_tma.cuh"
#include "hw/mbarrier.cuh"
#include "hw/memory.cuh"
#include "hw/sync.cuh"
#include "hw/tma.cuh"
#include "hw/wgmma.cuh"
#include "parts/exponent.cuh"
#include "parts/fragment.cuh"
#include "parts/mask.cuh"
#include "parts/online.cuh"
#include "parts/pair_words.cuh"
#include "parts/pipeline.cuh"
#include "parts/score.cuh"
#include "parts/swizzled.cuh"

using online::kScored;

// A barrier of the warpgroup.
__device__ __forceinline__ void sync_group() {
    const auto group = hw::forget(static_cast<uint32>(threadIdx.x)) / kGroupThreads;
    hw::named_barrier_sync(kGroups + static_cast<int>(group), kGroupThreads);
}

// The warpgroups start their products one after the other, if there are many.
template <class Start>
__device__ __forceinline__ void take_turn(int group, Start start) {
    if (kInTurns) hw::named_barrier_sync(1 + group, 2 * kGroupThreads);
    start();
    if (kInTurns) hw::named_barrier_arrive(1 + (group + 1) % kGroups, 2 * kGroupThreads);
}

// A tile that the warpgroup sees nothing of, though others do.
__device__ __forceinline__ void pass(Smem& smem, State& state, Passed& at, bool looked_through) {
    if (state.pending) {
        start_product(smem, state, at.v());
        end_product(smem, state, at.v());
    }
    const Stages stage = at.k;
    at.k.next();
    hw::mbarrier_wait(smem.k_full[stage.at()], stage.parity());
    take_turn(at.group, [] {});
    arrive(smem.k_empty[stage.at()]);
    hw::mbarrier_wait(smem.v_full[stage.at()], stage.parity());
    if (looked_through) {
        hw::mbarrier_wait(smem.v_seen[stage.at()], stage.parity());
        const int found = uniform(smem.special[stage.at()]);
        if (found) await_cleared(smem, found);
    }
    arrive(smem.v_empty[stage.at()]);
}

// One turn of the main loop: a tile of keys. Most turns are plain: the tile hides nothing from the
// block, and it is not the first of a job. kAdds: the product with the values of the tile
// before is pending. Which of them it is must be the same for all warps of the group, who have to
// start products by the same instruction; what differs between warps (a large shift) is asked
// inside.
template <bool kPlain, bool kAdds>
__device__ __forceinline__ void turn(const TmaParams& maps,
                                     Smem& smem,
                                     State& state,
                                     Passed& at,
                                     Slots slot,
                                     int32 tile,
                                     bool starts,
                                     bool hides) {
    const Params& p = maps.call;
    const Job& job = smem.jobs[slot.at()];
    const Slots before = {slot.count - 1};
    float inverse[2];
    if (kPlain || (kAdds && !kFlat)) starts = false;
    float s[1][kKeys8][4];
    const Stages k = at.k, v = at.v();
    at.k.next();
    hw::mbarrier_wait(smem.k_full[k.at()], k.parity());
    // Of wide heads descriptors would take registers.
    const int row = kGroupRows * (kFlat ? at.group : hw::forget(at.group));
    take_turn(at.group, [&] {
        swizzled::start_a_bt(s, smem.q[Places{slot.count}.at()], row, smem.k[k.at()]);
        if (kAdds) start_product(smem, state, v);
    });
    if (starts) {
        if (kAdds) conclude(p, inverse, state, smem.jobs[before.at()]);
        start(p, state, job);
    }
    const Scores score = Scores::of(p, job.work.entry, job.work.head);
    const int32 query = query_of(job), key = tile * plan::kTileKv;
    PairWords<1, kKeys8, kReadsPairs> words;
    if (kReadsPairs && !kPlain && (plan::kBias || hides)) words.read(score, query, key);
    hw::wgmma_wait<kAdds ? 1 : 0>();
    hw::pin(swizzled::listed(s));
    arrive(smem.k_empty[k.at()]);

    // Ends with weights; before what may be skipped, so that it is done between exponentials.
    float scales[2];
    const auto complete = [&](bool grows) {
        if (kAdds) {
            if (!kPlain) {
                // ptxas would add up the sums after the results of a job are on their way.
                float sums[2] = {state.rows[0].sum, state.rows[1].sum};
                hw::pin(sums);
                state.rows[0].sum = sums[0], state.rows[1].sum = sums[1];
            }
            end_product(smem, state, v);
            if (starts) store(maps, smem, state, inverse, before, at.group);
        }
#pragma unroll
        for (int j = 0; j < kSteps; ++j) fragment::left(state.weights[j], s[0], j);
        if (grows) online::rescale(state.out, scales);
        state.pending = true;
        state.adds = !starts;
    };
    if constexpr (kPlain && online::kFuses) {
        if (!state.large && online::fuses(state.rows, s, state.exponent, score, query, key)) {
            online::exponentials_of_products(s, state.rows, state.exponent, score, state.randoms,
                                             query, key);
            complete(false);
            return;
        }
    }
    // With a bias there is no tile that hides nothing; one form takes less time to compile than
    // two.
    if (!kPlain && (plan::kBias || hides)) {
        online::finish_scores<true, true>(s, words, score, query, key);
    } else if (kScored) {
        online::finish_scores<false, true>(s, words, score, query, key);
    }
    bool grows = false;
    if (starts) {
        state.large = online::begin(state.rows, s, state.factor);
    } else {
        grows = online::outgrown(state.rows, s, state.factor);
        if (grows) state.large = online::raise(state.rows, scales, s, state.factor);
    }
    float shifts[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) shifts[r] = state.rows[r].shift(state.factor);
    if (state.large) online::compare_first(s, state.rows, shifts);
    online::exponentials(s, state.rows, shifts, score, state.randoms, key, state.factor);
    complete(grows);
}

// Ends the job in a slot.
__device__ __forceinline__ void finish(
    const TmaParams& maps, Smem& smem, State& state, Passed& at, Slots slot) {
    if (state.pending) {
        start_product(smem, state, at.v());
        end_product(smem, state, at.v());
    }
    float inverse[2];
    conclude(maps.call, inverse, state, smem.jobs[slot.at()]);
    store(maps, smem, state, inverse, slot, at.group);
}

// Scores are in units of |scale|: the queries of a negative one change their signs.
__device__ __forceinline__ void negate(QueryTile& q, int group) {
    constexpr int kWords = QueryTile::kRowBytes / 4 * kGroupRows;  // of a chunk
    auto* const words = reinterpret_cast<uint32*>(q.at) + group * kWords;
#pragma unroll 1
    for (int c = 0; c < QueryTile::kChunks; ++c) {
#pragma unroll 1
        for (int i = thread_of_group(); i < kWords; i += kGroupThreads) {
            words[c * (QueryTile::kChunkBytes / 4) + i] ^= 0x80008000u;
        }
    }
    hw::fence_proxy_async();
    sync_group();
}

__device__ __forceinline__ void compute(const TmaParams& maps, Smem& smem, int group) {
    const Params& p = maps.call;
    const bool negates = !kScored && static_cast<float>(p.scale) < 0.0f;
    State state;
    state.pending = false;
    bool unfinished = false;  // the job before
    Passed at = {group};
    Slots slot;
    if (kInTurns && group == kGroups - 1) hw::named_barrier_arrive(1, 2 * kGroupThreads);
    for (;; slot.next()) {
        const Places place = {slot.count};
        hw::mbarrier_wait(smem.q_full[place.at()], place.parity());
        const Job& job = smem.jobs[slot.at()];
        const int32 kind = uniform(job.kind);
        const SeenTiles keys = uniform(job.keys), own = uniform(job.keys_of_group[group]);
        int32 tile = keys.any.last;
        const int32 first = keys.any.first;
        const bool begins = own.has(tile - 1);  // with the block's first tile
        if (kFlat && unfinished && !(state.pending && begins)) {
            finish(maps, smem, state, at, {slot.count - 1});
        }
        if (kind == kEnd) break;
        if (kind == kPause) {
            arrive(smem.q_empty[place.at()]);
            arrive(smem.job_empty[slot.at()]);
            unfinished = false;
            continue;
        }
        const Caution caution = kind == kAgain    ? Caution::kWaits
                                : hides_any(keys) ? Caution::kLooks
                                                  : Caution::kNone;
        if (own.any.first >= own.any.last) {
            state.caution = caution;
            start(p, state, job);
            fragment::clear(state.out);
        } else if (negates) {
            negate(smem.q[place.at()], group);
        }
        bool starts = true;
        const TileRange& plain = keys.all;  // nothing of them is hidden from anybody
        while (tile > first) {
            --tile;
            bool hides = false;
            if (!plain.holds(tile)) {
                if (!own.has(tile)) {
                    pass(smem, state, at, kind == kAgain && keys.hides(tile));
                    continue;
                }
                hides = own.hides(tile);
            }
            if (!state.pending) {
                turn<false, false>(maps, smem, state, at, slot, tile, starts, hides);
            } else if (starts || !plain.holds(tile)) {
                turn<false, true>(maps, smem, state, at, slot, tile, starts, hides);
            } else {
#pragma unroll 1
                for (;; --tile) {
                    turn<true, true>(maps, smem, state, at, slot, tile, false, false);
                    if (tile <= plain.first) break;
                }
            }
            starts = false;
            state.caution = caution;
            if (kind == kAgain && keys.hides(tile)) {
                add_special(p, smem, state, at, job, tile);
            }
        }
        arrive(smem.q_empty[place.at()]);  // no product reads these queries any more
        unfinished = true;
        if (!kFlat) finish(maps, smem, state, at, slot);
    }
    hw::bulk_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(plan::kThreads, 1)
    forward_sm90(const __grid_constant__ TmaParams p) {
    Smem& smem = hw::shared_memory<Smem>();
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp == 1) {
        prepare(smem);
    } else if (warp == 2 && hw::elect_one()) {
        hw::prefetch(p.q);
        hw::prefetch(p.k);
        hw::prefetch(p.v);
        hw::prefetch(p.o);
    }
    if (warp != 0) await_prepared();  // the taker does when it has found something
    if (warp >= 4) {
        if constexpr (kGroups > 1) hw::registers_increase<kRegisters>();
        compute(p, smem, warp / 4 - 1);
        return;
    }
    if constexpr (kGroups > 1) hw::registers_decrease<kFewRegisters>();
    if (warp == 0) {
        take_all(p, smem);
    } else if (warp == 1) {
        if (hw::elect_one()) load_all<1>(smem, smem.k, p.k, smem.k_full, smem.k_empty);
    } else if (warp == 2) {
        if (hw::elect_one()) load_all<0>(smem, smem.v, p.v, smem.v_full, smem.v_empty);
    } else {
        look_through_values(smem);
    }
}
