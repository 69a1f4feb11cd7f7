// jaxfp8_ragged_matmul_v1: a [v, m, k], b [v, g, n, k], their scale_invs, group_sizes i32 [v, g] -> out [v, m, n];
// or, where the groups cut the contraction: a [v, p, m], b [v, n, m] -> out [v, g, p, n].
// The scale_invs are [1] or [v]. On compute capability 9.0 they may be those of blocks (kernels/ragged_matmul.h).
#include "cuda/kernels/ragged_matmul.h"

#include <cstdlib>
#include <string>

#include "cuda/ffi/support.h"

namespace jaxfp8::cuda {
namespace {

constexpr char kOp[] = "ragged_matmul";

ffi::Error CheckSizes(const Operand& operand) {
  for (int64_t dim : operand.buffer.dimensions()) {
    if (dim > kRaggedMaxSize) return Mismatch(operand, "sizes of at most " + std::to_string(kRaggedMaxSize));
  }
  return CheckSize(operand, sizeof(float));
}

ffi::Error CheckCodes(const Operand& codes, size_t rank) {
  JAXFP8_RETURN_IF_ERROR(CheckFp8(codes));
  JAXFP8_RETURN_IF_ERROR(CheckRank(codes, rank));
  return CheckSizes(codes);
}

ffi::Error RaggedMatmulHandler(cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer a_scale_inv,
                               ffi::AnyBuffer b_scale_inv, ffi::AnyBuffer group_sizes,
                               ffi::Result<ffi::AnyBuffer> out, bool precise) {
  const Operand a_operand{kOp, "a", a};
  const Operand b_operand{kOp, "b", b};
  const Operand sizes_operand{kOp, "group_sizes", group_sizes};
  const Operand out_operand{kOp, "out", *out};
  JAXFP8_RETURN_IF_ERROR(CheckCodes(a_operand, 3));
  // What the groups cut shows in b's rank.
  const bool contraction = b.dimensions().size() == 3;
  JAXFP8_RETURN_IF_ERROR(CheckCodes(b_operand, contraction ? 3 : 4));
  JAXFP8_RETURN_IF_ERROR(CheckDtype(sizes_operand, {ffi::DataType::S32}));
  JAXFP8_RETURN_IF_ERROR(CheckRank(sizes_operand, 2));
  JAXFP8_RETURN_IF_ERROR(CheckSizes(sizes_operand));
  const int64_t members = a.dimensions()[0], rows = a.dimensions()[1], length = a.dimensions()[2];
  const int64_t groups = group_sizes.dimensions()[1];
  const int64_t columns = b.dimensions()[contraction ? 1 : 2];
  JAXFP8_RETURN_IF_ERROR(CheckShape(sizes_operand, {members, groups}));
  JAXFP8_RETURN_IF_ERROR(contraction ? CheckShape(b_operand, {members, columns, length})
                                     : CheckShape(b_operand, {members, groups, columns, length}));
  const Operand a_scale_operand{kOp, "a_scale_inv", a_scale_inv};
  const Operand b_scale_operand{kOp, "b_scale_inv", b_scale_inv};
  const bool blocks = a_scale_inv.dimensions().size() > 2 || b_scale_inv.dimensions().size() > 2;
  if (blocks) {
    const int64_t depth = RaggedBlocks(static_cast<int32_t>(length));
    JAXFP8_RETURN_IF_ERROR(CheckArray(a_scale_operand, ffi::DataType::F32, {members, depth, rows}));
    const int64_t column_blocks = RaggedBlocks(static_cast<int32_t>(columns));
    JAXFP8_RETURN_IF_ERROR(CheckDtype(b_scale_operand, {ffi::DataType::F32}));
    JAXFP8_RETURN_IF_ERROR(contraction ? CheckShape(b_scale_operand, {members, depth, columns})
                                       : CheckShape(b_scale_operand, {members, groups, column_blocks, depth}));
  } else {
    JAXFP8_RETURN_IF_ERROR(CheckScale(a_scale_operand, members));
    JAXFP8_RETURN_IF_ERROR(CheckScale(b_scale_operand, members));
  }
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(out_operand));
  JAXFP8_RETURN_IF_ERROR(contraction ? CheckShape(out_operand, {members, groups, rows, columns})
                                     : CheckShape(out_operand, {members, rows, columns}));
  JAXFP8_RETURN_IF_ERROR(CheckSizes(out_operand));

  RaggedMatmulParams params = {};
  params.plan.contraction = contraction;
  params.plan.members = static_cast<int32_t>(members);
  params.plan.groups = static_cast<int32_t>(groups);
  params.plan.rows = static_cast<int32_t>(rows);
  params.plan.columns = static_cast<int32_t>(columns);
  params.plan.length = static_cast<int32_t>(length);
  params.a_dtype = ToDtype(a.element_type());
  params.b_dtype = ToDtype(b.element_type());
  params.out_dtype = ToDtype(out->element_type());
  params.a = a.untyped_data();
  params.b = b.untyped_data();
  params.a_scale_inv = Data<float>(a_scale_inv);
  params.b_scale_inv = Data<float>(b_scale_inv);
  params.a_scale_stride = ScaleStride(a_scale_inv);
  params.b_scale_stride = ScaleStride(b_scale_inv);
  params.group_sizes = static_cast<const int32_t*>(group_sizes.untyped_data());
  params.out = out->untyped_data();
  params.precise = precise;
  params.blocks = blocks;
  const char* const tma = std::getenv("JAXFP8_RAGGED_TMA");  // until a GPU has run that kernel
  params.tma = tma != nullptr && *tma == '1';
  return ToError(kOp, LaunchRaggedMatmul(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_ragged_matmul_v1, jaxfp8::cuda::RaggedMatmulHandler,
                             jaxfp8::cuda::OnStream()
                                 .Arg<xla::ffi::AnyBuffer>()  // a
                                 .Arg<xla::ffi::AnyBuffer>()  // b
                                 .Arg<xla::ffi::AnyBuffer>()  // a_scale_inv
                                 .Arg<xla::ffi::AnyBuffer>()  // b_scale_inv
                                 .Arg<xla::ffi::AnyBuffer>()  // group_sizes
                                 .Ret<xla::ffi::AnyBuffer>()  // out
                                 .Attr<bool>("precise"),
                             {jaxfp8::cuda::kRecordable});
