"""vanward.h in ctypes: structs and prototypes under their C names, and the library. tests/test_abi.py compares."""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path

ABI_VERSION = 0


class vwd_session_options(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("device", c_uint32),
        ("device_id", c_int32),
        ("threads", c_uint32),
        ("scratch_bytes", c_uint64),
        ("pinned_limit", c_uint64),
        ("stream_count", c_uint32),
        ("flags", c_uint32),
    ]


class vwd_session_details(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("device", c_uint32),
        ("device_id", c_int32),
        ("threads", c_uint32),
        ("driver_version", c_uint32),
        ("compute_capability", c_uint32),
        ("multiprocessors", c_uint32),
        ("kernels", c_uint32),
        ("load_microseconds", c_uint64),
        ("scratch_bytes", c_uint64),
        ("scratch_peak", c_uint64),
        ("pinned_in_use", c_uint64),
        ("pinned_peak", c_uint64),
        ("pinned_cached", c_uint64),
        ("device_name", c_char * 64),
    ]


class vwd_tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("dtype_code", c_uint8),
        ("dtype_bits", c_uint8),
        ("lanes", c_uint16),
        ("ndim", c_int32),
        ("shape", c_int64 * 5),
        ("strides", c_int64 * 5),
    ]


class vwd_verify_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("draft", vwd_tensor),
        ("target", vwd_tensor),
        ("draft_lens", vwd_tensor),
        ("accepted", vwd_tensor),
        ("next_token", vwd_tensor),
        ("mismatch", vwd_tensor),
        ("committed", vwd_tensor),
    ]


class vwd_pack_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("tensor_count", c_uint32),
        ("rows", POINTER(vwd_tensor)),
        ("packed", POINTER(vwd_tensor)),
        ("accepted", vwd_tensor),
        ("offsets", vwd_tensor),
    ]


class vwd_verify_pack_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("tensor_count", c_uint32),
        ("rows", POINTER(vwd_tensor)),
        ("packed", POINTER(vwd_tensor)),
        ("draft", vwd_tensor),
        ("target", vwd_tensor),
        ("draft_lens", vwd_tensor),
        ("accepted", vwd_tensor),
        ("next_token", vwd_tensor),
        ("offsets", vwd_tensor),
        ("mismatch", vwd_tensor),
        ("committed", vwd_tensor),
    ]


class vwd_index(Structure):
    _fields_ = [
        ("kind", c_uint32),
        ("block_size", c_uint32),
        ("window", c_uint32),
        ("stride", c_uint32),
        ("table", vwd_tensor),
        ("key_max", vwd_tensor),
        ("key_min", vwd_tensor),
        ("means", vwd_tensor),
        ("labels", vwd_tensor),
        ("label_scale", vwd_tensor),
        ("label_min", vwd_tensor),
        ("channels", vwd_tensor),
    ]


class vwd_index_update_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("k", vwd_tensor),
        ("page_table", vwd_tensor),
        ("seq_lens", vwd_tensor),
        ("begin", vwd_tensor),
        ("index", vwd_index),
    ]


class vwd_channel_importance_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("q", vwd_tensor),
        ("k", vwd_tensor),
        ("channels", vwd_tensor),
        ("importance", vwd_tensor),
    ]


class vwd_block_list(Structure):
    _fields_ = [
        ("ids", vwd_tensor),
        ("counts", vwd_tensor),
    ]


class vwd_select_blocks_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("method", c_uint32),
        ("block_size", c_uint32),
        ("k", c_uint32),
        ("init_blocks", c_uint32),
        ("local_blocks", c_uint32),
        ("scale", c_float),
        ("flags", c_uint32),
        ("q", vwd_tensor),
        ("index", vwd_index),
        ("seq_lens", vwd_tensor),
        ("budgets", vwd_tensor),
        ("candidates", vwd_block_list),
        ("selected", vwd_block_list),
        ("scores", vwd_tensor),
    ]


class vwd_select_tokens_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("block_size", c_uint32),
        ("k", c_uint32),
        ("init_tokens", c_uint32),
        ("local_tokens", c_uint32),
        ("scale", c_float),
        ("q", vwd_tensor),
        ("index", vwd_index),
        ("seq_lens", vwd_tensor),
        ("budgets", vwd_tensor),
        ("candidates", vwd_block_list),
        ("selected", vwd_block_list),
        ("scores", vwd_tensor),
    ]


class vwd_paged_kv(Structure):
    _fields_ = [
        ("k", vwd_tensor),
        ("v", vwd_tensor),
        ("page_table", vwd_tensor),
        ("seq_lens", vwd_tensor),
    ]


class vwd_attention_state(Structure):
    _fields_ = [
        ("acc", vwd_tensor),
        ("m", vwd_tensor),
        ("l", vwd_tensor),
    ]


class vwd_attention_partials(Structure):
    _fields_ = [
        ("acc", vwd_tensor),
        ("m", vwd_tensor),
        ("l", vwd_tensor),
    ]


class vwd_attention_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("block_size", c_uint32),
        ("partial_blocks", c_uint32),
        ("scale", c_float),
        ("q", vwd_tensor),
        ("kv", vwd_paged_kv),
        ("list", vwd_block_list),
        ("out", vwd_tensor),
        ("lse", vwd_tensor),
        ("state", vwd_attention_state),
        ("partials", vwd_attention_partials),
    ]


class vwd_merge_states_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("input_count", c_uint32),
        ("inputs", POINTER(vwd_attention_state)),
        ("out", vwd_tensor),
        ("lse", vwd_tensor),
        ("state", vwd_attention_state),
    ]


class vwd_repair_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("mode", c_uint32),
        ("block_size", c_uint32),
        ("partial_blocks", c_uint32),
        ("scale", c_float),
        ("flags", c_uint32),
        ("q", vwd_tensor),
        ("kv", vwd_paged_kv),
        ("predicted", vwd_block_list),
        ("selected", vwd_block_list),
        ("predicted_state", vwd_attention_state),
        ("predicted_partials", vwd_attention_partials),
        ("out", vwd_tensor),
        ("lse", vwd_tensor),
        ("state", vwd_attention_state),
        ("missed_counts", vwd_tensor),
    ]


class vwd_gather_blocks_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("engine", c_uint32),
        ("source", vwd_tensor),
        ("target", vwd_tensor),
        ("source_ids", vwd_tensor),
        ("target_ids", vwd_tensor),
        ("count", vwd_tensor),
    ]


class vwd_predictor_state(Structure):
    _fields_ = [
        ("level", vwd_tensor),
        ("trend", vwd_tensor),
    ]


class vwd_predictor_reset_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("state", vwd_predictor_state),
        ("rows", vwd_tensor),
    ]


class vwd_holt(Structure):
    _fields_ = [
        ("alpha", c_float),
        ("beta", c_float),
        ("gamma", c_float),
    ]


class vwd_predictor_predict_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("block_size", c_uint32),
        ("k", c_uint32),
        ("init_blocks", c_uint32),
        ("local_blocks", c_uint32),
        ("ratio", c_float),
        ("holt", vwd_holt),
        ("flags", c_uint32),
        ("state", vwd_predictor_state),
        ("seq_lens", vwd_tensor),
        ("budgets", vwd_tensor),
        ("predicted", vwd_block_list),
        ("scores", vwd_tensor),
    ]


class vwd_predictor_update_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("block_size", c_uint32),
        ("holt", vwd_holt),
        ("flags", c_uint32),
        ("state", vwd_predictor_state),
        ("seq_lens", vwd_tensor),
        ("scores", vwd_tensor),
    ]


class vwd_predictor_calibrate_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("k", c_uint32),
        ("init_blocks", c_uint32),
        ("local_blocks", c_uint32),
        ("ratio", c_float),
        ("grid_count", c_uint32),
        ("grid", POINTER(vwd_holt)),
        ("scores", vwd_tensor),
        ("block_counts", vwd_tensor),
    ]


class vwd_forecast_options(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("layers", c_uint32),
        ("input_dim", c_uint32),
        ("q_heads", c_uint32),
        ("head_dim", c_uint32),
        ("ridge", c_float),
    ]


class vwd_forecast_details(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("layers", c_uint32),
        ("input_dim", c_uint32),
        ("q_heads", c_uint32),
        ("head_dim", c_uint32),
        ("ridge", c_float),
        ("solved", c_uint32),
        ("rank", c_uint32),
        ("map_bytes", c_uint64),
        ("sum_bytes", c_uint64),
    ]


class vwd_forecast_accumulate_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("layer", c_uint32),
        ("x", vwd_tensor),
        ("q", vwd_tensor),
    ]


class vwd_rope(Structure):
    _fields_ = [
        ("style", c_uint32),
        ("rotary_dim", c_uint32),
        ("theta", c_float),
        ("attention_factor", c_float),
        ("inv_freq", vwd_tensor),
    ]


class vwd_forecast_project_args(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("layer", c_uint32),
        ("rope", vwd_rope),
        ("x", vwd_tensor),
        ("positions", vwd_tensor),
        ("q", vwd_tensor),
    ]


def _load() -> ctypes.CDLL:
    """The library that VANWARD_LIBRARY names, else the one in the package's folder, else the system's."""
    name = f"libvanward.so.{ABI_VERSION}"
    here = Path(__file__).parent
    candidates = [os.environ.get("VANWARD_LIBRARY"), here / name, here / "libvanward.so"]
    path = next((str(p) for p in candidates if p and (p == candidates[0] or Path(p).exists())), name)
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"{error}; set VANWARD_LIBRARY to the path of {name}") from None


lib = _load()

lib.vwd_version.restype = c_char_p
lib.vwd_abi_version.restype = c_uint32
lib.vwd_last_error.restype = c_size_t

if lib.vwd_abi_version() != ABI_VERSION:
    raise ImportError(f"{lib._name} has ABI {lib.vwd_abi_version()}; this package was written for {ABI_VERSION}")

# Handles, argument structs, tensors' addresses and streams cross as plain pointers.
_PROTOTYPES = {
    "vwd_version": [],
    "vwd_abi_version": [],
    "vwd_last_error": [c_char_p, c_size_t],
    "vwd_session_create": [c_void_p, c_void_p],
    "vwd_session_release": [c_void_p],
    "vwd_session_info": [c_void_p, c_void_p],
    "vwd_session_reserve": [c_void_p, c_void_p, c_uint64],
    "vwd_session_stream": [c_void_p, c_uint32, c_void_p],
    "vwd_pinned_alloc": [c_void_p, c_uint64, c_void_p],
    "vwd_pinned_free": [c_void_p, c_void_p, c_void_p],
    "vwd_predictor_calibrate": [c_void_p, c_void_p, c_void_p, c_void_p],
    "vwd_forecast_create": [c_void_p, c_void_p, c_void_p],
    "vwd_forecast_release": [c_void_p],
    "vwd_forecast_info": [c_void_p, c_void_p],
    "vwd_forecast_accumulate": [c_void_p, c_void_p],
    "vwd_forecast_solve": [c_void_p, c_uint32],
    "vwd_forecast_save": [c_void_p, c_char_p],
    "vwd_forecast_load": [c_void_p, c_char_p, c_void_p],
    # Calls that enqueue: a handle, the arguments, a stream.
    "vwd_verify": [c_void_p, c_void_p, c_void_p],
    "vwd_pack": [c_void_p, c_void_p, c_void_p],
    "vwd_verify_pack": [c_void_p, c_void_p, c_void_p],
    "vwd_index_update": [c_void_p, c_void_p, c_void_p],
    "vwd_channel_importance": [c_void_p, c_void_p, c_void_p],
    "vwd_select_blocks": [c_void_p, c_void_p, c_void_p],
    "vwd_select_tokens": [c_void_p, c_void_p, c_void_p],
    "vwd_attention": [c_void_p, c_void_p, c_void_p],
    "vwd_merge_states": [c_void_p, c_void_p, c_void_p],
    "vwd_repair": [c_void_p, c_void_p, c_void_p],
    "vwd_gather_blocks": [c_void_p, c_void_p, c_void_p],
    "vwd_predictor_reset": [c_void_p, c_void_p, c_void_p],
    "vwd_predictor_predict": [c_void_p, c_void_p, c_void_p],
    "vwd_predictor_update": [c_void_p, c_void_p, c_void_p],
    "vwd_forecast_project": [c_void_p, c_void_p, c_void_p],
}
for _name, _arguments in _PROTOTYPES.items():
    getattr(lib, _name).argtypes = _arguments
