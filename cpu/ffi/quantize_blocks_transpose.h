// jaxfp8_quantize_blocks_transpose_v2: x [g, m, n] -> data fp8 [g, m, n], scale_inv [g, ceil(m / r), ceil(n / c)]; and,
// if more results are asked for, data_t [g, n, m] and scale_inv_t [g, ceil(n / r), ceil(m / c)].
//
// `block`: s64 [2], r rows and c columns of a layout share a scale, 0 means all. `scaling`: f32 or f32_power_2, scales
// are F32; or e8m0_ceil or e8m0_floor, they are U8, the codes of E8M0. CUDA's handler has four blocks, and other places
// for their scales.
#ifndef JAXFP8_CPU_FFI_QUANTIZE_BLOCKS_TRANSPOSE_H_
#define JAXFP8_CPU_FFI_QUANTIZE_BLOCKS_TRANSPOSE_H_

#include <cstdint>
#include <string_view>
#include <utility>

#include "common/ffi/block_checks.h"
#include "cpu/kernels/quantize_blocks_transpose.h"

namespace jaxfp8::cpu {

struct QuantizeBlocksTransposeOp {
  static constexpr char kName[] = "quantize_blocks_transpose";
  using Params = QuantizeBlocksTransposeParams;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .template Arg<ffi::AnyBuffer>()  // x
        .template Ret<ffi::AnyBuffer>()  // data
        .template Ret<ffi::AnyBuffer>()  // scale_inv
        .RemainingRets()                 // data_t, scale_inv_t
        .template Attr<ffi::Span<const int64_t>>("block")
        .template Attr<std::string_view>("scaling");
  }

  static ffi::Error ToParams(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> data, ffi::Result<ffi::AnyBuffer> scale_inv,
                             ffi::RemainingRets rest, ffi::Span<const int64_t> block, std::string_view scaling,
                             Params* params) {
    JAXFP8_RETURN_IF_ERROR(ToBlockScaling(kName, scaling, &params->scaling));
    if (block.size() != 2 || block[0] < 0 || block[1] < 0) {
      std::string got;
      for (int64_t size : block) got += (got.empty() ? "" : ", ") + std::to_string(size);
      return UnknownAttribute(kName, "block", "two sizes of at least 0", got);
    }
    params->block_rows = block[0];
    params->block_columns = block[1];
    const Operand x_operand{kName, "x", x};
    JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(x_operand));
    JAXFP8_RETURN_IF_ERROR(CheckInput(x_operand, 3));
    const int64_t g = params->groups = x.dimensions()[0];
    const int64_t m = params->m = x.dimensions()[1];
    const int64_t n = params->n = x.dimensions()[2];
    JAXFP8_RETURN_IF_ERROR(CheckFp8({kName, "data", *data}));
    const ffi::DataType format = data->element_type();
    JAXFP8_RETURN_IF_ERROR(CheckLayout({kName, "data", *data}, {kName, "scale_inv", *scale_inv}, *params, format,
                                       {g, m, n}));
    JAXFP8_RETURN_IF_ERROR(CheckTransposedCount(kName, 2, rest.size()));
    if (rest.size() == 2) {
      const ffi::AnyBuffer data_t = **rest.get<ffi::AnyBuffer>(0), scale_inv_t = **rest.get<ffi::AnyBuffer>(1);
      JAXFP8_RETURN_IF_ERROR(CheckLayout({kName, "data_t", data_t}, {kName, "scale_inv_t", scale_inv_t}, *params,
                                         format, {g, n, m}));
      params->data_t = data_t.untyped_data();
      params->scale_inv_t = scale_inv_t.untyped_data();
    }
    params->dtype = ToDtype(x.element_type());
    params->format = ToDtype(format);
    params->x = x.untyped_data();
    params->data = data->untyped_data();
    params->scale_inv = scale_inv->untyped_data();
    return ffi::Error::Success();
  }

 private:
  static int64_t CountBlocks(int64_t size, int64_t block) {
    return block == 0 ? (size != 0) : size / block + (size % block != 0);
  }

  // The codes of a layout [groups, rows, columns], and their scales.
  static ffi::Error CheckLayout(const Operand& data, const Operand& scale_inv, const Params& params,
                                ffi::DataType format, const int64_t (&dims)[3]) {
    JAXFP8_RETURN_IF_ERROR(CheckArray(data, format, {dims[0], dims[1], dims[2]}));
    const int64_t down = CountBlocks(dims[1], params.block_rows), across = CountBlocks(dims[2], params.block_columns);
    return CheckBlockScales(scale_inv, params.scaling, {dims[0], down, across});
  }
};

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_FFI_QUANTIZE_BLOCKS_TRANSPOSE_H_
