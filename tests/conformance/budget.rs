//! The budget: a profile of a tiny grid from measurement to answers, its file, and what is refused. Times themselves differ from run
//! to run: tests of what follows from them are beside the choice, in src/decode/budget.

use crate::Case;
use crate::support::*;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    budget_is_profiled_saved_loaded_and_asked,
    budget_profiles_each_method_of_selection_and_mode_of_repair,
    budget_of_another_shape_is_refused_by_what_differs,
    budget_that_exceeds_its_limit_is_refused_with_what_it_needs,
    budget_of_another_device_is_refused,
    budget_is_profiled_on_the_default_stream_and_in_sessions_that_check_or_delay,
];
pub const ON_THE_CPU: &[Case] = cases![
    budget_files_with_any_bit_changed_are_refused,
    budget_files_that_do_not_fit_the_format_are_refused_with_the_reason,
    budget_errors_name_the_argument,
];

struct Budget(*mut vwd_budget);

impl Drop for Budget {
    fn drop(&mut self) {
        // SAFETY: made once.
        unsafe { vwd_budget_release(self.0) }
    }
}

fn profile(backend: &Backend, options: &vwd_budget_options) -> Result<Budget, vwd_status> {
    let mut budget = null_mut();
    // SAFETY: the arguments are valid.
    match unsafe { vwd_budget_profile(backend.session(), options, backend.stream(), &mut budget) } {
        VWD_OK => Ok(Budget(budget)),
        status => Err(status),
    }
}

fn load(backend: &Backend, options: &vwd_budget_options, path: &Path) -> Result<Budget, vwd_status> {
    let (path, mut budget) = (text(path), null_mut());
    // SAFETY: the arguments are valid.
    match unsafe { vwd_budget_load(backend.session(), options, path.as_ptr(), &mut budget) } {
        VWD_OK => Ok(Budget(budget)),
        status => Err(status),
    }
}

fn text(path: &Path) -> CString {
    CString::new(path.to_str().expect("UTF-8")).expect("no NUL")
}

impl Budget {
    fn save(&self, path: &Path) {
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_budget_save(self.0, text(path).as_ptr()) });
    }

    fn ask(&self, question: &vwd_budget_question) -> vwd_budget_answer {
        let mut answer = args();
        // SAFETY: the arguments are valid.
        assert_ok(unsafe { vwd_budget_ask(self.0, question, &mut answer) });
        answer
    }
}

/// A folder of the test's own, gone at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str, backend: &Backend) -> Folder {
        let kind = if backend.is_cuda() { "cuda" } else { "cpu" };
        let path = std::env::temp_dir().join(format!("vanward-budget-{name}-{kind}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A grid of two contexts that is measured in no time.
fn tiny() -> vwd_budget_options {
    let mut options = vwd_budget_options {
        query_heads: 4,
        kv_heads: 2,
        key_dim: 16,
        value_dim: 16,
        dtype_code: F32.code as u32,
        dtype_bits: F32.bits as u32,
        page_size: 8,
        block_size: 8,
        method: VWD_SELECT_MINMAX,
        k: 3,
        init_blocks: 1,
        local_blocks: 1,
        max_draft: 2,
        samples: 1,
        limit_bytes: 112 << 10,
        ..args()
    };
    options.contexts[..2].copy_from_slice(&[16, 50]);
    options.batches[..2].copy_from_slice(&[1, 2]);
    options.ratios[..2].copy_from_slice(&[1.0, 1.5]);
    options
}

fn question(context: u32, batch: u32) -> vwd_budget_question {
    let mut question = vwd_budget_question { context, batch, acceptance: 0.9, ..args() };
    question.coverage_ratios[0] = 1.5;
    question.coverages[0] = 0.9;
    question
}

/// All numbers of an answer, bit for bit.
fn bits(answer: &vwd_budget_answer) -> Vec<u32> {
    let count = size_of::<vwd_budget_answer>() / 4;
    // SAFETY: the struct is as many 32-bit numbers.
    unsafe { std::slice::from_raw_parts((&raw const *answer).cast::<u32>(), count) }.to_vec()
}

fn budget_is_profiled_saved_loaded_and_asked(backend: &Backend) {
    let folder = Folder::new("round-trip", backend);
    let (path, again) = (folder.file("budget"), folder.file("again"));
    let options = tiny();
    let measured = profile(backend, &options).expect("a profile");
    measured.save(&path);
    let loaded = load(backend, &options, &path).expect("what was saved loads");
    loaded.save(&again);
    assert_eq!(std::fs::read(&path).unwrap(), std::fs::read(&again).unwrap(), "the same times make the same file");
    for (context, batch) in [(16, 1), (20, 1), (50, 2), (500, 9)] {
        let [a, b] = [&measured, &loaded].map(|budget| budget.ask(&question(context, batch)));
        assert_eq!(bits(&a), bits(&b), "{context} tokens, {batch} sequences");
        assert_eq!(a.extrapolated, (context > 50 || batch > 2) as u32);
        let times = [a.select_us, a.attend_us, a.guess_us, a.repair_us, a.dense_us, a.verify_us];
        assert!(times.iter().all(|time| *time > 0.0 && time.is_finite()), "{times:?}");
        assert!((a.sparse_gain - a.dense_us / (a.select_us + a.attend_us)).abs() <= 1e-5 * a.sparse_gain);
        assert!(a.gamma <= 2 && (a.gamma > 0) == (a.pays & VWD_BUDGET_SELF != 0));
        assert!((a.ratio > 0.0) == (a.pays & VWD_BUDGET_PRR != 0));
        assert!(a.hidden_ratio == 0.0 || (1.0..=1.5).contains(&a.hidden_ratio));
    }
}

fn budget_profiles_each_method_of_selection_and_mode_of_repair(backend: &Backend) {
    let shapes = [
        // Blocks that PRR does not take, in a decoder.
        vwd_budget_options { block_size: 4, ..tiny() },
        // Blocks of several pages, wide and few channels, FP8, guesses that cover everything.
        vwd_budget_options {
            method: VWD_SELECT_AXIS,
            repair_mode: VWD_REPAIR_SUPERSET,
            page_size: 4,
            block_size: 8,
            ..tiny()
        },
        vwd_budget_options {
            dtype_code: BF16.code as u32,
            dtype_bits: 16,
            key_dim: 64,
            value_dim: 32,
            partial_blocks: 2,
            ..tiny()
        },
        vwd_budget_options {
            dtype_code: F8E4M3.code as u32,
            dtype_bits: 8,
            k: 9,
            repair_mode: VWD_REPAIR_EXACT,
            ..tiny()
        },
    ];
    for options in &shapes {
        let budget = profile(backend, options).unwrap_or_else(|_| panic!("{}", last_error()));
        let answer = budget.ask(&question(50, 2));
        let is_judged = options.block_size >= 8;
        assert_eq!([answer.prr_gain, answer.guess_us, answer.repair_us].map(|x| x > 0.0), [is_judged; 3]);
        assert!(is_judged || answer.break_even_coverage == f32::INFINITY);
        assert!(answer.verify_us > 0.0);
    }
}

fn budget_of_another_shape_is_refused_by_what_differs(backend: &Backend) {
    let folder = Folder::new("shape", backend);
    let path = folder.file("budget");
    let options = tiny();
    profile(backend, &options).expect("a profile").save(&path);
    let others = [
        (vwd_budget_options { query_heads: 8, ..options }, "options.query_heads: 8; expected 4, with which "),
        (vwd_budget_options { kv_heads: 4, ..options }, "options.kv_heads: 4; expected 2, with which "),
        (vwd_budget_options { key_dim: 32, ..options }, "options.key_dim: 32; expected 16, with which "),
        (vwd_budget_options { value_dim: 32, ..options }, "options.value_dim: 32; expected 16, with which "),
        (vwd_budget_options { dtype_bits: 16, ..options }, "options.dtype: float16; expected float32, with which "),
        (vwd_budget_options { page_size: 16, ..options }, "options.page_size: 16; expected 8, with which "),
        (vwd_budget_options { block_size: 16, ..options }, "options.block_size: 16; expected 8, with which "),
        (vwd_budget_options { method: VWD_SELECT_AXIS, ..options }, "options.method: 5; expected 1, with which "),
        (vwd_budget_options { k: 4, ..options }, "options.k: 4; expected 3, with which "),
        (vwd_budget_options { init_blocks: 0, ..options }, "options.init_blocks: 0; expected 1, with which "),
        (vwd_budget_options { local_blocks: 0, ..options }, "options.local_blocks: 0; expected 1, with which "),
        (vwd_budget_options { repair_mode: 1, ..options }, "options.repair_mode: 1; expected 2, with which "),
        (vwd_budget_options { partial_blocks: 2, ..options }, "options.partial_blocks: 2; expected 1, with which "),
    ];
    for (other, message) in &others {
        let status = load(backend, other, &path).map(|_| VWD_OK).unwrap_or_else(|status| status);
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &[message, path.to_str().unwrap(), " was measured"]);
    }
    // The grid is the file's.
    let mut other_grid = vwd_budget_options { max_draft: 3, samples: 9, limit_bytes: 1, ..options };
    other_grid.contexts = [0; 16];
    assert!(load(backend, &other_grid, &path).is_ok());
}

fn budget_that_exceeds_its_limit_is_refused_with_what_it_needs(backend: &Backend) {
    let refused = |limit_bytes| {
        let status = profile(backend, &vwd_budget_options { limit_bytes, ..tiny() }).map(|_| VWD_OK);
        let status = status.unwrap_or_else(|status| status);
        let text = last_error();
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &["options.limit_bytes: ", "2 sequences of 50 tokens"]);
        text
    };
    let text = refused(1000);
    let needed: u64 = text.split("at least ").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
    refused(needed - 1);
    assert!(profile(backend, &vwd_budget_options { limit_bytes: needed, ..tiny() }).is_ok());
}

/// The default stream cannot be captured, and neither can checks that wait for the device.
fn budget_is_profiled_on_the_default_stream_and_in_sessions_that_check_or_delay(backend: &Backend) {
    let mut options = vwd_budget_options { max_draft: 1, limit_bytes: 64 << 10, ..tiny() };
    (options.contexts, options.batches, options.ratios) = ([0; 16], [0; 8], [0.0; 8]);
    (options.contexts[0], options.batches[0], options.ratios[0]) = (50, 1, 1.0);
    let mut budget = null_mut();
    // SAFETY: the arguments are valid.
    assert_ok(unsafe { vwd_budget_profile(backend.session(), &options, null_mut(), &mut budget) });
    let mut sessions = vec![backend.checking()];
    if backend.is_cuda() {
        sessions.push(backend.delaying(3));
    }
    let measured = |on: &Backend| profile(on, &options).unwrap_or_else(|_| panic!("{}", last_error()));
    for budget in [Budget(budget)].into_iter().chain(sessions.iter().map(measured)) {
        let answer = budget.ask(&question(50, 1));
        assert!(answer.select_us > 0.0 && answer.prr_gain > 0.0);
    }
}

/// Beside a GPU the other device is the CPU; beside the CPU it is one with more threads.
fn budget_of_another_device_is_refused(backend: &Backend) {
    let (one, two) = (Backend::cpu(1), Backend::cpu(2));
    let (here, about) = if backend.is_cuda() { (backend, "compute capability ") } else { (&two, "2 threads") };
    let both = [(&one, "1 threads"), (here, about)];
    for ((measured, name), (other, other_name)) in [(both[0], both[1]), (both[1], both[0])] {
        let folder = Folder::new("device", measured);
        let path = folder.file("budget");
        profile(measured, &tiny()).expect("a profile").save(&path);
        assert!(load(measured, &tiny(), &path).is_ok());
        let refused = |by: &Backend, options: &vwd_budget_options, pieces: &[&str]| {
            let status = load(by, options, &path).map(|_| VWD_OK).unwrap_or_else(|status| status);
            assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
        };
        let expected = ["session: ", other_name, "; expected ", name, ", on which ", " was measured"];
        refused(other, &tiny(), &expected);
        let other_shape = vwd_budget_options { k: 4, ..tiny() };
        refused(measured, &other_shape, &["options.k: 4; expected 3, with which ", " was measured"]);
    }
}

fn budget_files_with_any_bit_changed_are_refused(backend: &Backend) {
    let folder = Folder::new("bits", backend);
    let path = folder.file("budget");
    profile(backend, &tiny()).expect("a profile").save(&path);
    let whole = std::fs::read(&path).unwrap();
    let mut rng = Rng::new(7);
    println!("seed 7");
    for n in 0..400 {
        let mut bytes = whole.clone();
        // All of the last bytes, which are times, and some of the others.
        let at = if n < 40 { whole.len() - 1 - n } else { rng.size(0..=whole.len() - 1) };
        bytes[at] ^= 1 << rng.size(0..=7);
        std::fs::write(&path, &bytes).unwrap();
        let status = load(backend, &tiny(), &path).map(|_| VWD_OK).unwrap_or_else(|status| status);
        assert_eq!(status, VWD_ERROR_IO, "byte {at}: {}", last_error());
    }
    for length in [0, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        assert_eq!(load(backend, &tiny(), &path).err(), Some(VWD_ERROR_IO), "{length} bytes");
    }
    std::fs::write(&path, &whole).unwrap();
    assert!(load(backend, &tiny(), &path).is_ok());
}

fn budget_files_that_do_not_fit_the_format_are_refused_with_the_reason(backend: &Backend) {
    let folder = Folder::new("format", backend);
    let path = folder.file("budget");
    profile(backend, &tiny()).expect("a profile").save(&path);
    let whole = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
    assert!(whole.contains(r#""format":"vanward.budget","version":"3""#), "{whole}");
    let refuse = |from: &str, to: &str, pieces: &[&str]| {
        let bytes = std::fs::read(&path).unwrap();
        let at = bytes.windows(from.len()).position(|piece| piece == from.as_bytes()).expect("the text");
        assert_eq!(from.len(), to.len(), "lengths in the file stay");
        let changed = [&bytes[..at], to.as_bytes(), &bytes[at + from.len()..]].concat();
        let other = folder.file("changed");
        std::fs::write(&other, changed).unwrap();
        let status = load(backend, &tiny(), &other).map(|_| VWD_OK).unwrap_or_else(|status| status);
        assert_fails(status, VWD_ERROR_IO, &[&["changed: "], pieces].concat());
    };
    refuse("vanward.budget", "vanward.gadget", &["\"format\" is \"vanward.gadget\"; expected vanward.budget"]);
    refuse("\"version\":\"3\"", "\"version\":\"4\"", &["\"version\" is \"4\"; expected 3"]);
    let again = "expected 3, which has times of each strategy in a graph: profile again";
    refuse("\"version\":\"3\"", "\"version\":\"1\"", &["\"version\" is \"1\"; ", again]);
    refuse("\"version\":\"3\"", "\"version\":\"2\"", &["\"version\" is \"2\"; ", again]);
    refuse("\"max_draft\":\"2\"", "\"max_draft\":\"0\"", &["\"max_draft\" is \"0\"; expected 1 to 31"]);
    refuse("\"max_draft\":\"2\"", "\"max_draft\":\"3\"", &["dense: shape [2, 2, 3]; expected [2, 2, 4]"]);
    refuse("\"k\":\"3\"", "\"k\":\"4\"", &["\"checksum\" is ", "the checksum of what is in the file"]);
    refuse("\"select\"", "\"Select\"", &["select: no such tensor"]);
    assert_fails(
        load(backend, &tiny(), &folder.file("missing")).map(|_| VWD_OK).unwrap_or_else(|status| status),
        VWD_ERROR_IO,
        &["missing: "],
    );
}

fn budget_errors_name_the_argument(backend: &Backend) {
    let refused = |change: &dyn Fn(&mut vwd_budget_options), pieces: &[&str]| {
        let mut options = tiny();
        change(&mut options);
        let status = profile(backend, &options).map(|_| VWD_OK).unwrap_or_else(|status| status);
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
    };
    refused(&|o| o.flags = 1, &["options.flags: 1; expected 0"]);
    refused(&|o| o.kv_heads = 0, &["options.kv_heads: 0; expected at least 1"]);
    refused(&|o| o.query_heads = 3, &["options.query_heads: 3; expected a multiple of the 2 KV heads"]);
    refused(&|o| o.key_dim = 12, &["options.key_dim: 12"]);
    refused(&|o| o.value_dim = 600, &["options.value_dim: 600"]);
    refused(&|o| o.dtype_bits = 64, &["options.dtype_code: code 2, 64 bits; expected float32, float16, "]);
    refused(&|o| o.block_size = 3, &["options.block_size: 3"]);
    refused(&|o| o.page_size = 1 << 20, &["options.page_size: 1048576; expected at most 65536"]);
    refused(&|o| o.method = VWD_SELECT_MEAN_DOT, &["options.method: 3"]);
    refused(&|o| o.local_blocks = 3, &["options.init_blocks + options.local_blocks: 4; expected at most options.k, 3"]);
    refused(&|o| o.repair_mode = 3, &["options.repair_mode: 3"]);
    refused(&|o| o.max_draft = 32, &["options.max_draft: 32; expected at most 31"]);
    refused(&|o| o.samples = 1001, &["options.samples: 1001"]);
    refused(&|o| o.contexts[1] = 16, &["options.contexts[1]: 16; expected more than 16, the value before it"]);
    refused(&|o| o.contexts[3] = 60, &["options.contexts[3]: 60; expected 0 after the 0 that ends the list"]);
    refused(&|o| o.contexts[1] = 1 << 30, &["options.contexts[1]: 1073741824; expected at most 16777216"]);
    refused(&|o| o.batches[1] = 5000, &["options.batches[1]: 5000; expected at most 4096"]);
    refused(&|o| o.ratios[0] = 1.25, &["options.ratios[0]: 1.25; expected 1"]);
    refused(&|o| o.ratios[1] = f32::NAN, &["options.ratios[1]: NaN"]);

    let (session, options, untouched) = (backend.session(), tiny(), std::ptr::dangling_mut::<vwd_budget>());
    let mut budget = untouched;
    let invalid = |status, name: &str| assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, &[name]);
    // SAFETY: every pointer is valid or NULL.
    unsafe {
        let stream = null_mut();
        invalid(vwd_budget_profile(std::ptr::null(), &options, stream, &mut budget), "session: NULL");
        invalid(vwd_budget_profile(session, std::ptr::null(), stream, &mut budget), "options: NULL");
        invalid(vwd_budget_profile(session, &options, stream, null_mut()), "budget: NULL");
        invalid(vwd_budget_profile(session, &options, 64 as vwd_stream, &mut budget), "stream: ");
        invalid(vwd_budget_load(session, &options, std::ptr::null(), &mut budget), "path: NULL");
        invalid(vwd_budget_load(session, &options, c"\xff".as_ptr(), &mut budget), "path: ");
        assert_eq!(budget, untouched, "written in spite of an error");
        invalid(vwd_budget_save(std::ptr::null(), c"x".as_ptr()), "budget: NULL");
        invalid(vwd_budget_ask(std::ptr::null(), &question(1, 1), &mut args()), "budget: NULL");
        let made = profile(backend, &options).expect("a profile");
        invalid(vwd_budget_ask(made.0, std::ptr::null(), &mut args()), "question: NULL");
        invalid(vwd_budget_ask(made.0, &question(0, 1), &mut args()), "question.context: 0");
        invalid(vwd_budget_ask(made.0, &question(1, 1), null_mut()), "answer: NULL");
        invalid(vwd_budget_save(made.0, std::ptr::null()), "path: NULL");
        let missing = vwd_budget_save(made.0, c"/no/such/folder/budget".as_ptr());
        assert_fails(missing, VWD_ERROR_IO, &["/no/such/folder/budget"]);
        vwd_budget_release(null_mut());
    }
}
