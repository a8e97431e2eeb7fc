"""The hooks that vLLM calls, with stand-ins for vLLM's names; `tests_vllm` runs them under vLLM itself."""

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.vllm_parts.orders import Step
from kvstore.core.errors import ConfigError
from tests.connectors import vllm_names
from tests.support.vllm import BLOCK_TOKENS, FakeRequest, namespace


def test_an_engine_whose_workers_never_came_says_once_that_nothing_is_cached(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no worker answers the handshake vLLM asks no connector to begin, and ours did nothing, without a word."""
    module = vllm_names.stand_in(monkeypatch)
    connector = module.KvstoreConnector(vllm_names.config_of(), module.KVConnectorRole.SCHEDULER, vllm_names.caches())
    try:
        with caplog.at_level(logging.WARNING, "vllm.kvstore"):
            for _ in range(3):
                assert not connector.build_connector_meta(None).step.loads
        told = [record for record in caplog.records if "nothing is loaded and nothing is stored" in record.message]
        assert len(told) == 1
        assert connector.get_kv_connector_stats().data["counts"] == {"faults|handshake": 1}
    finally:
        connector.shutdown()


def test_a_device_that_blocks_cannot_be_copied_from_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = vllm_names.stand_in(monkeypatch)
    with pytest.raises(ConfigError, match="on xpu:0"):
        module._pages_on("xpu:0", [], {})


def test_one_transfer_config_is_enough_for_blocks_that_do_not_come_to_be_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under vLLM's default each late, evicted or damaged block failed its request. vLLM's scheduler reads the policy
    once the connector is made."""
    module = vllm_names.stand_in(monkeypatch)
    config = vllm_names.config_of(kv_load_failure_policy="fail")
    module.KvstoreConnector(config, module.KVConnectorRole.SCHEDULER, vllm_names.caches()).shutdown()
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


@pytest.mark.parametrize(("is_producer", "num_stored"), [(True, 2), (False, 0)])
def test_an_engine_that_only_produces_stores_what_it_computes(
    monkeypatch: pytest.MonkeyPatch, is_producer: bool, num_stored: int
) -> None:
    """Only those that load followed their requests, so a producer stored nothing, ever."""
    connector = begun(monkeypatch, is_kv_consumer=not is_producer, is_kv_producer=is_producer)
    try:
        request = FakeRequest("r", list(range(9)))
        connector.on_new_request(request)
        if is_producer:
            assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        stores = connector.build_connector_meta(first_step(request)).step.stores
        assert sum(len(order.hashes) for order in stores) == num_stored
    finally:
        connector.shutdown()


def test_what_an_adapter_computed_has_keys_of_its_own_by_its_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    names: list[list[bytes]] = []
    for weights in (None, b"old", b"new"):
        request: Any = FakeRequest("r", list(range(9)))
        if weights is not None:
            (tmp_path / "adapter_model.safetensors").write_bytes(weights)
            request.lora_request = SimpleNamespace(lora_name="latest", lora_path=str(tmp_path))
        names.append(stored_by(monkeypatch, request))
    assert [len(each) for each in names] == [2, 2, 2]
    assert len({each for some in names for each in some}) == 6


def test_an_adapter_that_cannot_be_read_is_neither_loaded_nor_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request: Any = FakeRequest("r", list(range(9)), {"session_id": "chat"})
    request.lora_request = SimpleNamespace(lora_name="latest", lora_path=str(tmp_path / "gone"))
    assert stored_by(monkeypatch, request) == []


@pytest.mark.parametrize(
    ("batches", "has_pool", "expected"), [(1, True, "sync"), (2, True, "async"), (1, False, "async")]
)
def test_loads_before_the_step_are_for_one_step_at_a_time_and_where_blocks_can_be_evicted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, batches: int, has_pool: bool, expected: str
) -> None:
    """A step that had begun before a failure was known gave out tokens that were computed over an unfilled block."""
    module = vllm_names.stand_in(monkeypatch)
    config = vllm_names.config_of(kv_connector_extra_config={"run_dir": "/nowhere", "load": "sync", "drain_s": 0.1})
    config.max_concurrent_batches = batches
    connector = module.KvstoreConnector(config, module.KVConnectorRole.SCHEDULER, vllm_names.caches())
    try:
        if has_pool:
            connector.bind_gpu_block_pool(SimpleNamespace(evict_blocks=lambda blocks: None))
        with caplog.at_level(logging.WARNING, "vllm.kvstore"):
            connector.set_xfer_handshake_metadata({0: module.KvstoreHandshake(namespace())})
        assert connector._settings.load == expected
        # Beside it the connector says, on a thread, that no daemon runs there.
        said = [record for record in caplog.records if '"load" is "async"' in record.getMessage()]
        assert len(said) == (expected == "async")
    finally:
        connector.shutdown()


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("use_v2_model_runner", True, "V2 model runner"),
        ("scheduler_config.long_prefill_token_threshold", 64, "long_prefill_token_threshold"),
        ("model_config.is_multimodal_model", True, "images or audio"),
        ("parallel_config.data_parallel_size", 2, "data parallelism"),
        ("speculative_config", object(), "speculative decoding"),
    ],
)
def test_loads_are_before_the_step_only_where_vllm_computes_again_what_does_not_come_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch, path: str, value: object, named: str
) -> None:
    """The V2 runner goes on where it was; and where the one that computes shared blocks again gets a part of its step
    only, the others run over the rest."""
    module = vllm_names.stand_in(monkeypatch)
    config = vllm_names.config_of()
    assert module._why_not_sync(config, object()) == ""
    *holders, name = path.split(".")
    holder = config
    for each in holders:
        holder = getattr(holder, each)
    setattr(holder, name, value)
    assert named in module._why_not_sync(config, object())


def stored_by(monkeypatch: pytest.MonkeyPatch, request: FakeRequest) -> list[bytes]:
    """Return what a new engine calls the blocks that it stores of the request's prompt."""
    connector = begun(monkeypatch, is_kv_consumer=False)
    try:
        connector.on_new_request(request)
        stores = connector.build_connector_meta(first_step(request)).step.stores
        request.num_computed_tokens = request.num_tokens
        connector.request_finished(request, [1, 2, 3])
        return [each for order in stores for each in order.hashes]
    finally:
        connector.shutdown()


def test_a_wrong_run_folder_is_warned_of_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a request both the log and the daemon's statistics looked as if all were well."""
    with caplog.at_level(logging.WARNING, "vllm.kvstore"):
        connector = begun(monkeypatch)
        try:
            for _ in range(30_000):
                if any("no daemon runs in /nowhere" in record.getMessage() for record in caplog.records):
                    break
                threading.Event().wait(0.001)
            else:
                raise AssertionError("nothing was said")
        finally:
            connector.shutdown()


def test_hints_of_no_use_are_said_once_and_never_in_the_words_of_a_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connector = begun(monkeypatch)
    try:
        with caplog.at_level(logging.WARNING, "vllm.kvstore"):
            for number in range(3):
                params = {"session_id": 7, "hints": {"ttl": "my secret", "my name": True}}
                connector.on_new_request(FakeRequest(f"id-{number}", list(range(9)), params))
        said = [record.getMessage() for record in caplog.records if "no use" in record.getMessage()]
        assert len(said) == 1
        assert "an unknown hint, hints.ttl, session_id" in said[0]
        assert not any(word in said[0] for word in ("my", "secret", "id-"))
    finally:
        connector.shutdown()


def test_an_engine_that_has_not_stepped_yet_shows_as_not_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM carries reports with steps only, so there was no such metric until the first request."""
    module = vllm_names.stand_in(monkeypatch)
    made: dict[tuple[str, ...], float] = {}
    module.KvstoreConnector.build_prom_metrics(None, made, ["engine"], {0: ["0"]})
    assert made == {("vllm:kvstore_attached", "0", side): 0 for side in ("scheduler", "worker")}


def begun(monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any] | None = None, **transfer: Any) -> Any:
    """Return a scheduler's connector whose one worker has answered the handshake."""
    module = vllm_names.stand_in(monkeypatch)
    config = vllm_names.config_of(
        kv_connector_extra_config={"run_dir": "/nowhere", "drain_s": 0.1, **(extra or {})}, **transfer
    )
    connector = module.KvstoreConnector(config, module.KVConnectorRole.SCHEDULER, vllm_names.caches())
    connector.set_xfer_handshake_metadata({0: module.KvstoreHandshake(namespace())})
    return connector


def first_step(request: FakeRequest) -> Any:
    """What vLLM schedules where it computes the whole prompt in one step."""
    blocks = list(range(1, 2 + request.num_tokens // BLOCK_TOKENS))
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=request.request_id, block_ids=(blocks,), num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[]),
        num_scheduled_tokens={request.request_id: request.num_tokens},
        total_num_scheduled_tokens=request.num_tokens,
    )


def test_a_fault_of_ours_leaves_the_step_its_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    module = vllm_names.stand_in(monkeypatch)
    connector = module.KvstoreConnector(vllm_names.config_of(), module.KVConnectorRole.SCHEDULER, vllm_names.caches())
    safe = Step(writes_anywhere=True)

    def fail(output: object) -> Step:
        raise RuntimeError("a fault")

    connector._scheduler = SimpleNamespace(
        begin_step=fail, begin_step_after_fault=lambda output: safe, close=lambda: None
    )
    try:
        assert connector.build_connector_meta(None).step is safe
        assert connector.get_kv_connector_stats().data["counts"] == {"faults|build_connector_meta": 1}
    finally:
        connector.shutdown()
