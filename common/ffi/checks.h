// Preconditions of the FFI handlers, as messages: "quantize: scale: expected f32[1], got f32[2]".
//
// Every handler checks all of its buffers with these before it writes the first byte. Shapes are in the handlers'
// canonical form (common/README.md): a leading group dimension `g`, then the tensor.
#ifndef JAXFP8_COMMON_FFI_CHECKS_H_
#define JAXFP8_COMMON_FFI_CHECKS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <string>

#include "common/dispatch.h"
#include "common/scale.h"
#include "xla/ffi/api/ffi.h"

namespace jaxfp8 {

namespace ffi = ::xla::ffi;

#define JAXFP8_RETURN_IF_ERROR(expression)                        \
  do {                                                            \
    if (::xla::ffi::Error error = (expression); error.failure()) { \
      return error;                                               \
    }                                                             \
  } while (false)

// As XLA_FFI_DEFINE_HANDLER_SYMBOL, with the op before what XLA says of a call that no handler has seen yet: a wrong
// number of buffers, attributes that the handler does not have.
#define JAXFP8_DEFINE_HANDLER_SYMBOL(name, handler, ...)                   \
  extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame* call_frame) {          \
    XLA_FFI_DEFINE_HANDLER(bound, handler, __VA_ARGS__);                   \
    return ::jaxfp8::WithOp(#name, *call_frame, (*bound)(call_frame));     \
  }                                                                        \
  static_assert(true, "a semicolon follows")

// XLA's function that tells an error's message, by the name that the header gives it: XLA_FFI_Error_GetMessage with
// jaxlib 0.10, XLA_FFI_Error_GetDetails, in the same place of the API, with 0.12.
template <class Api>
auto MessageFunction(const Api& api, int) -> decltype(api.XLA_FFI_Error_GetMessage) {
  return api.XLA_FFI_Error_GetMessage;
}
template <class Api>
auto MessageFunction(const Api& api, long) -> decltype(api.XLA_FFI_Error_GetDetails) {
  return api.XLA_FFI_Error_GetDetails;
}

// Calls that function. A newer XLA also writes the error's code, behind what an older header has: there is room for it.
template <class Args>
std::string Message(void (*get)(Args*), XLA_FFI_Error* error) {
  struct {
    Args args;
    int64_t code[2];
  } out = {};
  static_assert(offsetof(Args, message) == 3 * sizeof(void*) && sizeof(Args) <= 5 * sizeof(void*),
                "the code of XLA_FFI_Error_GetDetails_Args does not lie behind the message");
  out.args.struct_size = 5 * sizeof(void*);
  out.args.error = error;
  get(&out.args);
  return out.args.message;
}

// `error`, or null, with the op of the symbol `name` before its message: "jaxfp8_amax_v1" has the op "amax".
inline XLA_FFI_Error* WithOp(const char* name, const XLA_FFI_CallFrame& call_frame, XLA_FFI_Error* error) {
  // XLA refuses handlers of another major version, and minor ones move nothing.
  if (error == nullptr || call_frame.api->api_version.major_version != XLA_FFI_API_MAJOR) return error;
  const std::string symbol = name;
  constexpr size_t kPrefix = sizeof("jaxfp8_") - 1;
  const std::string op = symbol.substr(kPrefix, symbol.rfind("_v") - kPrefix) + ": ";
  const std::string message = Message(MessageFunction(*call_frame.api, 0), error);
  if (message.compare(0, op.size(), op) == 0) return error;
  // Errors of handlers start with their op, so this one is XLA's, and all that XLA finds wrong is an invalid argument.
  XLA_FFI_Error_Destroy_Args destroy = {};
  destroy.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  destroy.error = error;
  call_frame.api->XLA_FFI_Error_Destroy(&destroy);
  const std::string named = op + message;
  XLA_FFI_Error_Create_Args create = {};
  create.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  create.message = named.c_str();
  create.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return call_frame.api->XLA_FFI_Error_Create(&create);
}

// One buffer of a handler and the name its errors give it.
struct Operand {
  const char* op;
  const char* name;
  ffi::AnyBuffer buffer;
};

inline std::string Describe(ffi::DataType dtype, ffi::Span<const int64_t> dims) {
  std::ostringstream text;
  text << dtype << "[";
  for (size_t i = 0; i < dims.size(); ++i) text << (i ? "," : "") << dims[i];
  text << "]";
  return text.str();
}

inline ffi::Error Mismatch(const Operand& operand, const std::string& expected) {
  return ffi::Error::InvalidArgument(std::string(operand.op) + ": " + operand.name + ": expected " + expected +
                                     ", got " +
                                     Describe(operand.buffer.element_type(), operand.buffer.dimensions()));
}

inline ffi::Error CheckDtype(const Operand& operand, std::initializer_list<ffi::DataType> allowed) {
  for (ffi::DataType dtype : allowed) {
    if (operand.buffer.element_type() == dtype) return ffi::Error::Success();
  }
  std::ostringstream expected;
  const char* separator = "dtype ";
  for (ffi::DataType dtype : allowed) {
    expected << separator << dtype;
    separator = " or ";
  }
  return Mismatch(operand, expected.str());
}

inline ffi::Error CheckHighPrecision(const Operand& operand) {
  return CheckDtype(operand, {ffi::DataType::BF16, ffi::DataType::F16, ffi::DataType::F32});
}

inline ffi::Error CheckFp8(const Operand& operand) {
  return CheckDtype(operand, {ffi::DataType::F8E4M3FN, ffi::DataType::F8E5M2});
}

inline ffi::Error CheckRank(const Operand& operand, size_t rank) {
  if (operand.buffer.dimensions().size() == rank) return ffi::Error::Success();
  return Mismatch(operand, "rank " + std::to_string(rank));
}

inline ffi::Error CheckShape(const Operand& operand, ffi::Span<const int64_t> dims) {
  const ffi::Span<const int64_t> got = operand.buffer.dimensions();
  if (std::equal(got.begin(), got.end(), dims.begin(), dims.end())) return ffi::Error::Success();
  return Mismatch(operand, Describe(operand.buffer.element_type(), dims));
}

inline ffi::Error CheckShape(const Operand& operand, std::initializer_list<int64_t> dims) {
  return CheckShape(operand, ffi::Span<const int64_t>(dims.begin(), dims.size()));
}

// A buffer of one dtype and shape.
template <class Dims>
ffi::Error CheckArray(const Operand& operand, ffi::DataType dtype, const Dims& dims) {
  JAXFP8_RETURN_IF_ERROR(CheckDtype(operand, {dtype}));
  return CheckShape(operand, dims);
}

inline ffi::Error CheckArray(const Operand& operand, ffi::DataType dtype, std::initializer_list<int64_t> dims) {
  return CheckArray<>(operand, dtype, dims);
}

// A scale is f32 with one element for all groups, or one for each.
inline ffi::Error CheckScale(const Operand& operand, int64_t groups) {
  const ffi::Span<const int64_t> dims = operand.buffer.dimensions();
  if (operand.buffer.element_type() == ffi::DataType::F32 && dims.size() == 1 &&
      (dims[0] == 1 || dims[0] == groups)) {
    return ffi::Error::Success();
  }
  std::string expected = "F32[1]";
  if (groups != 1) expected += " or F32[" + std::to_string(groups) + "]";
  return Mismatch(operand, expected);
}

// The product of `dims` in elements of `width` bytes must fit int64.
inline ffi::Error CheckSize(const Operand& operand, int64_t width) {
  int64_t bytes = width;
  for (int64_t dim : operand.buffer.dimensions()) {
    if (dim < 0) return Mismatch(operand, "dimensions of at least 0");
    if (dim != 0 && bytes > std::numeric_limits<int64_t>::max() / dim) {
      return Mismatch(operand, "a size that fits 64 bits");
    }
    bytes *= dim;
  }
  return ffi::Error::Success();
}

// A program that asks for something a handler does not know must not get something else in silence. XLA itself checks
// this only for handlers that have attributes.
inline ffi::Error CheckNoAttributes(const char* op, const ffi::Dictionary& attributes) {
  if (attributes.size() == 0) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(op) + ": expected no attributes, got " +
                                     std::to_string(attributes.size()));
}

// Whether a buffer is [0]: what stands for an operand that there is not, or a result that nobody wants.
inline bool IsNone(ffi::AnyBuffer buffer) { return buffer.dimensions().size() == 1 && buffer.dimensions()[0] == 0; }

// An amax as a scale is: one of all groups, or one for each; or f32[0] where there is none.
inline ffi::Error CheckAmaxOrNone(const Operand& amax, int64_t groups) {
  return IsNone(amax.buffer) ? CheckDtype(amax, {ffi::DataType::F32}) : CheckScale(amax, groups);
}

// The elements of an f32 buffer; null where it has none.
inline float* FloatsOrNull(ffi::AnyBuffer buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<float*>(buffer.untyped_data());
}

// x: of `rank`, and small enough that neither it nor a result of the same shape overflows 64 bits.
inline ffi::Error CheckInput(const Operand& x, size_t rank) {
  JAXFP8_RETURN_IF_ERROR(CheckRank(x, rank));
  return CheckSize(x, sizeof(float));
}

// Matrices: [g, m, n], or [m, n] where g is 1; small enough as above.
inline ffi::Error CheckMatrices(const Operand& x) {
  const size_t rank = x.buffer.dimensions().size();
  if (rank != 2 && rank != 3) return Mismatch(x, "rank 2 or 3");
  return CheckSize(x, sizeof(float));
}

// g, m and n of a buffer that has passed CheckMatrices.
inline std::array<int64_t, 3> MatrixDims(ffi::AnyBuffer matrices) {
  const ffi::Span<const int64_t> dims = matrices.dimensions();
  if (dims.size() == 2) return {1, dims[0], dims[1]};
  return {dims[0], dims[1], dims[2]};
}

// [g, m, n] with the g of the matrices `like`, or [m, n] where these lack g.
inline ffi::Error CheckShapeLike(const Operand& operand, ffi::AnyBuffer like, int64_t m, int64_t n) {
  if (like.dimensions().size() == 2) return CheckShape(operand, {m, n});
  return CheckShape(operand, {like.dimensions()[0], m, n});
}

// An attribute that is divided by or into: not 0, not subnormal.
inline ffi::Error CheckPositiveNormal(const char* op, const char* name, float value) {
  if (IsPositiveNormal(value)) return ffi::Error::Success();
  std::ostringstream got;
  got << value;
  return ffi::Error::InvalidArgument(std::string(op) + ": " + name +
                                     ": expected a positive normal F32, got " + got.str());
}

// The elements of a buffer that has passed CheckDtype.
template <class T>
T* Data(ffi::AnyBuffer buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

// From one group's scale, or amax, to the next, in a buffer that has passed CheckScale.
inline int64_t ScaleStride(ffi::AnyBuffer scale) { return scale.dimensions()[0] == 1 ? 0 : 1; }

// Of a dtype that has passed CheckHighPrecision or CheckFp8.
inline Dtype ToDtype(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::BF16: return Dtype::kBF16;
    case ffi::DataType::F16: return Dtype::kF16;
    case ffi::DataType::F8E4M3FN: return Dtype::kE4M3;
    case ffi::DataType::F8E5M2: return Dtype::kE5M2;
    default: return Dtype::kF32;
  }
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_FFI_CHECKS_H_
