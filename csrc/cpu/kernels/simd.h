// Vectors of the accumulation type, with loads and stores that convert.
//
// GCC/Clang vector extensions, as wide as the registers of the instruction set. The kernels are compiled once
// per instruction set (see kernel_table.cpp), each time in another namespace, so that the linker cannot mix them.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "../../host_device.h"

#if !defined(FASTVIT_ISA)
#define FASTVIT_ISA baseline
#endif

namespace fastvit {
namespace FASTVIT_ISA {

using BFloat16 = c10::BFloat16;
using Half = c10::Half;

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class A>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
  typedef float unaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
  typedef double unaligned __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
};
template <class A>
using Simd = typename VectorOf<A>::type;
template <class A>
constexpr int kLanes = kVectorBytes / int(sizeof(A));

using FloatVector = Simd<float>;
typedef uint32_t WordVector __attribute__((vector_size(kVectorBytes)));
typedef uint16_t HalfWordVector __attribute__((vector_size(kVectorBytes / 2)));
typedef uint16_t UnalignedHalfWords __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));

// load<A>(p): kLanes<A> elements at p, converted. store<A>(p, v) is its reverse.
template <class A>
FASTVIT_HOST_DEVICE Simd<A> load(const A* p) {
  return *reinterpret_cast<const typename VectorOf<A>::unaligned*>(p);
}

template <class A>
FASTVIT_HOST_DEVICE FloatVector load(const BFloat16* p) {
#if defined(__AVX512F__)  // one permutation of words takes the place of a conversion and a shift
  const __m512i words = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const WordVector upper = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return FloatVector(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, __m512i(upper << 16), words));
#elif defined(__AVX2__)  // the compiler would convert each half by itself
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return FloatVector(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
#else
  const HalfWordVector bits = *reinterpret_cast<const UnalignedHalfWords*>(p);
  return reinterpret_cast<FloatVector>(__builtin_convertvector(bits, WordVector) << 16);
#endif
}

// The vector of T that `v` becomes in memory: to nearest, ties to even; a quiet NaN stays NaN.
template <class T, class A>
struct RoundToStorage {
  static FASTVIT_HOST_DEVICE Simd<A> of(Simd<A> v) { return v; }
};
template <>
struct RoundToStorage<BFloat16, float> {
  static FASTVIT_HOST_DEVICE HalfWordVector of(FloatVector v) {
    const WordVector bits = reinterpret_cast<WordVector>(v), more = 0x7fffu + ((bits >> 16) & 1u);
#if defined(__AVX512F__)
    const __mmask16 ordered = _mm512_cmp_ps_mask(__m512(v), __m512(v), _CMP_ORD_Q);
    const __m512i rounded = _mm512_mask_add_epi32(__m512i(bits), ordered, __m512i(bits), __m512i(more));
    const WordVector odd = {0x30001, 0x70005, 0xb0009, 0xf000d, 0x130011, 0x170015, 0x1b0019, 0x1f001d};
    return HalfWordVector(_mm512_castsi512_si256(_mm512_permutexvar_epi16(__m512i(odd), rounded)));
#else
    const WordVector rounded = bits + (more & WordVector(v == v));
#if defined(__AVX2__)
    const __m256i words = _mm256_srai_epi32(__m256i(rounded), 16);  // signed, so that packing saturates none
    return HalfWordVector(_mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    return __builtin_convertvector(rounded >> 16, HalfWordVector);
#endif
#endif
  }
};
template <>
struct RoundToStorage<Half, float> {
  static FASTVIT_HOST_DEVICE HalfWordVector of(FloatVector v) {
#if defined(__AVX512F__)
    return HalfWordVector(_mm512_cvtps_ph(__m512(v), 0));
#elif defined(__F16C__)
    return HalfWordVector(_mm256_cvtps_ph(__m256(v), 0));
#else
    HalfWordVector words;
    for (int i = 0; i < kLanes<float>; ++i) words[i] = Half(float(v[i])).x;
    return words;
#endif
  }
};
template <class A, class T>
FASTVIT_HOST_DEVICE void store(T* p, Simd<A> v) {
  const auto bits = RoundToStorage<T, A>::of(v);
  __builtin_memcpy(p, &bits, sizeof(bits));
}

// Position a whole vector's address, past the caches: the line is not read before. `fence_non_temporal` makes what was
// written visible to other threads.
template <class A, class T>
FASTVIT_HOST_DEVICE void store_non_temporal(T* p, Simd<A> v) {
  const auto bits = RoundToStorage<T, A>::of(v);
#if defined(__AVX512F__)
  if constexpr (sizeof(bits) == 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), __m512i(bits));
  else
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), __m256i(bits));
#elif defined(__AVX2__)
  if constexpr (sizeof(bits) == 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), __m256i(bits));
  else
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), __m128i(bits));
#else
  __builtin_memcpy(p, &bits, sizeof(bits));
#endif
}
inline void fence_non_temporal() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

template <class A>
FASTVIT_HOST_DEVICE FloatVector load(const Half* p) {
#if defined(__AVX512F__)
  return FloatVector(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
  return FloatVector(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  FloatVector v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = float(p[i]);
  return v;
#endif
}

// The n < kLanes elements at p, in the last lanes. The other lanes are 0, and other memory is not accessed.
template <class A, class T>
FASTVIT_HOST_DEVICE Simd<A> load_partial(const T* p, int n) {
  T padded[kLanes<A>] = {};
  for (int i = 0; i < n; ++i) padded[kLanes<A> - n + i] = p[i];
  return load<A>(padded);
}
template <class A, class T>
FASTVIT_HOST_DEVICE void store_partial(T* p, Simd<A> v, int n) {
  T padded[kLanes<A>];
  store<A>(padded, v);
  for (int i = 0; i < n; ++i) p[i] = padded[kLanes<A> - n + i];
}

#if defined(__AVX512F__)  // masked instructions; the copies above cost more than the rest of a short span
FASTVIT_HOST_DEVICE __mmask16 last_lanes_mask(int n) {
  return __mmask16(0xffff0000u >> n);
}
template <>
FASTVIT_HOST_DEVICE FloatVector load_partial<float>(const float* p, int n) {
  return FloatVector(_mm512_maskz_loadu_ps(last_lanes_mask(n), p - (16 - n)));
}
template <>
FASTVIT_HOST_DEVICE void store_partial<float>(float* p, FloatVector v, int n) {
  _mm512_mask_storeu_ps(p - (16 - n), last_lanes_mask(n), __m512(v));
}
#elif defined(__AVX2__)
FASTVIT_HOST_DEVICE __m256i last_lanes_mask(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0));
}
template <>
FASTVIT_HOST_DEVICE FloatVector load_partial<float>(const float* p, int n) {
  return FloatVector(_mm256_maskload_ps(p - (8 - n), last_lanes_mask(n)));
}
template <>
FASTVIT_HOST_DEVICE void store_partial<float>(float* p, FloatVector v, int n) {
  _mm256_maskstore_ps(p - (8 - n), last_lanes_mask(n), __m256(v));
}
#endif

template <class A>
struct LaneNumbers;
template <>
struct LaneNumbers<float> {
  typedef int32_t type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct LaneNumbers<double> {
  typedef int64_t type __attribute__((vector_size(kVectorBytes)));
};
template <class A>
FASTVIT_HOST_DEVICE typename LaneNumbers<A>::type lane_numbers() {
  typename LaneNumbers<A>::type lanes{};
  for (int i = 0; i < kLanes<A>; ++i) lanes[i] = i;
  return lanes;
}

// v with all lanes but the last n set to 0.
template <class A>
FASTVIT_HOST_DEVICE Simd<A> zero_all_but_last(Simd<A> v, int n) {
  return lane_numbers<A>() >= kLanes<A> - n ? v : Simd<A>{};
}

template <class A>
FASTVIT_HOST_DEVICE A sum_lanes(Simd<A> v) {  // pairwise, always in the same order
#if defined(__clang__)
  A lane[kLanes<A>];
  std::memcpy(lane, &v, sizeof(v));
  for (int half = kLanes<A> / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
#else
  for (int half = kLanes<A> / 2; half > 0; half /= 2) v += __builtin_shuffle(v, lane_numbers<A>() ^ half);
  return v[0];
#endif
}

// Where a vector is in a span of n elements: at element i, or at the end of the span. The latter overlaps the
// vector before it, or begins with zeros where the span is shorter than a vector.
template <class A>
struct FullVector {
  int64_t i;
  template <class T>
  FASTVIT_HOST_DEVICE Simd<A> load(const T* span) const {
    return FASTVIT_ISA::load<A>(span + i);
  }
  template <class T>
  FASTVIT_HOST_DEVICE void store(T* span, Simd<A> v) const {
    FASTVIT_ISA::store<A>(span + i, v);
  }
};
template <class A>
struct NonTemporalVector : FullVector<A> {  // of a result, within a span
  template <class T>
  FASTVIT_HOST_DEVICE void store(T* span, Simd<A> v) const {
    FASTVIT_ISA::store_non_temporal<A>(span + this->i, v);
  }
};
template <class A>
struct LastVector {
  int64_t n;
  template <class T>
  FASTVIT_HOST_DEVICE Simd<A> load(const T* span) const {
    return n < kLanes<A> ? load_partial<A>(span, int(n)) : FASTVIT_ISA::load<A>(span + n - kLanes<A>);
  }
  template <class T>
  FASTVIT_HOST_DEVICE void store(T* span, Simd<A> v) const {
    n < kLanes<A> ? store_partial<A>(span, v, int(n)) : FASTVIT_ISA::store<A>(span + n - kLanes<A>, v);
  }
};

// The vectors of a span that are written past the caches: from the first vector-aligned address on. A short
// span is streamed only if it has no ragged ends, which would write parts of cache lines.
struct NonTemporalRange {
  bool on = false;
  int64_t first = 0;

  template <class T>
  NonTemporalRange(bool wanted, const T* span, int64_t n, int64_t lanes) {
    if (!wanted) return;
    const int64_t before = int64_t(reinterpret_cast<uintptr_t>(span) / sizeof(T)) % lanes;
    on = n * int64_t(sizeof(T)) >= 1024 || (before == 0 && n % lanes == 0);
    if (on && before) first = lanes - before;
  }
};

// write(at, read(at)) for the vectors of a span of n elements. A streamed result is none of the
// operands.
template <class A, class Read, class Write>
FASTVIT_HOST_DEVICE void for_each_vector(int64_t n, NonTemporalRange streaming, const Read& read,
                                         const Write& write) {
  constexpr int L = kLanes<A>;
  const LastVector<A> end{n};
  const bool ragged = (n - streaming.first) % L != 0;
  decltype(read(end)) last{};
  if (ragged) last = read(end);  // before the vector that it overlaps is written, perhaps in place
  if (streaming.first) write(FullVector<A>{0}, read(FullVector<A>{0}));
  if (streaming.on)
    for (int64_t i = streaming.first; i + L <= n; i += L)
      write(NonTemporalVector<A>{i}, read(FullVector<A>{i}));
  else
    for (int64_t i = 0; i + L <= n; i += L) write(FullVector<A>{i}, read(FullVector<A>{i}));
  if (ragged) write(end, last);
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
