// Turns signals of the processor and of compiler traps into faults of the launch.
#pragma once
#include <signal.h>
#include <ucontext.h>

#include "state.h"

namespace {

void on_signal(int number, siginfo_t* info, void* context) {
    if (m.current < 0) {  // not from a kernel
        signal(number, SIG_DFL);
        return;
    }
    uintptr_t code = 0;
#if defined(__x86_64__)
    code = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    code = static_cast<ucontext_t*>(context)->uc_mcontext.pc;
#endif
    const bool own = code - m.library->base < (1u << 30);
    const std::string where = own ? at(site_of(reinterpret_cast<void*>(code + 1))) : "an intrinsic";
    const uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
    m.error = number == SIGILL || number == SIGTRAP
                  ? "undefined behaviour (overflow, misalignment, index, shift) at " + where
                  : format("%s at address 0x%zx at ", number == SIGSEGV ? "access violation" : strsignal(number),
                           static_cast<size_t>(address)) + where;
    if (self().stack.holds(info->si_addr)) m.error += " (the emulated thread's stack is full)";
    m.error += "\n  in " + place();
    siglongjmp(m.signalled, 1);
}

class Signals {
  public:
    Signals() {
        stack_t alternative{};
        alternative.ss_sp = memory_;
        alternative.ss_size = sizeof memory_;
        sigaltstack(&alternative, &old_stack_);
        struct sigaction action {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < 5; ++i) sigaction(NUMBERS[i], &action, &old_[i]);
    }
    ~Signals() {
        for (int i = 0; i < 5; ++i) sigaction(NUMBERS[i], &old_[i], nullptr);
        sigaltstack(&old_stack_, nullptr);
    }

  private:
    static constexpr int NUMBERS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP};
    inline static char memory_[64 * 1024];
    struct sigaction old_[5];
    stack_t old_stack_;
};

}  // namespace
