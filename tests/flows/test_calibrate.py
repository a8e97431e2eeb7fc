"""`kvstore calibrate` as a whole on a tiny model, with a real daemon and S3 server; then `kvstore plan` from it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore.cli import app
from kvstore.s3server import S3Server
from policies.saved_profile import read
from tests.engine.tiny import llama, write_folder
from tests.support.s3server import BUCKET, settings_for
from tiers.s3client import make_client


@pytest.mark.slow
@pytest.mark.leaks  # matplotlib keeps its fonts open
@pytest.mark.usefixtures("s3_server")
def test_prefill_and_every_tier_are_measured_and_nothing_but_the_profile_is_left(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = settings_for(s3_server, tmp_path)
    config = tmp_path / "kvstore.toml"
    config.write_text(
        f'[ssd]\npath = "{tmp_path / "disk" / "ssd"}"\n[s3]\nbucket = "{BUCKET}"\nprefix = "{bucket.prefix}"\n'
        f'endpoint = "{bucket.endpoint}"\nregion = "{bucket.region}"\n'
        f'access_key_file = "{bucket.access_key_file}"\nsecret_key_file = "{bucket.secret_key_file}"\n'
    )
    shape = llama()
    shape.max_position_embeddings = 2048
    model = write_folder(tmp_path / "model", shape)
    profiles, plot = tmp_path / "profiles", tmp_path / "costs.png"
    options = ["--model", str(model), "--config", str(config), "--profile-dir", str(profiles), "--plot", str(plot)]
    ran = CliRunner().invoke(app, ["calibrate", *options, "--ram-size", "64MiB", "--chunk-tokens", "64", "--json"])
    assert ran.exit_code == 0, ran.output + repr(ran.exception)
    answer = json.loads(ran.stdout)
    assert set(answer["tiers"]) == {"ram", "ssd", "s3"}
    for tier in answer["tiers"].values():
        assert tier["latency_s"] > 0 or tier["bytes_per_s"] > 0
    cases = {(load["tier"], load["blocks"], load["at_once"]) for load in answer["loads"]}
    assert {("s3", 1, 1), ("s3", 64, 1), ("ssd", 16, 4), ("ram", 16, 2)} <= cases
    assert {step["cached"] for step in answer["steps"]} >= {0, 64, 1024}
    assert {step["decodes"] for step in answer["steps"]} == {0, 1, 2, 4}
    assert plot.read_bytes().startswith(b"\x89PNG")
    (path,) = profiles.iterdir()
    assert set(read(path).loads) == {"ram", "ssd", "s3"}

    planned = CliRunner().invoke(
        app, ["plan", "--profile-dir", str(profiles), "--tier", "ssd:1024", "--tier", "s3:1024", "--json"]
    )
    assert json.loads(planned.stdout)["seconds"] > 0

    assert not list((tmp_path / "disk").iterdir())
    client = make_client(bucket)
    assert "Contents" not in client.list_objects_v2(Bucket=BUCKET, Prefix=bucket.prefix)
    client.close()
