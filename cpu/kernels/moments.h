// Moments of an optimizer in FP8: blocks of 128 elements of a row, each with codes, an amax and an exponent
// (jaxfp8/ops/_encode_moment.py has the definition).
//
// decode gives the f32 elements. encode quantizes `after`; blocks that decode to `after` already keep their bits. A step
// of Adam decodes, averages and encodes both moments of each leaf in one pass.
#ifndef JAXFP8_CPU_KERNELS_MOMENTS_H_
#define JAXFP8_CPU_KERNELS_MOMENTS_H_

#include "common/adam.h"
#include "common/params.h"
#include "cpu/kernels/task_pool.h"

namespace jaxfp8::cpu {

void DecodeMoment(TaskPool& pool, const DecodeMomentParams& params);
void EncodeMoment(TaskPool& pool, const EncodeMomentParams& params);
void AdamUpdate(TaskPool& pool, const AdamUpdateParams& params);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_MOMENTS_H_
