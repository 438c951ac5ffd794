// SPDX-License-Identifier: Apache-2.0
// Contexts: where a stack goes on. Switching saves what a function call must preserve.
#pragma once
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#if !defined(CUFLASH_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define CUFLASH_UCONTEXT  // may also be defined to test it
#endif

namespace host {
namespace {

#ifdef CUFLASH_UCONTEXT

struct Context {
    ucontext_t state;
};

void switch_context(Context* from, Context* to) { swapcontext(&from->state, &to->state); }

// Let `context` start with a call of `start`, which never returns, on the stack below `top`.
void prepare_context(Context* context, uintptr_t bottom, uintptr_t top, void (*start)()) {
    getcontext(&context->state);
    context->state.uc_stack.ss_sp = reinterpret_cast<void*>(bottom);
    context->state.uc_stack.ss_size = top - bottom;
    context->state.uc_link = nullptr;
    makecontext(&context->state, start, 0);
}

#else

struct Context {
    uintptr_t* stack;  // everything else lies there
};

// Saves the registers on the stack and its pointer in *from; restores those of the stack `to`.
extern "C" void cuflash_switch(uintptr_t** from, uintptr_t* to);

#if defined(__x86_64__)
// System V ABI: rbx, rbp, r12 to r15 and the control words of SSE and x87.
asm(R"(
    .text
    .p2align 4
    .globl cuflash_switch
    .hidden cuflash_switch
    .type cuflash_switch, @function
cuflash_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    subq $8, %rsp
    stmxcsr (%rsp)
    fnstcw 4(%rsp)
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    ldmxcsr (%rsp)
    fldcw 4(%rsp)
    addq $8, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size cuflash_switch, . - cuflash_switch
)");
constexpr int kSavedWords = 8;
constexpr int kReturnAddress = 7;
constexpr int kPadding = 1;  // a null return address for `start`, which also aligns its frame

#else
// AAPCS64: x19 to x28, the frame pointer, the link register, the lower halves of v8 to v15.
asm(R"(
    .text
    .p2align 4
    .globl cuflash_switch
    .hidden cuflash_switch
    .type cuflash_switch, %function
cuflash_switch:
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
    .size cuflash_switch, . - cuflash_switch
)");
constexpr int kSavedWords = 20;
constexpr int kReturnAddress = 11;
constexpr int kPadding = 0;
#endif

void switch_context(Context* from, Context* to) { cuflash_switch(&from->stack, to->stack); }

void prepare_context(Context* context, uintptr_t, uintptr_t top, void (*start)()) {
    // What cuflash_switch would have pushed, with `start` to return to.
    uintptr_t* words = reinterpret_cast<uintptr_t*>(top) - kPadding - kSavedWords;
    memset(words, 0, top - reinterpret_cast<uintptr_t>(words));
#if defined(__x86_64__)
    unsigned int sse;
    unsigned short x87;
    asm("stmxcsr %0\n\tfnstcw %1" : "=m"(sse), "=m"(x87));
    words[0] = sse | static_cast<uintptr_t>(x87) << 32;
#endif
    words[kReturnAddress] = reinterpret_cast<uintptr_t>(start);
    context->stack = words;
}

#endif

}  // namespace
}  // namespace host
