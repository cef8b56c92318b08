"""A team on Kubernetes: the image, the chart's objects with values of one's own, the job, two pods, and `kubectl exec`.

There is no cluster: what the rendered objects say of the job and the pods is done with containers of the image, on real
servers (scripts/contained.py, scripts/rolling_out.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg.conninfo
import yaml

from harvester.stack import StackInfo
from scripts.contained import Image, built
from scripts.rolling_out import Cluster, Template
from scripts.smoke_parts import Servers

from .steps import PUMP, RECORDS, ROOT, TOPIC, Failed, Hour, checked, verdict, wait_published

CHART = ROOT / "deploy" / "helm" / "harvester"
SECRETS = {("harvester", "password"): "known-to-nobody"}
_FILE = "/etc/harvester/harvester.toml"
_CONFIGURATION = """\
data_source = "{dsn} password=${{DB_PASSWORD}}"
leader_group_id = "shop-kubernetes"

[base_kafka_config]
"bootstrap.servers" = "{bootstrap}"
"broker.address.family" = "v4"
"""


class Rendered:
    """The objects of the chart, and what a pod of theirs is given."""

    def __init__(self, text: str, place: Path) -> None:
        self.text, self._place = text, place
        self._objects = [each for each in yaml.safe_load_all(text) if each]

    def of(self, kind: str) -> dict[str, Any]:
        """The only one of this kind."""
        (found,) = [each for each in self._objects if each["kind"] == kind]
        return dict(found["spec"]["template"]["spec"])

    def configuration(self, pod: dict[str, Any]) -> Path:
        """The file that the pod mounts, from the ConfigMap that it names."""
        (name,) = [each["configMap"]["name"] for each in pod["volumes"] if each["name"] == "config"]
        (data,) = [
            each["data"] for each in self._objects if (each["kind"], each["metadata"]["name"]) == ("ConfigMap", name)
        ]
        file = self._place / f"{name}.toml"
        file.write_text(data["harvester.toml"])
        file.chmod(0o644)
        return file

    @staticmethod
    def secrets(pod: dict[str, Any]) -> dict[str, str]:
        """The variables that it takes from Secrets."""
        (main,) = pod["containers"]
        named = ((each["name"], each.get("valueFrom", {}).get("secretKeyRef")) for each in main.get("env", ()))
        return {name: SECRETS[source["name"], source["key"]] for name, source in named if source}


def play(hour: Hour, servers: StackInfo) -> dict[str, int]:
    """All steps; what `verify` found."""
    dsn = psycopg.conninfo.make_conninfo(servers.dsn, dbname="shop_kubernetes")
    with psycopg.connect(servers.dsn, autocommit=True) as admin:
        admin.execute("CREATE DATABASE shop_kubernetes")
    helm = _helm()
    with hour.step("the image"):
        image = built()
    values = hour.place / "values.yaml"
    values.write_text(
        yaml.safe_dump(
            {
                "config": _CONFIGURATION.format(dsn=dsn, bootstrap=servers.bootstrap),
                "secrets": {"environment": [{"name": "DB_PASSWORD", "secret": "harvester", "key": "password"}]},
            }
        )
    )
    with hour.step("helm template"):
        command = [helm, "template", "shop", str(CHART), "-f", str(values), "--kube-version", "1.31.0"]
        text = checked(subprocess.run(command, capture_output=True, text=True, check=False))
    rendered = Rendered(text, hour.place)
    with ExitStack() as everything:
        return _play(hour, rendered, image, servers, everything)


def _play(hour: Hour, rendered: Rendered, image: Image, servers: StackInfo, everything: ExitStack) -> dict[str, int]:
    job, pod = rendered.of("Job"), rendered.of("Deployment")
    mounts, secrets = {rendered.configuration(pod): _FILE}, rendered.secrets(pod)

    def harvester(*arguments: str) -> str:
        return checked(image.run(*arguments, mounts=mounts, environment=secrets))

    with hour.step("the job of init"):
        (main,) = job["containers"]
        own = {rendered.configuration(job): _FILE}
        checked(image.run(*main["args"], mounts=own, environment=rendered.secrets(job)))
    elsewhere = Servers(servers.dsn, servers.bootstrap, "", "", Path(sys.executable), hour.place)
    cluster = Cluster(Template.read(rendered.text), elsewhere, image, everything, secrets)
    with hour.step(f"{cluster.template.replicas} pods, until they are ready"):
        pods = [cluster.start(next(iter(mounts))) for _ in range(cluster.template.replicas)]
        for each in pods:
            if not cluster.wait_ready(each, 120):
                raise Failed(f"{each.name} does not become ready: {_log(hour, each.name)}")
    with hour.step(f"harvester pump: {RECORDS:,} records, watched until all is published"):
        harvester(*PUMP)
        wait_published(
            lambda: sum(_delivered(each) for each in pods) == RECORDS,
            lambda: f"the pods did not publish all: {''.join(_log(hour, each.name) for each in pods)}",
        )
    with hour.step("the end of the pods"):
        for each in pods:
            cluster.stop(each)
    with hour.step("harvester verify"):
        return verdict(harvester("verify", "--topic", TOPIC, "--json"))


def _delivered(pod: Any) -> int:
    said = checked(pod.container.enter("harvester", "watch", "--once", "--json"))
    return int(json.loads(said.splitlines()[0])["delivered"])


def _log(hour: Hour, name: str) -> str:
    return (hour.place / f"{name}.log").read_text(errors="replace")[-800:]


def _helm() -> str:
    """The one that is installed, or that `scripts/chart` builds."""
    if found := shutil.which("helm"):
        return found
    tools = Path(os.environ.get("HARVESTER_CHART_TOOLS") or ROOT / "build" / "chart")
    if not (tools / "helm").exists():
        subprocess.run([ROOT / "scripts" / "chart"], stdout=sys.stderr, check=True)
    return str(tools / "helm")


def unusable() -> str:
    """Why this machine cannot play it; empty if it can."""
    if shutil.which("apt-get") is None:
        return "Debian or Ubuntu is needed, whose packages the image's base is made of"
    if shutil.which("helm") is None and shutil.which("go") is None:
        return "helm is needed, or Go to build it"
    return ""
