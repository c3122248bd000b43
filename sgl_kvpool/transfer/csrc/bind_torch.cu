// Bindings of the engines for torch.utils.cpp_extension, where SGLang is not installed.
#include <pybind11/pybind11.h>

#include "cuda_steps.cuh"
#include "engine_calls.h"

#define BIND(name, ...) module.def(#name, &__VA_ARGS__);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  KVPOOL_ENGINE_CALLS(kvpool::CudaSteps, BIND)
  BIND(has_batches, kvpool::uses_batches)
}
