//! A cache and its calls.

use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

/// A cache that releases itself.
pub struct Cache {
    pub raw: *mut vwd_kv_cache,
    stream: vwd_stream,
}

impl Cache {
    pub fn on(backend: &Backend, options: &vwd_kv_cache_options) -> Cache {
        let mut raw = std::ptr::null_mut();
        // SAFETY: everything is valid.
        assert_ok(unsafe { vwd_kv_cache_create(backend.session(), options, &mut raw) });
        Cache { raw, stream: backend.stream() }
    }

    pub fn stats(&self) -> vwd_kv_cache_stats {
        let mut stats = args();
        // SAFETY: both are valid.
        assert_ok(unsafe { vwd_kv_cache_info(self.raw, &mut stats) });
        stats
    }

    pub fn view(&self, layer: usize) -> vwd_kv_cache_layer {
        let mut view = args();
        // SAFETY: both are valid.
        assert_ok(unsafe { vwd_kv_cache_view(self.raw, layer as u32, &mut view) });
        view
    }

    pub fn add(&self) -> Result<u32, vwd_status> {
        let mut sequence = u32::MAX;
        // SAFETY: both are valid.
        let status = unsafe { vwd_kv_cache_add(self.raw, &mut sequence, self.stream) };
        if status == VWD_OK { Ok(sequence) } else { Err(status) }
    }

    pub fn extend(&self, sequence: u32, tokens: usize) -> vwd_status {
        // SAFETY: the cache lives.
        unsafe { vwd_kv_cache_extend(self.raw, sequence, tokens as u64, self.stream) }
    }

    pub fn fork(&self, sequence: u32, tokens: usize) -> Result<u32, vwd_status> {
        let mut fork = u32::MAX;
        // SAFETY: both are valid.
        let status = unsafe { vwd_kv_cache_fork(self.raw, sequence, tokens as u64, &mut fork, self.stream) };
        if status == VWD_OK { Ok(fork) } else { Err(status) }
    }

    pub fn truncate(&self, sequence: u32, tokens: usize) -> vwd_status {
        // SAFETY: the cache lives.
        unsafe { vwd_kv_cache_truncate(self.raw, sequence, tokens as u64, self.stream) }
    }

    pub fn free(&self, sequence: u32) {
        // SAFETY: the cache lives.
        assert_ok(unsafe { vwd_kv_cache_free(self.raw, sequence, self.stream) });
    }

    pub fn append(&self, call: &vwd_kv_cache_append_args) -> vwd_status {
        // SAFETY: the callers' tensors are valid until the stream has passed.
        unsafe { vwd_kv_cache_append(self.raw, call, self.stream) }
    }

    pub fn resolve(&self, call: &vwd_kv_cache_resolve_args) -> vwd_status {
        // SAFETY: the callers' tensors are valid until the stream has passed.
        unsafe { vwd_kv_cache_resolve(self.raw, call, self.stream) }
    }

    pub fn fetch(&self, layer: usize) -> vwd_status {
        // SAFETY: the cache lives.
        unsafe { vwd_kv_cache_fetch(self.raw, layer as u32, self.stream) }
    }

    pub fn wait(&self, layer: usize) -> vwd_status {
        // SAFETY: the cache lives.
        unsafe { vwd_kv_cache_wait(self.raw, layer as u32, self.stream) }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // SAFETY: created above, released once.
        unsafe { vwd_kv_cache_release(self.raw) }
    }
}
