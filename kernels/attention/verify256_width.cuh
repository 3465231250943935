// The width of heads for verify128.cuh and what it includes. A source includes this, verify64_width.cuh or verify128_width.cuh before it.
#pragma once

#include "common/types.cuh"

constexpr uint32 VERIFY_CHANNELS = 256, STAGE_TOKENS = 32;
// Stages of the ring, 32 KiB each.
constexpr uint32 STAGES = 4;
// Rows of which a CTA receives states: clusters of a power of two share all rows out evenly.
constexpr uint32 RECEIVED_ROWS = 64;
constexpr uint32 CHAIN_REGISTERS = 208;  // of a thread that computes
