// Tensors in simulated memory whose every byte outside of their elements is a guard.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/backend.h"
#include "reference.h"

namespace fastvit::simulate {

inline size_t size_of(ScalarType dtype) {
  return dtype == ScalarType::Double || dtype == ScalarType::Long ? 8 : dtype == ScalarType::Float ? 4 : 2;
}

template <class T>
void write(unsigned char* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}
template <class T>
T read(const unsigned char* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}
inline void put(ScalarType dtype, unsigned char* to, double value) {
  if (dtype == ScalarType::Double) return write(to, value);
  if (dtype == ScalarType::Float) return write(to, float(value));
  if (dtype == ScalarType::Half) return write(to, __float2half_rn(float(value)));
  if (dtype == ScalarType::BFloat16) return write(to, __float2bfloat16_rn(float(value)));
  write(to, int64_t(value));
}
inline double get(ScalarType dtype, const unsigned char* from) {
  if (dtype == ScalarType::Double) return read<double>(from);
  if (dtype == ScalarType::Float) return read<float>(from);
  if (dtype == ScalarType::Half) return __half2float(read<__half>(from));
  if (dtype == ScalarType::BFloat16) return __bfloat162float(read<__nv_bfloat16>(from));
  return double(read<int64_t>(from));
}

enum class Walk { planes, rows, cropped };  // NCHW; channels_last; NCHW cut out of larger planes, unaligned

struct Shape {
  Walk walk;
  int64_t N, C, S;

  int64_t numel() const { return N * C * S; }
};

class Array {  // N x C x S; for numbers per channel (1, C, 1)
 public:
  Array(std::string name, ScalarType dtype, const Shape& shape, const Values& values)
      : name(std::move(name)), dtype(dtype), shape(shape) {
    const int64_t wide = shape.walk == Walk::cropped ? shape.S + 3 : shape.S;
    if (shape.walk == Walk::rows)
      strides[0] = shape.C * shape.S, strides[1] = 1, strides[2] = shape.C;
    else
      strides[0] = shape.C * wide, strides[1] = wide, strides[2] = 1;
    begin = kGuard + (shape.walk == Walk::cropped ? size_of(dtype) : 0);
    image.assign(2 * kGuard + size_t(shape.N * shape.C * wide + 3) * size_of(dtype), kPattern);
    for (int64_t i = 0; i < shape.numel(); ++i) put(dtype, at(i), values[size_t(i)]);
    if (cudaMalloc(&device, image.size())) throw std::runtime_error("simulated memory is full");
    cudaMemcpy(device, image.data(), image.size(), cudaMemcpyHostToDevice);
  }
  // Of an output: NaN, so that what was not written shows.
  Array(std::string name, ScalarType dtype, const Shape& shape)
      : Array(std::move(name), dtype, shape, Values(size_t(shape.numel()), NAN)) {}

  void* data() const { return static_cast<unsigned char*>(device) + begin; }
  Operand operand() const { return {strides}; }

  // In the order of n, c, s; throws if a byte of a guard has changed.
  Values read() {
    std::vector<unsigned char> now(image.size());
    cudaMemcpy(now.data(), device, now.size(), cudaMemcpyDeviceToHost);
    Values values;
    for (int64_t i = 0; i < shape.numel(); ++i) {
      unsigned char* const element = now.data() + (at(i) - image.data());
      values.push_back(get(dtype, element));
      std::memcpy(element, at(i), size_of(dtype));
    }
    if (now != image) throw std::runtime_error(name + ": bytes outside of it were overwritten");
    return values;
  }

  const std::string name;
  const ScalarType dtype;
  const Shape shape;

 private:
  static constexpr size_t kGuard = 512;
  static constexpr unsigned char kPattern = 0xa5;

  unsigned char* at(int64_t i) {
    const int64_t s = i % shape.S, c = i / shape.S % shape.C, n = i / shape.S / shape.C;
    return image.data() + begin + size_t(n * strides[0] + c * strides[1] + s * strides[2]) * size_of(dtype);
  }
  int64_t strides[3];
  size_t begin;
  std::vector<unsigned char> image;
  void* device = nullptr;
};

template <class... Arrays>
Layout layout_of(const Array& first, const Arrays&... others) {
  const int64_t sizes[] = {first.shape.N, first.shape.C, first.shape.S};
  const Operand operands[] = {first.operand(), others.operand()...};
  return make_layout(3, sizes, 1, 1 + sizeof...(others), operands);
}

// Of channel c, of values in the order of n, c, s.
inline Values channel(const Values& values, const Shape& shape, int64_t c) {
  Values found;
  for (int64_t n = 0; n < shape.N; ++n)
    for (int64_t s = 0; s < shape.S; ++s) found.push_back(values[size_t((n * shape.C + c) * shape.S + s)]);
  return found;
}
inline void set_channel(Values& values, const Shape& shape, int64_t c, const Values& found) {
  size_t i = 0;
  for (int64_t n = 0; n < shape.N; ++n)
    for (int64_t s = 0; s < shape.S; ++s) values[size_t((n * shape.C + c) * shape.S + s)] = found[i++];
}

}  // namespace fastvit::simulate
