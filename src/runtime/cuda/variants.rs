//! Variants of a family's kernels. A family declares its variants in one enum, says in one function which of them can do a
//! call, and takes the first that does it well; a session's option forces another, for tests and measurements.

use crate::core::status::{Error, Result};
use crate::runtime::log::{Level, Log};
use std::fmt::Debug;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The variants of one family, an enum that [`variants!`] declares in the family's `choose.rs`.
pub trait Variant: Copy + Eq + Debug + 'static {
    /// The family's name where a variant is forced: "attention" in `attention=decode128`.
    const FAMILY: &'static str;
    /// In order of preference.
    const ALL: &'static [Self];
    /// Names of the variants, in the same order.
    const NAMES: &'static [&'static str];

    /// Place in [`Variant::ALL`].
    fn index(self) -> usize;

    fn name(self) -> &'static str {
        Self::NAMES[self.index()]
    }
}

/// Declares the variants of a family in order of preference, each with its name.
macro_rules! variants {
    (
        $(#[$attribute:meta])*
        $vis:vis enum $Name:ident: $family:literal {
            $($(#[$variant_attribute:meta])* $Variant:ident = $name:literal,)+
        }
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $Name {
            $($(#[$variant_attribute])* $Variant,)+
        }

        impl $crate::runtime::cuda::variants::Variant for $Name {
            const FAMILY: &'static str = $family;
            const ALL: &'static [Self] = &[$($Name::$Variant),+];
            const NAMES: &'static [&'static str] = &[$($name),+];

            fn index(self) -> usize {
                self as usize
            }
        }
    };
}
pub(crate) use variants;

/// How a variant suits a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// It does the call, and no variant after it in the order of preference is expected to be faster.
    Takes,
    /// It does the call, but another is expected to be faster: it runs where it is forced, or where no other can.
    Slower,
    /// It cannot do the call; the reason completes "it cannot run: …".
    Cannot(&'static str),
}

impl Fit {
    /// `self` where the variant can do the call, and the reason where it cannot.
    pub fn unless(self, cannot: bool, reason: &'static str) -> Fit {
        if cannot { Fit::Cannot(reason) } else { self }
    }
}

/// The forced variant if it can do the call. Otherwise the first that takes it, or else the first that does it more slowly.
#[inline]
pub fn choose<V: Variant>(forced: Option<V>, fit: impl Fn(V) -> Fit) -> Result<V> {
    if let Some(variant) = forced {
        return match fit(variant) {
            Fit::Cannot(reason) => Err(cannot(variant, "is forced", reason)),
            Fit::Takes | Fit::Slower => Ok(variant),
        };
    }
    let (mut slower, mut refusal) = (None, None);
    for &variant in V::ALL {
        match fit(variant) {
            Fit::Takes => return Ok(variant),
            Fit::Slower => slower = slower.or(Some(variant)),
            Fit::Cannot(reason) => refusal = Some((variant, reason)),
        }
    }
    slower.ok_or_else(|| match refusal {
        Some((variant, reason)) => cannot(variant, "is the last", reason),
        None => unreachable!("a family has variants"),
    })
}

#[cold]
fn cannot<V: Variant>(variant: V, how: &str, reason: &str) -> Error {
    Error::unsupported(format!("variant {}={} {how} and cannot run: {reason}", V::FAMILY, variant.name()))
}

/// The variants of one family as text: what a session knows of every family without its type.
#[derive(Clone, Copy, Debug)]
pub struct VariantList {
    pub family: &'static str,
    pub names: &'static [&'static str],
}

impl VariantList {
    pub const fn of<V: Variant>() -> VariantList {
        VariantList { family: V::FAMILY, names: V::NAMES }
    }
}

/// The environment variable that forces variants where the options do not.
pub const VARIABLE: &str = "VANWARD_VARIANTS";

/// The variants that a session's option forces: family and index.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Forced(Vec<(&'static str, usize)>);

impl Forced {
    /// `text` is "attention=decode128,select_blocks=axis_general"; `source` is its name in messages. The last of several
    /// variants of one family counts.
    pub fn parse(source: &str, text: &str, lists: &[VariantList]) -> Result<Forced> {
        let mut forced: Vec<(&'static str, usize)> = vec![];
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let found = || format!("{entry:?}");
            let (family, name) = entry
                .split_once('=')
                .ok_or_else(|| Error::argument(source, found(), "entries family=variant, separated by commas"))?;
            let list = lists.iter().find(|list| list.family == family).ok_or_else(|| {
                let families: Vec<_> = lists.iter().map(|list| list.family).collect();
                Error::argument(source, found(), format!("one of the families {}", families.join(", ")))
            })?;
            let index = list.names.iter().position(|known| *known == name).ok_or_else(|| {
                let expected = format!("one of the variants of {family}: {}", list.names.join(", "));
                Error::argument(source, found(), expected)
            })?;
            forced.retain(|(known, _)| *known != list.family);
            forced.push((list.family, index));
        }
        Ok(Forced(forced))
    }

    #[inline]
    pub fn variant<V: Variant>(&self) -> Option<V> {
        let (_, index) = self.0.iter().find(|(family, _)| *family == V::FAMILY)?;
        Some(V::ALL[*index])
    }
}

/// Which variants a session has run.
pub struct Ran {
    /// Each family with a bit for each of its variants that ran.
    families: Vec<(VariantList, AtomicU32)>,
}

impl Ran {
    pub fn new(lists: &[VariantList]) -> Ran {
        Ran { families: lists.iter().map(|&list| (list, AtomicU32::new(0))).collect() }
    }

    /// Logs the first launch of a variant in this session.
    #[inline]
    pub fn note<V: Variant>(&self, variant: V, log: &Log) {
        if !log.has(Level::Info) {
            return;
        }
        let family = self.families.iter().find(|(list, _)| list.family == V::FAMILY);
        let (_, ran) = family.expect("Kernels::VARIANTS names the family");
        let bit = 1 << variant.index();
        if ran.load(Relaxed) & bit == 0 && ran.fetch_or(bit, Relaxed) & bit == 0 {
            log.write(Level::Info, || format!("first use of variant {}={}", V::FAMILY, variant.name()));
        }
    }
}

/// Compares a family's variants with the table of `docs/<page>.md` whose first column is headed "variant of `family`".
#[cfg(test)]
pub fn check_docs(page: &str, list: VariantList) {
    let path = format!("{}/docs/{page}.md", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).expect("the family's page");
    let head = format!("| variant of `{}` |", list.family);
    let rows =
        text.lines().skip_while(|line| !line.starts_with(&head)).skip(2).take_while(|line| line.starts_with('|'));
    let names: Vec<&str> = rows.map(|row| row.split('`').nth(1).expect("a name in backticks")).collect();
    assert_eq!(names, list.names, "{path}: the rows of the table that begins with {head:?}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::status::Code;

    variants! {
        enum Sort: "sort" {
            Network = "network",
            Radix = "radix",
            Merge = "merge",
        }
    }

    variants! {
        enum Scan: "scan" {
            General = "general",
        }
    }

    const LISTS: [VariantList; 2] = [VariantList::of::<Sort>(), VariantList::of::<Scan>()];

    /// A network sorts up to 32 keys, radix whole numbers, and a merge everything.
    fn fit(keys: usize, are_whole: bool) -> impl Fn(Sort) -> Fit {
        move |variant| match variant {
            Sort::Network => Fit::Takes.unless(keys > 32, "more than 32 keys"),
            Sort::Radix if keys < 1000 => Fit::Slower.unless(!are_whole, "keys with fractions"),
            Sort::Radix => Fit::Takes.unless(!are_whole, "keys with fractions"),
            Sort::Merge => Fit::Takes,
        }
    }

    #[test]
    fn first_variant_that_takes_a_call_is_chosen() {
        assert_eq!(choose(None, fit(10, true)), Ok(Sort::Network));
        assert_eq!(choose(None, fit(100, true)), Ok(Sort::Merge));
        assert_eq!(choose(None, fit(1000, true)), Ok(Sort::Radix));
        assert_eq!(choose(None, fit(1000, false)), Ok(Sort::Merge));
    }

    #[test]
    fn forced_variant_runs_where_it_can_though_another_is_faster() {
        assert_eq!(choose(Some(Sort::Radix), fit(10, true)), Ok(Sort::Radix));
        let error = choose(Some(Sort::Radix), fit(1000, false)).unwrap_err();
        let text = "variant sort=radix is forced and cannot run: keys with fractions";
        assert_eq!((error.code, &*error.message), (Code::Unsupported, text));
    }

    #[test]
    fn slower_variant_runs_where_no_other_can() {
        let only_radix = |variant| if variant == Sort::Radix { Fit::Slower } else { Fit::Cannot("it is missing") };
        assert_eq!(choose(None, only_radix), Ok(Sort::Radix));
        let error = choose::<Sort>(None, |_| Fit::Cannot("there is no memory")).unwrap_err();
        assert_eq!(error.message, "variant sort=merge is the last and cannot run: there is no memory");
    }

    #[test]
    fn text_forces_variants_by_name() {
        let forced = Forced::parse("options.variants", "sort=radix, scan=general,sort=merge,", &LISTS).unwrap();
        assert_eq!((forced.variant(), forced.variant()), (Some(Sort::Merge), Some(Scan::General)));
        assert_eq!(Forced::parse(VARIABLE, "", &LISTS).unwrap().variant::<Sort>(), None);
    }

    #[test]
    fn unknown_names_are_refused_with_the_known_ones() {
        let refused = |text| Forced::parse("options.variants", text, &LISTS).unwrap_err().to_string();
        assert_eq!(refused("sort"), "options.variants: \"sort\"; expected entries family=variant, separated by commas");
        assert_eq!(
            refused("short=radix"),
            "options.variants: \"short=radix\"; expected one of the families sort, scan"
        );
        assert_eq!(
            refused("sort=heap"),
            "options.variants: \"sort=heap\"; expected one of the variants of sort: network, radix, merge"
        );
    }
}
