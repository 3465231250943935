// The width of heads for verify128.cuh, verify128_short.cuh and what they include. A source includes this, or verify64_width.cuh or verify256_width.cuh, before them.
#pragma once

#include "common/types.cuh"

constexpr uint32 VERIFY_CHANNELS = 128, STAGE_TOKENS = 64;
// Stages of the ring of verify128, and of each half of a CTA of verify128_short: 32 KiB each.
constexpr uint32 STAGES = 5, SHORT_STAGES = 2;
// Rows of which a CTA receives states: most are received where each of 15 CTAs has 5 rows.
constexpr uint32 RECEIVED_ROWS = 75;
constexpr uint32 CHAIN_REGISTERS = 184;  // of a thread that computes
