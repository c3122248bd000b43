// Bindings of the engines, which tvm-ffi loads.
#include <tvm/ffi/function.h>

#include "cuda_steps.cuh"
#include "engine_calls.h"

#define BIND(name, ...) TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, (__VA_ARGS__));
KVPOOL_ENGINE_CALLS(kvpool::CudaSteps, BIND)
BIND(has_batches, kvpool::uses_batches)
