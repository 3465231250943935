#include "ggml_calls.h"

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>

namespace vanward {

GgmlCalls ggml;

const char *find_ggml(const void *caller) {
    Dl_info info = {};
    void *library = nullptr;
    if (dladdr(caller, &info) != 0 && info.dli_fname != nullptr) {
        library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    if (library == nullptr) {  // ggml is linked into the program
        library = dlopen(nullptr, RTLD_LAZY);
    }
#define X(name)                                                                                                                \
    ggml.name = reinterpret_cast<decltype(ggml.name)>(dlsym(library, #name));                                                  \
    if (ggml.name == nullptr) {                                                                                                \
        return #name;                                                                                                          \
    }
    VANWARD_GGML_CALLS(X)
#undef X
    return nullptr;
}

void log(enum ggml_log_level level, const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text - 1, format, arguments);
    va_end(arguments);
    size_t end = length < 0 ? 0 : static_cast<size_t>(length) < sizeof text - 2 ? static_cast<size_t>(length) : sizeof text - 2;
    text[end] = '\n';
    text[end + 1] = '\0';

    ggml_log_callback callback = nullptr;
    void *context = nullptr;
    if (ggml.ggml_log_get != nullptr) {
        ggml.ggml_log_get(&callback, &context);
    }
    if (callback != nullptr) {
        callback(level, text, context);
    } else {
        fputs(text, stderr);
    }
}

}  // namespace vanward
