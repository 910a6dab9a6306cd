"""The KV blocks of an engine's layers as rows of bytes, in and out of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from batchllm_operator.errors import SpecError

_BY_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class KVBlocks:
    """The KV caches of all layers that have one, each a tensor [num_blocks, ...] in vLLM's layout.

    A block is copied as it lies, so both ends need the same layout inside a block; strides may
    differ. Layers that share one cache count once. Writes go into vLLM's own tensors.

    Args:
        caches: vLLM's tensors by the names of the layers. The blocks are their first dimension,
            or their second where the first tells keys from values (vLLM before 0.27).
        num_blocks: of each cache. A kernel's blocks may be smaller, by a whole number.

    Raises:
        SpecError: a cache has no dimension for the blocks, or layers differ in size.
    """

    def __init__(self, caches: Mapping[str, Tensor], num_blocks: int) -> None:
        self.layer_idxs: dict[str, int] = {}
        """By the names of all layers that read a cache."""
        self._caches: list[Tensor] = []
        by_address: dict[int, int] = {}
        for name, cache in caches.items():
            if cache.data_ptr() not in by_address:
                by_address[cache.data_ptr()] = len(self._caches)
                self._caches.append(_by_block(name, cache, num_blocks))
            self.layer_idxs[name] = by_address[cache.data_ptr()]
        if not self._caches:
            raise SpecError("runahead: the model has no KV cache")
        self._splits = [cache.shape[0] // num_blocks for cache in self._caches]
        sizes = {
            cache[0].numel() * cache.element_size() * split
            for cache, split in zip(self._caches, self._splits, strict=True)
        }
        if len(sizes) > 1:
            raise SpecError("runahead: the KV blocks of the layers differ in size")
        self.block_bytes: int = sizes.pop()
        self.device: torch.device = self._caches[0].device

    @property
    def num_layers(self) -> int:
        return len(self._caches)

    def layout(self) -> list[object]:
        """What has to be equal at both ends: shape of a block, element size, names of layers."""
        shapes = sorted({(*cache.shape[1:], cache.element_size()) for cache in self._caches})
        return [*map(list, shapes), sorted(set(self._splits)), list(self.layer_idxs)]

    def gather(self, layer_idx: int, block_ids: Sequence[int], out: Tensor) -> None:
        """Copy blocks of a layer into `out`: uint8 [len(block_ids) * block_bytes], contiguous."""
        if block_ids:
            cache, ids = self._caches[layer_idx], self._ids(layer_idx, block_ids)
            torch.index_select(cache, 0, ids, out=self._rows(cache, ids, out))

    def scatter(self, layer_idx: int, block_ids: Sequence[int], payload: Tensor) -> None:
        """Copy `payload`, as `gather` makes it, into blocks of a layer."""
        if block_ids:
            cache, ids = self._caches[layer_idx], self._ids(layer_idx, block_ids)
            cache.index_copy_(0, ids, self._rows(cache, ids, payload))

    def _ids(self, layer_idx: int, block_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor(block_ids, dtype=torch.int64)
        split = self._splits[layer_idx]
        if split > 1:
            ids = (ids[:, None] * split + torch.arange(split)).flatten()
        return ids.to(self.device)

    @staticmethod
    def _rows(cache: Tensor, ids: Tensor, payload: Tensor) -> Tensor:
        return payload.view(cache.dtype).view(len(ids), *cache.shape[1:])


def _by_block(name: str, cache: Tensor, num_blocks: int) -> Tensor:
    """The same memory with blocks first, as integers: no format of floats is left out."""
    for dimension in range(min(2, cache.dim())):
        size = cache.shape[dimension]
        if size >= num_blocks and size % num_blocks == 0:
            return cache.movedim(dimension, 0).view(_BY_SIZE[cache.element_size()])
    raise SpecError(
        f"runahead: the KV cache of {name}, of shape {tuple(cache.shape)}, has no dimension of"
        f" {num_blocks} blocks"
    )
