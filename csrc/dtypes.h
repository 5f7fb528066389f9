// The floating-point types of tensors, and the type of arithmetic on each; for host and device.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <type_traits>

#include "host_device.h"

namespace fastvit {

using torch::headeronly::ScalarType;

template <class T>
using Accumulation = std::conditional_t<std::is_same_v<T, double>, double, float>;

inline ScalarType accumulation_type(ScalarType t) {
  return t == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

struct ChannelVector {  // a parameter or buffer of C numbers, or null
  void* data = nullptr;
  ScalarType dtype = ScalarType::Float;
};

// f.template operator()<T>() for a dtype; Half and BFloat16 are a backend's types of 16 bits.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Half, class BFloat16, class F>
FASTVIT_HOST_DEVICE auto dispatch_storage_type(ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Half:
      return f.template operator()<Half>();
    case ScalarType::BFloat16:
      return f.template operator()<BFloat16>();
    case ScalarType::Double:
      return f.template operator()<double>();
    default:
      return f.template operator()<float>();
  }
}

// f.template operator()<T, Y>() for the dtypes of a LayerNorm's x and y: those of y are x's, or narrower than
// float.
template <class Half, class BFloat16, class F>
void dispatch_layer_norm_types(ScalarType x, ScalarType y, const F& f) {
  dispatch_storage_type<Half, BFloat16>(x, [&]<class T>() {
    if constexpr (std::is_same_v<T, float>)
      dispatch_storage_type<Half, BFloat16>(y, [&]<class Y>() {
        if constexpr (sizeof(Y) <= sizeof(T)) f.template operator()<T, Y>();
      });
    else
      f.template operator()<T, T>();
  });
}

// f.template operator()<A>() for the accumulation type of a dtype.
template <class F>
void dispatch_accumulation(ScalarType dtype, const F& f) {
  dtype == ScalarType::Double ? f.template operator()<double>() : f.template operator()<float>();
}

}  // namespace fastvit
