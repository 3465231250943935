#include "options.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <functional>

namespace vanward {

Options options;

namespace {

std::string wrong(const char *name, const char *found, const char *expected) {
    return std::string(name) + ": found \"" + found + "\"; expected " + expected;
}

/** A whole number in [low, high] that fills `text` up to `end`. */
bool whole(const char *text, const char *end, int64_t low, int64_t high, int64_t &value) {
    char *stop = nullptr;
    errno = 0;
    long long parsed = strtoll(text, &stop, 10);
    if (errno != 0 || stop == text || stop != end || parsed < low || parsed > high) {
        return false;
    }
    value = parsed;
    return true;
}

bool budget(const std::string &text, Options &o) {
    char *stop = nullptr;
    if (!text.empty() && text.back() == '%') {
        double percent = strtod(text.c_str(), &stop);
        o.budget_share = percent / 100;
        o.budget_tokens = 0;
        return stop == text.c_str() + text.size() - 1 && percent > 0 && percent <= 100;
    }
    return whole(text.c_str(), text.c_str() + text.size(), 1, INT32_MAX, o.budget_tokens);
}

bool layers(const std::string &text, std::vector<int> &list) {
    list.clear();
    for (size_t begin = 0; begin < text.size();) {
        size_t end = text.find(',', begin);
        end = end == std::string::npos ? text.size() : end;
        int64_t layer = 0;
        if (!whole(text.c_str() + begin, text.c_str() + end, 0, 100000, layer)) {
            return false;
        }
        list.push_back(static_cast<int>(layer));
        begin = end + 1;
    }
    return true;
}

std::vector<std::string> names(const std::string &text) {
    std::vector<std::string> list;
    for (size_t begin = 0; begin < text.size();) {
        const size_t end = std::min(text.find(',', begin), text.size());
        list.push_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    return list;
}

}  // namespace

std::string read_options(Options &o) {
    std::string error;
    auto read = [&](const char *name, const char *expected, const std::function<bool(const std::string &)> &take) {
        const char *found = getenv(name);
        if (error.empty() && found != nullptr && found[0] != '\0' && !take(found)) {
            error = wrong(name, found, expected);
        }
    };
    auto number = [&](const char *name, const char *expected, int64_t low, int64_t high, auto &value) {
        read(name, expected, [&](const std::string &text) {
            int64_t parsed = 0;
            bool valid = whole(text.c_str(), text.c_str() + text.size(), low, high, parsed);
            if (valid) {
                value = static_cast<std::remove_reference_t<decltype(value)>>(parsed);
            }
            return valid;
        });
    };

    number("VANWARD_GGML_ENABLED", "0 or 1", 0, 1, o.enabled);
    read("VANWARD_GGML_STRATEGY", "sparse or dense", [&](const std::string &text) {
        o.sparse = text == "sparse";
        return o.sparse || text == "dense";
    });
    read("VANWARD_GGML_METHOD", "minmax or axis", [&](const std::string &text) {
        o.method = text == "axis" ? Method::axis : Method::minmax;
        return text == "axis" || text == "minmax";
    });
    number("VANWARD_GGML_BLOCK", "8 … 256", 8, 256, o.block);
    read("VANWARD_GGML_BUDGET", "a number of tokens or a share such as 25%",
         [&](const std::string &text) { return budget(text, o); });
    read("VANWARD_GGML_DENSE_LAYERS", "layers such as 0,1,29", [&](const std::string &text) { return layers(text, o.dense_layers); });
    number("VANWARD_GGML_DENSE_BELOW", "a number of tokens", 0, INT32_MAX, o.dense_below);
    number("VANWARD_GGML_ROWS", "1 … 256", 1, 256, o.rows);
    number("VANWARD_GGML_THREADS", "0 … 1024", 0, 1024, o.threads);
    read("VANWARD_GGML_DEVICES", "devices of ggml such as CUDA0,CUDA1 or CUDA*", [&](const std::string &text) {
        o.devices = text == "none" ? std::vector<std::string>() : names(text);
        return true;
    });
    read("VANWARD_GGML_BACKEND", "the path of a backend of ggml", [&](const std::string &text) {
        o.backend = text;
        return true;
    });
    read("VANWARD_GGML_GRAPHS", "on or off", [&](const std::string &text) {
        o.graphs = text == "on";
        return o.graphs || text == "off";
    });
    read("VANWARD_GGML_BESIDE", "on or off", [&](const std::string &text) {
        o.beside = text == "on";
        return o.beside || text == "off";
    });
    number("VANWARD_GGML_CHECK", "0 or 1", 0, 1, o.check);
    return error;
}

}  // namespace vanward
