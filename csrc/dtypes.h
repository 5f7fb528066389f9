// The floating-point dtypes of tensors as C++ types, for host and device.
//
// A storage type T is the type of a tensor's elements in memory: float, double, or one of 16 bits. Arithmetic
// and sums are done in its accumulation type: double for double, else float.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <type_traits>

#include "host_device.h"

namespace fastvit {

using torch::headeronly::ScalarType;

// The accumulation type of T.
template <class T>
using Accumulation = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The accumulation type of a tensor of dtype storage_type, as a dtype.
inline ScalarType accumulation_type(ScalarType storage_type) {
  return storage_type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// A parameter or a buffer of any floating-point dtype: one number per channel, or per column of a LayerNorm.
struct ChannelVector {
  void* data = nullptr;  // null: the call has no such tensor
  ScalarType dtype = ScalarType::Float;
};

// Calls function.template operator()<T>() with the storage type T of `dtype`. CPU and CUDA kernels have
// different types for float16 and bfloat16: the caller gives its own as Half and BFloat16.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Half, class BFloat16, class Function>
FASTVIT_HOST_DEVICE auto dispatch_storage_type(ScalarType dtype, const Function& function) {
  switch (dtype) {
    case ScalarType::Half:
      return function.template operator()<Half>();
    case ScalarType::BFloat16:
      return function.template operator()<BFloat16>();
    case ScalarType::Double:
      return function.template operator()<double>();
    default:
      return function.template operator()<float>();
  }
}

// Calls function.template operator()<T, Y>() with the storage types of a LayerNorm: T of x and dx, Y of y and
// dy. If T is float, Y may have 16 bits, as under autocast; otherwise Y is T.
template <class Half, class BFloat16, class Function>
void dispatch_layer_norm_types(ScalarType x_dtype, ScalarType y_dtype, const Function& function) {
  dispatch_storage_type<Half, BFloat16>(x_dtype, [&]<class T>() {
    if constexpr (std::is_same_v<T, float>)
      dispatch_storage_type<Half, BFloat16>(y_dtype, [&]<class Y>() {
        if constexpr (sizeof(Y) <= sizeof(T)) function.template operator()<T, Y>();
      });
    else
      function.template operator()<T, T>();
  });
}

// Calls function.template operator()<A>() with the accumulation type A of `dtype`.
template <class Function>
void dispatch_accumulation(ScalarType dtype, const Function& function) {
  dtype == ScalarType::Double ? function.template operator()<double>()
                              : function.template operator()<float>();
}

}  // namespace fastvit
