//! Random arguments for every call, and random files for a forecast.
//!
//! A call is described once, as one that is accepted (`calls`, `sequences`, `forecasts`). A seed draws its sizes,
//! layouts and contents, breaks some of it (`wrong`), lays it out behind guard pages (`placed`, `memory`), and makes the
//! call on sessions of 1, of 7, and of 2 or the caller's threads (`check`). That happens in a process of its own
//! (`child`), which a reach outside a tensor, a write to an input or a hang kills. Whatever fails is told with its seed
//! and arguments.
//!
//! `VANWARD_FUZZ_SECONDS` is the time for all targets (24); `VANWARD_SEED=<seed>` runs that seed alone, best with the
//! name of a target: `VANWARD_SEED=17 cargo test --test fuzz -- vwd_repair`.

mod caches;
mod calls;
mod case;
mod check;
mod child;
mod content;
mod decoders;
mod files;
mod forecasts;
mod int4;
mod memory;
mod placed;
mod remainder;
mod sequences;
#[path = "../support/mod.rs"]
mod support;
mod wrong;

use case::Case;
use child::{Folder, Journal, Orders, PATIENCE};
use libtest_mimic::{Arguments, Failed, Trial};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use vanward::abi::*;

pub enum Target {
    Call(fn(&mut Case)),
    Files,
}

const TARGETS: &[(&str, Target)] = &[
    ("vwd_verify", Target::Call(calls::verify)),
    ("vwd_verify of drafts one after the other", Target::Call(calls::verify_flat)),
    ("vwd_pack", Target::Call(calls::pack)),
    ("vwd_verify_pack", Target::Call(calls::verify_pack)),
    ("vwd_verify_sample", Target::Call(calls::verify_sample)),
    ("vwd_tree_prepare of parents", Target::Call(|case| calls::tree_prepare(case, true))),
    ("vwd_tree_prepare of children and siblings", Target::Call(|case| calls::tree_prepare(case, false))),
    ("vwd_verify_tree", Target::Call(|case| calls::verify_tree(case, false))),
    ("vwd_verify_tree from logits", Target::Call(|case| calls::verify_tree(case, true))),
    ("vwd_verify_tree by sampling", Target::Call(calls::sampled_tree)),
    ("vwd_compact", Target::Call(calls::compact)),
    ("vwd_index_update of MINMAX", Target::Call(|case| sequences::index_update(case, VWD_INDEX_MINMAX))),
    ("vwd_index_update of MEAN", Target::Call(|case| sequences::index_update(case, VWD_INDEX_MEAN))),
    ("vwd_index_update of LABEL", Target::Call(|case| sequences::index_update(case, VWD_INDEX_LABEL))),
    ("vwd_index_update of AXIS", Target::Call(|case| sequences::index_update(case, VWD_INDEX_AXIS))),
    ("vwd_index_update_layers", Target::Call(sequences::index_update_layers)),
    ("vwd_channel_importance", Target::Call(sequences::channel_importance)),
    ("vwd_select_blocks by MINMAX", Target::Call(|case| sequences::select_blocks(case, VWD_SELECT_MINMAX))),
    ("vwd_select_blocks by MEAN_SOFTMAX", Target::Call(|case| sequences::select_blocks(case, VWD_SELECT_MEAN_SOFTMAX))),
    ("vwd_select_blocks by MEAN_DOT", Target::Call(|case| sequences::select_blocks(case, VWD_SELECT_MEAN_DOT))),
    ("vwd_select_blocks by LABEL_MASS", Target::Call(|case| sequences::select_blocks(case, VWD_SELECT_LABEL_MASS))),
    ("vwd_select_blocks by AXIS", Target::Call(|case| sequences::select_blocks(case, VWD_SELECT_AXIS))),
    ("vwd_select_tokens", Target::Call(sequences::select_tokens)),
    ("vwd_topk", Target::Call(calls::topk)),
    ("vwd_attention over a list", Target::Call(|case| sequences::attention(case, true))),
    ("vwd_attention over everything", Target::Call(|case| sequences::attention(case, false))),
    ("vwd_attention over INT4", Target::Call(int4::attention)),
    ("vwd_attention with a remainder", Target::Call(remainder::attention)),
    ("vwd_remainder_update", Target::Call(remainder::update)),
    ("vwd_kv_quantize", Target::Call(int4::quantize)),
    ("vwd_kv_weights", Target::Call(int4::weights)),
    ("vwd_merge_states", Target::Call(sequences::merge_states)),
    ("vwd_repair to a superset", Target::Call(|case| sequences::repair(case, VWD_REPAIR_SUPERSET))),
    ("vwd_repair exactly", Target::Call(|case| sequences::repair(case, VWD_REPAIR_EXACT))),
    ("vwd_gather_blocks", Target::Call(calls::gather_blocks)),
    ("vwd_kv_cache_append", Target::Call(caches::append)),
    ("vwd_kv_cache_compact", Target::Call(caches::compact)),
    ("vwd_kv_cache_resolve", Target::Call(caches::resolve)),
    ("vwd_predictor_reset", Target::Call(calls::predictor_reset)),
    ("vwd_predictor_predict", Target::Call(calls::predictor_predict)),
    ("vwd_predictor_update", Target::Call(calls::predictor_update)),
    ("vwd_predictor_calibrate", Target::Call(calls::predictor_calibrate)),
    ("vwd_forecast_create", Target::Call(forecasts::create)),
    ("vwd_forecast_accumulate", Target::Call(forecasts::accumulate)),
    ("vwd_forecast_project", Target::Call(forecasts::project)),
    ("vwd_decoder_foresee", Target::Call(decoders::foresee)),
    ("vwd_forecast_load", Target::Files),
];

/// The share of a target's cases that must reach its work, at least.
const WORK: f64 = 0.3;
/// Failures of one target that are told.
const TOLD: usize = 3;

fn main() {
    if let Some(status) = in_another_role() {
        std::process::exit(status);
    }
    let arguments = Arguments::from_args();
    let at_once = arguments.test_threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let time = Duration::from_secs(number("VANWARD_FUZZ_SECONDS").unwrap_or(24));
    let share = time * at_once as u32 / TARGETS.len() as u32;
    let trials = TARGETS.iter().map(|&(name, _)| Trial::test(name, move || fuzz(name, share))).collect();
    libtest_mimic::run(&arguments, trials).exit();
}

/// What this executable does for itself: it runs the cases of a target, or describes one.
fn in_another_role() -> Option<i32> {
    let words: Vec<String> = std::env::args().collect();
    let [_, role, name, rest @ ..] = &words[..] else { return None };
    let (_, target) = TARGETS.iter().find(|target| target.0 == name)?;
    match (role.as_str(), rest) {
        ("cases", [folder, first, seconds]) => {
            let time = Duration::from_secs_f64(seconds.parse().expect("seconds"));
            Some(child::run(Orders { target, folder: folder.into(), first: first.parse().expect("a seed"), time }))
        }
        ("describe", [seed]) => {
            child::limit();
            println!("{}", describe(target, seed.parse().expect("a seed")));
            Some(0)
        }
        _ => None,
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect(name))
}

fn draw(seed: u64, describe: impl Fn(&mut Case)) -> Case {
    let mut case = Case::new(seed, describe);
    wrong::break_some(&mut case);
    case
}

fn describe(target: &Target, seed: u64) -> String {
    match target {
        Target::Call(describe) => {
            let mut case = draw(seed, describe);
            placed::Placed::new(&mut case, &mut memory::Memory::map());
            case.to_string()
        }
        Target::Files => files::describe(seed, &Folder::new().0),
    }
}

/// Runs cases for some time; after a failure goes on with the next seed.
fn fuzz(name: &'static str, time: Duration) -> Result<(), Failed> {
    let only = number("VANWARD_SEED");
    let (begin, folder) = (Instant::now(), Folder::new());
    let (mut seed, mut total, mut failures) = (only.unwrap_or(0), Journal::default(), vec![]);
    loop {
        let left = if only.is_some() { Duration::ZERO } else { time.saturating_sub(begin.elapsed()) };
        let path = folder.0.to_str().expect("a path in UTF-8");
        let output = process(&["cases", name, path, &seed.to_string(), &left.as_secs_f64().to_string()]);
        let journal = Journal::read(&folder.0);
        total.cases += journal.cases;
        total.accepted += journal.accepted;
        total.worked += journal.worked;
        if let Some(what) = failure(&output) {
            let described = process(&["describe", name, &journal.seed.to_string()]);
            let described = String::from_utf8_lossy(&described.stdout).into_owned();
            failures.push(format!("VANWARD_SEED={}: {what}\n{described}", journal.seed));
            seed = journal.seed + 1;
        }
        if output.status.success() || only.is_some() || failures.len() == TOLD || left.is_zero() {
            break;
        }
    }
    println!("{name}: {total}");
    if only.is_none() && failures.len() < TOLD && total.worked_share() < WORK {
        failures.push(format!("{total}; expected {:.0} % with results at least", WORK * 100.0));
    }
    if failures.is_empty() { Ok(()) } else { Err(Failed::from(failures.join("\n"))) }
}

/// This executable in another role.
fn process(words: &[&str]) -> Output {
    let executable = std::env::current_exe().expect("the path of this executable");
    Command::new(executable)
        .args(words)
        .env("RUST_BACKTRACE", "0")
        .output()
        .expect("another process of this executable")
}

/// Why a process ended before its time.
fn failure(output: &Output) -> Option<String> {
    let said = [&output.stdout[..], &output.stderr[..]].concat();
    let said = String::from_utf8_lossy(&said).trim().to_string();
    let signal = match output.status.signal() {
        None if output.status.success() => return None,
        None => return Some(said),
        Some(libc::SIGALRM) => format!("did not return within {PATIENCE} s"),
        Some(libc::SIGSEGV | libc::SIGBUS) => "touched memory outside a tensor, or wrote an input".into(),
        Some(libc::SIGABRT) => "aborted".into(),
        Some(signal) => format!("ended by signal {signal}"),
    };
    Some([signal, said].join(" ").trim().to_string())
}
