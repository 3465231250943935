//! Verification and packing beside what bounds them: an empty kernel, a plain device copy of the same bytes, the two-step
//! path, and, on the host, the launches of each call without the library; so, too, of the sparse families. `cargo bench
//! --bench gpu_floors`, on a machine with a GPU; writes one JSON object per row to the file named by VANWARD_BENCH_OUT, and a table to stdout.

mod device;
mod sparse;

use device::{Buffer, Device, args, check_status, tensor};
use sparse::Sparse;
use std::cell::RefCell;
use std::ffi::c_void;
use std::io::Write;
use vanward::abi::*;
use vanward::capi::*;

const INT: u8 = 0;
const FLOAT: u8 = 2;
const ALPHAS: [f64; 3] = [0.3, 0.6, 0.9];

fn main() {
    let Some(device) = Device::open() else {
        assert!(std::env::var_os("VANWARD_REQUIRE_GPU").is_none(), "VANWARD_REQUIRE_GPU is set and there is no GPU");
        println!("gpu_floors: skipped, no CUDA device");
        return;
    };
    let options = vwd_session_options { device: VWD_DEVICE_CUDA, ..args() };
    let mut session = std::ptr::null_mut();
    // SAFETY: options and session are valid.
    check_status(unsafe { vwd_session_create(&options, &mut session) });
    let bench = Bench { device, session, rows: Rows::new() };
    println!("{}; medians, microseconds unless said", bench.device.name());
    bench.rows.put(serde_json::json!({"what": "machine", "device": bench.device.name()}));
    bench.host();
    bench.verify();
    bench.verify_pack();
    // SAFETY: created above, not used again.
    unsafe { vwd_session_release(session) };
}

struct Bench {
    device: Device,
    session: *mut vwd_session,
    rows: Rows,
}

/// Where the JSON rows go.
struct Rows(Option<RefCell<std::fs::File>>);

impl Rows {
    fn new() -> Rows {
        Rows(
            std::env::var_os("VANWARD_BENCH_OUT")
                .map(|path| std::fs::File::create(path).expect("VANWARD_BENCH_OUT").into()),
        )
    }

    fn put(&self, row: serde_json::Value) {
        if let Some(file) = &self.0 {
            writeln!(file.borrow_mut(), "{row}").expect("VANWARD_BENCH_OUT");
        }
    }
}

/// Draft and target tokens of `sets` data sets; k ~ Binomial(γ, α), as in the report this is compared with.
struct Tokens {
    batch: usize,
    gamma: usize,
    draft: Buffer,
    target: Buffer,
    /// accepted, next_token: [sets, B] each.
    accepted: Buffer,
    next_token: Buffer,
    /// Σ k of each set.
    totals: Vec<usize>,
}

impl Tokens {
    fn new(device: &Device, sets: usize, batch: usize, gamma: usize, alpha: f64) -> Tokens {
        let mut random = fastrand::Rng::with_seed(7);
        let mut draft = Vec::with_capacity(sets * batch * gamma);
        let mut target = Vec::with_capacity(sets * batch * (gamma + 1));
        let mut totals = Vec::with_capacity(sets);
        for _ in 0..sets {
            let mut total = 0;
            for _ in 0..batch {
                let k = (0..gamma).filter(|_| random.f64() < alpha).count();
                let row: Vec<i32> = (0..gamma).map(|_| random.i32(0..4096)).collect();
                target.extend((0..=gamma).map(|j| match j {
                    j if j < k => row[j],
                    j if j < gamma => (row[j] + 1) % 4096,
                    _ => random.i32(0..4096),
                }));
                draft.extend(row);
                total += k;
            }
            totals.push(total);
        }
        Tokens {
            batch,
            gamma,
            draft: device.upload(&draft),
            target: device.upload(&target),
            accepted: device.alloc(sets * batch * 4),
            next_token: device.alloc(sets * batch * 4),
            totals,
        }
    }

    /// Arguments of set 0, as all arguments here: each call is then pointed at its set, as an engine does that keeps its arguments.
    fn verify_args(&self) -> vwd_verify_args {
        let [draft, target, accepted, next_token] = self.tensors();
        vwd_verify_args { draft, target, accepted, next_token, ..args() }
    }

    /// [draft, target, accepted, next_token]
    fn tensors(&self) -> [vwd_tensor; 4] {
        let (b, g) = (self.batch, self.gamma);
        let at = |buffer: &Buffer, shape: &[usize]| tensor(buffer.address, INT, 32, shape);
        [at(&self.draft, &[b, g]), at(&self.target, &[b, g + 1]), at(&self.accepted, &[b]), at(&self.next_token, &[b])]
    }

    fn point_at(&self, set: usize, [draft, target, accepted, next_token]: [&mut vwd_tensor; 4]) {
        let (b, g) = (self.batch, self.gamma);
        point(draft, &self.draft, set * b * g * 4);
        point(target, &self.target, set * b * (g + 1) * 4);
        point(accepted, &self.accepted, set * b * 4);
        point(next_token, &self.next_token, set * b * 4);
    }
}

impl Bench {
    fn verify_with(&self, args: &vwd_verify_args) {
        // SAFETY: all tensors are valid device memory.
        check_status(unsafe { vwd_verify(self.session, args, self.device.stream.cast()) });
    }

    fn verify_set(&self, tokens: &Tokens, set: usize, args: &mut vwd_verify_args) {
        let vwd_verify_args { draft, target, accepted, next_token, .. } = args;
        tokens.point_at(set, [draft, target, accepted, next_token]);
        self.verify_with(args);
    }

    fn pack_with(&self, args: &vwd_pack_args) {
        // SAFETY: all tensors are valid device memory; the arrays live through the call.
        check_status(unsafe { vwd_pack(self.session, args, self.device.stream.cast()) });
    }

    fn verify_pack_with(&self, args: &vwd_verify_pack_args) {
        // SAFETY: as above.
        check_status(unsafe { vwd_verify_pack(self.session, args, self.device.stream.cast()) });
    }

    fn host(&self) {
        println!("\nhost time of one call, nanoseconds; its launches alone; the difference");
        let tokens = Tokens::new(&self.device, 1, 32, 8, 0.6);
        let args = tokens.verify_args();
        self.host_of("verify", 0, &|| self.verify_with(&args));
        for tensors in [1, 2, 64, 256] {
            let rows = Rotating::new(&self.device, 1, 32, 8, 128, tensors);
            let pack = rows.pack_args(&tokens);
            self.host_of("pack", tensors, &|| self.pack_with(&pack));
            let both = rows.verify_pack_args(&tokens);
            self.host_of("verify_pack", tensors, &|| self.verify_pack_with(&both));
        }
        Sparse::new(&self.device, self.session).each(|what, call| {
            let (launches, time, bare) = self.host_times(what, "", call, true);
            self.rows.put(
                serde_json::json!({"what": "sparse_host_ns", "call": what, "launches": launches, "time": time, "bare": bare}),
            );
        });
    }

    fn host_of(&self, what: &str, tensors: usize, call: &dyn Fn()) {
        let tensors_of = if tensors > 0 { format!("{tensors} tensors") } else { String::new() };
        let (launches, time, bare) = self.host_times(what, &tensors_of, call, false);
        self.rows.put(serde_json::json!({"what": "host_ns", "call": what, "tensors": tensors, "launches": launches,
            "time": time, "bare": bare}));
    }

    /// How many launches a call makes, its time, and that of the same launches without the library.
    fn host_times(&self, what: &str, of: &str, call: &dyn Fn(), begins_early: bool) -> (usize, f64, f64) {
        let launches = self.device.launches(call, begins_early);
        let [time, bare] = self.device.host_times([call, &|| launches.launch()]);
        let count = launches.count();
        println!("  {what:<13} {of:>11}  {time:6.0}       {count} × {bare:6.0}      {:6.0}", time - bare);
        (count, time, bare)
    }

    fn verify(&self) {
        println!("\nverify          event          × empty   graph");
        for batch in [1, 4, 16, 32, 128, 256, 512, 1024] {
            for gamma in [8, 64, 128] {
                for alpha in ALPHAS {
                    const SETS: usize = 400;
                    let tokens = Tokens::new(&self.device, SETS, batch, gamma, alpha);
                    let args = RefCell::new(tokens.verify_args());
                    let call = |set| self.verify_set(&tokens, set, &mut args.borrow_mut());
                    let [empty, event] = self.device.event_times(SETS, [&|_| self.device.launch_empty(), &call]);
                    let graph = self.device.graph_time(SETS, call);
                    let ratio = event / empty;
                    println!(
                        "  B={batch:<5} γ={gamma:<4} α={alpha}  {event:6.2} ({empty:.2})  {ratio:5.2}   {graph:6.2}"
                    );
                    self.rows.put(serde_json::json!({"what": "verify", "batch": batch, "gamma": gamma, "alpha": alpha,
                        "event": event, "empty": empty, "graph": graph}));
                }
            }
        }
    }

    fn verify_pack(&self) {
        println!(
            "\nverify_pack                          MB   event  two-step    copy   empty   graph  two-step    copy"
        );
        for batch in [1, 4, 16, 32, 128, 512, 1024] {
            for gamma in [8, 64, 128] {
                for dim in [128, 512, 1024, 2048] {
                    for alpha in ALPHAS {
                        self.verify_pack_at(batch, gamma, dim, alpha);
                    }
                }
            }
        }
    }

    fn verify_pack_at(&self, batch: usize, gamma: usize, dim: usize, alpha: f64) {
        let set_bytes = batch * gamma * dim * 2;
        let sets = ((512 << 20) / set_bytes).clamp(3, 400);
        let device = &self.device;
        let tokens = Tokens::new(device, sets, batch, gamma, alpha);
        let rows = Rotating::new(device, sets, batch, gamma, dim, 1);
        let arguments = RefCell::new((tokens.verify_args(), rows.pack_args(&tokens), rows.verify_pack_args(&tokens)));
        let two_steps = |set: usize| {
            let (verify, pack, _) = &mut *arguments.borrow_mut();
            self.verify_set(&tokens, set, verify);
            rows.point_at(set, &mut pack.offsets);
            pack.accepted.data = verify.accepted.data;
            self.pack_with(pack);
        };
        let copy = |i: usize| rows.copy(device, i, tokens.totals[i] * dim * 2);
        let one = |set: usize| {
            let (.., both) = &mut *arguments.borrow_mut();
            let vwd_verify_pack_args { draft, target, accepted, next_token, offsets, .. } = both;
            tokens.point_at(set, [draft, target, accepted, next_token]);
            rows.point_at(set, offsets);
            self.verify_pack_with(both);
        };
        let [empty, event, event2, event_copy] =
            device.event_times(sets, [&|_| device.launch_empty(), &one, &two_steps, &copy]);
        let [graph, graph2, graph_copy] =
            [device.graph_time(sets, one), device.graph_time(sets, two_steps), device.graph_time(sets, copy)];
        let megabytes = (tokens.totals[0] * dim * 2) as f64 / 1e6;
        println!(
            "  B={batch:<4} γ={gamma:<3} kv={dim:<4} α={alpha}  {megabytes:8.2}  {event:6.2}  {event2:8.2}  {event_copy:6.2}  \
             {empty:6.2}  {graph:6.2}  {graph2:8.2}  {graph_copy:6.2}"
        );
        self.rows.put(serde_json::json!({"what": "verify_pack", "batch": batch, "gamma": gamma, "dim": dim,
            "alpha": alpha, "packed_bytes": tokens.totals[0] * dim * 2, "event": event, "two_step_event": event2,
            "copy_event": event_copy, "empty": empty, "graph": graph, "two_step_graph": graph2, "copy_graph": graph_copy}));
    }
}

fn point(t: &mut vwd_tensor, buffer: &Buffer, bytes: usize) {
    t.data = (buffer.address + bytes as u64) as *mut c_void;
}

/// Rows to pack and where to, float16, one data set after another.
struct Rotating {
    batch: usize,
    set_bytes: usize,
    from: Buffer,
    to: Buffer,
    offsets: Buffer,
    /// rows, packed.
    tensors: RefCell<[Vec<vwd_tensor>; 2]>,
}

impl Rotating {
    fn new(device: &Device, sets: usize, batch: usize, gamma: usize, dim: usize, count: usize) -> Rotating {
        let set_bytes = batch * gamma * dim * 2;
        let buffer = || device.alloc(sets * count * set_bytes);
        let rows = vec![tensor(0, FLOAT, 16, &[batch, gamma, dim]); count];
        let packed = vec![tensor(0, FLOAT, 16, &[batch * gamma, dim]); count];
        let offsets = device.alloc(sets * (batch + 1) * 4);
        Rotating { batch, set_bytes, from: buffer(), to: buffer(), offsets, tensors: [rows, packed].into() }
    }

    fn offsets(&self) -> vwd_tensor {
        tensor(self.offsets.address, INT, 32, &[self.batch + 1])
    }

    fn point_at(&self, set: usize, offsets: &mut vwd_tensor) {
        let [rows, packed] = &mut *self.tensors.borrow_mut();
        for n in 0..rows.len() {
            let at = (set * rows.len() + n) * self.set_bytes;
            point(&mut rows[n], &self.from, at);
            point(&mut packed[n], &self.to, at);
        }
        point(offsets, &self.offsets, set * (self.batch + 1) * 4);
    }

    fn pack_args(&self, tokens: &Tokens) -> vwd_pack_args {
        let mut offsets = self.offsets();
        self.point_at(0, &mut offsets);
        let [_, _, accepted, _] = tokens.tensors();
        let [rows, packed] = &*self.tensors.borrow();
        vwd_pack_args {
            tensor_count: rows.len() as u32,
            rows: rows.as_ptr(),
            packed: packed.as_ptr(),
            accepted,
            offsets,
            ..args()
        }
    }

    fn verify_pack_args(&self, tokens: &Tokens) -> vwd_verify_pack_args {
        let vwd_pack_args { tensor_count, rows, packed, offsets, .. } = self.pack_args(tokens);
        let [draft, target, accepted, next_token] = tokens.tensors();
        vwd_verify_pack_args { tensor_count, rows, packed, draft, target, accepted, next_token, offsets, ..args() }
    }

    /// A plain copy of as many bytes as the set's accepted rows have.
    fn copy(&self, device: &Device, set: usize, bytes: usize) {
        let at = (set * self.set_bytes) as u64;
        device.copy(self.from.address + at, self.to.address + at, bytes);
    }
}
