//! One suite, run on every backend.
//!
//! `cpu::<case>` always runs. `cuda::<case>` runs where a CUDA session can be created; elsewhere it is listed as ignored,
//! with the reason, or fails if `VANWARD_REQUIRE_GPU=1`. The executable needs no source tree and no cargo.

#[path = "../support/mod.rs"]
mod support;

/// Functions with their names.
macro_rules! cases {
    ($($case:ident),* $(,)?) => { &[$((stringify!($case), $case)),*] };
}

mod attention;
mod attention_edges;
mod attention_int4;
mod attention_model;
mod attention_rows;
mod attention_tree;
mod attention_variants;
mod axis;
mod budget;
mod compact;
mod contents;
mod decoder;
mod forecast;
mod gather;
mod index;
mod index_bits;
mod keys_to_blocks;
mod predictor;
mod quantize;
mod remainder;
mod sample;
mod sampling;
mod select;
mod select_batch;
mod select_labels;
mod select_status;
mod select_variants;
mod topk;
mod tree;
mod tree_end;
mod tree_sample;
mod verify;
mod verify_end;

use libtest_mimic::{Arguments, Failed, Trial};
use std::sync::Arc;
use support::Backend;

type Case = (&'static str, fn(&Backend));

/// A file of cases, and whether the CUDA backend implements what they test.
struct Family {
    cases: &'static [Case],
    on_cuda: bool,
}

const FAMILIES: &[Family] = &[
    Family { cases: verify::CASES, on_cuda: true },
    Family { cases: verify::ON_THE_CPU, on_cuda: false },
    Family { cases: verify_end::CASES, on_cuda: true },
    Family { cases: sample::CASES, on_cuda: true },
    Family { cases: tree::CASES, on_cuda: true },
    Family { cases: tree_end::CASES, on_cuda: true },
    Family { cases: tree_sample::CASES, on_cuda: true },
    Family { cases: compact::CASES, on_cuda: true },
    Family { cases: compact::ON_THE_CPU, on_cuda: false },
    Family { cases: index::CASES, on_cuda: true },
    Family { cases: index_bits::CASES, on_cuda: true },
    Family { cases: select::CASES, on_cuda: true },
    Family { cases: axis::CASES, on_cuda: true },
    Family { cases: select_labels::CASES, on_cuda: true },
    Family { cases: select_status::CASES, on_cuda: true },
    Family { cases: keys_to_blocks::CASES, on_cuda: true },
    Family { cases: select_batch::CASES, on_cuda: true },
    Family { cases: select_batch::ON_THE_CPU, on_cuda: false },
    Family { cases: topk::CASES, on_cuda: true },
    Family { cases: select_variants::CASES, on_cuda: true },
    Family { cases: attention::CASES, on_cuda: true },
    Family { cases: attention::repair::CASES, on_cuda: true },
    Family { cases: attention_rows::CASES, on_cuda: true },
    Family { cases: attention_tree::CASES, on_cuda: true },
    Family { cases: attention_variants::CASES, on_cuda: true },
    Family { cases: attention_edges::CASES, on_cuda: true },
    Family { cases: attention_edges::ON_THE_CPU, on_cuda: false },
    Family { cases: attention_int4::CASES, on_cuda: true },
    Family { cases: gather::CASES, on_cuda: true },
    Family { cases: gather::ON_THE_CPU, on_cuda: false },
    Family { cases: quantize::CASES, on_cuda: true },
    Family { cases: remainder::CASES, on_cuda: true },
    Family { cases: remainder::quality::CASES, on_cuda: true },
    Family { cases: remainder::contents::CASES, on_cuda: true },
    Family { cases: predictor::CASES, on_cuda: true },
    Family { cases: predictor::CALIBRATION, on_cuda: false },
    Family { cases: predictor::ON_THE_CPU, on_cuda: false },
    Family { cases: forecast::CASES, on_cuda: true },
    Family { cases: contents::CASES, on_cuda: true },
    Family { cases: decoder::CASES, on_cuda: true },
    Family { cases: decoder::drafts::CASES, on_cuda: true },
    Family { cases: decoder::strategies::CASES, on_cuda: true },
    Family { cases: decoder::tiered::CASES, on_cuda: true },
    Family { cases: decoder::tiered_types::CASES, on_cuda: true },
    Family { cases: decoder::model::ON_THE_CPU, on_cuda: false },
    Family { cases: budget::CASES, on_cuda: true },
    Family { cases: budget::ON_THE_CPU, on_cuda: false },
    Family { cases: attention::ON_THE_CPU, on_cuda: false },
];

fn main() {
    let mut arguments = Arguments::from_args();
    let cpu = Arc::new(Backend::cpu(2));
    let cuda = Backend::cuda().map(Arc::new);
    if cuda.is_ok() {
        // Calls on one stream are ordered by the caller.
        arguments.test_threads = Some(1);
    }
    let required = std::env::var_os("VANWARD_REQUIRE_GPU").is_some_and(|value| value == "1");
    let mut trials = Vec::new();
    for family in FAMILIES {
        for &(name, case) in family.cases {
            trials.push(trial(format!("cpu::{name}"), case, &cpu));
            if !family.on_cuda {
                continue;
            }
            let name = format!("cuda::{name}");
            trials.push(match &cuda {
                Ok(backend) => trial(name, case, backend),
                Err(reason) => missing(name, reason, required),
            });
        }
    }
    if let Err(reason) = &cuda {
        println!("cuda: {reason}");
    }
    libtest_mimic::run(&arguments, trials).exit();
}

fn trial(name: String, case: fn(&Backend), backend: &Arc<Backend>) -> Trial {
    let backend = backend.clone();
    Trial::test(name, move || {
        case(&backend);
        Ok(())
    })
}

fn missing(name: String, reason: &str, required: bool) -> Trial {
    let failure = Failed::from(format!("VANWARD_REQUIRE_GPU=1, but {reason}"));
    Trial::test(name, move || Err(failure)).with_ignored_flag(!required)
}
