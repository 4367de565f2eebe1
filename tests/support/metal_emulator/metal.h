// The part of the Metal standard library that MLX custom kernels use, as C++17.
#pragma once
#include "emu.h"
#include <limits>
#include <math.h>
#include <string.h>
#include <type_traits>
#undef INFINITY
#undef NAN
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define LINE emu_line
#define EACH(expr) for (int i = 0; i < N; i++) { expr; }

namespace metal {
using std::conditional_t, std::enable_if_t, std::is_same_v, std::is_integral_v, std::integral_constant, std::enable_if;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half, float16_t;

// bfloat converts implicitly to float and to nothing else; conversions to it are explicit, as in Metal.
template <class T> constexpr bool is_num = std::is_arithmetic<T>::value || is_same_v<T, half>;
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <class U, enable_if_t<is_num<U>, int> = 0> explicit constexpr bfloat(U x) : bits(round((float)x)) {}
  constexpr operator float() const { return __builtin_bit_cast(float, (uint32_t)bits << 16); }
  static constexpr uint16_t round(float f) {
    uint32_t u = __builtin_bit_cast(uint32_t, f);
    return (u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  }
};
typedef bfloat bfloat16_t;
template <class T> using If_int = enable_if_t<is_integral_v<T>, int>;
#define OP(op) \
  constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat((float)a op (float)b); } \
  template <class I, If_int<I> = 0> constexpr bfloat operator op(bfloat a, I b) { return a op bfloat(b); } \
  template <class I, If_int<I> = 0> constexpr bfloat operator op(I a, bfloat b) { return bfloat(a) op b; } \
  inline bfloat& operator op##=(bfloat& a, bfloat b) { return a = a op b; }
OP(+) OP(-) OP(*) OP(/)
constexpr bfloat operator-(bfloat a) { return bfloat(-(float)a); }
template <class T> constexpr bool is_floating_point_v =
  is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T> constexpr bool is_scalar = is_num<T> || is_same_v<T, bfloat>;
template <class T> using If_scalar = enable_if_t<is_scalar<T>, int>;
template <class T> struct numeric_limits : std::numeric_limits<T> {};
#define LIMITS(T, big, small, eps) \
  template <> struct numeric_limits<T> { \
    static constexpr T max() { return T(big); } \
    static constexpr T lowest() { return T(-big); } \
    static constexpr T min() { return T(small); } \
    static constexpr T epsilon() { return T(eps); } \
    static constexpr T infinity() { return T(INFINITY); } \
    static constexpr T quiet_NaN() { return T(NAN); } \
  };
LIMITS(half, 65504.0f, 6.103515625e-05f, 9.765625e-04f)
LIMITS(bfloat, 3.3895313892515355e38f, 1.1754943508222875e-38f, 7.8125e-03f)
template <class D, class S> inline D as_type(S s) {
  static_assert(sizeof(D) == sizeof(S), "as_type: sizes differ");
  D d;
  memcpy((void*)&d, &s, sizeof d);
  return d;
}

// ---------------------------------------------------------------- vectors
template <class T, int N> struct vstore { alignas(N == 8 ? 8 * sizeof(T) : sizeof(T)) T v[N]; };
template <class T> struct alignas(2 * sizeof(T)) vstore<T, 2> { union { T v[2]; struct { T x, y; }; }; };
template <class T> struct alignas(4 * sizeof(T)) vstore<T, 3> { union { T v[3]; struct { T x, y, z; }; }; };
template <class T> struct alignas(4 * sizeof(T)) vstore<T, 4> { union { T v[4]; struct { T x, y, z, w; }; }; };
template <class T, int N> struct vec;
template <class T, int... I> struct swizzle {  // assignable v.xy, spelled v.xy_() after rewriting
  T* p;
  void operator=(vec<T, sizeof...(I)> o) { int k = 0; ((p[I] = o.v[k++]), ...); }
};
template <class E, class T> inline void append(E* d, int& k, T a) { d[k++] = E(a); }
template <class E, class T, int N> inline void append(E* d, int& k, vec<T, N> a) { EACH(d[k++] = E(a.v[i])) }
template <class T, int N> struct vec : vstore<T, N> {
  using vstore<T, N>::v;
  vec() = default;
  template <class S, If_scalar<S> = 0> vec(S s) { EACH(v[i] = T(s)) }
  template <class U> explicit vec(vec<U, N> o) { EACH(v[i] = T(o.v[i])) }
  template <class A, class B, class... C> vec(A a, B b, C... c) {
    int k = 0;
    append(v, k, a), append(v, k, b), (append(v, k, c), ...);
    if (k != N) __builtin_trap();
  }
  T& operator[](int i) { return v[i]; }
  const T& operator[](int i) const { return v[i]; }
  template <int... I> vec<T, sizeof...(I)> pick() const { return vec<T, sizeof...(I)>(v[I]...); }
#define SWIZZLE(name, ...) \
  auto name##_() { return swizzle<T, __VA_ARGS__>{v}; } \
  auto name() const { return pick<__VA_ARGS__>(); }
  SWIZZLE(xy, 0, 1) SWIZZLE(yx, 1, 0) SWIZZLE(zw, 2, 3) SWIZZLE(xz, 0, 2) SWIZZLE(yw, 1, 3) SWIZZLE(xx, 0, 0)
  SWIZZLE(yz, 1, 2) SWIZZLE(xyz, 0, 1, 2) SWIZZLE(yzw, 1, 2, 3) SWIZZLE(wzyx, 3, 2, 1, 0)
};
#define VBIN(op, R) \
  template <class T, int N> inline vec<R, N> operator op(vec<T, N> a, vec<T, N> b) { \
    vec<R, N> r; \
    EACH(r.v[i] = R(a.v[i] op b.v[i])) \
    return r; \
  } \
  template <class T, int N, class S, If_scalar<S> = 0> inline auto operator op(vec<T, N> a, S b) { \
    return a op vec<T, N>(b); } \
  template <class T, int N, class S, If_scalar<S> = 0> inline auto operator op(S a, vec<T, N> b) { \
    return vec<T, N>(a) op b; }
#define VOP(op) \
  VBIN(op, T) \
  template <class T, int N, class B> inline vec<T, N>& operator op##=(vec<T, N>& a, B b) { return a = a op b; }
VOP(+) VOP(-) VOP(*) VOP(/) VOP(%) VOP(&) VOP(|) VOP(^) VOP(<<) VOP(>>)
VBIN(<, bool) VBIN(>, bool) VBIN(<=, bool) VBIN(>=, bool) VBIN(==, bool) VBIN(!=, bool)
template <class T, int N> inline vec<T, N> operator-(vec<T, N> a) { return vec<T, N>(T(0)) - a; }
#define VT(t) typedef vec<t, 2> t##2; typedef vec<t, 3> t##3; typedef vec<t, 4> t##4;
VT(bool) VT(char) VT(uchar) VT(short) VT(ushort) VT(int) VT(uint) VT(long) VT(ulong) VT(half) VT(float) VT(bfloat)

// ---------------------------------------------------------------- math, computed in float
#define FN(n, args, list, e) \
  inline float n(args(float)) { return e; } \
  inline half n(args(half)) { return half(e); } \
  inline bfloat n(args(bfloat)) { return bfloat(e); } \
  template <class T, int N> inline vec<T, N> n(args(vec<T COMMA N>)) { EACH(a.v[i] = n(list)) return a; }
#define COMMA ,
#define A1(T) T a
#define A2(T) T a, T b
#define A3(T) T a, T b, T c
#define F1(n, e) FN(n, A1, a.v[i], [](float x) { return e; }(a))
#define F2(n, e) FN(n, A2, a.v[i] COMMA b.v[i], [](float x, float y) { return e; }(a, b))
#define F3(n, e) FN(n, A3, a.v[i] COMMA b.v[i] COMMA c.v[i], [](float x, float y, float z) { return e; }(a, b, c))
#define MATH \
  F1(exp, expf(x)) F1(exp2, exp2f(x)) F1(log, logf(x)) F1(log2, log2f(x)) \
  F1(sqrt, sqrtf(x)) F1(rsqrt, 1.0f / sqrtf(x)) \
  F1(sin, sinf(x)) F1(cos, cosf(x)) F1(tanh, tanhf(x)) F1(floor, floorf(x)) F1(ceil, ceilf(x)) F1(rint, rintf(x)) \
  F1(round, roundf(x)) F1(trunc, truncf(x)) F1(abs, fabsf(x)) F1(fabs, fabsf(x)) F2(pow, powf(x, y)) \
  F2(fmod, fmodf(x, y)) \
  F2(max, fmaxf(x, y)) F2(min, fminf(x, y)) F2(divide, x / y) F3(fma, fmaf(x, y, z)) F3(clamp, fminf(fmaxf(x, y), z))
MATH
namespace fast { MATH }
namespace precise { MATH }
#define INT(T) \
  inline T max(T a, T b) { return a < b ? b : a; } \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
INT(signed char) INT(char) INT(uchar) INT(short) INT(ushort) INT(int) INT(uint) INT(long) INT(ulong)
inline int abs(int x) { return x < 0 ? -x : x; }
template <class T, If_scalar<T> = 0> inline bool isnan(T x) { return __builtin_isnan((float)x); }
template <class T, If_scalar<T> = 0> inline bool isinf(T x) { return __builtin_isinf((float)x); }
template <class T> inline T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N> inline T dot(vec<T, N> a, vec<T, N> b) { T s(0); EACH(s = T(s + a.v[i] * b.v[i])) return s; }
template <class T> inline T popcount(T x) { return __builtin_popcountll(std::make_unsigned_t<T>(x)); }

// ---------------------------------------------------------------- barriers and simdgroup functions
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags((int)a | (int)b); }
inline void threadgroup_barrier(mem_flags m, EMU_LINE) { emu::barrier(true, (int)m, LINE); }
inline void simdgroup_barrier(mem_flags m, EMU_LINE) { emu::barrier(false, (int)m, LINE); }
template <class T> EMU_NOSAN inline emu::Xchg* xchg(T v, int op, int line) { return emu::simd(&v, sizeof v, op, line); }
template <class T> EMU_NOSAN inline T lane(emu::Xchg* x, uint i, int line) {
  T r;
  bool there = i < 32 && (x->mask >> i & 1);
  if (!there) emu::inactive_lane(line), memset((void*)&r, 0xFF, sizeof r);
  return there ? *(T*)x->d[i] : r;
}
template <class T, class F> EMU_NOSAN inline T reduce(T v, F f, int line) {  // tree: distance 1, 2, 4, 8, 16
  emu::Xchg* x = xchg(v, 1, line);
  uint m = x->mask;
  for (int w = 1; w < 32 && !x->reduced; w *= 2)
    for (int i = 0; i < 32; i += 2 * w) {
      T &a = *(T*)x->d[i], &b = *(T*)x->d[i + w];
      if (m >> (i + w) & 1) a = m >> i & 1 ? f(a, b) : b, m |= 1u << i;
    }
  x->reduced = 1;
  return *(T*)x->d[0];
}
#define RED(n, e) \
  template <class T> inline T simd_##n(T v, EMU_LINE) { \
  return reduce(v, [](T a, T b) EMU_NOSAN { return T(e); }, LINE); }
RED(sum, a + b) RED(product, a * b) RED(max, max(a, b)) RED(min, min(a, b)) RED(and, a & b)
RED(or, a | b) RED(xor, a ^ b)
inline bool simd_all(bool v, EMU_LINE) { return simd_and(int(v), LINE); }
inline bool simd_any(bool v, EMU_LINE) { return simd_or(int(v), LINE); }
EMU_NOSAN inline uint me() { return emu::cur->lane; }
#define SHUFFLE(n, to) \
  template <class T> inline T n(T v, ushort k, EMU_LINE) { auto x = xchg(v, 2, LINE); return lane<T>(x, to, LINE); }
SHUFFLE(simd_shuffle, k) SHUFFLE(simd_broadcast, k) SHUFFLE(simd_shuffle_xor, me() ^ k)
SHUFFLE(simd_shuffle_down, me() + k > 31 ? me() : me() + k) SHUFFLE(simd_shuffle_up, me() < k ? me() : me() - k)

// ---------------------------------------------------------------- simdgroup matrices
// Lane l holds row (l / 16) * 4 + (l / 2) % 4, columns (l / 8 % 2) * 4 + (l % 2) * 2 and the next.
EMU_NOSAN inline uint row() { return me() / 16 * 4 + me() / 2 % 4; }
EMU_NOSAN inline uint col() { return me() / 8 % 2 * 4 + me() % 2 * 2; }
EMU_NOSAN inline uint lane_of(uint r, uint c) { return r / 4 * 16 + c / 4 * 8 + r % 4 * 2 + c / 2 % 2; }
template <class T, int C, int R> struct simdgroup_matrix {
  static_assert(C == 8 && R == 8 && is_floating_point_v<T>, "8x8 of half, bfloat or float");
  vec<T, 2> e;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T d) : e(row() == col() ? d : T(0), row() == col() + 1 ? d : T(0)) {}  // diagonal
  vec<T, 2>& thread_elements() { return e; }
};
template <class T, int C = 8, int R = 8> inline auto make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, C, R> m;
  m.e = vec<T, 2>(v);
  return m;
}
template <class T> using M8 = simdgroup_matrix<T, 8, 8>;
typedef M8<float> simdgroup_float8x8;
typedef M8<half> simdgroup_half8x8;
typedef M8<bfloat> simdgroup_bfloat8x8;
template <class T> EMU_NOSAN inline T* element(T* p, ulong stride, ulong2 origin, bool transpose, int k) {
  ulong r = row(), c = col() + k;
  return p + origin.y * stride + origin.x + (transpose ? c * stride + r : r * stride + c);
}
template <class T> inline void simdgroup_load(M8<T>& m, const T* p, ulong stride = 8, ulong2 o = 0, bool t = false) {
  for (int k = 0; k < 2; k++) m.e.v[k] = *element(p, stride, o, t, k);
}
template <class T> inline void simdgroup_store(M8<T> m, T* p, ulong stride = 8, ulong2 o = 0, bool t = false) {
  for (int k = 0; k < 2; k++) *element(p, stride, o, t, k) = m.e.v[k];
}
template <class D, class A, class B, class C>
EMU_NOSAN inline void simdgroup_multiply_accumulate(M8<D>& d, M8<A> a, M8<B> b, M8<C> c, EMU_LINE) {
  struct AB { vec<A, 2> a; vec<B, 2> b; } in = {a.e, b.e};
  emu::Xchg* x = xchg(in, 4, LINE);
  if (!x->reduced++) emu::count_mma();
  if (x->mask != ~0u) emu::inactive_lane(LINE);
  for (int j = 0; j < 2; j++) {
    float s = c.e.v[j];
    for (uint k = 0; k < 8; k++)
      s = fmaf(((AB*)x->d[lane_of(row(), k)])->a.v[k % 2], ((AB*)x->d[lane_of(k, col() + j)])->b.v[j], s);
    d.e.v[j] = D(s);
  }
}
template <class D, class A, class B> inline void simdgroup_multiply(M8<D>& d, M8<A> a, M8<B> b, EMU_LINE) {
  simdgroup_multiply_accumulate(d, a, b, M8<float>(0.0f), LINE);
}
}  // namespace metal
// Address spaces vanish; rewrite.py has already turned threadgroup variables into references.
#undef LINE
#define METAL_FUNC inline
#define device
#define constant
#define threadgroup
#define thread
#define kernel
