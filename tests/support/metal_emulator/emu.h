// What metal.h (compiled into every kernel) needs from runtime.cpp.
#pragma once
#include <stddef.h>
#include <stdint.h>
#define EMU_NOSAN __attribute__((no_sanitize("thread"), no_sanitize("undefined")))
#define EMU_LINE int emu_line = __builtin_LINE()

namespace emu {
struct Thread {
  uint32_t lid, lane, sg, size, in_grid[3], in_tg[3], tg[3], tg_size[3];
};
struct Xchg {  // a finished simdgroup exchange: every participating lane's operand
  uint32_t mask, reduced;
  alignas(16) unsigned char red[64], d[32][64];
};
extern Thread* cur;
extern uint32_t grid[3], tg_nominal[3], tg_count[3];
Xchg* simd(const void* v, unsigned size, int op, int line);  // wait for the whole simdgroup
void barrier(bool whole_group, int mem, int line);
void* tg_var(int id, size_t bytes, size_t elem, const char* name);
void inactive_lane(int line);
void count_mma();
}  // namespace emu
