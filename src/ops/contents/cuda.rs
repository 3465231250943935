//! Launch of the kernel of kernels/contents/contents.cu.

use super::{Finding, Is, LARGEST, MOST_DIMS, Number, Rule, Span, cpu};
use crate::core::status::Result;
use crate::runtime::cuda::layout::{kernel_constants, kernel_struct};
use crate::runtime::cuda::views::View;
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Kind, Modules, Source, source};

pub struct Kernels {
    check: Kernel,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[source!("contents/contents", compute_80)];

    fn find(modules: &Modules) -> Result<Kernels> {
        Ok(Kernels { check: modules.kernel("contents/contents", "check_contents")? })
    }
}

kernel_struct! {
    /// Mirrors Number of kernels/contents/contents.cu.
    #[derive(Clone, Copy)]
    struct NumberParams {
        of: View<MOST_DIMS>,
        less: View<MOST_DIMS>,
        per_position: i64,
        plus: i64,
        divisor: i64,
        times: i64,
        most: i64,
    }
}

kernel_struct! {
    /// Mirrors RuleParams of kernels/contents/contents.cu. Strides are in bytes.
    struct RuleParams {
        tensor: View<MOST_DIMS>,
        shape: [i64; MOST_DIMS],
        applies: [NumberParams; 2],
        from: NumberParams,
        to: NumberParams,
        below: NumberParams,
        least: i64,
        along: u32,
        last: u32,
        is: u32,
        padding: u32,
        report: *mut Report,
    }
}

kernel_struct! {
    /// What the kernel says of a rule; mirrors Report of kernels/contents/contents.cu.
    #[derive(Clone, Copy)]
    struct Report {
        /// The number of the first element that breaks the rule; NONE if all keep it.
        element: u64,
        value: i64,
        other: i64,
    }
}

kernel_constants! {
    const THREADS: u32 = 256;
    const WITHIN: u32 = 0;
    const ASCENDING: u32 = 1;
    const DISTINCT: u32 = 2;
    const FACTOR: u32 = 3;
    const FINITE: u32 = 4;
    const NUMBER: u32 = 5;
}
const NONE: u64 = u64::MAX;

impl NumberParams {
    fn new(n: &Number) -> NumberParams {
        let view = |t| View::optional(t, |t| View::new(t, std::array::from_fn(|d| d)));
        let &Number { per_position, plus, divisor, times, most, .. } = n;
        NumberParams { of: view(&n.of), less: view(&n.less), per_position, plus, divisor, times, most }
    }
}

impl RuleParams {
    fn new(rule: &Rule, report: *mut Report) -> RuleParams {
        let (is, least, below) = match &rule.is {
            Is::Within { least, below } => (WITHIN, *least, *below),
            Is::Ascending { by } => (ASCENDING, *by, Number::constant(0)),
            Is::Distinct => (DISTINCT, 0, Number::constant(0)),
            Is::Factor => (FACTOR, 0, Number::constant(0)),
            Is::Finite => (FINITE, 0, Number::constant(0)),
            Is::Number => (NUMBER, 0, Number::constant(0)),
        };
        let all = Span { along: 0, from: Number::constant(0), to: Number::constant(LARGEST) };
        let Span { along, from, to } = rule.span.unwrap_or(all);
        RuleParams {
            tensor: View::new(&rule.tensor, std::array::from_fn(|d| d)),
            shape: rule.shape().map(|n| n as i64),
            applies: rule.applies.each_ref().map(NumberParams::new),
            from: NumberParams::new(&from),
            to: NumberParams::new(&to),
            below: NumberParams::new(&below),
            least,
            along: along as u32,
            last: rule.last() as u32,
            is,
            padding: 0,
            report,
        }
    }
}

/// The first element that breaks each rule. Waits for the stream where a rule is about the device's memory.
pub fn find(enqueue: &Enqueue, rules: &[Rule]) -> Result<Vec<Option<Finding>>> {
    let on_device = rules.iter().filter(|rule| !rule.on_host).count();
    let mut reports = Vec::new();
    if on_device > 0 {
        reports = enqueue.wait_for_reports(on_device, |reports: *mut Report| {
            for (n, rule) in rules.iter().filter(|rule| !rule.on_host).enumerate() {
                let params = RuleParams::new(rule, reports.wrapping_add(n));
                let grid = Grid { ctas: 1, threads: THREADS, kind: Kind::Plain };
                // SAFETY: RuleParams is the kernel's struct; the op's caller keeps the tensors valid, and there are as many reports.
                unsafe {
                    enqueue.launch(&enqueue.kernels::<Kernels>().check, grid, [(&raw const params).cast()])?;
                }
            }
            Ok(())
        })?;
    }
    let mut reports = reports.into_iter();
    let finding = |rule: &Rule| match rule.on_host {
        // SAFETY: the op's caller keeps the tensors valid, and the rule's lie in host memory.
        true => unsafe { cpu::find(rule) },
        false => reports.next().filter(|report| report.element != NONE).map(|report| Finding {
            element: report.element as usize,
            value: report.value,
            other: report.other,
        }),
    };
    Ok(rules.iter().map(finding).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs = [
            NumberParams::layout("Number"),
            Report::layout("Report"),
            RuleParams::layout("RuleParams"),
            kernel_constants(),
        ];
        layout::check("contents", file!(), &structs);
    }
}
