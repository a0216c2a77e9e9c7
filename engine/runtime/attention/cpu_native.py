"""The CPU backend in C: paged attention in place, for decode steps and prompt chunks alike.

The pool has the shape of kv_layout.py, but the layout inside a block of one head is that of native/quire_cpu.h, so only the
library reads or writes it. Engine thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.attention.backend import AttentionBackend, BackendCapabilities, Batch
from engine.runtime.kv_layout import SCALE_BYTES, AttentionSpec
from engine.runtime.native.library import DTYPES, AttendArgs, Pool, StoreArgs, native
from engine.runtime.native.parts import PagedLayer


class CpuNativeAttention(AttentionBackend):
    """Few calls, no gathering, no padding."""

    capabilities = BackendCapabilities(native=True, both_ways=True)

    def __init__(self) -> None:
        library = native()
        assert library is not None, "table.py has refused this backend without it"
        self._library = library
        self._store, self._attend = StoreArgs(), AttendArgs()
        self._reached: dict[AttentionSpec, AttendArgs] = {}  # of layers with a reach, whose ends are others

    def check(self, spec: AttentionSpec, dtype: torch.dtype) -> None:  # noqa: ARG002 - AttentionBackend's parameters
        """Raise ConfigError for an odd head_dim."""
        odd = next((dim for dim in (spec.head_dim, spec.out_dim) if dim % 2), None)
        if odd is not None:
            raise ConfigError(f"--attention-backend 'cpu_native' needs an even head_dim, not {odd}; use 'torch'.")

    def paged_layer(self, spec: AttentionSpec, k_pool: Tensor, v_pool: Tensor) -> PagedLayer:
        attend = self._attend if spec.reach is None else self._reached.setdefault(spec, AttendArgs())
        return PagedLayer(_pool_of(spec, k_pool, v_pool), self._store, attend)

    def prepare(self, batch: Batch) -> None:
        """Point the arguments that all layers share at the step's index tensors."""
        self.batch = batch  # this also keeps the memory below alive
        self._store.num_tokens = batch.kv_slots.shape[0]
        self._store.slots = batch.kv_slots.data_ptr()
        for spec, args in [(None, self._attend), *self._reached.items()]:
            args.num_slices, args.table_stride = batch.block_tables.shape
            args.query_starts = batch.query_starts.data_ptr()
            args.context_lens = batch.context_lens.data_ptr()
            args.block_tables = batch.block_tables.data_ptr()
            ends = batch.ends if spec is None else batch.ends_of(spec)
            args.ends = None if ends is None else ends.data_ptr()

    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        assert q.dtype == k.dtype == v.dtype, "one type for queries, keys and values"
        assert k_pool.dtype == v_pool.dtype
        assert k_pool.dtype in (q.dtype, torch.int8)
        pool = _pool_of(spec, k_pool, v_pool)
        if spec.is_latent:
            v = k
        q, k, v = _rows(q), _rows(k), _rows(v)
        pool.dtype = DTYPES[q.dtype]
        assert k.shape[1:] == v.shape[1:] == (pool.num_kv_heads, spec.head_dim)
        assert q.shape[1:] == (spec.num_heads, spec.head_dim)
        if spec.source is None:
            rows, step = (k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0)), self._store
            self._library.store(StoreArgs(pool, *rows, step.num_tokens, step.slots))

        out = torch.empty((*q.shape[:2], spec.out_dim), dtype=q.dtype)
        sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
        args = AttendArgs.from_buffer_copy(self._attend)  # of this call, which may pause while another one begins
        args.pool = pool
        args.q, args.q_stride, args.num_heads = q.data_ptr(), q.stride(0), spec.num_heads
        args.out = out.data_ptr()
        args.sinks = None if sinks is None else sinks.data_ptr()
        ends = self.batch.ends_of(spec)
        args.ends = None if ends is None else ends.data_ptr()
        args.window, args.scale, args.softcap = spec.seen or 0, spec.scale, spec.softcap or 0.0
        self._library.attend(args)
        return out


def _pool_of(spec: AttentionSpec, k: Tensor, v: Tensor) -> Pool:
    """Describe one layer's pool, perhaps of latents alone, without the type of its queries."""
    _, heads, block_size, width = k.shape
    assert k.stride()[2:] == (width, 1)  # blocks and heads may be anywhere
    assert spec.is_latent or k.stride() == v.stride()
    values, value_dim = (None, spec.out_dim) if spec.is_latent else (v.data_ptr(), 0)
    is_int8 = k.dtype == torch.int8
    dim = width - SCALE_BYTES * is_int8
    return Pool(k.data_ptr(), values, k.stride(1), k.stride(0), heads, dim, block_size, value_dim, is_int8=is_int8)


def _rows(x: Tensor) -> Tensor:
    """Return x [T, heads, dim] with each token's heads contiguous; tokens need not be adjacent."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
