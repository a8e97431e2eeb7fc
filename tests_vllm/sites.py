"""The tiny model in float32 on engines that share one daemon, each a process of its own."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from tests.support.daemons import DaemonProcess, until
from tests_vllm import tokens
from tests_vllm.engines import BLOCK_TOKENS, Answer, Engine, Prompt, with_kvstore

# Just behind, at and before the border of a block, and longer than the chunks of whoever stores.
LENGTHS = (33, 64, 65, 96, 128, 200, 257, 300, 416, 511, 640, 900)
CHUNK_TOKENS = 64


class Site:
    """Engines start when they are first used, those that will be needed next beside them."""

    def __init__(self, daemon: DaemonProcess, model: Path, make: Callable[..., Engine]) -> None:
        self.daemon = daemon
        self.model = model
        self.prompts = [Prompt(tokens.prompt(seed, length), 16) for seed, length in enumerate(LENGTHS)]
        self._make = make

    @cached_property
    def reference_engine(self) -> Engine:
        """Without a connector, and each prompt in one piece."""
        return self._make("reference", self.model, chunk_tokens=2048)

    @cached_property
    def reference(self) -> list[Answer]:
        self.reference_engine.ready()
        return self.ask_reference(self.prompts)

    def ask_reference(self, prompts: list[Prompt], *, together: bool = False) -> list[Answer]:
        """What is asked once more is computed once more."""
        self.reference_engine.ready()
        self.reference_engine.forget()
        return self.reference_engine.say(prompts, together=together)

    @cached_property
    def stored(self) -> list[Answer]:
        """The answers of an engine that began with an empty daemon; all its full blocks are in RAM now."""
        writer = self._make("writer", self.model, chunk_tokens=CHUNK_TOKENS, transfer=with_kvstore(self.daemon.run_dir))
        _ = self.reference_engine
        answers = writer.say(self.prompts)
        self.wait_stored(writer)
        writer.close()
        return answers

    @cached_property
    def sync_engine(self) -> Engine:
        _ = self.stored
        return self._reader("sync")

    @cached_property
    def async_engine(self) -> Engine:
        _ = self.stored
        return self._reader("async")

    def reader(self, load: str) -> Engine:
        """An engine that had nothing to do with what is stored."""
        if load == "async":
            return self.async_engine
        _ = self.async_engine
        return self.sync_engine

    def wait_stored(self, engine: Engine) -> None:
        """Until all full blocks of the prompts can be loaded, the engine stepping meanwhile as it would by itself."""
        wanted = sum(len(prompt.tokens) // BLOCK_TOKENS for prompt in self.prompts)

        def all_there() -> bool:
            engine.step()
            return bool(self.daemon.stats()["tiers"]["ram"]["blocks"] >= wanted)

        until(all_there)

    def wait_blocks(self, engine: Engine, number: int) -> None:
        """Until the daemon has taken so many blocks since it started."""

        def all_stored() -> bool:
            engine.step()
            return bool(self.daemon.stats()["store"]["blocks_stored"] >= number)

        until(all_stored)

    def _reader(self, load: str) -> Engine:
        transfer = with_kvstore(self.daemon.run_dir, load=load, plan="fetch")
        return self._make(load, self.model, transfer=transfer)
