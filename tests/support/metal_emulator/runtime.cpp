// SIMT on the CPU: every GPU thread is a fiber, barriers and simdgroup operations are rendezvous points. Kernels are
// compiled with -fsanitize=thread but linked against the __tsan_* hooks at the end of this file instead of libtsan, so
// every load and store they make passes through touch().
#include "emu.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

extern "C" void emu_kernel_main(void** bufs);
extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" char _end[] __attribute__((visibility("hidden")));

// Mirrored in launch.py.
enum Kind { OOB = 1, READ_ONLY, UNINIT, RACE, DIVERGED, BARRIER, UNDEFINED, TG_MEMORY, STEPS, WILD, INACTIVE, CRASH };
struct Buf {
  const char* name;
  void* data;
  uint64_t bytes, origin;                  // origin: byte offset of element 0 (strided inputs)
  uint32_t elem, kind;                     // kind: 0 input, 1 output, 2 constant
  uint64_t load_bytes, store_bytes;        // every access of every thread
  uint64_t tg_read, tg_write;              // distinct bytes per threadgroup, summed over threadgroups
  uint64_t foot_read, foot_write;          // distinct bytes over the launch
  uint64_t unwritten;                      // output elements never written
};
struct Err {
  uint64_t pc;
  const char* name;                        // buffer, threadgroup variable or description
  int64_t index;
  int32_t kind, line, count, thread, group, other, extra, pad;
};
struct Launch {
  uint32_t grid[3], tg[3], nbuf, seed, nerr, tg_mem;
  Buf* buf;
  Err* err;
  uint64_t step_limit, steps, simd_ops, barriers, mmas, same_value_races;
};

namespace emu {
Thread* cur;
uint32_t grid[3], tg_nominal[3], tg_count[3];
static const size_t STK = 128 << 10;
enum State { RUN, W_SIMD, W_SG, W_TG, DONE };
struct Fiber {
  Thread t;
  void* sp;
  State st;
  int op, line, mem;
  unsigned size;
  Xchg* res;
  alignas(16) unsigned char dep[64];
};
static Fiber F[1024], *fib;
static Launch* L;
static char* stacks;
static void *main_sp, **kernel_bufs;
static bool aborted, active;
static uint32_t group;

// ---------------------------------------------------------------- fibers (x86-64 Linux)
asm(R"(
.local emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
extern "C" void emu_switch(void** save, void* to) __attribute__((visibility("hidden")));

static void report(Kind k, bool fatal, void* pc, int line, const char* name,
    int64_t index = 0, int other = 0, int extra = 0) {
  uint64_t off = pc ? (char*)pc - __ehdr_start : 0;
  Err *e = L->err, *end = e + L->nerr;
  while (e < end && (e->pc != off || e->line != line || e->kind != k)) e++;
  if (e == end && L->nerr < 32) {
    L->nerr++;
    *e = {off, name, index, k, line, 0, fib ? (int)fib->t.lid : -1, (int)group, other, extra, 0};
  }
  if (L->nerr < 32) e->count++;
  if (!fatal || !active) return;
  aborted = true;
  for (;;) emu_switch(&fib->sp, main_sp);  // never resumed
}
static struct sigaction old_act[3];
static const int SIGS[3] = {SIGSEGV, SIGFPE, SIGBUS};
static void on_signal(int sig, siginfo_t* si, void* uc) {  // what the hooks did not stop: a stack overflow, mostly
  if (active) report(CRASH, true, (void*)(((ucontext_t*)uc)->uc_mcontext.gregs[REG_RIP] + 1), 0, "",
      (int64_t)si->si_addr, sig);
  for (int i = 0; i < 3; i++) sigaction(SIGS[i], &old_act[i], nullptr);
}

// ---------------------------------------------------------------- memory
// Region i starts near BASE + i * 64 GiB: a pointer gives its region by a shift, and no index error can reach another.
static const uintptr_t BASE = 0x200000000000ull;
static const int SHIFT = 36, MAXREG = 96;
struct Cell { uint32_t w, we, r1, e1, r2, e2; };  // last writer and two last readers of an element: thread, epoch
struct Region {
  uintptr_t lo, hi;
  const char* name;
  Buf* buf;           // null: threadgroup memory
  uint32_t elem, owner;
  Cell* cell;         // null: read-only
  uint32_t *tr, *tw;  // last threadgroup + 1 to read / write each element
  size_t n, maplen;
};
static Region R[MAXREG];
static unsigned nreg;
static int tg_slot[256];
static uint16_t G[2], S[2][32];  // barriers so far, [device, threadgroup] memory: of the group, of each simdgroup

static Region& new_region(const char* name, size_t bytes, size_t elem, Buf* b, bool writable) {
  size_t len = (bytes / 4096 + 3) * 4096, n = bytes / elem + 1;
  uintptr_t at = BASE + ((uintptr_t)nreg << SHIFT) + (1ull << (SHIFT - 1));
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | MAP_NORESERVE;
  if (nreg == MAXREG || mmap((void*)at, len, PROT_READ | PROT_WRITE, flags, -1, 0) != (void*)at) abort();
  memset((void*)at, 0xFF, len);  // poison: NaN
  uint32_t* seen = b ? (uint32_t*)calloc(n, 8) : nullptr;
  Cell* cell = writable ? (Cell*)calloc(n, sizeof(Cell)) : nullptr;
  return R[nreg++] = {at + 4096, at + 4096 + bytes, name, b, (uint32_t)elem, 0, cell, seen, seen + n, n, len};
}
void* tg_var(int id, size_t bytes, size_t elem, const char* name) {
  if (tg_slot[id] < 0) {
    tg_slot[id] = nreg;
    new_region(name, bytes, elem, nullptr, true);
    if ((L->tg_mem += bytes) > 32768) report(TG_MEMORY, true, __builtin_return_address(0), 0, name, L->tg_mem);
  }
  Region& r = R[tg_slot[id]];
  if (r.owner != group + 1) {  // first thread of a new threadgroup
    r.owner = group + 1;
    memset((void*)r.lo, 0xFF, bytes);
    memset(r.cell, 0, r.n * sizeof(Cell));
  }
  return (void*)r.lo;
}
// Hooks run before the store; whether a racing store changed the value is known at the next event.
static struct { uintptr_t a; unsigned n; unsigned char old[16]; void* pc; const char* name; size_t g; int other; } pend;
static void flush_pending() {
  if (!pend.n) return;
  if (!memcmp((void*)pend.a, pend.old, pend.n)) L->same_value_races++;
  else report(RACE, false, pend.pc, 0, pend.name, pend.g, pend.other, 1);
  pend.n = 0;
}
static bool unordered(uint32_t o, uint32_t oe, uint32_t t, uint32_t e) {
  uint32_t a = o - 1, b = t - 1;
  if (!o || a == b) return false;
  if (a / 1024 != b / 1024) return true;                // different threadgroups
  if ((oe ^ e) >> 16) return false;                     // a threadgroup barrier in between
  return a % 1024 / 32 != b % 1024 / 32 || oe == e;     // same simdgroup: a simdgroup barrier in between
}
static void touch(uintptr_t a, unsigned n, bool w, void* pc) {
  if (!active) return;
  flush_pending();
  if (++L->steps > L->step_limit) report(STEPS, true, pc, 0, "");
  uintptr_t slot = (a - BASE) >> SHIFT;
  if (slot >= nreg) {
    if (a - (uintptr_t)(stacks + STK * fib->t.lid) < STK) return;                  // private memory
    if (a - (uintptr_t)__ehdr_start < (uintptr_t)(_end - __ehdr_start)) return;    // program-scope constants
    report(WILD, true, pc, 0, "", a, n, w);
  }
  Region& r = R[slot];
  if (a < r.lo || a + n > r.hi)
      report(OOB, true, pc, 0, r.name, (int64_t)(a - r.lo) / (int)r.elem, (r.hi - r.lo) / r.elem, w);
  size_t g0 = (a - r.lo) / r.elem, g1 = (a - r.lo + n - 1) / r.elem;
  if (w && !r.cell) report(READ_ONLY, true, pc, 0, r.name, g0);
  if (Buf* b = r.buf) {
    (w ? b->store_bytes : b->load_bytes) += n;
    for (size_t g = g0; g <= g1; g++) {
      uint32_t& last = (w ? r.tw : r.tr)[g];
      if (!last) (w ? b->foot_write : b->foot_read) += r.elem;
      if (last != group + 1) (w ? b->tg_write : b->tg_read) += r.elem;
      last = group + 1;
    }
  }
  if (!r.cell) return;
  bool tgm = !r.buf, whole = n >= r.elem;
  uint32_t me = group * 1024 + fib->t.lid + 1, e = (uint32_t)G[tgm] << 16 | S[tgm][fib->t.sg];
  for (size_t g = g0; g <= g1; g++) {
    Cell& c = r.cell[g];
    uint32_t other = 0;
    if (!w && !c.w) report(UNINIT, false, pc, 0, r.name, g);
    if (unordered(c.w, c.we, me, e)) other = c.w;
    if (w && !other && unordered(c.r1, c.e1, me, e)) other = c.r1;
    if (w && !other && unordered(c.r2, c.e2, me, e)) other = c.r2;
    if (other && whole && !pend.n) {
      int o = other - 1;
      if (w && n <= 16) pend = {a, n, {}, pc, r.name, g, o}, memcpy(pend.old, (void*)a, n);
      else report(RACE, false, pc, 0, r.name, g, o, w);
    }
    if (w) {
      c.w = me, c.we = e;
    } else {
      if (c.r1 && c.r1 != me && (!c.r2 || (c.r2 - 1) / 32 == (me - 1) / 32 || e != c.e2)) c.r2 = c.r1, c.e2 = c.e1;
      c.r1 = me, c.e1 = e;
    }
  }
}

// ---------------------------------------------------------------- rendezvous
static struct { uint32_t alive, waiting, par; } sgs[32];
static Xchg ring[32][2];
static uint32_t group_n, group_alive, group_waiting;
static bool same(const Fiber& a, const Fiber& b) { return a.st == b.st && a.op == b.op && a.line == b.line; }
static Fiber* all_at_one_site(Fiber* f, uint32_t n) {  // ignoring threads that have returned
  Fiber* first = nullptr;
  for (uint32_t i = 0; i < n; i++) {
    if (f[i].st == DONE) continue;
    if (!first) first = &f[i];
    if (!same(*first, f[i])) return nullptr;
  }
  return first;
}
static void try_sg(uint32_t sg) {
  auto& s = sgs[sg];
  uint32_t n = group_n - sg * 32 < 32 ? group_n - sg * 32 : 32;
  Fiber *lane = &F[sg * 32], *first;
  if (!s.alive || s.waiting != s.alive || !(first = all_at_one_site(lane, n))) return;
  Xchg* x = &ring[sg][s.par ^= 1];
  x->mask = x->reduced = s.waiting = 0;
  bool bar = first->st == W_SG;
  for (uint32_t i = 0; i < n; i++) {
    if (lane[i].st == DONE) continue;
    if (!bar) memcpy(x->d[i], lane[i].dep, lane[i].size);
    x->mask |= 1u << i;
    lane[i].res = x;
    lane[i].st = RUN;
  }
  for (int k = 0; k < 2 && bar; k++) S[k][sg] += first->mem >> k & 1;
  L->simd_ops += !bar;
}
static void try_tg() {
  Fiber* first;
  if (!group_alive || group_waiting != group_alive || !(first = all_at_one_site(F, group_n))) return;
  if (group_alive != group_n) report(BARRIER, false, nullptr, first->line, "", 0, group_alive, group_n);
  for (uint32_t i = 0; i < group_n; i++) if (F[i].st == W_TG) F[i].st = RUN;
  group_waiting = 0;
  for (int k = 0; k < 2; k++) if (first->mem >> k & 1) G[k]++, memset(S[k], 0, sizeof S[k]);
  L->barriers++;
}
static void wait(State st, int op, int mem, int line) {
  flush_pending();
  Fiber* f = fib;
  f->op = op, f->mem = mem, f->line = line, f->st = st;
  if (st == W_TG) group_waiting++, try_tg();
  else sgs[f->t.sg].waiting++, try_sg(f->t.sg);
  while (f->st != RUN) emu_switch(&f->sp, main_sp);
}
Xchg* simd(const void* v, unsigned size, int op, int line) {
  memcpy(fib->dep, v, fib->size = size);
  wait(W_SIMD, op, 0, line);
  return fib->res;
}
void barrier(bool whole_group, int mem, int line) { wait(whole_group ? W_TG : W_SG, mem, mem, line); }
void inactive_lane(int line) { report(INACTIVE, false, nullptr, line, ""); }
void count_mma() { L->mmas++; }
static void entry() {
  emu_kernel_main(kernel_bufs);
  flush_pending();
  fib->st = DONE;
  sgs[fib->t.sg].alive--, group_alive--;
  try_sg(fib->t.sg);
  try_tg();
  for (;;) emu_switch(&fib->sp, main_sp);
}
static void report_stuck() {  // nothing can run: name two threads that wait for different things
  for (uint32_t i = 0; i < group_n; i++)
    for (uint32_t j = i + 1; j < group_n; j++) {
      if (F[i].st == DONE || F[j].st == DONE || same(F[i], F[j]) || (F[i].st != W_TG && j / 32 != i / 32)) continue;
      fib = &F[i];
      report(F[i].st == W_TG && F[j].st == W_TG ? BARRIER : DIVERGED, false, nullptr, F[i].line, "deadlock", 0, j,
            F[j].line);
      return;
    }
}
static bool run_group(const uint32_t* g) {
  static uint32_t order[1024];
  static uint64_t rng = 88172645463325252ull;
  uint32_t sz[3];
  for (int k = 0; k < 3; k++) {
    uint32_t left = grid[k] - g[k] * tg_nominal[k];
    sz[k] = left < tg_nominal[k] ? left : tg_nominal[k];
  }
  group_n = group_alive = sz[0] * sz[1] * sz[2];
  group_waiting = 0;
  memset(sgs, 0, sizeof sgs), memset(G, 0, sizeof G), memset(S, 0, sizeof S);
  for (uint32_t i = 0; i < group_n; i++) {
    F[i].t = {i, i % 32, i / 32, group_n, {}, {i % sz[0], i / sz[0] % sz[1], i / (sz[0] * sz[1])},
        {g[0], g[1], g[2]}, {sz[0], sz[1], sz[2]}};
    for (int k = 0; k < 3; k++) F[i].t.in_grid[k] = g[k] * tg_nominal[k] + F[i].t.in_tg[k];
    uint64_t* sp = (uint64_t*)(stacks + STK * (i + 1)) - 8;
    memset(sp, 0, 64);
    sp[6] = (uint64_t)&entry;
    F[i].sp = sp;
    F[i].st = RUN;
    sgs[i / 32].alive++;
    order[i] = L->seed == 1 ? group_n - 1 - i : i;
  }
  for (bool ran = true; group_alive;) {
    if (!ran) return report_stuck(), false;
    ran = false;
    for (uint32_t i = group_n; L->seed > 1 && i > 1; i--) {  // shuffle
      rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
      uint32_t j = (rng + L->seed) % i, t = order[i - 1];
      order[i - 1] = order[j], order[j] = t;
    }
    for (uint32_t i = 0; i < group_n; i++) {
      fib = &F[order[i]];
      if (fib->st != RUN) continue;
      ran = active = true;
      cur = &fib->t;
      emu_switch(&main_sp, fib->sp);
      active = false;
      if (aborted) return false;
    }
  }
  return true;
}
}  // namespace emu

using namespace emu;
extern "C" __attribute__((visibility("default"))) void emu_launch(Launch* l) {
  static char alt[64 << 10];
  static void* ptrs[MAXREG];
  L = l, fib = nullptr, aborted = active = false, nreg = group = pend.n = 0, kernel_bufs = ptrs;
  for (int& s : tg_slot) s = -1;
  for (int k = 0; k < 3; k++)
    grid[k] = l->grid[k], tg_nominal[k] = l->tg[k], tg_count[k] = (grid[k] + tg_nominal[k] - 1) / tg_nominal[k];
  size_t nthr = tg_nominal[0] * tg_nominal[1] * tg_nominal[2];
  stacks = (char*)mmap(nullptr, STK * nthr, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (size_t i = 0; i < nthr; i++) mprotect(stacks + STK * i, 4096, PROT_NONE);  // guard pages
  for (uint32_t i = 0; i < l->nbuf; i++) {
    Buf& b = l->buf[i];
    Region& r = new_region(b.name, b.bytes, b.elem, &b, b.kind == 1);
    if (b.kind != 1) memcpy((void*)r.lo, b.data, b.bytes);
    ptrs[i] = (void*)(r.lo + b.origin);
  }
  stack_t ss = {}, old_ss;
  ss.ss_sp = alt, ss.ss_size = sizeof alt;
  sigaltstack(&ss, &old_ss);
  struct sigaction sa = {};
  sa.sa_sigaction = on_signal, sa.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 3; i++) sigaction(SIGS[i], &sa, &old_act[i]);
  bool ok = true;
  for (uint32_t n = tg_count[0] * tg_count[1] * tg_count[2]; ok && group < n; group++) {
    const uint32_t g[3] = {group % tg_count[0], group / tg_count[0] % tg_count[1], group / (tg_count[0] * tg_count[1])};
    ok = run_group(g);
  }
  for (int i = 0; i < 3; i++) sigaction(SIGS[i], &old_act[i], nullptr);
  sigaltstack(&old_ss, nullptr);
  for (Region* r = R; r < R + nreg; r++) {
    if (Buf* b = r->buf; b && b->kind == 1) {
      memcpy(b->data, (void*)r->lo, b->bytes);
      for (size_t g = 0; g + 1 < r->n; g++) b->unwritten += !r->tw[g];
    }
    munmap((void*)(r->lo - 4096), r->maplen);
    free(r->cell), free(r->tr);
  }
  munmap(stacks, STK * nthr);
}

// ---------------------------------------------------------------- hooks the compiler calls
#define PC __builtin_return_address(0)
#define HOOK(n) \
  extern "C" void __tsan_read##n(void* a) { touch((uintptr_t)a, n, false, PC); } \
  extern "C" void __tsan_write##n(void* a) { touch((uintptr_t)a, n, true, PC); }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
extern "C" void __tsan_read_range(void* a, size_t n) { touch((uintptr_t)a, n, false, PC); }
extern "C" void __tsan_write_range(void* a, size_t n) { touch((uintptr_t)a, n, true, PC); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
struct UbLoc { const char* file; uint32_t line, col; };  // first field of every handler's data
#define UB(n, what, fatal) \
  extern "C" void __ubsan_handle_##n(UbLoc* l, uintptr_t v) { \
    if (active) report(UNDEFINED, fatal, nullptr, l->line, what, v); }
UB(out_of_bounds, "array index out of bounds", true)
UB(type_mismatch_v1, "null or misaligned pointer, or past a private array", true)
UB(divrem_overflow, "division by zero", true) UB(shift_out_of_bounds, "shift count out of range", false)
UB(float_cast_overflow, "float-to-int out of range", false) UB(load_invalid_value, "invalid bool", false)
UB(negate_overflow, "signed overflow", false) UB(add_overflow, "signed overflow", false)
UB(sub_overflow, "signed overflow", false) UB(mul_overflow, "signed overflow", false)
