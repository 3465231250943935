//! Constants that the host's Rust and the kernels' CUDA both have, and that `layout.cuh` does not state to the compiler: one test reads
//! both sources and compares them. Another compares the shared memory that the host reckons with to what the kernels' PTX declares.

use std::collections::BTreeMap;
use std::path::Path;

/// A constant of a file of `src`, a file of `kernels`, and the expression of that file's names that has its value.
const SHARED: &[(&str, &str, &str, &str)] = &[
    ("ops/attention/device/plan.rs", "THREADS", "attention/attention.cuh", "THREADS"),
    ("ops/attention/device/plan.rs", "WARPS", "attention/attention.cuh", "WARPS"),
    ("ops/attention/device/plan.rs", "WARP_ROWS", "attention/attention.cuh", "WARP_ROWS"),
    ("ops/attention/device/plan.rs", "TILE", "attention/attention.cuh", "TILE"),
    ("ops/attention/device/params.rs", "MAX_INPUTS", "attention/attention.cuh", "MAX_INPUTS"),
    ("ops/attention/device/mla16.rs", "ROWS", "attention/mla16.cuh", "MLA16_ROWS"),
    ("ops/attention/device/mla16.rs", "ROW_BYTES", "attention/mla16.cuh", "MLA16_PITCH"),
    ("ops/attention/device/mla64.rs", "ROWS", "attention/mla64.cuh", "MLA64_ROWS"),
    ("ops/attention/device/mla64.rs", "THREADS", "attention/mla64.cuh", "MLA64_THREADS"),
    ("ops/attention/device/mla64.rs", "TOKENS", "attention/mla64.cuh", "MLA64_TOKENS"),
    ("ops/attention/device/mla64.rs", "SLAB_BYTES", "common/warpgroup.cuh", "SLAB_WIDTH"),
    ("ops/attention/device/verify128.rs", "ROWS", "attention/verify128_join.cuh", "VERIFY_ROWS"),
    ("ops/attention/device/verify128.rs", "CHANNELS", "attention/verify128_width.cuh", "VERIFY_CHANNELS"),
    ("ops/attention/device/verify128.rs", "NARROW_CHANNELS", "attention/verify64_width.cuh", "VERIFY_CHANNELS"),
    ("ops/attention/device/verify128.rs", "RING_BYTES", "attention/verify128_width.cuh", "QUERIES_OFFSET"),
    ("ops/attention/device/verify128.rs", "RING_BYTES", "attention/verify64_width.cuh", "QUERIES_OFFSET"),
    ("ops/attention/device/verify128.rs", "THREADS", "attention/verify128_join.cuh", "VERIFY_THREADS"),
    ("ops/attention/device/verify128.rs", "SHORT_THREADS", "attention/verify128_short.cuh", "SHORT_THREADS"),
    ("ops/attention/device/verify128.rs", "HALVES", "attention/verify128_short.cuh", "HALVES"),
    ("ops/attention/device/verify128.rs", "BROAD_CHANNELS", "attention/verify256_width.cuh", "VERIFY_CHANNELS"),
    ("ops/attention/device/verify128.rs", "BROAD_RING_BYTES", "attention/verify256_width.cuh", "QUERIES_OFFSET"),
    ("ops/attention/device/verify128.rs", "BROAD_RECEIVED_ROWS", "attention/verify256_width.cuh", "RECEIVED_ROWS"),
    ("ops/attention/device/verify128.rs", "BROAD_STAGE_UNITS", "attention/verify256_width.cuh", "STAGE_TILES"),
    ("ops/attention/device/verify128.rs", "RECEIVED_ROWS", "attention/verify128_width.cuh", "RECEIVED_ROWS"),
    ("ops/attention/device/verify128.rs", "RECEIVED_ROWS", "attention/verify64_width.cuh", "RECEIVED_ROWS"),
    ("ops/attention/device/verify128.rs", "STAGE_UNITS", "attention/verify128_join.cuh", "STAGE_TILES"),
    ("ops/attention/device/boxes.rs", "SLAB_ELEMENTS", "common/warpgroup.cuh", "SLAB_ELEMENTS"),
    ("ops/attention/device/boxes.rs", "BOXES_BYTES", "attention/verify128_boxes.cuh", "BOXES_BYTES"),
    ("ops/quantize/rows.rs", "LANES", "quantize/rows.cu", "LANES"),
    ("ops/quantize/rows.rs", "CACHE_THREADS", "cache/code_rows.cu", "CODE_THREADS"),
    ("ops/quantize/rows.rs", "CACHE_SPAN", "cache/code_rows.cu", "CODE_SPAN"),
    ("ops/select/cuda/rows.rs", "THREADS", "common/topk.cuh", "TOPK_THREADS"),
    ("ops/select/cuda/params.rs", "THREADS", "select/axis_tiles.cuh", "THREADS"),
    ("ops/select/cuda/params.rs", "THREADS", "select/labels_cluster.cuh", "THREADS"),
    ("ops/select/cuda/params.rs", "THREADS", "select/means.cuh", "SCORING_THREADS"),
    ("ops/select/cuda/params.rs", "MOST_HEADS", "select/means.cuh", "MOST_HEADS"),
    ("ops/select/cuda/params.rs", "MOST_HEADS", "select/labels_general.cuh", "MOST_HEADS"),
    ("ops/select/cuda/axis_tiles.rs", "MOST_HEADS", "select/axis_tiles.cuh", "MOST_HEADS"),
    ("ops/select/cuda/axis_tiles.rs", "MOST_STAGES", "select/axis_tiles.cuh", "MOST_STAGES"),
    ("ops/select/cuda/axis_tiles.rs", "MOST_CTAS", "select/axis_cluster.cuh", "MOST_CTAS"),
    ("ops/select/cuda/axis_tiles.rs", "BLOCKS", "select/tiles.cuh", "BLOCKS"),
    ("ops/select/cuda/axis_two_launches.rs", "MOST_TILES", "select/axis_tiles.cuh", "TILES_AT_ONCE * WARP"),
    ("ops/select/cuda/labels_cluster.rs", "TOKENS", "select/labels_cluster.cuh", "TOKENS"),
    ("ops/select/cuda/labels_cluster.rs", "HEADS", "select/labels_cluster.cuh", "HEADS"),
    ("ops/select/cuda/labels_cluster.rs", "MOST_HEADS", "select/labels_cluster.cuh", "MOST_HEADS"),
    ("ops/select/cuda/labels_cluster.rs", "SHARED_CANDIDATES", "select/labels_cluster.cuh", "SHARED_CANDIDATES"),
    ("ops/select/cuda/labels_general.rs", "CHUNK", "select/labels_general.cuh", "TOKEN_CHUNK"),
    ("ops/select/cuda/labels_general.rs", "SHARED_CANDIDATES", "select/labels_general.cuh", "SHARED_CANDIDATES"),
    ("ops/select/cuda/means.rs", "CHUNK_WINDOWS", "select/means.cuh", "CHUNK"),
    ("ops/select/cuda/minmax.rs", "CHUNK", "select/minmax.cuh", "CHUNK"),
    ("ops/select/cuda/minmax.rs", "MOST_FOLDED", "select/minmax.cuh", "MOST_FOLDED"),
    ("ops/select/choose.rs", "TOP_CTAS", "common/cluster_prefilter.cuh", "MOST_CTAS"),
    ("ops/index/mod.rs", "GROUP", "index/axis.cuh", "GROUP"),
    ("ops/index/mod.rs", "GROUP", "select/axis_tiles.cuh", "GROUP"),
    ("ops/index/cuda.rs", "THREADS", "index/cta_share.cuh", "THREADS"),
    ("ops/index/cuda.rs", "TOKEN_SLOTS", "index/axis.cuh", "SLOTS"),
    ("ops/verify/cuda.rs", "THREADS", "verify/verify.cu", "THREADS"),
    ("ops/verify/cuda.rs", "LONG_THREADS", "verify/verify.cu", "LONG_THREADS"),
    ("ops/verify/choose.rs", "TILE_TOKENS", "verify/verify.cuh", "TOKEN_SLOTS * WARP"),
    ("ops/pack/cuda/mod.rs", "MAX_SUMMED_BATCH", "pack/pack.cuh", "MAX_SUMMED_BATCH"),
    ("ops/pack/cuda/mod.rs", "OFFSETS_PER_CTA", "pack/pack.cu", "OFFSETS_PER_CTA"),
    ("ops/pack/cuda/mod.rs", "CLUSTER_THREADS", "pack/verify_pack.cu", "MAX_THREADS"),
    ("ops/pack/cuda/tiles.rs", "MAX_TENSORS", "pack/pack.cuh", "MAX_TENSORS"),
    ("ops/pack/cuda/tiles.rs", "MAX_LAYOUTS", "pack/pack.cuh", "MAX_LAYOUTS"),
    ("ops/prefetch/cuda/mod.rs", "SLOTS", "prefetch/vectors.cu", "SLOTS"),
    ("ops/prefetch/cuda/params.rs", "MOST_GIVEN", "prefetch/pairs.cuh", "MOST"),
    ("decode/forecast/cuda.rs", "THREADS", "forecast/products.cuh", "THREADS"),
    ("decode/forecast/cuda.rs", "CHUNK", "forecast/products.cuh", "CHUNK"),
    ("decode/forecast/cuda.rs", "MOST_SLICES", "forecast/low_rank.cu", "MOST_SLICES"),
    ("decode/forecast/choose.rs", "BATCH_ROWS", "forecast/low_rank.cu", "ROWS"),
    ("kv/cuda/tuning.rs", "FIND_THREADS", "cache/resolve.cu", "FIND_THREADS"),
    ("kv/cuda/tuning.rs", "MOST_GIVE_THREADS", "cache/resolve.cu", "MOST_THREADS"),
    ("kv/cuda/tuning.rs", "APPEND_THREADS", "cache/append.cu", "THREADS"),
    ("kv/cuda/tuning.rs", "APPEND_WARPS", "cache/append.cu", "WARPS"),
    ("kv/cuda/tuning.rs", "FETCH_THREADS", "cache/copies.cu", "FETCH_THREADS"),
    ("kv/cuda/tuning.rs", "FETCH_ROOM", "cache/copies.cu", "FETCH_WARPS * STAGES * PIECE"),
    ("kv/cuda/tuning.rs", "DECODE_THREADS", "cache/coded.cu", "DECODE_THREADS"),
    ("kv/cuda/tuning.rs", "WRITE_THREADS", "cache/copies.cu", "WRITE_THREADS"),
    ("kv/cuda/tuning.rs", "SEQUENCE_THREADS", "cache/sequences.cu", "THREADS"),
    ("kv/cuda/params.rs", "MOST_BLOCKS", "cache/params.cuh", "MOST"),
    ("ops/draw/device.rs", "THREADS", "common/draw.cuh", "DRAW_THREADS"),
    ("ops/draw/device.rs", "SEGMENT_THREADS", "common/sampling.cuh", "SEGMENT_THREADS"),
    ("ops/draw/device.rs", "SEARCH_BYTES", "sample/cluster_filtered.cu", "SEARCH_BYTES"),
    ("ops/sample/cuda.rs", "TOP_P_BYTES", "sample/top_p.cu", "TOP_P_BYTES"),
    ("runtime/cuda/mod.rs", "LARGEST_CLUSTER", "common/cluster_topk.cuh", "LARGEST_CLUSTER"),
];

/// A constant of a file of `src`: no less than the bytes of shared memory that these kernels declare. The kernels are those of PTX files
/// whose names begin so, and whose own names begin so.
const DECLARED: &[(&str, &str, &str, &str)] = &[
    ("ops/draw/device.rs", "CLUSTER_SHARED", "sample/cluster", ""),
    ("ops/attention/device/mma.rs", "STATIC_SHARED", "attention/mma_", ""),
    ("ops/attention/device/mma.rs", "STATIC_SHARED", "attention_int4/mma_", ""),
    ("ops/attention/device/mma.rs", "STATIC_SHARED", "attention/repair_verify128", ""),
    ("ops/attention/device/decode128.rs", "STATIC_SHARED", "attention/decode128_", ""),
    ("ops/attention/device/decode128.rs", "STATIC_SHARED", "attention/decode64", ""),
    ("ops/attention/device/decode128.rs", "STATIC_SHARED", "attention/decode256", ""),
    ("ops/select/cuda/axis_cluster.rs", "STATIC_SHARED", "select/axis_cluster", ""),
    ("ops/select/cuda/axis_two_launches.rs", "MULTIPLY_SHARED", "select/axis_two_launches", "select_axis_multiply"),
    ("ops/select/cuda/axis_two_launches.rs", "SELECT_SHARED", "select/axis_two_launches", "select_axis_weigh"),
    ("ops/select/cuda/labels_cluster.rs", "STATIC_SHARED", "select/labels_cluster", ""),
    ("ops/select/cuda/labels_general.rs", "DECLARED", "select/labels_general", ""),
    ("ops/select/cuda/means.rs", "WEIGH_SHARED", "select/means", "select_means_weigh"),
    ("ops/select/cuda/minmax.rs", "DECODE_SHARED", "select/minmax", "select_minmax_decode"),
    ("ops/select/cuda/minmax.rs", "GENERAL_SHARED", "select/minmax", ""),
    ("ops/select/cuda/rows.rs", "TOP_CLUSTER_SHARED", "select/top_cluster", ""),
    ("ops/topk/choose.rs", "STATIC_BYTES", "topk/topk", ""),
];

/// Where names are found that a file takes from a header.
const HEADERS: [&str; 6] = [
    "common/types.cuh",
    "common/topk.cuh",
    "common/warpgroup.cuh",
    "attention/attention.cuh",
    "attention/verify128_width.cuh",
    "attention/verify128_join.cuh",
];

#[test]
fn constants_of_rust_are_those_of_the_kernels() {
    for (source, name, kernel, expression) in SHARED {
        let ours = rust_constant(source, name);
        let theirs = Kernel::read(kernel).value(expression);
        assert_eq!(ours, theirs, "{name} of src/{source} and {expression} of kernels/{kernel}");
    }
}

#[test]
fn shared_memory_that_is_reckoned_with_is_what_kernels_declare() {
    let mut files: Vec<(String, String)> = Vec::new();
    for family in
        std::fs::read_dir(root().join("kernels/ptx")).expect("PTX").map(|entry| entry.expect("an entry").path())
    {
        for file in std::fs::read_dir(&family).into_iter().flatten().map(|entry| entry.expect("an entry").path()) {
            let name = file.strip_prefix(root().join("kernels/ptx")).expect("inside").to_string_lossy().into_owned();
            files.push((name, std::fs::read_to_string(&file).expect("PTX")));
        }
    }
    for (source, name, module, entry) in DECLARED {
        let ours = rust_constant(source, name);
        let of_module = files.iter().filter(|(file, _)| file.starts_with(module));
        let declared: Vec<(String, u64)> = of_module.flat_map(|(_, text)| static_shared(text)).collect();
        let most = declared.iter().filter(|(kernel, _)| kernel.starts_with(entry)).max_by_key(|(_, bytes)| *bytes);
        let (kernel, bytes) = most.unwrap_or_else(|| panic!("no kernel {entry}… in {module}…"));
        assert!(*bytes <= ours, "{kernel} declares {bytes} bytes, {name} of src/{source} is {ours}");
    }
}

/// The bytes of shared memory that each kernel of a PTX file declares.
fn static_shared(ptx: &str) -> Vec<(String, u64)> {
    let mut kernels: Vec<(String, u64)> = Vec::new();
    for line in ptx.lines() {
        if let Some(rest) = line.strip_prefix(".visible .entry ") {
            kernels.push((rest.split('(').next().expect("a name").to_owned(), 0));
        } else if let Some(rest) = line.trim_start().strip_prefix(".shared .align ") {
            // ".shared .align 4 .b8 name[516];" or ".shared .align 4 .u32 name;"
            let mut words = rest.split_whitespace();
            let align: u64 = words.next().and_then(|word| word.parse().ok()).expect("an alignment");
            let element: u64 = words.next().and_then(|kind| kind[2..].parse().ok()).expect("a type");
            let count =
                words.next().and_then(|name| name.split(['[', ']']).nth(1)).map_or(1, |n| n.parse().expect("a count"));
            let (_, bytes) = kernels.last_mut().expect("inside a kernel");
            *bytes = bytes.next_multiple_of(align) + element / 8 * count;
        }
    }
    kernels
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The value of `const NAME: type = …;` in a file of `src`.
fn rust_constant(source: &str, name: &str) -> u64 {
    let text = read(&format!("src/{source}"));
    let begin = format!("const {name}: ");
    let at = text.find(&begin).unwrap_or_else(|| panic!("no {name} in src/{source}"));
    let value = text[at..].split(['=', ';']).nth(1).expect("a value");
    evaluate(&value.replace(" as usize", "").replace(" as u32", ""), &|name| rust_constant(source, name))
}

/// The constants of a file of `kernels`; the first of each name.
struct Kernel(BTreeMap<String, String>);

impl Kernel {
    fn read(file: &str) -> Kernel {
        let mut constants = BTreeMap::new();
        for file in [file].into_iter().chain(HEADERS) {
            for line in read(&format!("kernels/{file}")).lines() {
                let Some((_, rest)) = line.split_once("constexpr uint32 ") else { continue };
                for definition in rest.split(';').next().unwrap_or_default().split(", ") {
                    if let Some((name, value)) = definition.split_once(" = ") {
                        constants.entry(name.trim().to_owned()).or_insert(value.to_owned());
                    }
                }
            }
        }
        Kernel(constants)
    }

    fn value(&self, expression: &str) -> u64 {
        evaluate(expression, &|name| self.value(self.0.get(name).unwrap_or_else(|| panic!("no constant {name}"))))
    }
}

/// The value of an expression of numbers, names, `<<`, `+`, `-`, `*` and `/`, without parentheses.
fn evaluate(expression: &str, name: &dyn Fn(&str) -> u64) -> u64 {
    let expression = expression.trim();
    // What binds least is split first, at its last place.
    for operators in [&["<<"][..], &[" + ", " - "], &[" * ", " / "]] {
        let at = operators.iter().filter_map(|operator| expression.rfind(operator).map(|at| (at, *operator))).max();
        if let Some((at, operator)) = at {
            let (left, right) = (evaluate(&expression[..at], name), evaluate(&expression[at + operator.len()..], name));
            return match operator.trim() {
                "<<" => left << right,
                "+" => left + right,
                "-" => left - right,
                "*" => left * right,
                _ => left / right,
            };
        }
    }
    expression.trim_end_matches(['u', 'l']).parse().unwrap_or_else(|_| name(expression))
}

#[test]
fn expressions_have_their_values() {
    let names = |name: &str| if name == "TWO" { 2 } else { panic!("{name}") };
    for (text, value) in
        [("12", 12), ("3 << 10", 3072), ("1 + 2 * 3", 7), ("8 - 2 - 1", 5), ("8 / 4 * TWO", 4), ("4 << TWO", 16)]
    {
        assert_eq!(evaluate(text, &names), value, "{text}");
    }
}
