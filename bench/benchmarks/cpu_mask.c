/* Hides instruction sets from a program: `cpuid` faults (arch_prctl ARCH_SET_CPUID), and the handler answers with the processor's
 * own values less the bits of what is hidden. Loaded by LD_PRELOAD; CPU_MASK says what stays: VNNI (all but AMX), AVX2, AVX or SSE4. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (1u << (n))

static int keeps_avx, keeps_avx2, keeps_vnni;
static struct sigaction earlier;

static void answer(uint32_t leaf, uint32_t subleaf, uint32_t *r) {
    __cpuid_count(leaf, subleaf, r[0], r[1], r[2], r[3]);
    if (leaf == 1 && !keeps_avx2) /* FMA, F16C, AVX */
        r[2] &= ~(BIT(12) | BIT(29) | (keeps_avx ? 0 : BIT(28)));
    if (leaf == 7 && subleaf == 0) /* AMX */
        r[3] &= ~(BIT(22) | BIT(24) | BIT(25));
    if (leaf == 0x1d || leaf == 0x1e)
        memset(r, 0, 4 * sizeof *r);
    if (keeps_vnni) return;
    if (leaf == 7 && subleaf == 0) { /* AVX512 in all its parts, GFNI, VAES, VPCLMULQDQ; AVX2 */
        r[1] &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31) | (keeps_avx2 ? 0 : BIT(5)));
        r[2] &= ~(BIT(1) | BIT(6) | BIT(8) | BIT(9) | BIT(10) | BIT(11) | BIT(12) | BIT(14));
        r[3] &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(23));
    }
    /* AVX-VNNI and what came after it; AVX10 */
    if ((leaf == 7 && subleaf == 1) || leaf == 0x24)
        memset(r, 0, 4 * sizeof *r);
}

static void on_fault(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *code = (const uint8_t *)registers[REG_RIP];
    if (info->si_code != SI_KERNEL || code[0] != 0x0f || code[1] != 0xa2) {
        sigaction(number, &earlier, NULL); /* not `cpuid`: the instruction faults again, as it would have without us */
        return;
    }
    uint32_t r[4];
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    answer((uint32_t)registers[REG_RAX], (uint32_t)registers[REG_RCX], r);
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    registers[REG_RAX] = r[0], registers[REG_RBX] = r[1], registers[REG_RCX] = r[2], registers[REG_RDX] = r[3];
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void hide(void) {
    const char *stays = getenv("CPU_MASK");
    if (!stays) return;
    keeps_vnni = !strcmp(stays, "VNNI");
    keeps_avx2 = keeps_vnni || !strcmp(stays, "AVX2");
    keeps_avx = keeps_avx2 || !strcmp(stays, "AVX");
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &action, &earlier);
    if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) {
        static const char words[] = "cpu_mask: this processor or kernel cannot trap cpuid\n";
        (void)!write(2, words, sizeof words - 1);
        _exit(125);
    }
}
