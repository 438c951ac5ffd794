// SPDX-License-Identifier: Apache-2.0
// Faults of the CPU in a kernel. The handlers are there only while a launch runs, and leave to the
// previous ones what does not come from the code of a fiber.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <ucontext.h>

#include "host/executor/state.h"

namespace host {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP};
constexpr int kSignalCount = sizeof(kSignals) / sizeof(kSignals[0]);

pthread_mutex_t signal_mutex = PTHREAD_MUTEX_INITIALIZER;
int signal_users = 0;
struct sigaction previous[kSignalCount];

void pass_on(int signal, siginfo_t* info, void* context) {
    int i = 0;
    while (kSignals[i] != signal) ++i;
    const struct sigaction& old = previous[i];
    if (old.sa_flags & SA_SIGINFO) {
        old.sa_sigaction(signal, info, context);
    } else if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN) {
        old.sa_handler(signal);
    } else if (info->si_code > 0 || old.sa_handler == SIG_DFL) {
        // A faulting instruction is executed again on return, and then ends the process.
        struct sigaction standard = {};
        standard.sa_handler = SIG_DFL;
        sigaction(signal, &standard, nullptr);
        if (info->si_code <= 0) raise(signal);
    }
}

void on_signal(int signal, siginfo_t* info, void* context) {
    Worker* w = this_worker;
    // A positive code: caused by an instruction, not sent by a process.
    if (!w || w->running < 0 || info->si_code <= 0) return pass_on(signal, info, context);
    const ucontext_t* state = static_cast<const ucontext_t*>(context);
#if defined(__x86_64__)
    const uintptr_t instruction = static_cast<uintptr_t>(state->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
    const uintptr_t instruction = state->uc_mcontext.pc;
#else
    const uintptr_t instruction = 0;
    (void)state;
#endif
    const uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
    // Leaves the handler for good, which the kernel does not mind: it looks only at the stack
    // pointer to see whether the signal stack is in use, and SA_NODEFER left the signal unblocked.
    fail(*w, {Fault::kSignal, {}, 0, {}, address, 0, 0, signal, instruction});
}

void catch_signals(Worker& w, stack_t* previous_stack) {
    stack_t stack = {};
    stack.ss_sp = w.signal_stack;
    stack.ss_size = kSignalStackBytes;
    sigaltstack(&stack, previous_stack);
    pthread_mutex_lock(&signal_mutex);
    if (signal_users++ == 0) {
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigemptyset(&action.sa_mask);
        for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], &action, &previous[i]);
    }
    pthread_mutex_unlock(&signal_mutex);
}

void release_signals(const stack_t* previous_stack) {
    pthread_mutex_lock(&signal_mutex);
    if (--signal_users == 0) {
        for (int i = 0; i < kSignalCount; ++i) {
            struct sigaction present;
            sigaction(kSignals[i], nullptr, &present);
            // Somebody may have put another handler there in the meantime.
            if ((present.sa_flags & SA_SIGINFO) && present.sa_sigaction == on_signal) {
                sigaction(kSignals[i], &previous[i], nullptr);
            }
        }
    }
    pthread_mutex_unlock(&signal_mutex);
    sigaltstack(previous_stack, nullptr);
}

}  // namespace
}  // namespace host
