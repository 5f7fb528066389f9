// SIMD registers (here: vectors) of the accumulation type, loads and stores that convert between a storage
// type and the accumulation type, and the positions at which a vector lies in a span.
//
// A vector is a GCC/Clang vector extension as wide as the registers of the instruction set. setup.py compiles
// the kernels once per instruction set, each time with another FASTVIT_ISA; the namespace of that name keeps
// the linker from mixing the copies. A is the accumulation type (float or double), T the storage type (A,
// Half or BFloat16). A span is a run of elements that a kernel processes in order, such as one channel of an
// NCHW image.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "../../simd_math.h"

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

// type: a vector in a register. unaligned: the same vector at any address, whatever type the memory has.
template <class A>
struct SimdTypes;
template <>
struct SimdTypes<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
  typedef float unaligned __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
};
template <>
struct SimdTypes<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
  typedef double unaligned __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
};
template <class A>
using Simd = typename SimdTypes<A>::type;
template <class A>  // elements of a vector
constexpr int kLanes = kVectorBytes / int(sizeof(A));

using FloatVector = Simd<float>;
typedef uint32_t Uint32Vector __attribute__((vector_size(kVectorBytes)));
// As many lanes as a FloatVector, in half of its bytes: a vector of a 16-bit storage type.
typedef uint16_t Uint16Vector __attribute__((vector_size(kVectorBytes / 2)));
typedef uint16_t UnalignedUint16Vector __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));

// load<A>(source) converts the kLanes<A> elements at `source` to the accumulation type, and
// store<A>(target, values) converts `values` to the type of the elements at `target`.
template <class A>
FASTVIT_FORCE_INLINE Simd<A> load(const A* source) {
  return *reinterpret_cast<const typename SimdTypes<A>::unaligned*>(source);
}

// The bits of a BFloat16 are the upper half of a float's.
template <class A>
FASTVIT_FORCE_INLINE FloatVector load(const BFloat16* source) {
#if defined(__AVX512F__)  // one permutation of words takes the place of a conversion and a shift
  const __m512i words = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  const Uint32Vector source_words = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return FloatVector(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, __m512i(source_words << 16), words));
#elif defined(__AVX2__)  // without intrinsics the compiler converts the two halves of a vector one by one
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return FloatVector(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
#else
  const Uint16Vector words = *reinterpret_cast<const UnalignedUint16Vector*>(source);
  return reinterpret_cast<FloatVector>(__builtin_convertvector(words, Uint32Vector) << 16);
#endif
}

template <class A>
FASTVIT_FORCE_INLINE FloatVector load(const Half* source) {
#if defined(__AVX512F__)
  return FloatVector(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source))));
#elif defined(__F16C__)
  return FloatVector(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
#else
  FloatVector values;
  for (int i = 0; i < kLanes<float>; ++i) values[i] = float(source[i]);
  return values;
#endif
}

// RoundToStorage<T, A>::round(values) rounds to the nearest values of T, ties to even, and returns a vector
// with the bits of T. A quiet NaN stays NaN.
template <class T, class A>
struct RoundToStorage {  // T is A
  static FASTVIT_FORCE_INLINE Simd<A> round(Simd<A> values) { return values; }
};
template <>
struct RoundToStorage<BFloat16, float> {
  static FASTVIT_FORCE_INLINE Uint16Vector round(FloatVector values) {
    // Adding 0x7fff, or 0x8000 if the upper 16 bits are odd, and keeping the upper 16 bits rounds to nearest
    // even. A NaN keeps its bits, as the sum could be an infinity.
    const Uint32Vector bits = reinterpret_cast<Uint32Vector>(values),
                       increment = 0x7fffu + ((bits >> 16) & 1u);
#if defined(__AVX512F__)
    const __mmask16 is_number = _mm512_cmp_ps_mask(__m512(values), __m512(values), _CMP_ORD_Q);
    const __m512i rounded =
        _mm512_mask_add_epi32(__m512i(bits), is_number, __m512i(bits), __m512i(increment));
    // The indices 1, 3, 5, ... of the lanes' upper words, two indices of 16 bits in each element.
    const Uint32Vector upper_words = {0x30001,  0x70005,  0xb0009,  0xf000d,
                                      0x130011, 0x170015, 0x1b0019, 0x1f001d};
    return Uint16Vector(_mm512_castsi512_si256(_mm512_permutexvar_epi16(__m512i(upper_words), rounded)));
#else
    const Uint32Vector rounded = bits + (increment & Uint32Vector(values == values));
#if defined(__AVX2__)
    // The shift is arithmetic, so that the shifted values fit into int16 and _mm_packs_epi32 never saturates.
    const __m256i words = _mm256_srai_epi32(__m256i(rounded), 16);
    return Uint16Vector(_mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    return __builtin_convertvector(rounded >> 16, Uint16Vector);
#endif
#endif
  }
};
template <>
struct RoundToStorage<Half, float> {
  static FASTVIT_FORCE_INLINE Uint16Vector round(FloatVector values) {
#if defined(__AVX512F__)
    return Uint16Vector(_mm512_cvtps_ph(__m512(values), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    return Uint16Vector(_mm256_cvtps_ph(__m256(values), _MM_FROUND_TO_NEAREST_INT));
#else
    Uint16Vector words;
    for (int i = 0; i < kLanes<float>; ++i) words[i] = Half(float(values[i])).x;
    return words;
#endif
  }
};

template <class A, class T>
FASTVIT_FORCE_INLINE void store(T* target, Simd<A> values) {
  const auto bits = RoundToStorage<T, A>::round(values);
  __builtin_memcpy(target, &bits, sizeof(bits));
}

// Stores a vector past the caches, so that the cache line is not read first; without AVX2 an ordinary store.
// `target` must be aligned to the size of the stored vector. fence_non_temporal makes all such stores of a
// thread visible to other threads.
template <class A, class T>
FASTVIT_FORCE_INLINE void store_non_temporal(T* target, Simd<A> values) {
  const auto bits = RoundToStorage<T, A>::round(values);
#if defined(__AVX512F__)
  if constexpr (sizeof(bits) == 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), __m512i(bits));
  else
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), __m256i(bits));
#elif defined(__AVX2__)
  if constexpr (sizeof(bits) == 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), __m256i(bits));
  else
    _mm_stream_si128(reinterpret_cast<__m128i*>(target), __m128i(bits));
#else
  __builtin_memcpy(target, &bits, sizeof(bits));
#endif
}
inline void fence_non_temporal() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// load_partial loads `count` < kLanes<A> elements at `source` into the last lanes, and 0 into the other
// lanes. store_partial stores the last `count` lanes. Neither accesses memory beside those elements.
template <class A, class T>
FASTVIT_FORCE_INLINE Simd<A> load_partial(const T* source, int count) {
  T padded[kLanes<A>] = {};
  for (int i = 0; i < count; ++i) padded[kLanes<A> - count + i] = source[i];
  return load<A>(padded);
}
template <class A, class T>
FASTVIT_FORCE_INLINE void store_partial(T* target, Simd<A> values, int count) {
  T padded[kLanes<A>];
  store<A>(padded, values);
  for (int i = 0; i < count; ++i) target[i] = padded[kLanes<A> - count + i];
}

// Masked instructions for float: the copies above take longer than all other work on a short span.
#if defined(__AVX512F__)
FASTVIT_FORCE_INLINE __mmask16 last_lanes_mask(int count) {
  return __mmask16(0xffff0000u >> count);
}
template <>
FASTVIT_FORCE_INLINE FloatVector load_partial<float>(const float* source, int count) {
  return FloatVector(_mm512_maskz_loadu_ps(last_lanes_mask(count), source - (16 - count)));
}
template <>
FASTVIT_FORCE_INLINE void store_partial<float>(float* target, FloatVector values, int count) {
  _mm512_mask_storeu_ps(target - (16 - count), last_lanes_mask(count), __m512(values));
}
#elif defined(__AVX2__)
FASTVIT_FORCE_INLINE __m256i last_lanes_mask(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0));
}
template <>
FASTVIT_FORCE_INLINE FloatVector load_partial<float>(const float* source, int count) {
  return FloatVector(_mm256_maskload_ps(source - (8 - count), last_lanes_mask(count)));
}
template <>
FASTVIT_FORCE_INLINE void store_partial<float>(float* target, FloatVector values, int count) {
  _mm256_maskstore_ps(target - (8 - count), last_lanes_mask(count), __m256(values));
}
#endif

// A vector of integers, each as wide as A: the type that the compiler's shuffles and comparisons of a Simd<A>
// need.
template <class A>
struct LaneIndices;
template <>
struct LaneIndices<float> {
  typedef int32_t type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct LaneIndices<double> {
  typedef int64_t type __attribute__((vector_size(kVectorBytes)));
};
template <class A>
FASTVIT_FORCE_INLINE typename LaneIndices<A>::type get_lane_indices() {  // 0, 1, 2, ...
  typename LaneIndices<A>::type indices{};
  for (int i = 0; i < kLanes<A>; ++i) indices[i] = i;
  return indices;
}

// Keeps the last `count` lanes and sets the others to 0.
template <class A>
FASTVIT_FORCE_INLINE Simd<A> zero_all_but_last(Simd<A> values, int count) {
  return get_lane_indices<A>() >= kLanes<A> - count ? values : Simd<A>{};
}

// Adds the lanes pairwise, always in the same order.
template <class A>
FASTVIT_FORCE_INLINE A sum_lanes(Simd<A> values) {
#if defined(__clang__)  // which has no __builtin_shuffle
  A lanes[kLanes<A>];
  std::memcpy(lanes, &values, sizeof(values));
  for (int half = kLanes<A> / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
#else
  for (int half = kLanes<A> / 2; half > 0; half /= 2)
    values += __builtin_shuffle(values, get_lane_indices<A>() ^ half);
  return values[0];
#endif
}

// Returns a * b + c, with one rounding where AVX2 or AVX-512 has an instruction for it, else always with two.
// For the expression a * b + c the compiler would choose anew in each kernel, and kernels might disagree on a
// value near a kink.
template <class A>
FASTVIT_FORCE_INLINE Simd<A> multiply_add(Simd<A> a, Simd<A> b, Simd<A> c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4)
    return Simd<A>(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
  else
    return Simd<A>(_mm512_fmadd_pd(__m512d(a), __m512d(b), __m512d(c)));
#elif defined(__AVX2__) && defined(__FMA__)
  if constexpr (sizeof(A) == 4)
    return Simd<A>(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
  else
    return Simd<A>(_mm256_fmadd_pd(__m256d(a), __m256d(b), __m256d(c)));
#else
  return round_product(Simd<A>(a * b)) + c;
#endif
}

// Positions of a vector in a span. position.load(span) and position.store(span, values) access the vector's
// elements in a span that begins at `span`.
//
// FullVector: kLanes<A> elements from element i on.
template <class A>
struct FullVector {
  int64_t i;
  template <class T>
  FASTVIT_FORCE_INLINE Simd<A> load(const T* span) const {
    return FASTVIT_ISA::load<A>(span + i);
  }
  template <class T>
  FASTVIT_FORCE_INLINE void store(T* span, Simd<A> values) const {
    FASTVIT_ISA::store<A>(span + i, values);
  }
};
// NonTemporalVector: a FullVector whose store bypasses the caches.
template <class A>
struct NonTemporalVector : FullVector<A> {
  template <class T>
  FASTVIT_FORCE_INLINE void store(T* span, Simd<A> values) const {
    FASTVIT_ISA::store_non_temporal<A>(span + this->i, values);
  }
};
// LastVector: the last kLanes<A> elements of a span of `length` elements, which may overlap the vector
// before. A span shorter than a vector is in the last lanes, after zeros.
template <class A>
struct LastVector {
  int64_t length;
  template <class T>
  FASTVIT_FORCE_INLINE Simd<A> load(const T* span) const {
    return length < kLanes<A> ? load_partial<A>(span, int(length))
                              : FASTVIT_ISA::load<A>(span + length - kLanes<A>);
  }
  template <class T>
  FASTVIT_FORCE_INLINE void store(T* span, Simd<A> values) const {
    length < kLanes<A> ? store_partial<A>(span, values, int(length))
                       : FASTVIT_ISA::store<A>(span + length - kLanes<A>, values);
  }
};

// Which vectors of a result's span are stored past the caches: if is_used, all full vectors from element
// `first` on, else none. `first` is the first element at which a stored vector is aligned. A span below 1 KiB
// bypasses the caches only if it begins and ends at vector boundaries, since non-temporal stores of parts of
// a cache line are slow.
struct NonTemporalRange {
  bool is_used = false;
  int64_t first = 0;

  template <class T>
  NonTemporalRange(bool stores_past_cache, const T* span, int64_t length, int64_t lanes) {
    if (!stores_past_cache) return;
    const int64_t misalignment = int64_t(reinterpret_cast<uintptr_t>(span) / sizeof(T)) % lanes;
    is_used = length * int64_t(sizeof(T)) >= 1024 || (misalignment == 0 && length % lanes == 0);
    if (is_used && misalignment) first = lanes - misalignment;
  }
};

// Calls write(position, compute(position)) for the vectors of a span of `length` elements. The written span
// may be one that compute reads, unless non_temporal.is_used, since then the first two vectors may overlap.
template <class A, class Compute, class Write>
FASTVIT_FORCE_INLINE void for_each_vector(int64_t length, NonTemporalRange non_temporal,
                                          const Compute& compute, const Write& write) {
  constexpr int L = kLanes<A>;
  const LastVector<A> last{length};
  const bool needs_last = (length - non_temporal.first) % L != 0;
  decltype(compute(last)) last_result{};
  if (needs_last) last_result = compute(last);  // before a write to the vector that it overlaps
  if (non_temporal.first) write(FullVector<A>{0}, compute(FullVector<A>{0}));  // the unaligned beginning
  if (non_temporal.is_used)
    for (int64_t i = non_temporal.first; i + L <= length; i += L)
      write(NonTemporalVector<A>{i}, compute(FullVector<A>{i}));
  else
    for (int64_t i = 0; i + L <= length; i += L) write(FullVector<A>{i}, compute(FullVector<A>{i}));
  if (needs_last) write(last, last_result);
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
