//! Bad input: each call × each argument × each way in which it can be wrong.

mod arrays;
mod calls;
mod combinations;
mod handles;
mod sampling;
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
    let others: [(&str, fn()); 18] = [
        ("forecast_calls_refuse_what_is_missing", handles::forecast_calls_refuse_what_is_missing),
        ("calibration_needs_a_place_for_its_result_alone", handles::calibration_needs_a_place_for_its_result_alone),
        ("structs_of_other_sizes_are_refused", handles::structs_of_other_sizes_are_refused),
        (
            "attention_refuses_what_makes_no_sense_together",
            combinations::attention_refuses_what_makes_no_sense_together,
        ),
        ("messages_say_where_expectations_come_from", combinations::messages_say_where_expectations_come_from),
        ("updates_of_layers_are_all_made_or_none", combinations::updates_of_layers_are_all_made_or_none),
        ("budgets_of_nothing_are_refused", combinations::budgets_of_nothing_are_refused),
        ("slots_refuse_what_makes_no_sense_beside_them", combinations::slots_refuse_what_makes_no_sense_beside_them),
        (
            "remainder_refuses_what_makes_no_sense_beside_it",
            combinations::remainder_refuses_what_makes_no_sense_beside_it,
        ),
        ("repair_refuses_what_makes_no_sense_together", combinations::repair_refuses_what_makes_no_sense_together),
        ("tensors_of_one_form_are_checked_one_by_one", arrays::tensors_of_one_form_are_checked_one_by_one),
        (
            "tensors_of_one_form_may_differ_in_what_is_ignored",
            arrays::tensors_of_one_form_may_differ_in_what_is_ignored,
        ),
        ("overlap_is_found_in_any_order_of_addresses", arrays::overlap_is_found_in_any_order_of_addresses),
        (
            "interleaved_tensors_are_told_from_overlapping_ones",
            arrays::interleaved_tensors_are_told_from_overlapping_ones,
        ),
        (
            "verify_sample_says_what_its_arguments_follow_from",
            sampling::verify_sample_says_what_its_arguments_follow_from,
        ),
        ("trees_say_what_their_arguments_follow_from", sampling::trees_say_what_their_arguments_follow_from),
        ("compact_names_the_argument_that_lies_in_a_cache", sampling::compact_names_the_argument_that_lies_in_a_cache),
        ("verify_says_whose_dtype_is_expected", sampling::verify_says_whose_dtype_is_expected),
    ];
    let others = others.into_iter().map(|(name, test)| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.chain(others).collect()).exit();
}
