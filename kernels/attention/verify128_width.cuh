// The width of heads for verify128.cuh, verify128_short.cuh and what they include. A source includes this, or verify64_width.cuh, before them.
#pragma once

#include "common/types.cuh"

constexpr uint32 VERIFY_CHANNELS = 128;
// Stages of the ring of verify128, and of each half of a CTA of verify128_short: 32 KiB each.
constexpr uint32 STAGES = 5, SHORT_STAGES = 2;
