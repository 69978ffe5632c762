// Stands in for an instruction set that the compiler or the machine's architecture does not have.
#include "kernels.h"

#define DIPTYCH_JOIN_OF(a, b) a##b
#define DIPTYCH_JOIN(a, b) DIPTYCH_JOIN_OF(a, b)

namespace diptych {

const KernelTable* DIPTYCH_JOIN(DIPTYCH_ISA, _kernels)() { return nullptr; }

}  // namespace diptych
