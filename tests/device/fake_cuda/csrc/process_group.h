#pragma once
#include "operations.h"
namespace fake_cuda {
inline void bind_process_group(py::module&) {}
}
