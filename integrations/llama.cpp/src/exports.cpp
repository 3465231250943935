#include "exports.h"

#include "cache.h"
#include "counters.h"
#include "entry.h"
#include "ggml_calls.h"
#include "options.h"
#include "vanward.h"

#include <cstdlib>
#include <cstring>

namespace {

using namespace vanward;

/** The version of the backend API: first of all in every registry of every version. Where none is there yet, the release says it. */
int api_version() {
    if (ggml.ggml_backend_reg_count() > 0) {
        int version = 0;
        memcpy(&version, ggml.ggml_backend_reg_get(0), sizeof version);
        return version;
    }
    const char *release = ggml.ggml_version();
    const char *dot = strchr(release, '.');
    const long minor = strncmp(release, "0.", 2) == 0 && dot != nullptr ? strtol(dot + 1, nullptr, 10) : -1;
    return minor == 25 ? 2 : minor == 26 || minor == 27 ? 3 : 0;
}

}  // namespace

ggml_backend_reg_t ggml_backend_init() {
    const char *missing = find_ggml(__builtin_return_address(0));
    if (missing != nullptr) {
        log(GGML_LOG_LEVEL_ERROR, "vanward: ggml has no function %s; expected ggml 0.25 … 0.27", missing);
        return nullptr;
    }
    if (vwd_abi_version() != VWD_ABI_VERSION) {
        log(GGML_LOG_LEVEL_ERROR, "vanward: libvanward has ABI %u; expected %u", vwd_abi_version(), VWD_ABI_VERSION);
        return nullptr;
    }
    const std::string error = read_options(options);
    if (!error.empty()) {
        log(GGML_LOG_LEVEL_ERROR, "vanward: not loaded: %s", error.c_str());
        return nullptr;
    }
    const int version = api_version();
    switch (version) {
    case 2: return registry_of_api2();
    case 3: return registry_of_api3();
    default:
        log(GGML_LOG_LEVEL_ERROR, "vanward: ggml %s has backend API version %d; this library knows 2 and 3", ggml.ggml_version(), version);
        return nullptr;
    }
}

uint64_t vanward_ggml_counter(const char *name) {
#define X(each, meaning)                                                                                                       \
    if (strcmp(name, #each) == 0) {                                                                                            \
        return counters.each;                                                                                                  \
    }
    VANWARD_GGML_COUNTERS(X)
#undef X
    return 0;
}

const char *vanward_ggml_read_options() {
    static std::string error;
    Options read;
    error = read_options(read);
    if (!error.empty()) {
        return error.c_str();
    }
    read.method = options.method;
    read.block = options.block;
    options = read;
    return nullptr;
}

void vanward_ggml_forget_summaries() { forget_all(); }
