// Reads the contents of a tensor by one rule, and reports the first element that breaks it.
//
//   report = (n, x[n], what it was compared with) of the smallest n, in the order of the indices, for which the rule does not hold
//
// src/ops/contents/mod.rs says what the rules are. Sessions that check contents launch this before each call and wait for the report, so
// that time does not matter.
//
// Work split: one CTA; thread t takes the elements t, t + THREADS, … up to the first that breaks the rule, and the CTA finds the smallest.
// Distinct elements are compared with all before them.
//
// On entry: every tensor of a Number has the leading extents of the rule's tensor, or 1; strides of extents of 1 are 0.
//
// targets: compute_80
// cold: check_contents

#include "common/types.cuh"

constexpr uint32 THREADS = 256;
constexpr uint32 WITHIN = 0, ASCENDING = 1, DISTINCT = 2, FACTOR = 3, FINITE = 4, NUMBER = 5;
constexpr uint32 DIMS = 4;
constexpr uint64 NONE = ~0ull;

// The index of an element.
struct At {
    int64 d[DIMS];

    // Coordinate `n`, without an address of the index.
    __device__ int64 along(uint32 n) const { return n == 0 ? d[0] : n == 1 ? d[1] : n == 2 ? d[2] : d[3]; }
};

// A tensor: the address of its first element, NULL where it is absent, and its strides in bytes.
struct View {
    const char *data;
    int64 step[DIMS];

    __device__ const char *at(const At &at) const {
        const char *address = data;
#pragma unroll
        for (uint32 d = 0; d < DIMS; ++d) address += at.d[d] * step[d];
        return address;
    }
};

// times·⌊(of − less + per_position·r + plus) / divisor⌋ in 0 … most; r is coordinate 1 of the element.
struct Number {
    View of, less;
    int64 per_position, plus, divisor, times, most;

    __device__ int64 at(const At &at) const {
        int64 sum = per_position * at.d[1] + plus;
        if (of.data) sum += as<int32>(of.at(at));
        if (less.data) sum -= as<int32>(less.at(at));
        return sum < 0 ? 0 : min(int64(uint64(sum) / uint64(divisor)) * times, most);
    }
};

struct Report {
    uint64 element;  // NONE if all elements keep the rule
    int64 value;     // the integer, or the bits of the float
    int64 other;
};

// Mirrored in src/ops/contents/cuda.rs. Strides are in bytes.
struct RuleParams {
    View tensor;  // int32 or float32
    int64 shape[DIMS];
    Number applies[2], from, to, below;
    int64 least;
    uint32 along, last, is, padding;
    Report *report;
};
#include "contents/layout.cuh"

__device__ inline At index_of(const RuleParams &p, uint64 element) {
    At at;
#pragma unroll
    for (uint32 d = DIMS; d-- > 0;) {
        at.d[d] = element % uint64(p.shape[d]);
        element /= uint64(p.shape[d]);
    }
    return at;
}

// Whether the rule is about an element.
__device__ inline bool is_read(const RuleParams &p, const At &at) {
    const int64 along = at.along(p.along);
    return along >= p.from.at(at) && along < p.to.at(at) && p.applies[0].at(at) > 0 && p.applies[1].at(at) > 0;
}

// The number of the first element before this one that has the same value; -1 if there is none.
__device__ inline int64 earlier(const RuleParams &p, int64 element, int32 value) {
    for (int64 n = 0; n < element; ++n) {
        const At at = index_of(p, n);
        if (is_read(p, at) && as<int32>(p.tensor.at(at)) == value) return n;
    }
    return -1;
}

// Whether an element breaks the rule. `report` is filled where it does.
__device__ inline bool is_broken(const RuleParams &p, int64 element, Report &report) {
    const At at = index_of(p, element);
    if (!is_read(p, at)) return false;
    const int32 value = as<int32>(p.tensor.at(at));
    const float number = __int_as_float(value);
    report = {uint64(element), value, 0};
    switch (p.is) {
        case WITHIN:
            report.other = p.below.at(at);
            return value < p.least || value >= report.other;
        case ASCENDING: {
            if (at.along(p.last) == 0 || (p.last == p.along && at.along(p.along) == p.from.at(at))) return false;
            report.other = as<int32>(p.tensor.at(at) - p.tensor.step[p.last]);
            return value < report.other + p.least;
        }
        case DISTINCT:
            report.other = value < 0 ? -1 : earlier(p, element, value);
            return report.other >= 0;
        case FACTOR: return !(isfinite(number) && number >= 0);
        case FINITE: return !isfinite(number);
        default: return isnan(number);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) check_contents(const __grid_constant__ RuleParams p) {
    __shared__ uint64 first;
    if (threadIdx.x == 0) first = NONE;
    __syncthreads();
    const int64 count = p.shape[0] * p.shape[1] * p.shape[2] * p.shape[3];
    Report report = {NONE, 0, 0};
    for (int64 n = threadIdx.x; n < count; n += THREADS) {
        if (is_broken(p, n, report)) {
            atomicMin(&first, report.element);
            break;
        }
        report.element = NONE;
    }
    __syncthreads();
    if (first == NONE ? threadIdx.x == 0 : report.element == first) *p.report = report;
}
