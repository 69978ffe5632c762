// Linear layers over packed weights by the fastest way that the instruction set has for so many rows.
#pragma once

#include "linear.h"
#if DIPTYCH_AMX
#include "amx_linear.h"
#endif

namespace diptych {
namespace DIPTYCH_ISA {

template <class Weights>
void linear_of(const PackedLinear& layer, const LinearRows& rows) {
#if DIPTYCH_AMX
  if (rows.num_rows > kMaxVectorRows) return linear_tiles<Weights>(layer, rows);
#endif
  linear_rows<Weights>(layer, rows);
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
