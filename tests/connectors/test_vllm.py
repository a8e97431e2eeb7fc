"""The hooks that vLLM calls, with stand-ins for vLLM's names; `tests_vllm` runs them under vLLM itself."""

import logging

import pytest

from kvstore.core.errors import ConfigError
from tests.connectors import vllm_names


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
