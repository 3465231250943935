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
mod attention_boxes;
mod attention_edges;
mod attention_int4;
mod attention_int4_scales;
mod attention_model;
mod attention_rows;
mod attention_tree;
mod attention_variants;
mod axis;
mod budget;
mod calibration;
mod compact;
mod contents;
mod decoder;
mod draws;
mod forecast;
mod gather;
mod index;
mod index_bits;
mod invariance;
mod keys_to_blocks;
mod many;
mod predictor;
mod quantize;
mod remainder;
mod sample;
mod sample_draws;
mod sample_ends;
mod sample_skips;
mod sample_variants;
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
mod wide;

use libtest_mimic::{Arguments, Failed, Trial};
use std::sync::Arc;
use support::Backend;

type Case = (&'static str, fn(&Backend));

/// A file of cases, and the backends that have what they test.
struct Family {
    cases: &'static [Case],
    on: On,
}

#[derive(PartialEq)]
enum On {
    Both,
    Cpu,
    Cuda,
}

const FAMILIES: &[Family] = &[
    Family { cases: verify::CASES, on: On::Both },
    Family { cases: verify::ON_THE_CPU, on: On::Cpu },
    Family { cases: verify_end::CASES, on: On::Both },
    Family { cases: sample::CASES, on: On::Both },
    Family { cases: sample_ends::CASES, on: On::Both },
    Family { cases: sample_draws::CASES, on: On::Both },
    Family { cases: sample_draws::VARIANTS, on: On::Cuda },
    Family { cases: sample_skips::CASES, on: On::Cuda },
    Family { cases: sample_variants::CASES, on: On::Cuda },
    Family { cases: tree::CASES, on: On::Both },
    Family { cases: tree_end::CASES, on: On::Both },
    Family { cases: tree_sample::CASES, on: On::Both },
    Family { cases: compact::CASES, on: On::Both },
    Family { cases: many::CASES, on: On::Both },
    Family { cases: wide::CASES, on: On::Both },
    Family { cases: wide::VARIANTS, on: On::Cuda },
    Family { cases: wide::ON_THE_CPU, on: On::Cpu },
    Family { cases: index::CASES, on: On::Both },
    Family { cases: index_bits::CASES, on: On::Both },
    Family { cases: select::CASES, on: On::Both },
    Family { cases: axis::CASES, on: On::Both },
    Family { cases: select_labels::CASES, on: On::Both },
    Family { cases: select_status::CASES, on: On::Both },
    Family { cases: keys_to_blocks::CASES, on: On::Both },
    Family { cases: select_batch::CASES, on: On::Both },
    Family { cases: select_batch::ON_THE_CPU, on: On::Cpu },
    Family { cases: topk::CASES, on: On::Both },
    Family { cases: select_variants::CASES, on: On::Cuda },
    Family { cases: attention::CASES, on: On::Both },
    Family { cases: attention::repair::CASES, on: On::Both },
    Family { cases: attention_rows::CASES, on: On::Both },
    Family { cases: attention_tree::CASES, on: On::Both },
    Family { cases: attention_variants::CASES, on: On::Cuda },
    Family { cases: attention_boxes::CASES, on: On::Cuda },
    Family { cases: attention_edges::CASES, on: On::Both },
    Family { cases: invariance::CASES, on: On::Both },
    Family { cases: attention_edges::ON_THE_CPU, on: On::Cpu },
    Family { cases: attention_int4::CASES, on: On::Both },
    Family { cases: attention_int4_scales::CASES, on: On::Both },
    Family { cases: attention_int4_scales::VARIANTS, on: On::Cuda },
    Family { cases: gather::CASES, on: On::Both },
    Family { cases: gather::ON_THE_CPU, on: On::Cpu },
    Family { cases: quantize::CASES, on: On::Both },
    Family { cases: remainder::CASES, on: On::Both },
    Family { cases: remainder::attention::CASES, on: On::Both },
    Family { cases: remainder::coded::CASES, on: On::Both },
    Family { cases: remainder::coded::VARIANTS, on: On::Cuda },
    Family { cases: remainder::quality::CASES, on: On::Both },
    Family { cases: remainder::contents::CASES, on: On::Both },
    Family { cases: predictor::CASES, on: On::Both },
    Family { cases: predictor::ON_THE_CPU, on: On::Cpu },
    Family { cases: calibration::CASES, on: On::Both },
    Family { cases: calibration::ON_THE_CPU, on: On::Cpu },
    Family { cases: forecast::CASES, on: On::Both },
    Family { cases: contents::CASES, on: On::Both },
    Family { cases: decoder::CASES, on: On::Both },
    Family { cases: decoder::errors::CASES, on: On::Both },
    Family { cases: decoder::drafts::CASES, on: On::Both },
    Family { cases: decoder::own_drafts::CASES, on: On::Both },
    Family { cases: decoder::strategies::CASES, on: On::Both },
    Family { cases: decoder::foreseen::CASES, on: On::Both },
    Family { cases: decoder::batches::CASES, on: On::Both },
    Family { cases: decoder::smoothed::CASES, on: On::Both },
    Family { cases: decoder::fallback::CASES, on: On::Both },
    Family { cases: decoder::tiered::CASES, on: On::Both },
    Family { cases: decoder::tiered_errors::CASES, on: On::Both },
    Family { cases: decoder::tiered_far::CASES, on: On::Both },
    Family { cases: decoder::tiered_slots::CASES, on: On::Both },
    Family { cases: decoder::trees::CASES, on: On::Both },
    Family { cases: decoder::tiered_types::CASES, on: On::Both },
    Family { cases: decoder::coded::CASES, on: On::Both },
    Family { cases: decoder::coded_trees::CASES, on: On::Both },
    Family { cases: decoder::coded_term::CASES, on: On::Both },
    Family { cases: decoder::term::CASES, on: On::Both },
    Family { cases: decoder::model::ON_THE_CPU, on: On::Cpu },
    Family { cases: budget::CASES, on: On::Both },
    Family { cases: budget::ON_THE_CPU, on: On::Cpu },
    Family { cases: attention::ON_THE_CPU, on: On::Cpu },
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
            if family.on != On::Cuda {
                trials.push(trial(format!("cpu::{name}"), case, &cpu));
            }
            if family.on == On::Cpu {
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
