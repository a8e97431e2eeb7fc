"""KV caches as vLLM lays them out, over one buffer of bytes, on any device; with torch, so not for every test."""

from dataclasses import dataclass

import torch

from kvstore.connectors.vllm_parts.pages import Layer, describe_all

# How [layer, block, head, token, content] lies in memory, outermost first.
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
}


@dataclass(frozen=True)
class LayerSet:
    """Layers of one shape that lie at one distance from each other: what vLLM calls a KVCacheTensor. `heads` None:
    three dimensions, as MLA has them. `kernel_blocks` of them are one pool block."""

    layout: str
    dtype: torch.dtype
    num_layers: int
    heads: int | None
    tokens: int
    content: int
    kernel_blocks: int = 1

    def num_bytes(self, num_blocks: int) -> int:
        heads = 1 if self.heads is None else self.heads
        numbers = self.num_layers * num_blocks * self.kernel_blocks * heads * self.tokens * self.content
        return numbers * self.dtype.itemsize

    def views(self, raw: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
        heads = 1 if self.heads is None else self.heads
        shape = (self.num_layers, num_blocks * self.kernel_blocks, heads, self.tokens, self.content)
        order = ORDERS[self.layout]
        stored = raw.view(self.dtype).view([shape[dimension] for dimension in order])
        whole = stored.permute([order.index(dimension) for dimension in range(5)])
        return [whole[layer] if self.heads is not None else whole[layer, :, 0] for layer in range(self.num_layers)]


@dataclass(frozen=True)
class Caches:
    """Sets of layers one after another in a buffer, with `gap_bytes` before each that are nobody's."""

    sets: tuple[LayerSet, ...]
    num_blocks: int
    gap_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(_round_up(self.gap_bytes + each.num_bytes(self.num_blocks)) for each in self.sets)

    def raw(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (self.num_bytes,), dtype=torch.uint8, generator=generator)

    def views(self, raw: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {}
        start = 0
        for index, each in enumerate(self.sets):
            num_bytes = each.num_bytes(self.num_blocks)
            first = start + self.gap_bytes
            for layer, view in enumerate(each.views(raw[first : first + num_bytes], self.num_blocks)):
                found[f"set.{index}.layer.{layer}"] = view
            start += _round_up(self.gap_bytes + num_bytes)
        return found

    def layers(self, views: dict[str, torch.Tensor]) -> list[Layer]:
        return describe_all(views, list(views), self.num_blocks)


def _round_up(num_bytes: int) -> int:
    # Where a view of any dtype may begin.
    return -(-num_bytes // 16) * 16


def _plain(layout: str, dtype: torch.dtype) -> Caches:
    return Caches((LayerSet(layout, dtype, 3, 2, 4, 6),), 5)


NAMED = {
    **{f"{layout} {str(dtype)[6:]}": _plain(layout, dtype) for layout in ORDERS for dtype in (torch.bfloat16,)},
    "float32": _plain("LBHNC", torch.float32),
    "fp8": _plain("LBNHC", torch.float8_e4m3fn),
    "MLA": Caches((LayerSet("LBHNC", torch.bfloat16, 3, None, 4, 36),), 5),
    "MLA with an indexer": Caches(
        (LayerSet("LBHNC", torch.bfloat16, 3, None, 4, 36), LayerSet("LBHNC", torch.uint8, 3, None, 4, 33)), 5, 16
    ),
    "a draft model with other heads": Caches(
        (LayerSet("LBNHC", torch.bfloat16, 3, 2, 4, 8), LayerSet("LBNHC", torch.bfloat16, 1, 3, 4, 16)), 5
    ),
    "kernel blocks": Caches((LayerSet("LBHNC", torch.float16, 2, 2, 4, 6, kernel_blocks=3),), 4),
    # A page of many rounds of one program and no whole number of lanes.
    "odd and long": Caches((LayerSet("LBHNC", torch.uint8, 1, 3, 7, 311),), 3, 1),
}
