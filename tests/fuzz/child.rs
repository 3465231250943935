//! The process in which cases run, one seed after the other, until one fails or kills it.

use crate::check::{Lab, Verdict};
use crate::{Target, files};
use std::fmt::{Display, Formatter};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A case that takes longer hangs.
pub const PATIENCE: u32 = 20;
/// Cases that run however long they take.
const LEAST: u64 = 100;
/// What calls may allocate.
const MEMORY: u64 = 4 << 30;
/// The stack of the thread that calls: that of any thread under musl.
const STACK: usize = 128 << 10;

/// A folder for one target's processes, which is gone with this.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("vanward-fuzz-{}-{n}", std::process::id()));
        std::fs::create_dir(&path).expect("a folder for temporary files");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// How far a process has come. It lies in a file, so that it outlives the process.
#[derive(Clone, Copy, Default)]
pub struct Journal {
    pub seed: u64,
    pub cases: u64,
    pub accepted: u64,
    /// Accepted, and wrote results.
    pub worked: u64,
}

impl Journal {
    pub fn read(folder: &Path) -> Journal {
        let bytes = std::fs::read(folder.join("journal")).unwrap_or_default();
        let number = |n: usize| bytes.get(n * 8..n * 8 + 8).map_or(0, |b| u64::from_le_bytes(b.try_into().unwrap()));
        Journal { seed: number(0), cases: number(1), accepted: number(2), worked: number(3) }
    }

    pub fn worked_share(&self) -> f64 {
        self.worked as f64 / self.cases.max(1) as f64
    }

    fn write(&self, file: &File) {
        let bytes = [self.seed, self.cases, self.accepted, self.worked].map(u64::to_le_bytes).concat();
        file.write_all_at(&bytes, 0).expect("the journal");
    }
}

impl Display for Journal {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let percent = |n: u64| n * 100 / self.cases.max(1);
        let (accepted, worked) = (percent(self.accepted), percent(self.worked));
        write!(f, "{} cases, {accepted} % accepted, {worked} % with results", self.cases)
    }
}

/// What a process is told: a target, a folder for its files, the first seed, and for how long to go on; no time means
/// once.
pub struct Orders {
    pub target: &'static Target,
    pub folder: PathBuf,
    pub first: u64,
    pub time: Duration,
}

/// The status of the process: 1 where a case failed, and it has said why.
pub fn run(orders: Orders) -> i32 {
    let caller = std::thread::Builder::new().stack_size(STACK).spawn(move || cases(&orders)).expect("a thread");
    caller.join().unwrap_or(1)
}

fn cases(orders: &Orders) -> i32 {
    let begin = Instant::now();
    let file = File::create(orders.folder.join("journal")).expect("the journal");
    let mut lab = Lab::new();
    limit();
    let mut journal = Journal::default();
    for seed in orders.first.. {
        journal.seed = seed;
        journal.write(&file);
        // SAFETY: a timer whose signal, if it ever comes, ends the process.
        unsafe { libc::alarm(PATIENCE) };
        let verdict = match orders.target {
            Target::Call(describe) => lab.check(&mut crate::draw(seed, describe)),
            Target::Files => files::check(&lab, seed, &orders.folder),
        };
        journal.cases += 1;
        match verdict {
            Ok(verdict) => {
                journal.accepted += (verdict != Verdict::Refused) as u64;
                journal.worked += (verdict == Verdict::Worked) as u64;
            }
            Err(what) => {
                journal.write(&file);
                println!("{what}");
                return 1;
            }
        }
        if orders.time.is_zero() || (begin.elapsed() > orders.time && journal.cases >= LEAST) {
            journal.write(&file);
            break;
        }
    }
    0
}

/// Bounds what the process may have beyond what it has now.
pub fn limit() {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages: u64 = pages.split(' ').next().and_then(|pages| pages.parse().ok()).expect("pages of the process");
    let most = pages * 4096 + MEMORY;
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: plain data.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
}
