//! Bad input: each call × each argument × each way in which it can be wrong.

mod calls;
#[path = "../support/mod.rs"]
mod support;
mod table;

use libtest_mimic::{Arguments, Failed, Trial};
use support::Backend;

fn main() {
    let trials = calls::ALL.iter().map(|&(name, describe)| {
        Trial::test(name, move || {
            let backend = Backend::cpu(2);
            let (failures, rows) = describe(&backend).run();
            assert!(rows > 50, "a table of {rows} rows");
            println!("{name}: {rows} rows");
            if failures.is_empty() {
                return Ok(());
            }
            Err(Failed::from(format!("{} of {rows} rows failed:\n{}", failures.len(), failures.join("\n"))))
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}
