// Fibers: a stack each and a switch that saves the registers a function call must keep. x86-64 and AArch64.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>

// Saves the current context, stores its stack pointer in *from, and continues the context `to`.
extern "C" void fiber_switch(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.globl fiber_switch
.type fiber_switch, @function
fiber_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size fiber_switch, . - fiber_switch
)");
constexpr int SAVED_WORDS = 6, RETURN_WORD = 6, FRAME_WORDS = 8;  // the return address, and 8 bytes as after a call
#elif defined(__aarch64__)
asm(R"(
.text
.globl fiber_switch
.type fiber_switch, %function
fiber_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size fiber_switch, . - fiber_switch
)");
constexpr int SAVED_WORDS = 20, RETURN_WORD = 11, FRAME_WORDS = 20;
#else
#error "fiber_switch is written for x86-64 and AArch64; add this processor's callee-saved registers"
#endif

// A stack with an unmapped page below it, so that an overflow faults instead of corrupting memory.
class Stack {
  public:
    static constexpr size_t BYTES = 256 * 1024;  // of address space; only touched pages are memory

    Stack() {
        base_ = static_cast<char*>(mmap(nullptr, BYTES, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (base_ == MAP_FAILED) throw std::bad_alloc();
        mprotect(base_, sysconf(_SC_PAGESIZE), PROT_NONE);
    }
    ~Stack() {
        if (base_) munmap(base_, BYTES);
    }
    Stack(Stack&& other) noexcept : base_(other.base_) { other.base_ = nullptr; }
    Stack(const Stack&) = delete;
    Stack& operator=(const Stack&) = delete;

    // A context that enters `function` on this stack. `function` must not return.
    void* start(void (*function)()) const {
        void** frame = reinterpret_cast<void**>(base_ + BYTES) - FRAME_WORDS;
        for (int i = 0; i < FRAME_WORDS; ++i) frame[i] = nullptr;
        frame[RETURN_WORD] = reinterpret_cast<void*>(function);
        return frame;
    }
    const void* base() const { return base_; }
    bool holds(const void* p) const { return static_cast<size_t>(static_cast<const char*>(p) - base_) < BYTES; }

  private:
    char* base_;
};
