// A block of CUDA threads on the host: barriers of the block and of its warps, and values exchanged between lanes.
//
// A thread runs until it waits; the last one to arrive at a barrier continues. `order` selects the next thread, so that results
// differ if a barrier is missing. 0: all threads in turn; 1: one warp goes as far as it can, the last one first; 2 and more: as 0 or 1,
// shuffled. A thread that ends counts for no barrier of the block; a warp-wide operation that misses a lane never completes, and the
// launch fails.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "fiber.h"

namespace host {

struct Index {
  unsigned x, y, z;
};

struct Thread {
  Index index;
  int number;
  bool done;
  Fiber fiber;
};

class Block {
 public:
  using Body = void (*)(void*);

  // False: threads wait for one that never comes.
  bool run(int threads, unsigned order, Body body, void* argument) {
    live_ = threads, body_ = body, argument_ = argument;
    waiting_ = Barrier(threads);
    any_[0] = any_[1] = false;
    warps_.clear();
    for (int i = 0; i < threads; i += 32) warps_.emplace_back(std::min(32, threads - i));
    while (int(pool_.size()) < threads) pool_.push_back(std::make_unique<Thread>());
    random_.seed(order);
    order_ = order;
    ready_.clear();
    head_ = 0;
    std::vector<int> numbers(threads);
    std::iota(numbers.begin(), numbers.end(), 0);
    for (int number : numbers) {
      pool_[number]->index = {unsigned(number), 0, 0};
      pool_[number]->number = number;
      pool_[number]->done = false;
      pool_[number]->fiber.start(&Block::enter);
    }
    make_ready(numbers);
    active() = this;
    Thread* first = next_ready();
    current_ = first;
    main_.switch_to(first->fiber);
    return live_ == 0;
  }

  static Block*& active() {
    static Block* block = nullptr;
    return block;
  }
  Thread& current() { return *current_; }

  void sync() { arrive(waiting_, live_); }
  // Two alternating results suffice, as threads are at most one barrier ahead.
  bool sync_or(bool vote) {
    bool& any = any_[waiting_.generation % 2];
    any = any || vote;
    sync();
    return any;
  }
  void sync_warp() {
    Warp& warp = warps_[current_->number / 32];
    arrive(warp.barrier, warp.lanes);
  }

  // Every lane contributes a value and gets all 32. Two alternating tables suffice, as lanes are at most one exchange ahead.
  const uint64_t* exchange(uint64_t value) {
    Warp& warp = warps_[current_->number / 32];
    uint64_t* table = warp.tables[warp.barrier.generation % 2];
    table[current_->number % 32] = value;
    arrive(warp.barrier, warp.lanes);
    return table;
  }

 private:
  struct Barrier {
    explicit Barrier(int threads = 0) { waiters.reserve(threads); }
    std::vector<int> waiters;
    unsigned generation = 0;
  };
  struct Warp {
    explicit Warp(int lanes) : lanes(lanes), barrier(lanes) {}
    int lanes;
    Barrier barrier;
    uint64_t tables[2][32];
  };

  static void enter() {
    Block& block = *active();
    Fiber::arrive(block.main_);
    block.body_(block.argument_);
    block.leave();
  }

  void arrive(Barrier& barrier, int expected) {
    if (int(barrier.waiters.size()) + 1 == expected) {
      release(barrier);
      return;
    }
    barrier.waiters.push_back(current_->number);
    switch_away();
  }

  void release(Barrier& barrier) {
    ++barrier.generation;
    if (&barrier == &waiting_) any_[barrier.generation % 2] = false;
    make_ready(barrier.waiters);
    barrier.waiters.clear();
  }

  void leave() {
    current_->done = true;
    --live_;
    if (live_ > 0 && int(waiting_.waiters.size()) == live_) release(waiting_);
    switch_away();
  }

  void make_ready(std::vector<int>& numbers) {
    if (order_ == 1) std::reverse(numbers.begin(), numbers.end());
    if (order_ > 1) std::shuffle(numbers.begin(), numbers.end(), random_);
    ready_.insert(ready_.end(), numbers.begin(), numbers.end());
  }

  Thread* next_ready() {
    if (head_ == ready_.size()) return nullptr;
    int number;
    if (order_ % 2) {
      number = ready_.back();
      ready_.pop_back();
    } else {
      number = ready_[head_++];
    }
    if (head_ == ready_.size()) ready_.clear(), head_ = 0;
    return pool_[number].get();
  }

  void switch_away() {
    Thread* self = current_;
    Thread* next = next_ready();
    current_ = next;
    self->fiber.switch_to(next ? next->fiber : main_);
  }

  int live_ = 0;
  unsigned order_ = 0;
  Body body_ = nullptr;
  void* argument_ = nullptr;
  std::mt19937 random_;
  Barrier waiting_;
  bool any_[2] = {};
  std::vector<Warp> warps_;
  std::vector<int> ready_;
  std::size_t head_ = 0;
  std::vector<std::unique_ptr<Thread>> pool_;
  Thread* current_ = nullptr;
  Fiber main_;
};

}  // namespace host
