//! The form of rows of codes and of queries that are multiplied with them; `codes` says what it is for.

/// Channels that 32 bytes hold.
pub const UNIT: usize = 64;
/// The most rows of codes of a call.
pub const MOST_ROWS: usize = 64;
/// D and what fills up the last unit.
pub const fn padded(dim: usize) -> usize {
    dim.next_multiple_of(UNIT)
}

/// The place of channel `c` in a query.
pub const fn place(c: usize) -> usize {
    c / UNIT * UNIT + c % 4 * (UNIT / 4) + c % UNIT / 4
}
