//! Random numbers that are the same on every machine, for what is timed and tested. Tokens are drawn by another generator: `ops::draw`.

/// A linear congruential generator (Knuth's MMIX constants) that gives the upper half of its state.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub fn next_u32(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }

    pub fn below(&mut self, n: usize) -> usize {
        ((self.next_u32() as u64 * n as u64) >> 32) as usize
    }

    /// Uniform in −1 … 1.
    pub fn uniform(&mut self) -> f32 {
        self.next_u32() as i32 as f32 / 2147483648.0
    }
}
