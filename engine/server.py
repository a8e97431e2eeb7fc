"""`python -m engine.server`: loads a model, attaches to kvstore, and answers over HTTP until it is told to end.

SIGTERM and SIGINT: no new requests; running ones are finished, or cancelled at the deadline; then stores and sessions
are written out and the engine detaches from kvstore.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import torch
import typer
import uvicorn

from engine.app import make_app
from engine.guard import Guard, read_api_keys
from engine.layers import LayerOverlap
from engine.model import default_model_folder, load_model, make_pool
from engine.service import Engine, EngineOptions, Objective
from kernels.quantized import QuantizedDtype, quantized_dtype
from kvstore.core.errors import ConfigError
from kvstore.core.hosts import is_loopback
from kvstore.core.units import parse_size
from kvstore.names import check_import_names
from policies.saved_profile import default_folder as default_profile_dir
from tiers.hbm import HbmTier

_DRAIN_S = 10.0
_EXIT_CONFIG = 2


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What to serve, and to whom."""

    engine: EngineOptions
    model: Path | None
    cache_dir: Path
    host: str
    port: int
    hbm_bytes: int
    device: str
    dtype: str
    api_key_file: Path | None
    max_tokens: int


def serve(options: ServerOptions) -> None:
    """Return when told to end. Raises ConfigError where it cannot begin, if possible before a model is loaded."""
    check_import_names()
    if options.api_key_file is None and not is_loopback(options.host):
        raise ConfigError(f"--host {options.host} can be reached by others: name their keys with --api-key-file")
    tenants = None if options.api_key_file is None else read_api_keys(options.api_key_file, options.engine.tenant)
    engine = build(options)
    engine.start()
    try:
        app = make_app(engine, Guard(tenants, options.engine.tenant), options.max_tokens)
        config = uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=int(_DRAIN_S),
            lifespan="off",
        )
        _Server(config, engine.model_name).run()
    finally:
        engine.stop(_DRAIN_S)


def build(options: ServerOptions) -> Engine:
    """Load the model and allocate the pool. Raises ConfigError naming what to change."""
    device, dtype = choose_device(options.device, options.dtype)
    folder = options.model if options.model is not None else default_model_folder(options.cache_dir)
    model = load_model(folder, device, dtype)
    stride = options.engine.pool_block_tokens
    if stride < 1:
        raise ConfigError("--pool-block-tokens must be at least 1")
    pool_block_bytes = model.spec.kv_bytes_per_token * stride
    num_pool_blocks = options.hbm_bytes // pool_block_bytes
    least = 2 * max(1, options.engine.block_tokens // stride)
    if num_pool_blocks < least:
        raise ConfigError(
            f"--hbm-bytes {options.hbm_bytes} holds {num_pool_blocks} pool blocks of {pool_block_bytes} bytes; "
            f"give at least {least * pool_block_bytes}"
        )
    pool = make_pool(model.spec, num_pool_blocks, stride, device)
    hbm = HbmTier(pool, options.engine.block_tokens, options.engine.kv_store_dtype)
    return Engine(model, pool, hbm, options.engine)


def choose_device(device: str, dtype: str) -> tuple[str, str]:
    """Return the device and dtype to compute on and in, "auto" resolved."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        # bfloat16 is five times slower on a CPU without its instructions.
        dtype = "float32" if device == "cpu" else "bfloat16"
    return device, dtype


class _Server(uvicorn.Server):
    """Says when it is ready, and ends by returning: a clean end is no death by signal."""

    def __init__(self, config: uvicorn.Config, model_name: str) -> None:
        super().__init__(config)
        self._model_name = model_name

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(f"ready: {self._model_name} on http://{host}:{port}", flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def default_cache_dir() -> Path:
    """Return where the default model is kept where nobody says otherwise. Raises ConfigError for a user without a
    home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore"
    except RuntimeError:
        raise ConfigError("this user has no home folder to keep the model in: name one by --cache-dir") from None


def main(
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="A Hugging Face folder; default: SmolLM2-135M.")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", metavar="DIR", help="Where the default model is kept.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; others than loopback need --api-key-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="kvstore's run folder; default: no kvstore.")
    ] = None,
    hbm_bytes: Annotated[str, typer.Option("--hbm-bytes", metavar="SIZE", help="The HBM pool.")] = "512MiB",
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens per block, the unit that is stored.")] = 16,
    pool_block_tokens: Annotated[int, typer.Option(min=1, help="Tokens per pool block of HBM.")] = 16,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="The most prefill tokens per step.")] = 256,
    max_batch: Annotated[int, typer.Option(min=1, help="The most requests per step.")] = 16,
    max_requests: Annotated[int, typer.Option(min=1, help="The most requests at once; more are refused.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest reply that may be asked for.")] = 4096,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_store_dtype: Annotated[
        str, typer.Option("--kv-store-dtype", help="auto: KV is stored as it is; int8 or fp8: smaller, not lossless.")
    ] = "auto",
    profile_dir: Annotated[
        Path | None,
        typer.Option("--profile-dir", metavar="DIR", help="Where measured costs are kept; default: the state folder."),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(help="latency: the plan with the soonest first token; throughput: GPU seconds have a price, too."),
    ] = "latency",
    layer_overlap: Annotated[
        str,
        typer.Option(help="Compute while later layers of cached blocks are copied: auto (on a GPU), on or off."),
    ] = "auto",
    tenant: Annotated[str, typer.Option(help="Whose requests those are that name no tenant.")] = "",
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="One key per line, with its tenant if any.")
    ] = None,
) -> None:
    """Serve a language model over an OpenAI-style API, with its KV cache in kvstore.

    Example: python -m engine.server --run-dir /tmp/kvstore-1000 --hbm-bytes 1GiB
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        serve(
            ServerOptions(
                engine=EngineOptions(
                    run_dir=run_dir,
                    block_tokens=block_tokens,
                    pool_block_tokens=pool_block_tokens,
                    chunk_tokens=chunk_tokens,
                    max_batch=max_batch,
                    max_requests=max_requests,
                    default_reply_tokens=min(256, max_tokens),
                    tenant=tenant,
                    kv_store_dtype=_store_dtype(kv_store_dtype),
                    objective=_objective(objective),
                    profile_dir=_profile_dir(profile_dir),
                    layer_overlap=_layer_overlap(layer_overlap),
                ),
                model=model,
                cache_dir=cache_dir if cache_dir is not None else default_cache_dir(),
                host=host,
                port=port,
                hbm_bytes=_size(hbm_bytes),
                device=device,
                dtype=dtype,
                api_key_file=api_key_file,
                max_tokens=max_tokens,
            )
        )
    except ConfigError as error:
        typer.echo(f"engine: {error}", err=True)
        sys.exit(_EXIT_CONFIG)


def _profile_dir(folder: Path | None) -> Path | None:
    try:
        return folder if folder is not None else default_profile_dir()
    except ConfigError:
        # Without a home nothing is kept, and the engine serves all the same.
        return None


def _store_dtype(name: str) -> QuantizedDtype | None:
    try:
        return quantized_dtype(name)
    except ValueError as error:
        raise ConfigError(f"--kv-store-dtype: {error}") from None


def _objective(name: str) -> Objective:
    if name not in get_args(Objective):
        raise ConfigError(f"--objective is {name!r}; known are {', '.join(get_args(Objective))}")
    return cast(Objective, name)


def _layer_overlap(name: str) -> LayerOverlap:
    if name not in get_args(LayerOverlap):
        raise ConfigError(f"--layer-overlap is {name!r}; known are {', '.join(get_args(LayerOverlap))}")
    return cast(LayerOverlap, name)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--hbm-bytes: {error}") from None


if __name__ == "__main__":
    typer.run(main)
