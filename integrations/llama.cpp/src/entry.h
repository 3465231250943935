// One entry for each version of ggml's backend API, each compiled against that version's header.
#pragma once

#include "ggml-backend.h"

namespace vanward {

ggml_backend_reg_t registry_of_api2();
ggml_backend_reg_t registry_of_api3();

}  // namespace vanward
