//! What the emulator has to compute, and what it has to notice, in kernels of a few lines. Each file of `checks/` is a subject.

mod arithmetic;
mod atomics;
mod barriers;
mod clusters;
mod copies;
mod global_races;
mod lanes;
mod matrices;
mod memory;
mod tensors;

use crate::instruction;
use crate::machine::{self, Choices, Launch};
use crate::memory::{Fault, Pieces};
use crate::races::{Current, Global};
use crate::{decode, parse};
use std::cell::RefCell;

/// A launch of a kernel of a few lines. What its body finds:
///
/// %r1 the thread's number in its CTA · %r2 the address of the thread's word of `room`, 4 KiB of shared memory · %r3 the CTA's number
/// %rd1 the output · %rd2 the thread's own word of it, one for each thread of the grid · %rd3 the input
/// `gate`: four words of 8 bytes in shared memory, for barriers · %r10…, %rd10…, %p1…, %f…, %h…: free
#[derive(Clone)]
struct Check {
    body: String,
    threads: u32,
    ctas: u32,
    cluster: u32,
    input: Vec<u32>,
    choices: Choices,
    finds_races: bool,
    /// Launch bounds.
    bounds: &'static str,
}

/// What each word of the output holds before the launch.
const UNTOUCHED: u32 = 7;

/// Two warps of one CTA, in order.
fn check(body: impl Into<String>) -> Check {
    let choices = Choices::new(0);
    Check {
        body: body.into(),
        threads: 64,
        ctas: 1,
        cluster: 1,
        input: vec![0; 4],
        choices,
        finds_races: true,
        bounds: "",
    }
}

impl Check {
    fn threads(self, threads: u32) -> Check {
        Check { threads, ..self }
    }
    fn ctas(self, ctas: u32) -> Check {
        Check { ctas, ..self }
    }
    /// One cluster of so many CTAs.
    fn cluster(self, ctas: u32) -> Check {
        Check { ctas, cluster: ctas, ..self }
    }
    fn input(self, input: Vec<u32>) -> Check {
        Check { input, ..self }
    }
    fn bounds(self, bounds: &'static str) -> Check {
        Check { bounds, ..self }
    }
    fn seed(self, seed: u64) -> Check {
        Check { choices: Choices::new(seed), ..self }
    }

    fn kernel(&self) -> Result<instruction::Kernel, Fault> {
        let text = format!(
            ".version 8.4\n.target sm_90a\n.address_size 64\n.visible .entry kernel(.param .u64 out, .param .u64 in) {}\n{{\n\
             .reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %rd<40>; .reg .f32 %f<99>; .reg .b16 %h<9>; .reg .f64 %fd<9>;\n\
             .shared .align 1024 .b8 room[4096]; .shared .align 8 .b64 gate[4];\n\
             ld.param.u64 %rd1, [out]; ld.param.u64 %rd3, [in]; mov.u32 %r1, %tid.x; mov.u32 %r3, %ctaid.x;\n\
             mov.u32 %r4, %ntid.x; mad.lo.s32 %r4, %r3, %r4, %r1; mul.wide.u32 %rd4, %r4, 4; add.s64 %rd2, %rd1, %rd4;\n\
             mov.u32 %r2, room; shl.b32 %r5, %r1, 2; add.s32 %r2, %r2, %r5;\n\
             {}\nret;\n}}\n",
            self.bounds, self.body
        );
        decode::kernel(&parse::module(&text)?, &vec![], "kernel")
    }

    /// The output.
    fn run(&self) -> Result<Vec<u32>, Fault> {
        let mut out = vec![UNTOUCHED; (self.threads * self.ctas) as usize];
        self.run_into(&mut out, None)?;
        Ok(out)
    }

    fn run_into(&self, out: &mut [u32], global: Option<(&RefCell<Global>, &Current)>) -> Result<(), Fault> {
        let piece = |words: &[u32]| (words.as_ptr() as u64, words.as_ptr_range().end as u64);
        let (to, from) = (piece(out), piece(&self.input));
        let parameters: Vec<u8> = [to.0, from.0].into_iter().flat_map(u64::to_ne_bytes).collect();
        let mut pieces = vec![to, from];
        pieces.sort_unstable();
        let kernel = self.kernel()?;
        let launch = Launch {
            kernel: &kernel,
            ctas: self.ctas,
            threads: self.threads,
            cluster: self.cluster,
            shared: 0,
            parameters: &parameters,
            pieces: &Pieces(pieces),
            choices: self.choices,
            finds_races: self.finds_races,
            global,
        };
        machine::run(&launch).map(|_| ())
    }

    #[track_caller]
    fn gives(&self, expected: impl Fn(u32) -> u32) {
        let out = self.run().unwrap_or_else(|fault| panic!("{fault}: {}", self.body));
        let expected: Vec<u32> = (0..out.len() as u32).map(expected).collect();
        assert_eq!(out, expected, "{}", self.body);
    }

    #[track_caller]
    fn fails(&self, words: &str) {
        let fault = self.run().expect_err(&self.body);
        assert!(fault.contains(words), "{fault}: {}", self.body);
    }
}

/// Runs instructions in each thread of a warp, and returns the first thread's %r10.
#[track_caller]
fn word(instructions: &str) -> u32 {
    let out = check(format!("{instructions}; st.global.u32 [%rd2], %r10;")).threads(32).run();
    let out = out.unwrap_or_else(|fault| panic!("{fault}: {instructions}"));
    assert!(out.iter().all(|&x| x == out[0]), "{instructions}: {out:x?}");
    out[0]
}

/// Instructions, and what they leave in %r10.
#[track_caller]
fn words(table: &[(&str, u32)]) {
    for (instructions, expected) in table {
        let found = word(instructions);
        assert!(found == *expected, "{instructions} gives {found:#x} instead of {expected:#x}");
    }
}
