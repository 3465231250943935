//! Matrices: a warp's registers hold their elements as the instruction set lays them out. With g = lane / 4 and t = lane % 4 a lane has
//! rows g and g + 8 of a 16-row operand, columns 2t and 2t + 1 of eight.

#![allow(clippy::needless_range_loop)] // a lane is a place in many rows

use crate::instruction::{Access, Product};
use crate::machine::{Cluster, Launch};
use crate::memory::Fault;
use crate::races::Kind;
use crate::values::LANES;
use crate::warp::Warp;
use half::{bf16, f16};

fn halves(product: Product, bits: u32) -> [f32; 2] {
    let value = |bits: u16| {
        if product == Product::Bf16 { bf16::from_bits(bits).to_f32() } else { f16::from_bits(bits).to_f32() }
    };
    [value(bits as u16), value((bits >> 16) as u16)]
}

impl Warp {
    /// C += A · B.
    pub fn multiply(&mut self, product: Product, r: &[u32]) {
        let words = &self.registers.words;
        match product {
            Product::Bytes => {
                let (mut a, mut b) = ([[0i32; 32]; 16], [[0i32; 8]; 32]);
                for lane in 0..LANES {
                    let (g, t) = (lane / 4, lane % 4);
                    for n in 0..4 {
                        for (byte, value) in words[r[4 + n] as usize][lane].to_le_bytes().into_iter().enumerate() {
                            a[g + n % 2 * 8][n / 2 * 16 + t * 4 + byte] = value as i32;
                        }
                    }
                    for n in 0..2 {
                        for (byte, value) in words[r[8 + n] as usize][lane].to_le_bytes().into_iter().enumerate() {
                            b[n * 16 + t * 4 + byte][g] = value as i8 as i32;
                        }
                    }
                }
                let mut c = [[0i32; 8]; 16];
                for (row, a) in c.iter_mut().zip(&a) {
                    for (x, b) in a.iter().zip(&b) {
                        row.iter_mut().zip(b).for_each(|(sum, y)| *sum += x * y);
                    }
                }
                for lane in 0..LANES {
                    for n in 0..4 {
                        let sum = c[lane / 4 + n / 2 * 8][lane % 4 * 2 + n % 2];
                        let before = self.registers.words[r[10 + n] as usize][lane];
                        self.registers.words[r[n] as usize][lane] = before.wrapping_add(sum as u32);
                    }
                }
            }
            Product::Tf32 => {
                let value = |bits: u32| f32::from_bits(bits & !0x1fff);
                let (mut a, mut b) = ([[0f32; 8]; 16], [[0f32; 8]; 8]);
                for lane in 0..LANES {
                    let (g, t) = (lane / 4, lane % 4);
                    for n in 0..4 {
                        a[g + n % 2 * 8][t + n / 2 * 4] = value(words[r[4 + n] as usize][lane]);
                    }
                    for n in 0..2 {
                        b[t + n * 4][g] = value(words[r[8 + n] as usize][lane]);
                    }
                }
                self.add_product(&a, &b, &r[..4], &r[10..14]);
            }
            Product::F16 | Product::Bf16 => {
                let (mut a, mut b) = ([[0f32; 16]; 16], [[0f32; 8]; 16]);
                for lane in 0..LANES {
                    let (g, t) = (lane / 4, lane % 4);
                    for n in 0..4 {
                        let x = halves(product, words[r[4 + n] as usize][lane]);
                        a[g + n % 2 * 8][n / 2 * 8 + t * 2..][..2].copy_from_slice(&x);
                    }
                    for n in 0..2 {
                        let x = halves(product, words[r[8 + n] as usize][lane]);
                        (b[n * 8 + t * 2][g], b[n * 8 + t * 2 + 1][g]) = (x[0], x[1]);
                    }
                }
                self.add_product(&a, &b, &r[..4], &r[10..14]);
            }
        }
    }

    fn add_product<const K: usize>(&mut self, a: &[[f32; K]; 16], b: &[[f32; 8]; K], to: &[u32], from: &[u32]) {
        let mut c = [[0f32; 8]; 16];
        for (row, a) in c.iter_mut().zip(a) {
            for (x, b) in a.iter().zip(b) {
                row.iter_mut().zip(b).for_each(|(sum, y)| *sum = x.mul_add(*y, *sum));
            }
        }
        for n in 0..4 {
            let before = self.registers.words[from[n] as usize];
            self.registers.words[to[n] as usize] = std::array::from_fn(|lane| {
                (f32::from_bits(before[lane]) + c[lane / 4 + n / 2 * 8][lane % 4 * 2 + n % 2]).to_bits()
            });
        }
    }

    /// 8 × 8 elements of 16 bits; lanes 8n … 8n + 7 have the addresses of matrix n's rows.
    pub fn load_matrices(
        &mut self,
        from: &Access,
        transposed: bool,
        r: &[u32],
        launch: &Launch,
        cluster: &mut Cluster,
    ) -> Result<(), Fault> {
        let count = r.len() - 1;
        let addresses = self.addresses(r[count], from);
        for (n, &to) in r[..count].iter().enumerate() {
            let mut matrix = [[0u16; 8]; 8];
            for (row, elements) in matrix.iter_mut().enumerate() {
                let at = self.pointer(
                    launch,
                    cluster,
                    addresses[n * 8 + row],
                    from.space,
                    16,
                    (n * 8 + row, Kind::Read(!0)),
                )?;
                // SAFETY: 16 bytes are there.
                *elements = unsafe { at.cast::<[u16; 8]>().read_unaligned() };
            }
            self.registers.words[to as usize] = in_lanes(&matrix, transposed);
        }
        Ok(())
    }

    pub fn transpose_matrix(&mut self, r: &[u32]) {
        let from = self.registers.words[r[1] as usize];
        let mut matrix = [[0u16; 8]; 8];
        for (lane, bits) in from.into_iter().enumerate() {
            matrix[lane / 4][lane % 4 * 2..][..2].copy_from_slice(&[bits as u16, (bits >> 16) as u16]);
        }
        self.registers.words[r[0] as usize] = in_lanes(&matrix, true);
    }

    /// A warp's 16 rows of a warpgroup's product of 64 rows, 16 deep.
    pub fn group_multiply(
        &mut self,
        columns: u32,
        product: Product,
        a_in_registers: bool,
        transposes: [bool; 2],
        r: &[u32],
        cluster: &Cluster,
    ) -> Result<(), Fault> {
        let (columns, sums) = (columns as usize, columns as usize / 2);
        let shared = &cluster.shared[self.rank];
        let (a_at, b_at) = (sums * 2, sums * 2 + if a_in_registers { 4 } else { 1 });
        let double = |at: usize| self.registers.doubles[r[at] as usize][0];
        let mut a = [[0f32; 16]; 16];
        if a_in_registers {
            for lane in 0..LANES {
                for n in 0..4 {
                    let x = halves(product, self.registers.words[r[a_at + n] as usize][lane]);
                    a[lane / 4 + n % 2 * 8][n / 2 * 8 + lane % 4 * 2..][..2].copy_from_slice(&x);
                }
            }
        } else {
            let matrix = Descriptor::of(double(a_at), transposes[0]);
            for (row, a) in a.iter_mut().enumerate() {
                for (k, x) in a.iter_mut().enumerate() {
                    *x = matrix.element(shared, product, self.number as usize % 4 * 16 + row, k)?;
                }
            }
        }
        let matrix = Descriptor::of(double(b_at), transposes[1]);
        let adds = self.registers.predicates[r[b_at + 1] as usize] & 1 != 0;
        for column in 0..columns {
            let mut b = [0f32; 16];
            for (k, x) in b.iter_mut().enumerate() {
                *x = matrix.element(shared, product, column, k)?;
            }
            for (row, a) in a.iter().enumerate() {
                let sum: f32 = a.iter().zip(&b).map(|(x, y)| x * y).sum();
                let (lane, n) = (row % 8 * 4 + column % 8 / 2, column / 8 * 4 + row / 8 * 2 + column % 2);
                let before = if adds { f32::from_bits(self.registers.words[r[sums + n] as usize][lane]) } else { 0.0 };
                self.registers.words[r[n] as usize][lane] = (before + sum).to_bits();
            }
        }
        Ok(())
    }
}

fn in_lanes(matrix: &[[u16; 8]; 8], transposed: bool) -> [u32; LANES] {
    std::array::from_fn(|lane| {
        let (row, column) = (lane / 4, lane % 4 * 2);
        let at = |column: usize| if transposed { matrix[column][row] } else { matrix[row][column] };
        at(column) as u32 | (at(column + 1) as u32) << 16
    })
}

/// A matrix of 16-bit elements in shared memory. Rows here are those of A and the columns of B; transposed, they follow each other.
struct Descriptor {
    start: usize,
    leading: usize,
    stride: usize,
    swizzle: u64,
    transposed: bool,
}

impl Descriptor {
    fn of(bits: u64, transposed: bool) -> Descriptor {
        let field = |at: u32| ((bits >> at & 0x3fff) << 4) as usize;
        Descriptor { start: field(0), leading: field(16), stride: field(32), swizzle: bits >> 62, transposed }
    }
    fn element(&self, shared: &[u8], product: Product, row: usize, k: usize) -> Result<f32, Fault> {
        // Bytes that follow each other in a row of the swizzled pattern, of which there are eight.
        let width = match self.swizzle {
            1 => 128,
            2 => 64,
            3 => 32,
            _ => 16,
        };
        let elements = width / 2;
        let (along, across) = if self.transposed { (row, k) } else { (k, row) };
        let offset = if self.transposed {
            across % 8 * width + across / 8 * self.stride + along / elements * self.leading + along % elements * 2
        } else if width == 16 {
            across % 8 * 16 + across / 8 * self.stride + along / 8 * self.leading + along % 8 * 2
        } else {
            across % 8 * width + across / 8 * self.stride + along * 2
        };
        let address = self.start + offset;
        let pattern = (address >> 7) & (width / 16 - 1);
        let address = address ^ pattern << 4;
        let bytes = shared.get(address..address + 2).ok_or("a matrix past the end of shared memory")?;
        Ok(halves(product, u16::from_le_bytes([bytes[0], bytes[1]]) as u32)[0])
    }
}
