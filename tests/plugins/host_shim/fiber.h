// Threads of a block as fibers of one OS thread: switching costs a few nanoseconds and the order is ours, so runs repeat exactly.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
extern "C" void tide_switch_stack(void** save_stack_pointer, void* load_stack_pointer);
asm(R"(
.text
.type tide_switch_stack, @function
tide_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#endif

namespace host {

class Fiber {
 public:
  static constexpr std::size_t kStackBytes = 256 * 1024;

  Fiber() = default;  // the OS thread's own stack, once switched away from
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (stack_) munmap(stack_, kStackBytes);
  }

  // Makes the next switch to this fiber call `entry`, which never returns. Stacks are kept from one start to the next.
  void start(void (*entry)()) {
    if (!stack_) {
      stack_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (stack_ == MAP_FAILED) std::abort();
    }
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>(static_cast<char*>(stack_) + kStackBytes) - 1;
    *top = nullptr;  // where entry would return to; a function starts 8 bytes below a multiple of 16
    *--top = reinterpret_cast<void*>(entry);
    stack_pointer_ = top - 6;
    for (int i = 0; i < 6; ++i) top[-1 - i] = nullptr;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
  }

  void switch_to(Fiber& next) {
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, next.stack_ ? next.stack_ : next.bottom_, next.stack_ ? kStackBytes : next.size_);
#endif
#if defined(__x86_64__)
    tide_switch_stack(&stack_pointer_, next.stack_pointer_);
#else
    swapcontext(&context_, &next.context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  // First thing on a fiber's own stack; `from`: the OS thread's fiber, whose stack is learnt when it is the one that was left.
  static void arrive([[maybe_unused]] Fiber& from) {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    std::size_t size = 0;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (!from.bottom_) from.bottom_ = bottom, from.size_ = size;
#endif
  }

 private:
  void* stack_ = nullptr;
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_{};
#endif
  const void* bottom_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace host
