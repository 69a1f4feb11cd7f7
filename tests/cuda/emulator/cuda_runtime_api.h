// The emulated runtime under its other name.
#include "cuda_runtime.h"
