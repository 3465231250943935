//! What only a GPU can show: graph replay, what the driver is asked for, contexts, streams, the pinned pool.
//!
//! Without a CUDA device every case is listed as ignored, with the reason, or fails if `VANWARD_REQUIRE_GPU=1`.

#[path = "../kv_cache/model.rs"]
mod model;
#[path = "../support/mod.rs"]
mod support;

mod attention;
mod cache;
mod calls;
mod decoder;
mod gather;
mod graph;
mod int4;
mod predict;
mod runtime;
mod sample;
mod select;
mod tiered;
mod tree;

use libtest_mimic::{Arguments, Failed, Trial};
use std::sync::Arc;
use support::Backend;

type Case = (&'static str, fn(&Backend));

/// Microseconds: longer than any part of a step that the suite runs beside others.
const MOST_DELAY: u64 = 200;

fn main() {
    let mut arguments = Arguments::from_args();
    // One case at a time: some count what the driver is asked for, or what memory is free.
    arguments.test_threads = Some(1);
    let required = std::env::var_os("VANWARD_REQUIRE_GPU").is_some_and(|value| value == "1");
    let backend = Backend::cuda().map(Arc::new);
    if let Err(reason) = &backend {
        println!("gpu: {reason}");
    }
    let cases = [
        graph::CASES,
        sample::CASES,
        attention::CASES,
        int4::CASES,
        gather::CASES,
        predict::CASES,
        select::CASES,
        tree::CASES,
        cache::CASES,
        calls::CASES,
        decoder::CASES,
        tiered::CASES,
        runtime::CASES,
    ];
    let trials = cases.concat().into_iter().map(|(name, case)| match &backend {
        Ok(backend) => {
            let backend = backend.clone();
            Trial::test(name, move || {
                case(&backend);
                Ok(())
            })
        }
        Err(reason) => {
            let failure = Failed::from(format!("VANWARD_REQUIRE_GPU=1, but {reason}"));
            Trial::test(name, move || Err(failure)).with_ignored_flag(!required)
        }
    });
    libtest_mimic::run(&arguments, trials.collect()).exit();
}
