// choose_token: the next token of each row of logits, as tide_runtime/sampler.py chooses it, in three launches.
//
//   greedy row    the largest logit, the first of equals
//   sampled row   the largest sum of score and Gumbel noise (gumbel_noise.cuh) among the tokens that top-k, top-p and min-p keep;
//                 score = (logit - largest logit) / temperature, in float32
//   -1            where the logits are not finite, or rounding leaves the host's choice in doubt
//
//   peak   the largest logit
//   cut    number and weight of the tokens in bins of score, and the bins in which top-k and top-p cut
//   race   noise of all tokens better than these bins; the last block sorts out the few tokens inside them
//
// Weights exp(score) are added as integers, multiples of 2^-44, so that no order of blocks changes a sum.
#pragma once

#include "choose_token_params.h"
#include "entry_points.cuh"
#include "gumbel_noise.cuh"
#include "last_block.cuh"
#include "race_leader.cuh"
#include "row_piece.cuh"

namespace tide {

constexpr float kWeightOne = 17592186044416.0f;  // 2^44
constexpr float kBinsPerScore = kBins / 32.0f;
constexpr int kLowest = kBins;  // the bin of all that is less likely than e^-32 times the likeliest
constexpr int kNoBin = kBins + 1;
constexpr double kSlack = 2e-5;  // relative, twice `sampling_filters._SLACK`: where this is clear, the host's is
constexpr float kMinPSlack = 1e-4f;

// A row's part of the parameters.
struct ChosenRow {
  choose_token_scratch* scratch;
  int sequence, top_k;
  float temperature, tail, min_p, peak;

  __device__ ChosenRow(const choose_token_params& v, int row) : scratch(v.workspace + row), sequence(row / v.tokens) {
    temperature = v.temperature[sequence], top_k = v.top_k[sequence], tail = v.tail[sequence], min_p = v.min_p[sequence];
  }
  __device__ bool cuts() const { return temperature > 0.0f && (top_k > 0 || tail > 0.0f); }
  __device__ float score(float logit) const { return (logit - peak) / temperature; }
};

__device__ __forceinline__ bool is_wanted(const choose_token_params& v, int row) {
  return row < v.rows && v.finished[row / v.tokens] == 0;
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < kLargest; }

// The block's pieces of a row, one after the other; tokens from `vocab` on do not exist.
template <typename T>
struct Pieces {
  static constexpr int kSize = Piece<T>::kSize;
  const T* row;
  int vocab, at, next_at;
  bool aligned;
  float logits[kSize];

  __device__ Pieces(const choose_token_params& v, int row)
      : row(static_cast<const T*>(v.logits) + int64_t(row) * v.vocab), vocab(v.vocab), at(0) {
    next_at = int(blockIdx.x * kChooseThreads + threadIdx.x) * kSize, aligned = rows_aligned<T>(this->row, 0);
  }
  __device__ bool next() {
    at = next_at, next_at += int(gridDim.x) * kChooseThreads * kSize;
    if (at >= vocab) return false;
    load_row(row, at, vocab, aligned, logits);
    return true;
  }
};

// Leaves the block's leader for the last block of the row. True there, where each thread then has the leader of one block.
__device__ __forceinline__ bool is_last_to_leave(const choose_token_params& v, int row, choose_token_scratch& scratch, Leader& leader) {
  block_meet<kChooseThreads>(leader);
  if (threadIdx.x == 0)
    scratch.best[blockIdx.x] = leader.best, scratch.second[blockIdx.x] = leader.second, scratch.leader[blockIdx.x] = leader.token;
  if (!last_block(v.counters + row, gridDim.x)) return false;
  leader = Leader();
  if (threadIdx.x < gridDim.x)
    leader.meet(__ldcg(scratch.best + threadIdx.x), __ldcg(scratch.second + threadIdx.x), __ldcg(scratch.leader + threadIdx.x));
  return true;
}

// --- peak

template <typename T>
__device__ __forceinline__ void choose_peak(const choose_token_params& v) {
  const int row = blockIdx.y;
  if (!is_wanted(v, row)) return;
  const ChosenRow r(v, row);
  choose_token_scratch& scratch = *r.scratch;
  for (int i = blockIdx.x * kChooseThreads + threadIdx.x; i < kBins + 2 && r.cuts(); i += gridDim.x * kChooseThreads)
    scratch.weights[i] = 0, scratch.counts[i] = 0;  // for `choose_cut`
  Leader leader;
  for (Pieces<T> piece(v, row); piece.next();) {
#pragma unroll
    for (int i = 0; i < piece.kSize; ++i) {
      const float logit = piece.logits[i];  // a NaN leads as infinity does
      if (piece.at + i < v.vocab) leader.meet(logit <= kLargest ? logit : 2.0f * kLargest, kNoScore, piece.at + i);
    }
  }
  if (!is_last_to_leave(v, row, scratch, leader)) return;
  block_meet<kChooseThreads>(leader);
  if (threadIdx.x != 0) return;
  scratch.peak = leader.best, scratch.list_size = 0;
  v.chosen[row] = r.temperature == 0.0f && is_finite(leader.best) ? int64_t(leader.token) : -1;
}

// Whether the row is one that the other two launches have to do with; then also its peak.
__device__ __forceinline__ bool is_sampled(ChosenRow& r) {
  r.peak = r.scratch->peak;
  return r.temperature > 0.0f && is_finite(r.peak);
}

// --- cut

__device__ __forceinline__ int bin_of(float score) { return score > -32.0f ? int(-score * kBinsPerScore) : kLowest; }

__device__ __forceinline__ uint64_t weight_of(float score) { return uint64_t(expf(score) * kWeightOne); }

// Counts the block's tokens by bin.
template <typename T>
__device__ __forceinline__ void count_bins(const choose_token_params& v, int row, const ChosenRow& r) {
  __shared__ uint64_t weights[kBins + 1];
  __shared__ uint32_t counts[kBins + 1];
  for (int bin = threadIdx.x; bin <= kBins; bin += kChooseThreads) weights[bin] = 0, counts[bin] = 0;
  __syncthreads();
  uint64_t lowest_weight = 0;
  uint32_t lowest = 0;  // of the bin that most tokens are in
  for (Pieces<T> piece(v, row); piece.next();) {
#pragma unroll
    for (int i = 0; i < piece.kSize; ++i) {
      if (piece.at + i >= v.vocab) continue;
      const float score = r.score(piece.logits[i]);
      const int bin = bin_of(score);
      if (bin == kLowest) {
        lowest_weight += weight_of(score), lowest += 1;
      } else {
        atomicAdd(weights + bin, weight_of(score));
        atomicAdd(counts + bin, 1u);
      }
    }
  }
  atomicAdd(weights + kLowest, lowest_weight);
  atomicAdd(counts + kLowest, lowest);
  __syncthreads();
  for (int bin = threadIdx.x; bin <= kBins; bin += kChooseThreads) {
    if (counts[bin] == 0) continue;
    atomicAdd(r.scratch->weights + bin, weights[bin]);
    atomicAdd(r.scratch->counts + bin, counts[bin]);
  }
}

// Replaces each bin's count and weight by those of all bins before it.
__device__ __forceinline__ void add_up_bins(choose_token_scratch& scratch) {
  __shared__ uint64_t weights[2][kChooseThreads];
  __shared__ uint32_t counts[2][kChooseThreads];
  constexpr int kOwn = (kBins + 2 + kChooseThreads - 1) / kChooseThreads;
  const int thread = threadIdx.x, first = thread * kOwn, end = min(first + kOwn, kBins + 2);
  uint64_t weight = 0;
  uint32_t count = 0;
  for (int bin = first; bin < end; ++bin) weight += __ldcg(scratch.weights + bin), count += __ldcg(scratch.counts + bin);
  weights[0][thread] = weight, counts[0][thread] = count;
  int from = 0;
  for (int offset = 1; offset < kChooseThreads; offset *= 2, from ^= 1) {
    __syncthreads();
    weights[from ^ 1][thread] = weights[from][thread] + (thread >= offset ? weights[from][thread - offset] : 0);
    counts[from ^ 1][thread] = counts[from][thread] + (thread >= offset ? counts[from][thread - offset] : 0);
  }
  weight = weights[from][thread] - weight, count = counts[from][thread] - count;
  for (int bin = first; bin < end; ++bin) {
    const uint64_t own_weight = __ldcg(scratch.weights + bin);
    const uint32_t own_count = __ldcg(scratch.counts + bin);
    scratch.weights[bin] = weight, scratch.counts[bin] = count;
    weight += own_weight, count += own_count;
  }
  __syncthreads();
}

// How far above top-p's cut a token is, of a `total` in all, with the weight `before` that is more likely: the weight of itself and
// all less likely ones, less the share that is dropped. Rounding may change it by `margin`.
struct TopP {
  double tail, margin;

  __device__ TopP(float tail, const choose_token_scratch& scratch, int vocab) : tail(tail) {
    const uint64_t all = scratch.weights[kNoBin], lowest = all - scratch.weights[kLowest];
    margin = kSlack * tail * double(all) + double(lowest) + vocab;
  }
  __device__ double above(uint64_t total, uint64_t before) const { return (1.0 - tail) * double(total) - double(before); }
};

// Writes which bin has the k-th token, and the first and last bin in which top-p may cut.
__device__ __forceinline__ void find_cuts(const choose_token_params& v, const ChosenRow& r) {
  choose_token_scratch& scratch = *r.scratch;
  __shared__ int top_k_bin;
  if (threadIdx.x == 0) top_k_bin = kNoBin, scratch.first_bin = kNoBin, scratch.last_bin = kNoBin;
  __syncthreads();
  for (int bin = threadIdx.x; bin < kBins && r.top_k > 0; bin += kChooseThreads)
    if (scratch.counts[bin] < uint32_t(r.top_k) && scratch.counts[bin + 1] >= uint32_t(r.top_k)) top_k_bin = bin;
  __syncthreads();
  if (threadIdx.x == 0) scratch.top_k_bin = top_k_bin;
  if (r.tail == 0.0f) return;
  const TopP top_p(r.tail, scratch, v.vocab);
  const uint64_t least = scratch.weights[top_k_bin], most = scratch.weights[min(top_k_bin + 1, kNoBin)];
  for (int bin = threadIdx.x; bin <= kBins; bin += kChooseThreads) {
    // Before the least likely token of a bin stands less than the bins up to it weigh; before the likeliest, all bins before it.
    const bool keeps = top_p.above(least, scratch.weights[bin + 1]) > top_p.margin;
    const bool kept = bin > 0 && top_p.above(least, scratch.weights[bin]) > top_p.margin;
    if (!keeps && (bin == 0 || kept)) scratch.first_bin = bin;
    const bool drops_next = top_p.above(most, scratch.weights[bin + 1]) < -top_p.margin;
    const bool drops = bin > 0 && top_p.above(most, scratch.weights[bin]) < -top_p.margin;
    if (!drops && (drops_next || bin == kBins)) scratch.last_bin = bin;
  }
}

template <typename T>
__device__ __forceinline__ void choose_cut(const choose_token_params& v) {
  const int row = blockIdx.y;
  if (!is_wanted(v, row)) return;
  ChosenRow r(v, row);
  if (!r.cuts() || !is_sampled(r)) return;
  count_bins<T>(v, row, r);
  if (!last_block(v.counters + row, gridDim.x)) return;
  add_up_bins(*r.scratch);
  find_cuts(v, r);
}

// --- race

enum class Filter { kKeeps, kDrops, kListed, kDoubts };

struct Cuts {
  int top_k_bin = kNoBin, first_bin = kNoBin, last_bin = kNoBin;
  bool any;

  __device__ explicit Cuts(const ChosenRow& r) : any(r.cuts()) {
    if (any) top_k_bin = r.scratch->top_k_bin, first_bin = r.scratch->first_bin, last_bin = r.scratch->last_bin;
  }
  __device__ Filter filter(float score) const {
    if (!any) return Filter::kKeeps;
    const int bin = bin_of(score);
    if (bin == top_k_bin) return Filter::kListed;  // also where top-p drops it: its weight counts
    if (bin > top_k_bin || bin > last_bin) return Filter::kDrops;
    if (bin == kLowest) return Filter::kDoubts;
    return bin >= first_bin ? Filter::kListed : Filter::kKeeps;
  }
};

// What min-p does with a token that the others keep.
__device__ __forceinline__ Filter min_p_filter(float min_p, float score) {
  if (min_p == 0.0f || score == 0.0f) return Filter::kKeeps;
  const float ratio = expf(score) / min_p;
  return ratio < 1.0f - kMinPSlack ? Filter::kDrops : ratio > 1.0f + kMinPSlack ? Filter::kKeeps : Filter::kDoubts;
}

__device__ __forceinline__ void enter(Leader& leader, const ChosenRow& r, float score, uint64_t word, int token, bool doubtful) {
  const Filter last = min_p_filter(r.min_p, score);
  if (last == Filter::kDrops) return;
  leader.meet(score + gumbel(word), kNoScore, uint32_t(token) | (doubtful || last == Filter::kDoubts ? kDoubtful : 0));
}

// The leader of the block's tokens before the cuts; lists the tokens inside them.
template <typename T>
__device__ __forceinline__ Leader race_block(const choose_token_params& v, int row, const ChosenRow& r, int64_t position) {
  const Cuts cuts(r);
  Leader leader;
  for (Pieces<T> piece(v, row); piece.next();) {
#pragma unroll
    for (int begin = 0; begin < piece.kSize; begin += 4) {
      Filter filters[4];
      bool any = false;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = piece.at + begin + i;
        filters[i] = token < v.vocab ? cuts.filter(r.score(piece.logits[begin + i])) : Filter::kDrops;
        any |= filters[i] == Filter::kKeeps || filters[i] == Filter::kDoubts;
        if (filters[i] != Filter::kListed) continue;
        const int place = atomicAdd(&r.scratch->list_size, 1);
        if (place < kMaxListed) r.scratch->listed[place] = token;
      }
      if (!any) continue;
      uint64_t words[4];
      philox_words(v.key + 2 * r.sequence, position, (piece.at + begin) / 4, words);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (filters[i] == Filter::kKeeps || filters[i] == Filter::kDoubts)
          enter(leader, r, r.score(piece.logits[begin + i]), words[i], piece.at + begin + i, filters[i] == Filter::kDoubts);
    }
  }
  return leader;
}

// The tokens inside the cuts.
struct Listed {
  float logit[kMaxListed];
  int token[kMaxListed];
  uint64_t weight[kMaxListed];
  short bin[kMaxListed];
  bool survives[kMaxListed];  // top-k
  uint64_t total;             // weight of all that survive top-k
};

// Has the tokens inside the cuts that are kept enter the race, by the whole block. They are few, so each is compared with all.
template <typename T>
__device__ __forceinline__ void race_listed(const choose_token_params& v, int row, const ChosenRow& r, int64_t position, int count,
                                            Leader& leader) {
  __shared__ Listed list;
  const T* logits = static_cast<const T*>(v.logits) + int64_t(row) * v.vocab;
  const choose_token_scratch& scratch = *r.scratch;
  const int top_k_bin = scratch.top_k_bin;
  for (int i = threadIdx.x; i < count; i += kChooseThreads) {
    list.token[i] = __ldcg(scratch.listed + i), list.logit[i] = to_float(logits[list.token[i]]);
    const float score = r.score(list.logit[i]);
    list.weight[i] = weight_of(score), list.bin[i] = short(bin_of(score));
  }
  if (threadIdx.x == 0) list.total = scratch.weights[top_k_bin];
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kChooseThreads) {
    list.survives[i] = true;
    if (list.bin[i] != top_k_bin) continue;
    uint32_t larger = scratch.counts[top_k_bin];
    for (int j = 0; j < count; ++j) larger += list.bin[j] == top_k_bin && list.logit[j] > list.logit[i];
    list.survives[i] = larger < uint32_t(r.top_k);
    if (list.survives[i]) atomicAdd(&list.total, list.weight[i]);
  }
  __syncthreads();
  const TopP top_p(r.tail, scratch, v.vocab);
  for (int i = threadIdx.x; i < count; i += kChooseThreads) {
    if (!list.survives[i]) continue;
    uint64_t before = scratch.weights[list.bin[i]];
    for (int j = 0; j < count; ++j) {
      const bool likelier = list.logit[j] > list.logit[i] || (list.logit[j] == list.logit[i] && list.token[j] > list.token[i]);
      if (list.bin[j] == list.bin[i] && list.survives[j] && likelier) before += list.weight[j];
    }
    const double above = top_p.above(list.total, before);
    const bool first = before == 0;  // the likeliest is always kept
    if (r.tail > 0.0f && !first && above < -top_p.margin) continue;
    uint64_t words[4];
    philox_words(v.key + 2 * r.sequence, position, list.token[i] / 4, words);
    enter(leader, r, r.score(list.logit[i]), words[list.token[i] % 4], list.token[i], r.tail > 0.0f && !first && above <= top_p.margin);
  }
}

template <typename T>
__device__ __forceinline__ void choose_race(const choose_token_params& v) {
  const int row = blockIdx.y;
  if (!is_wanted(v, row)) return;
  ChosenRow r(v, row);
  if (!is_sampled(r)) return;
  choose_token_scratch& scratch = *r.scratch;
  const int64_t position = v.length[r.sequence] + 1 + row % v.tokens;
  Leader leader = race_block<T>(v, row, r, position);
  if (!is_last_to_leave(v, row, scratch, leader)) return;
  const int listed = __ldcg(&scratch.list_size);
  if (listed > kMaxListed) return;  // the row has -1 from `choose_peak`
  if (listed > 0) race_listed<T>(v, row, r, position, listed, leader);
  block_meet<kChooseThreads>(leader);
  if (threadIdx.x == 0 && leader.is_clear() && !(leader.token & kDoubtful)) v.chosen[row] = leader.token;
}

}  // namespace tide

TIDE_ENTRY_POINTS(choose_peak, choose_token_params, tide::kChooseThreads)
TIDE_ENTRY_POINTS(choose_cut, choose_token_params, tide::kChooseThreads)
TIDE_ENTRY_POINTS(choose_race, choose_token_params, tide::kChooseThreads)
