"""How tokens, pool blocks and blocks relate."""

from dataclasses import dataclass

from kvstore.core.key import Namespace


@dataclass(frozen=True, slots=True)
class Shape:
    """`namespace` gives the block and its hash; its root is each request's own."""

    namespace: Namespace
    pool_block_tokens: int

    def __post_init__(self) -> None:
        if self.pool_block_tokens < 1 or self.namespace.block_tokens % self.pool_block_tokens:
            raise ValueError("block_tokens must be a whole number of pool blocks")

    @property
    def block_tokens(self) -> int:
        return self.namespace.block_tokens

    @property
    def pool_blocks_per_block(self) -> int:
        return self.block_tokens // self.pool_block_tokens

    def pool_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool_block_tokens)
