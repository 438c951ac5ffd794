// SPDX-License-Identifier: Apache-2.0
// The gradients on Hopper, by TMA and wgmma, for float16 and bfloat16. What it computes, and in
// which order dq is summed up, is in backward_mma.cu.
//
// A block stays on its multiprocessor and takes one job after the other: kTileKv keys of one key
// head. It walks the query heads of the group and their query tiles. Scores are transposed: rows
// are keys. A warpgroup that computes has 64 keys; where heads are wide, kColumnGroups of them have
// the same keys and compute the same scores, but have a share of the columns of dk and dv each.
// Of a further warpgroup one warp takes jobs and loads, and two bring dq to its sums, each every
// other part of it, when it is the job's turn.
//
//     load      q0 k dout0 v   q1 dout1           ..  | q0 k dout0 v ..      as places are free
//     compute      s = k q^T, dp = v dout^T | p, ds | dv += p dout, dq = ds^T k, dk += ds q | ..
//     (dq)                                     wait for the turn, add dq, end the turn
//
// p and ds are left operands in registers; ds also goes through shared memory, where all
// warpgroups find it for dq. Of dq a warpgroup has 64 queries, or, where a tile has no more, a
// share of the columns, in kSplits parts one after the other. dk and dv are written through the
// place of ds that the last visit left alone, while the tiles of the next job come.
//
// Turns. The part of dq that a job has for a query tile waits for those of all earlier key tiles of
// the head. These jobs have lower indices, and an index is a ticket, from a block's first job on:
// whoever has one runs already, and takes his jobs in the order of their indices. So of all jobs
// that are not finished, the one with the lowest index waits for nobody, whatever order blocks
// start in and however few of them run. That a block draws its next ticket early changes nothing:
// it finishes the job it has without waiting for later ones. Without kOrdered only the first key
// tile of a query tile, which stores its part, has a turn; all others wait for that one.
//
// Barriers, and who arrives (lanes are one of a warp):
//   job_full[slot]    the one who takes jobs
//   job_empty[slot]   lanes of the two who bring dq, once its turns are over, and of the first
//                     computing warp, once it has copied the job: see begin()
//   k_full, v_full    the loader, and the bytes
//   k_empty, v_empty  lanes of the computing warps
//   q_full, dout_full the loader, and the bytes, with those of the row statistics for q
//   q_empty, dout_empty   lanes of the computing warps
//   dq_full[i]        lanes of the computing warps: every other part of dq is in shared memory
//   dq_empty[i]       the one who brings it to the sums, once he has read it; a second part goes
//                     through the place of Q, and of that he tells q_empty too
//   again_full        bytes that are loaded a second time: see clear() and add_special()
//   and a named barrier of all who compute: ds is written
//
// Budget: a computing thread holds (kDim + kDimV) / 2 / kColumnGroups sums, kTileQ scores and their
// gradients, and kTileQ / 2 of them rounded.
//
// This file has the main loop. Beside it, and each behind those it needs: backward_sm90_smem.cuh
// (jobs and shared memory), _tiles (loading), _pairs (bias and mask), _dq, _results (dk and dv),
// and _jobs (who takes which).
#include "attention/backward_sm90_dq.cuh"
#include "attention/backward_sm90_jobs.cuh"
#include "attention/backward_sm90_pairs.cuh"
#include "attention/backward_sm90_results.cuh"
#include "attention/backward_sm90_smem.cuh"
#include "attention/backward_sm90_tiles.cuh"
#include "attention/params_tma.cuh"
#include "hw/mbarrier.cuh"
#include "hw/memory.cuh"
#include "hw/sync.cuh"
#include "hw/tma.cuh"
#include "hw/wgmma.cuh"
#include "parts/fragment.cuh"
#include "parts/jobs.cuh"
#include "parts/pipeline.cuh"
#include "parts/swizzled.cuh"
#include "parts/transposed.cuh"
#include "parts/work.cuh"

// What a computing thread has passed.
struct Passed {
    int group;
    Stages stage;
};

// Is it looked up who is seen before dP is begun? Behind it is better, if there are registers.
constexpr bool kLooksEarly = plan::kTileQ > kGroupRows;

template <bool kPlain>
__device__ __forceinline__ void turn(
    const TmaParams& maps, Smem& smem, Sums& sums, Passed& at, bool last = false) {
    const Params& p = maps.call;
    Job& job = smem.job;
    const Stages stage = at.stage;
    at.stage.next();
    const int group = hw::forget(at.group);  // or operands' descriptors take registers
    QueryTile& q = smem.q[stage.at()];
    const DoutStages dout_stage = {stage.count};
    DoutTile& dout = smem.dout[dout_stage.at()];
    ScoreTile& tile = smem.ds[stage.count % 2];

    float s[1][kQueries8][4], dp[1][kQueries8][4];
    hw::mbarrier_wait(smem.q_full[stage.at()], stage.parity());
    swizzled::start_a_bt(s, smem.k, row_group(group) * kGroupRows, q);
    HeldPairs held = {{smem, stage.count, group}};
    if constexpr (plan::kMask) {
        if (!kPlain) {
            const VisitedPairs x = pairs_at(p, smem, stage, row_of_warp(group));
            held.bring_mask(x.score, x.query, x.key);
        }
    }
    const auto look = [&] {
        if constexpr (!kPlain && HeldPairs::kPairs) {
            const VisitedPairs x = pairs_at(p, smem, stage, row_of_warp(group));
            held.look(x.score, x.query, x.key);
            held.bring_bias(x.score, x.query, x.key);
        }
    };
    hw::mbarrier_wait(smem.dout_full[dout_stage.at()], dout_stage.parity());
    if (kLooksEarly) look();
    swizzled::start_a_bt(dp, smem.v, row_group(group) * kGroupRows, dout);
    if (!kLooksEarly) look();
    hw::wgmma_wait<0>();
    hw::pin(swizzled::listed(s));
    hw::pin(swizzled::listed(dp));
    if (!kPlain) suspect(smem, stage, group, s, dp);

    const int row = row_of_warp(group);
    const VisitedPairs x = pairs_at(p, smem, stage, row);
    transposed::soften<kPlain>(s, x.score);
    if (!kPlain) transposed::hide(s, held, x.score, x.query, x.key);
    transposed::gradients<kPlain>(s, dp, smem.rows[stage.at()], held, x.score, x.query, x.key);
    uint32 weights[kSteps][4], ds[kSteps][4];
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
        fragment::left(weights[j], s[0], j);
        fragment::left(ds[j], dp[0], j);
        if (plan::kColumnGroups > 1 && j % plan::kColumnGroups != column_group(group)) continue;
        swizzled::put_transposed(tile, ds[j], 16 * j, row);
    }
    if (kPlain) swizzled::start_x_b(sums.dv, weights, dout, true, column_group(group) * kColsV);
    hw::fence_proxy_async();
    sync_computing();
    if (!kPlain) {
        const int32 found = is_suspect(smem, stage) ? search(smem, q, dout) : 0;
        if (found & kOfQueries) {
            clear(q);
            clear(dout);
        }
        if (found & kOfKeys) clear(smem.k);
        if (found) {
            if (threadIdx.x == kGroupThreads) job.special |= found;
            hw::fence_proxy_async();
            sync_computing();
        }
        swizzled::start_x_b(sums.dv, weights, dout, true, column_group(group) * kColsV);
    }
    float dq[1][kDqCols / 8][4];
    const auto start_dq = [&](int split) {
        swizzled::start_a_b(dq, tile, kByColumns ? 0 : group * kGroupRows, smem.k,
                            kByColumns ? group * kDqShare + split * kDqCols : 0);
    };
    start_dq(0);
    hw::wgmma_wait<1>();
    hw::pin(swizzled::listed(sums.dv));
    arrive(smem.dout_empty[dout_stage.at()]);
    swizzled::start_x_b(sums.dk, ds, q, true, column_group(group) * kCols);
    hw::wgmma_wait<1>();
    hw::pin(swizzled::listed(dq));
    if (!kPlain && last && uniform(releases_early(job))) release_keys(smem);
    if (p.dq.data) put_dq(smem, dq, group, dq_part(stage, 0), 0);
    if constexpr (plan::kSplits > 1) {
        if (p.dq.data) tell_dq(smem, dq_part(stage, 0));
        start_dq(1);
    }
    hw::wgmma_wait<0>();
    hw::pin(swizzled::listed(sums.dk));
    if constexpr (plan::kSplits > 1) {
        hw::pin(swizzled::listed(dq));
        if (p.dq.data) {
            sync_computing();  // nobody needs these queries any more
            put_dq(smem, dq, group, dq_part(stage, 1), 1);
        } else if (plan::kBias) {
            sync_computing();  // nor this ds: see PlaceOfPairs
        }
    }
    if (p.dq.data) tell_dq(smem, dq_part(stage, plan::kSplits - 1));
    if (plan::kSplits == 1 || !p.dq.data) arrive(smem.q_empty[stage.at()]);
    if (!kPlain && job.special & kOfKeys) load_keys_again(maps, smem);
}

// One job.
__device__ __forceinline__ void compute(const TmaParams& p, Smem& smem, Passed& at) {
    const Job& job = smem.job;
    Sums sums;
    fragment::clear(sums.dk);
    fragment::clear(sums.dv);
    const int32 heads = uniform(job.heads);
    if (heads > 0) {
        const int parity = job.part.parity();
        hw::mbarrier_wait(smem.k_full, parity);
        hw::mbarrier_wait(smem.v_full, parity);
    }
    for (int32 head = 0; head < heads; ++head) {
        const int32 first = uniform(job.tiles.any.first);
        for (int32 tile = uniform(job.tiles.any.last); tile > first;) {
            if (HeldPairs::kPairs || uniform(job.tiles.hides(tile - 1))) {
                --tile;
                turn<false>(p, smem, sums, at, head == heads - 1 && tile == first);
            } else {
                const int32 stop = uniform(max(first, job.tiles.all.first));
#pragma unroll 1
                for (; tile > stop; --tile) turn<true>(p, smem, sums, at);
            }
        }
    }
    const int32 special = uniform(job.special);
    if (heads > 0 && !special && !uniform(releases_early(job))) release_keys(smem);
    // All have passed the visit before the last.
    write_results(p.call, job, sums, smem.ds[at.stage.count % 2], at.group);
    if (special) {
        add_special(p, smem, at.group);
        hw::fence_proxy_async();
        release_keys(smem);
    }
}

extern "C" __global__ void __launch_bounds__(plan::kThreads, 1)
    backward_sm90(const __grid_constant__ TmaParams p) {
    Smem& smem = hw::shared_memory<Smem>();
    if (threadIdx.x < sizeof(smem.jobs) / 4) {  // jobs are copied by words, with their padding
        reinterpret_cast<uint32*>(smem.jobs)[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) {
        hw::prefetch(p.q);
        hw::prefetch(p.k);
        hw::prefetch(p.v);
        hw::prefetch(p.o);
        smem.again = smem.passed = 0;
        for (auto& visits : smem.suspects) {
            for (uint32& visit : visits) visit = 0;
        }
        for (int i = 0; i < kJobs; ++i) {
            hw::mbarrier_init(smem.job_full[i], 1);
            hw::mbarrier_init(smem.job_empty[i], kJobReaders);
        }
        hw::mbarrier_init(smem.k_full, 1);
        hw::mbarrier_init(smem.k_empty, kComputingWarps);
        hw::mbarrier_init(smem.v_full, 1);
        hw::mbarrier_init(smem.v_empty, kComputingWarps);
        for (int i = 0; i < plan::kStages; ++i) {
            hw::mbarrier_init(smem.q_full[i], 1);
            hw::mbarrier_init(smem.q_empty[i], kComputingWarps);
        }
        for (int i = 0; i < plan::kDoutStages; ++i) {
            hw::mbarrier_init(smem.dout_full[i], 1);
            hw::mbarrier_init(smem.dout_empty[i], kComputingWarps);
        }
        for (int i = 0; i < 2; ++i) {
            hw::mbarrier_init(smem.dq_full[i], kComputingWarps);
            hw::mbarrier_init(smem.dq_empty[i], 1);
        }
        hw::mbarrier_init(smem.again_full, 1);
        hw::fence_mbarrier_init();
    }
    __syncthreads();
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp >= 4) {
        if constexpr (kGroups > 1) hw::registers_increase<kRegisters>();
        Passed at = {warp / 4 - 1};
        while (begin(smem)) compute(p, smem, at);
        return;
    }
    if constexpr (kGroups > 1) hw::registers_decrease<kFewRegisters>();
    if (warp == 0) {
        lead(p, smem);
    } else if (warp > 1) {
        DqParts at;
        follow<Slots>(smem, [&](const Job& job) {
            if (hw::elect_one()) bring_dq(p.call, smem, job, at, static_cast<uint32>(warp - 2));
        });
    }
}
