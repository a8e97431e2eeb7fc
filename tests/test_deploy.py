"""The Kubernetes manifests, Prometheus' configuration and vLLM in the compose file, as far as they can be checked
without a cluster: against the schemas, and against what the daemon and the connector accept."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.connectors.vllm_parts.settings import parse
from kvstore.core.units import parse_size
from kvstore.settings import Loaded, load

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
MANIFESTS = DEPLOY / "kubernetes"
# The first in which native sidecars are on by default, and a recent one.
VERSIONS = ("1.29", "1.37")


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    template: dict[str, Any] = yaml.safe_load((MANIFESTS / "deployment.yaml").read_text())["spec"]["template"]
    return template


@pytest.fixture
def sidecar(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["spec"]["initContainers"]
    return dict(found)


@pytest.fixture
def vllm(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["spec"]["containers"]
    return dict(found)


@pytest.fixture
def loaded(sidecar: dict[str, Any]) -> Loaded:
    environ = {entry["name"]: entry["value"] for entry in sidecar["env"] if "value" in entry}
    return load(MANIFESTS / "kvstore.toml", {key: value for key, value in environ.items() if key != "KVSTORE_CONFIG"})


def mounts(container: dict[str, Any]) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}


def volume(pod: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == name]
    return dict(found)


def size(text: str) -> int:
    """As Kubernetes writes sizes."""
    return parse_size(f"{text}B")


def volume_at(pod: dict[str, Any], container: dict[str, Any], path: str) -> str:
    """The name of the volume that the path lies in."""
    return max((at, name) for at, name in mounts(container).items() if Path(path).is_relative_to(at))[1]


# ---------------------------------------------------------------- the manifests


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["deployment.yaml", "service.yaml"])
def test_the_manifests_follow_the_schema_strictly(name: str, version: str) -> None:
    command = [Path(sys.executable).parent / "kubernetes-validate", "--strict", "-k", version, MANIFESTS / name]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_kustomization_names_files_and_images_that_are_there(pod: dict[str, Any]) -> None:
    kustomization = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())
    (generated,) = kustomization["configMapGenerator"]
    named = {*kustomization["resources"], *generated["files"], "kustomization.yaml"}
    assert named == {path.name for path in MANIFESTS.iterdir()}
    containers = [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
    assert {image["name"] for image in kustomization["images"]} == {container["image"] for container in containers}
    assert volume(pod, "config")["configMap"]["name"] == generated["name"]
    for image in kustomization["images"]:
        assert image["newName"] == f"REGISTRY/{image['name']}"
    targets = {line.split()[-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("FROM ")}
    assert {container["image"].removeprefix("kvstore-") for container in containers} <= targets


def test_the_service_leads_to_vllm(pod: dict[str, Any], vllm: dict[str, Any]) -> None:
    service = yaml.safe_load((MANIFESTS / "service.yaml").read_text())["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] in {port["name"] for port in vllm["ports"]}


def test_socket_and_region_are_shared_by_volumes_and_by_nothing_else(
    pod: dict[str, Any], sidecar: dict[str, Any], vllm: dict[str, Any]
) -> None:
    spec = pod["spec"]
    assert not {"hostIPC", "hostPID", "hostNetwork"} & spec.keys()
    assert not any("hostPath" in volume for volume in spec["volumes"])
    assert mounts(sidecar)["/run/kvstore"] == mounts(vllm)["/run/kvstore"]
    assert mounts(sidecar)["/run/kvstore-shm"] == mounts(vllm)["/run/kvstore-shm"]
    for name in ("run", "region"):
        assert volume(pod, name)["emptyDir"]["medium"] == "Memory"
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 10001
    assert not any("runAsUser" in container["securityContext"] for container in (sidecar, vllm))


def test_the_sidecar_starts_first_ends_last_and_asks_for_no_gpu(
    pod: dict[str, Any], sidecar: dict[str, Any], vllm: dict[str, Any], loaded: Loaded
) -> None:
    assert sidecar["restartPolicy"] == "Always"
    patience_s = shutdown_timeout_s(vllm["args"]) + loaded.config.daemon.drain_deadline_s
    assert pod["spec"]["terminationGracePeriodSeconds"] >= patience_s + 20
    amounts = sidecar["resources"]["requests"] | sidecar["resources"]["limits"]
    assert set(amounts) == {"cpu", "memory", "ephemeral-storage"}
    assert vllm["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_sizes_have_room_for_the_region_twice(pod: dict[str, Any], sidecar: dict[str, Any], loaded: Loaded) -> None:
    """While an engine maps the region of a daemon that was restarted, there are two."""
    ram = loaded.config.ram.size_bytes
    assert size(volume(pod, "region")["emptyDir"]["sizeLimit"]) >= 2 * ram
    assert size(sidecar["resources"]["limits"]["memory"]) >= 2 * ram + (1 << 30)
    assert size(sidecar["resources"]["requests"]["memory"]) > ram
    assert size(volume(pod, "ssd")["emptyDir"]["sizeLimit"]) > loaded.config.ssd.max_bytes


def test_the_node_has_the_disk_that_volumes_may_take(
    pod: dict[str, Any], sidecar: dict[str, Any], vllm: dict[str, Any]
) -> None:
    disks = [volume["emptyDir"] for volume in pod["spec"]["volumes"] if "emptyDir" in volume]
    may_take = sum(size(disk["sizeLimit"]) for disk in disks if "medium" not in disk)
    asked = sum(size(container["resources"]["requests"]["ephemeral-storage"]) for container in (sidecar, vllm))
    assert asked >= may_take


def test_vllm_asks_for_a_key_and_the_hubs_token_may_be_missing(vllm: dict[str, Any]) -> None:
    secrets = {entry["name"]: entry["valueFrom"]["secretKeyRef"] for entry in vllm["env"] if "valueFrom" in entry}
    assert not secrets["VLLM_API_KEY"].get("optional", False)
    assert secrets["HF_TOKEN"]["optional"]
    told = (ROOT / "docs" / "kubernetes.md").read_text()
    for secret in secrets.values():
        assert f"kubectl create secret generic {secret['name']}" in told and f"--from-file={secret['key']}" in told


def test_the_daemon_accepts_its_configuration_and_finds_its_folders(
    pod: dict[str, Any], sidecar: dict[str, Any], loaded: Loaded
) -> None:
    config = loaded.config
    assert config.s3.enabled
    # A volume is open to its group; the folders below are made by the daemon, for itself alone.
    assert volume_at(pod, sidecar, config.daemon.run_dir) == "run"
    assert config.daemon.run_dir not in mounts(sidecar)
    assert volume_at(pod, sidecar, config.ram.shm_dir) == "region"
    assert volume_at(pod, sidecar, config.ssd.path) == "ssd"
    for secret in (config.s3.access_key_file, config.s3.secret_key_file, config.http.token_file):
        assert volume_at(pod, sidecar, secret) == "bucket"
        assert f"--from-file={Path(secret).name}" in (MANIFESTS / "deployment.yaml").read_text()
    (path,) = [entry["value"] for entry in sidecar["env"] if entry["name"] == "KVSTORE_CONFIG"]
    assert volume_at(pod, sidecar, path) == "config"


def test_probes_ask_what_needs_no_token(sidecar: dict[str, Any], vllm: dict[str, Any]) -> None:
    for container in (sidecar, vllm):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[probe]["httpGet"]
            assert asked["path"] == "/health"
            assert asked["port"] in {port["name"] for port in container["ports"]}


def test_prometheus_finds_the_sidecars_port_and_shows_the_token(pod: dict[str, Any], sidecar: dict[str, Any]) -> None:
    job, _ = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["authorization"]["credentials_file"].endswith("/http-token")
    (port,) = sidecar["ports"]
    assert port["name"] in {rule.get("regex") for rule in job["relabel_configs"]}
    annotations = pod["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    assert annotations["prometheus.io/port"] == str(port["containerPort"])


def test_prometheus_finds_vllms_port_by_the_pods_label(pod: dict[str, Any], vllm: dict[str, Any]) -> None:
    _, job = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    kept = {rule["source_labels"][0]: rule["regex"] for rule in job["relabel_configs"] if rule.get("action") == "keep"}
    assert (
        kept["__meta_kubernetes_pod_label_app_kubernetes_io_name"]
        == (pod["metadata"]["labels"]["app.kubernetes.io/name"])
    )
    assert kept["__meta_kubernetes_pod_container_port_name"] == vllm["ports"][0]["name"]
    # The sidecar's token is not shown to vLLM.
    assert "authorization" not in job


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_takes_the_configuration() -> None:
    command = ["promtool", "check", "config", "--syntax-only", DEPLOY / "prometheus.yml"]
    subprocess.run(command, check=True, capture_output=True)


# ---------------------------------------------------------------- what vLLM is told


def transfer_config(arguments: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    return config


def check_transfer_config(arguments: list[str], run_dir: str) -> None:
    config = transfer_config(arguments)
    extra = config.pop("kv_connector_extra_config")
    assert config == {
        "kv_connector": "KvstoreConnector",
        "kv_connector_module_path": "kvstore.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    assert str(parse(extra).run_dir) == run_dir


def shutdown_timeout_s(arguments: list[str]) -> int:
    (found,) = [word.partition("=")[2] for word in arguments if word.startswith("--shutdown-timeout=")]
    return int(found)


def test_vllm_is_given_the_time_to_store_what_waits(vllm: dict[str, Any]) -> None:
    """vLLM's default is 0: it kills its engine, and the connector's drain never runs."""
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["vllm"]
    for arguments in (vllm["args"], service["command"]):
        drain_s = parse(transfer_config(arguments)["kv_connector_extra_config"]).drain_s
        assert shutdown_timeout_s(arguments) > drain_s
    assert int(service["stop_grace_period"].removesuffix("s")) > shutdown_timeout_s(service["command"])


def test_vllm_in_the_pod_attaches_to_its_sidecar(vllm: dict[str, Any], loaded: Loaded) -> None:
    check_transfer_config(vllm["args"], loaded.config.daemon.run_dir)


def test_vllm_in_the_compose_file_attaches_to_its_sidecar_and_starts_only_by_name() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    vllm, sidecar = services["vllm"], services["kvstore"]
    assert vllm["profiles"] == ["vllm"]
    assert "profiles" not in sidecar
    assert set(vllm["depends_on"]) == {"kvstore"} and set(sidecar["depends_on"]) == {"s3"}
    check_transfer_config(vllm["command"], "/run/kvstore")
    assert set(vllm["volumes"]) & set(sidecar["volumes"]) == {"run:/run/kvstore", "shm:/run/kvstore-shm"}
    assert vllm["user"] == sidecar["user"]
