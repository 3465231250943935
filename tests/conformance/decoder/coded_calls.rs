//! The single calls that steps of coded.rs are compared with: the index of a layer, selection, and attention over lists whose blocks are brought to slots.

use super::coded::{Ids, K, Kinds, MAX_BLOCKS, NUMBERS, Step, World};
use super::*;

impl<'b> World<'b> {
    /// A list of each row and KV head with slots, in a tensor of that capacity.
    pub fn list(&self, ids: &Ids, capacity: usize) -> [Tensor<'b>; 3] {
        let shape = [ids.len(), self.kinds.heads[1], capacity];
        let values = Array::from_fn(&shape, |at| ids[at[0]][at[1]].get(at[2]).copied().unwrap_or(-1));
        let counts = Array::from_fn(&shape[..2], |at| ids[at[0]][at[1]].len() as i64);
        let plain = Layout::default();
        let slots = Tensor::ints(self.backend, I32, &Array::filled(&shape, -1), &plain);
        [Tensor::ints(self.backend, I32, &values, &plain), Tensor::ints(self.backend, I32, &counts, &plain), slots]
    }

    pub fn index(&self, layer: usize, table: &Tensor) -> vwd_index {
        let [first, second] = self.summaries[layer].each_ref().map(Tensor::c);
        let index = vwd_index { block_size: self.kinds.block as u32, table: table.c(), ..args() };
        match self.kinds.method {
            VWD_SELECT_AXIS => vwd_index { kind: VWD_INDEX_AXIS, axes: first, axis_range: second, ..index },
            _ => vwd_index { kind: VWD_INDEX_MINMAX, key_max: first, key_min: second, ..index },
        }
    }

    /// The rows of sequences in a table, one for each row of a step.
    pub fn table(&self, taken: &[usize]) -> Tensor<'b> {
        let numbers = taken.iter().map(|&n| self.sequences[n].number as i64).collect();
        Tensor::ints(self.backend, I32, &Array::new(&[taken.len(), 1], numbers), &Layout::default())
    }

    pub fn update(&self, layer: usize, taken: &[usize], first: &[usize], lens: &Tensor) {
        let (backend, table, block) = (self.backend, self.table(taken), self.kinds.block);
        let pages = Array::from_fn(&[taken.len(), MAX_BLOCKS], |at| {
            self.tail_table[[self.sequences[taken[at[0]]].number, at[1]]]
        });
        let pages = Tensor::ints(backend, I32, &pages, &Layout::default());
        let begin = ints(backend, &first.iter().map(|&first| (first / block * block) as i64).collect::<Vec<_>>());
        let index = self.index(layer, &table);
        let args = vwd_index_update_args {
            index: &index,
            k: self.views[layer].tail_k,
            page_table: pages.c(),
            seq_lens: lens.c(),
            begin: begin.c(),
            ..args()
        };
        // SAFETY: the arguments are valid.
        backend.finish(unsafe { vwd_index_update(backend.session(), &args, backend.stream()) });
    }

    /// The lists that the method selects for rows of `q_lens` positions, of `k` blocks with `local` newest ones among the first `lens` tokens.
    pub fn select(&self, layer: usize, taken: &[usize], q: vwd_tensor, q_lens: &[i64], lens: &[i64], k: usize) -> Ids {
        let (backend, heads, table) = (self.backend, self.kinds.heads[1], self.table(taken));
        let [ids, counts, _] = self.list(&vec![vec![vec![]; heads]; taken.len()], k);
        let (q_lens, lens, index) = (ints(backend, q_lens), ints(backend, lens), self.index(layer, &table));
        let extents = [taken.len(), if q.ndim == 4 { q.shape[1] as usize } else { 1 }, self.kinds.heads[0]];
        let extents = if q.ndim == 4 { extents.to_vec() } else { vec![extents[0], extents[2]] };
        let log_mass = Tensor::poisoned(backend, F32, &extents, &Layout::default());
        let args = vwd_select_blocks_args {
            method: self.kinds.method,
            block_size: self.kinds.block as u32,
            k: k as u32,
            init_blocks: POLICY.init_blocks,
            local_blocks: POLICY.local_blocks,
            scale: 0.1,
            index: &index,
            q,
            q_lens: q_lens.c(),
            seq_lens: lens.c(),
            selected: vwd_block_list { ids: ids.c(), counts: counts.c(), slots: absent() },
            log_mass: if self.kinds.has_term { log_mass.c() } else { absent() },
            ..args()
        };
        // SAFETY: the arguments are valid.
        backend.finish(unsafe { vwd_select_blocks(backend.session(), &args, backend.stream()) });
        self.log_mass.replace(Some(log_mass));
        let (ids, counts) = (ids.read_ints(), counts.read_ints());
        let of = |i, g| (0..counts[[i, g]] as usize).map(|n| ids[[i, g, n]]).collect();
        (0..taken.len()).map(|i| (0..heads).map(|g| of(i, g)).collect()).collect()
    }

    /// Resolves, fetches, waits and attends. Gives `out` and, where it is asked for, the state.
    pub fn attend(
        &mut self,
        layer: usize,
        step: &Step,
        ids: &Ids,
        capacity: usize,
        q_lens: &[i64],
        has_state: bool,
    ) -> [Array<f64>; 4] {
        let Kinds { heads, dims, block, window, soft_cap, decoded, has_term, is_exact, .. } = self.kinds;
        let (backend, view, stream) = (self.backend, self.views[layer], self.backend.stream());
        let [ids, counts, slots] = self.list(ids, capacity);
        let list = vwd_block_list { ids: ids.c(), counts: counts.c(), slots: slots.c() };
        let resolve =
            vwd_kv_cache_resolve_args { layer: layer as u32, sequences: step.numbers.c(), wanted: list, ..args() };
        let int4 = vwd_int4_kv {
            block_size: block as u32,
            k: view.int4_k,
            v: view.int4_v,
            k_scale: view.int4_k_scale,
            v_scale: view.int4_v_scale,
            means: view.int4_means,
            weights: view.weights,
            ..args()
        };
        let int4 = if decoded || is_exact { std::ptr::null() } else { &raw const int4 };
        let scale = if is_exact { [view.k_scale, view.v_scale] } else { [absent(); 2] };
        let [k_scale, v_scale] = scale;
        let kv = vwd_paged_kv { k: view.k, v: view.v, seq_lens: step.lens.c(), k_scale, v_scale, int4, ..args() };
        let numbers: Vec<i64> = step.numbers.read_ints().data;
        let log_mass = self.log_mass.borrow().as_ref().map(|log_mass| log_mass.read_floats());
        let sums = self.sums_of(layer, if has_term && !has_state { &numbers } else { &[] });
        let [tokens, mean_k, mean_v, covariance] = sums.each_ref().map(Tensor::c);
        let remainder = vwd_remainder { tokens, mean_k, mean_v, covariance, ..args() };
        let log_mass = log_mass.filter(|_| has_term && !has_state).map(|values| {
            let values = Array::new(&[step.batch, step.positions, heads[0]], values.data);
            Tensor::floats(backend, F32, &values, &Layout::default())
        });
        let (extents, q_lens) = ([step.batch, step.positions, heads[0], dims[1]], ints(backend, q_lens));
        let output = |rank: usize| Tensor::poisoned(backend, F32, &extents[..rank], &Layout::default());
        let (out, state) = (output(4), [output(4), output(3), output(3)]);
        let mut attend = vwd_attention_args {
            block_size: block as u32,
            scale: 0.1,
            soft_cap,
            window,
            kv: &kv,
            q: step.q.c(),
            q_lens: q_lens.c(),
            list,
            out: out.c(),
            sinks: step.sinks.as_ref().filter(|_| !has_state).map_or(absent(), Tensor::c),
            ..args()
        };
        if let Some(log_mass) = &log_mass {
            let (weights, tokens) = (log_mass.read_floats(), sums[0].read_ints());
            let has_sums = |at: &[usize]| tokens[[at[0], at[2] * heads[1] / heads[0]]] > 0;
            self.sums.joined +=
                indices(&weights.shape).filter(|at| has_sums(at) && weights[[at[0], at[1], at[2]]] > -1e30).count();
            (attend.remainder, attend.log_mass) = (&remainder, log_mass.c());
        }
        if has_state || has_term {
            let [acc, m, l] = state.each_ref().map(Tensor::c);
            attend.state = vwd_attention_state { acc, m, l };
        }
        // SAFETY: the arguments are valid.
        unsafe {
            assert_ok(vwd_kv_cache_resolve(self.cache.0, &resolve, stream));
            assert_ok(vwd_kv_cache_fetch(self.cache.0, layer as u32, stream));
            assert_ok(vwd_kv_cache_wait(self.cache.0, layer as u32, stream));
            let mut bytes = 0;
            assert_ok(vwd_attention_scratch(backend.session(), &attend, &mut bytes));
            assert_ok(vwd_session_reserve(backend.session().cast_mut(), stream, bytes));
            backend.finish(vwd_attention(backend.session(), &attend, stream));
        }
        let (slots, counts, exact) = (slots.read_ints(), counts.read_ints(), (4 * NUMBERS * heads[1]) as i64);
        for at in indices(&slots.shape).filter(|at| (at[2] as i64) < counts[[at[0], at[1]]]) {
            let slot = slots[[at[0], at[1], at[2]]];
            assert!(slot >= 0, "a listed block has a slot");
            self.entries[(slot >= exact && !is_exact) as usize] += 1;
        }
        let floats = |t: &Tensor| if has_state { t.read_floats() } else { Array::filled(&[0], 0.0) };
        [out.read_floats(), floats(&state[0]), floats(&state[1]), floats(&state[2])]
    }

    /// Attention over all blocks of rows, a few at a time, in double precision from the states of these.
    pub fn attend_all(&mut self, layer: usize, step: &Step, lens: &[i64], q_lens: &[i64]) -> Array<f64> {
        let Kinds { heads, dims, block, .. } = self.kinds;
        let mut states = vec![];
        for first in (0..MAX_BLOCKS).step_by(K) {
            let chunk = |len: i64| (first..(first + K).min((len as usize).div_ceil(block))).map(|n| n as i64).collect();
            let ids = lens.iter().map(|&len| vec![chunk(len); heads[1]]).collect();
            states.push(self.attend(layer, step, &ids, K, q_lens, true));
        }
        let sinks = step.sinks.as_ref().map(Tensor::read_floats);
        Array::from_fn(&[step.batch, step.positions, heads[0], dims[1]], |at| {
            let [i, r, h, c] = [at[0], at[1], at[2], at[3]];
            let sink = sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| sinks[[h]]);
            let most = states.iter().map(|state| state[2][[i, r, h]]).fold(sink, f64::max);
            if r as i64 >= q_lens[i] {
                return 0.0;
            }
            let sum = |of: &dyn Fn(&[Array<f64>; 4]) -> f64| -> f64 {
                states.iter().map(|state| of(state) * (state[2][[i, r, h]] - most).exp()).sum()
            };
            sum(&|state| state[1][[i, r, h, c]]) / (sum(&|state| state[3][[i, r, h]]) + (sink - most).exp())
        })
    }
}
