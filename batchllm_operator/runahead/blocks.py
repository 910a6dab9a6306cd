"""Copies KV blocks between an engine's layers and messages."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from batchllm_operator.errors import SpecError

_BY_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class KVBlocks:
    """The KV caches of all attention layers; writes go into vLLM's own tensors.

    Blocks are copied as bytes, so both ends need the same layout inside a block; strides may
    differ. Layers that share one cache count once.

    Args:
        caches: vLLM's tensors by layer name. Blocks are the first dimension,
            or the second where the first separates keys and values (vLLM 0.27 on ROCm).
        num_blocks: blocks of each cache. A kernel may divide each into equal smaller ones.

    Raises:
        SpecError: a cache has no dimension for the blocks, or layers differ in size.
    """

    def __init__(self, caches: Mapping[str, Tensor], num_blocks: int) -> None:
        self.layer_idxs: dict[str, int] = {}
        """Index of each layer's cache, by layer name."""
        self._caches: list[Tensor] = []
        by_address: dict[int, int] = {}
        for name, cache in caches.items():
            idx = by_address.setdefault(cache.data_ptr(), len(self._caches))
            if idx == len(self._caches):
                self._caches.append(_by_block(name, cache, num_blocks))
            self.layer_idxs[name] = idx
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
        """What must be equal at both ends: shape of a block, element size, names of layers."""
        shapes = sorted({(*cache.shape[1:], cache.element_size()) for cache in self._caches})
        return [*map(list, shapes), sorted(set(self._splits)), list(self.layer_idxs)]

    def gather(self, layer_idx: int, block_ids: Sequence[int], out: Tensor) -> None:
        """Copy blocks of a layer into `out`: uint8 [len(block_ids) * block_bytes], contiguous."""
        if block_ids:
            cache, ids = self._caches[layer_idx], self._ids(layer_idx, block_ids)
            torch.index_select(cache, 0, ids, out=self._rows(cache, ids, out))

    def scatter(self, layer_idx: int, block_ids: Sequence[int], payload: Tensor) -> None:
        """Copy `payload`, in the format of `gather`, into blocks of a layer."""
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
    """The same memory with blocks first, as integers, which exist for every element size."""
    for dimension in range(min(2, cache.dim())):
        size = cache.shape[dimension]
        if size >= num_blocks and size % num_blocks == 0:
            return cache.movedim(dimension, 0).view(_BY_SIZE[cache.element_size()])
    raise SpecError(
        f"runahead: the KV cache of {name}, of shape {tuple(cache.shape)}, has no dimension of"
        f" {num_blocks} blocks"
    )
