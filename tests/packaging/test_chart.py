"""The manifests that the Helm chart renders: what they promise, and (long) the chart itself and a rollout with them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from harvester.config.load import build
from scripts.rolling_out import Template
from tests.support.longs import long

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "harvester"
MANIFEST = (ROOT / "deploy" / "kubernetes" / "harvester.yaml").read_text()
OBJECTS: dict[str, dict[str, Any]] = {
    f"{each['kind']}/{each['metadata']['name']}": each for each in yaml.safe_load_all(MANIFEST) if each
}
DEPLOYMENT = OBJECTS["Deployment/harvester"]["spec"]
POD = DEPLOYMENT["template"]["spec"]
(MAIN,) = POD["containers"]
(JOB,) = (each["spec"]["template"]["spec"] for name, each in OBJECTS.items() if name.startswith("Job/"))


def test_the_manifests_are_of_the_chart_as_it_stands() -> None:
    """Only `scripts/chart`, which builds helm, can render it; every run notices a chart that was changed since."""
    listed = sorted(str(file.relative_to(ROOT)) for file in CHART.rglob("*") if file.is_file())
    sums = [f"{hashlib.sha256((ROOT / file).read_bytes()).hexdigest()}  {file}\n" for file in listed]
    assert f"# Chart: {hashlib.sha256(''.join(sums).encode()).hexdigest()[:16]}\n" in MANIFEST, "scripts/chart --write"


def test_names_leave_room_for_the_job() -> None:
    """A job's name becomes a label of its pods."""
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    longest = re.findall(r"trunc (\d+) \| trimSuffix", helpers)
    assert longest == ["58", "49", "49", "49"]
    assert 49 + len("-init-") + 8 <= 63
    assert 58 + len("-init") <= 63


def test_resources_are_those_of_the_table_of_sizes() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    row = re.search(r"^\| 8 \|.*\| (\d+), (\d+) MB \|$", page, re.MULTILINE)
    assert row is not None
    resources = MAIN["resources"]
    assert resources["requests"]["memory"] == f"{row[1]}Mi"
    assert resources["limits"] == {"memory": f"{row[2]}Mi"}


def test_the_configuration_is_one() -> None:
    text = OBJECTS["ConfigMap/harvester"]["data"]["harvester.toml"]
    import tomllib

    config = build({**tomllib.loads(text), "data_source": "host=postgres"})
    assert config.leader_group_id == "shop"
    (init,) = (each for name, each in OBJECTS.items() if name.startswith("ConfigMap/harvester-init"))
    assert init["data"]["harvester.toml"] == text


def test_a_new_pod_comes_before_an_old_one_goes() -> None:
    assert DEPLOYMENT["replicas"] == 2
    assert DEPLOYMENT["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert DEPLOYMENT["minReadySeconds"] > 0
    assert "checksum/config" in DEPLOYMENT["template"]["metadata"]["annotations"]
    assert OBJECTS["PodDisruptionBudget/harvester"]["spec"]["maxUnavailable"] == 1
    spread = {each["topologyKey"] for each in POD["topologySpreadConstraints"]}
    assert spread == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}


def test_there_is_time_to_drain() -> None:
    """With the default settings, and with the hook before SIGTERM."""
    from harvester.config import Config

    hook = MAIN["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[0] == "sleep"
    drain_s = Config(leader_group_id="any").limits.drain_interval.total_seconds()
    assert POD["terminationGracePeriodSeconds"] >= int(hook[1]) + drain_s + 10


def test_probes_are_pages_of_the_product() -> None:
    pages = (ROOT / "docs" / "operations.md").read_text()
    for probe, path in (("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert MAIN[probe]["httpGet"] == {"path": path, "port": "http"}
        assert f"| `{path}` |" in pages
    (port,) = MAIN["ports"]
    assert f"http.listen=0.0.0.0:{port['containerPort']}" in MAIN["args"]
    assert OBJECTS["Service/harvester"]["spec"]["ports"][0]["targetPort"] == "http"


@pytest.mark.parametrize("pod", [POD, JOB], ids=["harvester", "init"])
def test_pods_may_do_nothing_beside_their_task(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["limits"]
    user = re.search(r"^USER (\d+):", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    assert user
    assert pod["securityContext"]["runAsUser"] == int(user[1])


def test_no_secret_is_in_the_manifests() -> None:
    assert not [name for name in OBJECTS if name.startswith("Secret/")]
    for container in (MAIN, JOB["containers"][0]):
        (password,) = (each for each in container["env"] if each["name"] == "DB_PASSWORD")
        assert password["valueFrom"] == {"secretKeyRef": {"name": "harvester", "key": "password"}}


def test_the_network_is_closed_but_for_servers_and_metrics() -> None:
    policy = OBJECTS["NetworkPolicy/harvester"]["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert [port["port"] for rule in policy["ingress"] for port in rule["ports"]] == [9464]
    assert sorted({port["port"] for rule in policy["egress"] for port in rule["ports"]}) == [53, 5432, 9092]
    labels = DEPLOYMENT["template"]["metadata"]["labels"]
    (names,) = (each["values"] for each in policy["podSelector"]["matchExpressions"])
    assert labels["app.kubernetes.io/name"] in names


def test_every_value_is_known_to_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global", "nameOverride", "fullnameOverride"}
    for name, value in values.items():
        properties = schema["properties"][name].get("properties")
        if isinstance(value, dict) and properties is not None:
            assert set(value) == set(properties), name


def test_the_chart_has_the_alerts_of_the_documents() -> None:
    alerts = ROOT / "docs" / "alerts" / "harvester.rules.yml"
    assert (CHART / "files" / "harvester.rules.yml").read_text() == alerts.read_text(), f"copy {alerts} there"


def test_the_rollout_reads_the_manifest() -> None:
    template = Template.read(MANIFEST)
    assert template.ready_path == "/readyz"
    assert template.replicas == 2
    assert template.arguments[0] == "start"


@long
@pytest.mark.timeout(2400)
def test_the_chart_is_linted_rendered_and_decoded() -> None:
    if shutil.which("go") is None:
        pytest.skip("helm is built from its Go module: needs Go")
    done = subprocess.run(["scripts/chart"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pods", [[], ["--image"]], ids=["processes", "image"])
def test_a_rolling_update_repeats_nothing(pods: list[str]) -> None:
    done = subprocess.run(
        ["scripts/rollout", "--min-ready", "3", *pods], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["lost"], found["repeated"], found["out_of_order"]) == (0, 0, 0)
    assert found["records"] > 0
    assert found["broken_rollout_stopped"] is True
