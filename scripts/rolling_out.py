"""`scripts/rollout`: the rolling update of the plain manifests, with processes (or containers of the image) for pods.

What a pod runs, when it is ready, what happens before it is stopped and how long it may take is read from the manifest;
this module does what the Deployment controller and the kubelet do with it. While four sessions write, every pod is
replaced by one of another template, one after the other: a new pod first (`maxSurge`), an old one stopped when that has
been ready for `minReadySeconds`. Then a rollout begins whose pods cannot reach Kafka: it must stop at its first pod,
and the old ones must go on. `verify` compares what was committed with what Kafka holds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from confluent_kafka import Consumer, TopicPartition

from harvester import stack
from harvester.stack.stack import free_ports
from scripts.contained import Container, Image, built, container
from scripts.smoke_parts import Broken, Outbox, Servers, outbox, run, running

ROOT = Path(__file__).parents[1]
MANIFEST = ROOT / "deploy" / "kubernetes" / "harvester.yaml"
_NOWHERE = "127.0.0.1:9"  # discard: nobody listens
_STUCK_S = 12.0  # how long the broken rollout is watched, many times what a good pod takes to become ready


@dataclass(frozen=True, slots=True)
class Template:
    """What a Deployment says of its pods."""

    replicas: int
    min_ready_s: float
    arguments: tuple[str, ...]
    pre_stop: tuple[str, ...]
    grace_s: float
    ready_path: str
    ready_period_s: float
    ready_failures: int
    environment: dict[str, str]

    @classmethod
    def read(cls, text: str) -> Template:
        """The one Deployment among these manifests, whose surge is one pod and of which none may be missing."""
        (spec,) = [each["spec"] for each in yaml.safe_load_all(text) if each and each["kind"] == "Deployment"]
        if spec["strategy"]["rollingUpdate"] != {"maxSurge": 1, "maxUnavailable": 0}:
            raise Broken("a rollout of another kind than this script plays")
        pod = spec["template"]["spec"]
        (main,) = pod["containers"]
        probe = main["readinessProbe"]
        hook = main.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        return cls(
            spec["replicas"],
            spec["minReadySeconds"],
            tuple(main["args"]),
            tuple(hook),
            pod["terminationGracePeriodSeconds"],
            probe["httpGet"]["path"],
            probe["periodSeconds"],
            probe["failureThreshold"],
            {each["name"]: each["value"] for each in main["env"] if "value" in each},
        )


@dataclass(slots=True)
class Pod:
    """A process that stands in for one. `process` 1 is that of the container, or the harvester itself."""

    name: str
    port: int
    stop_with: Callable[[], None]
    process: subprocess.Popen[bytes]
    container: Container | None = None
    ready: bool = False
    began: float = field(default_factory=time.monotonic)
    took_to_ready_s: float = 0.0


class Cluster:
    """The Deployment controller and the kubelet, as far as a rollout goes.

    `secrets` are variables that the manifest takes from Secrets; only containers are given any.
    """

    def __init__(
        self,
        template: Template,
        servers: Servers,
        image: Image | None,
        stack_: ExitStack,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        self.template, self.servers, self.image = template, servers, image
        self.environment = {**template.environment, **(secrets or {})}
        self.pods: list[Pod] = []
        self._numbers = itertools.count(1)
        self._stack = stack_

    def start(self, config: Path) -> Pod:
        (port,) = free_ports(1, [])
        name = f"harvester-{next(self._numbers)}"
        arguments = [each.replace("$(POD_NAME)", name) for each in self.template.arguments]
        # All pods have one network here, so each has a port of its own.
        arguments = [f"http.listen=127.0.0.1:{port}" if each.startswith("http.listen=") else each for each in arguments]
        log = self.servers.place / f"{name}.log"
        if self.image is not None:
            made = self._stack.enter_context(
                container(
                    self.image,
                    log,
                    *arguments,
                    mounts={config: "/etc/harvester/harvester.toml"},
                    environment=self.environment,
                )
            )
            pod = Pod(name, port, lambda: os.kill(made.first, signal.SIGTERM), made.process, made)
        else:
            process = self._stack.enter_context(_process(self.servers, config, log, name, arguments))
            pod = Pod(name, port, lambda: process.send_signal(signal.SIGTERM), process)
        self.pods.append(pod)
        return pod

    def probe(self, pod: Pod) -> bool:
        """Asked once, as the readiness probe asks."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{pod.port}{self.template.ready_path}", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def wait_ready(self, pod: Pod, timeout_s: float) -> bool:
        """Probes until it has been ready for `minReadySeconds`; False when the time is up or it ends."""
        deadline = time.monotonic() + timeout_s
        since: float | None = None
        while time.monotonic() < deadline:
            if pod.process.poll() is not None:
                return False
            if not self.probe(pod):
                since = None
            elif since is None:
                since = time.monotonic()
                pod.took_to_ready_s = since - pod.began
            if since is not None and time.monotonic() - since >= self.template.min_ready_s:
                pod.ready = True
                return True
            time.sleep(min(self.template.ready_period_s, 0.5))
        return False

    def stop(self, pod: Pod) -> float:
        """The hook, SIGTERM, and how long it took; Broken where the grace period ends first, or it did not end well."""
        began = time.monotonic()
        if self.template.pre_stop:
            subprocess.run(self.template.pre_stop, check=True)
        pod.stop_with()
        try:
            code = pod.process.wait(self.template.grace_s - (time.monotonic() - began))
        except subprocess.TimeoutExpired:
            raise Broken(f"{pod.name} was not done within its grace period") from None
        if code:
            raise Broken(f"{pod.name} ended with exit code {code}")
        self.pods.remove(pod)
        return time.monotonic() - began

    def roll_out(self, config: Path, timeout_s: float) -> list[float]:
        """Replace all pods; how long each old one took to stop. Broken at the first new pod that does not get ready."""
        took = []
        for old in list(self.pods):
            new = self.start(config)
            if not self.wait_ready(new, timeout_s):
                raise Broken(f"{new.name} does not become ready")
            took.append(self.stop(old))
        return took


@contextmanager
def _process(
    servers: Servers, config: Path, log: Path, name: str, arguments: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    control = servers.place / "control" / name
    environment = {**os.environ, "RUNTIME_DIRECTORY": str(control), "HARVESTER_CONFIG": str(config)}
    with log.open("ab") as file:
        process = subprocess.Popen(
            [servers.python, "-m", "harvester_cli", *arguments],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=servers.place, env=environment,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def longest_pause_ms(servers: Servers, topic: str) -> int:
    """The longest time between two records of the topic, by the times at which they were handed to a producer."""
    consumer = Consumer({"bootstrap.servers": servers.bootstrap, "broker.address.family": "v4", "group.id": "pauses"})
    times: list[int] = []
    try:
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        ends = {number: consumer.get_watermark_offsets(TopicPartition(topic, number))[1] for number in partitions}
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        while len(times) < sum(ends.values()):
            records = consumer.consume(5000, timeout=5)
            if not records:
                break
            times += [record.timestamp()[1] for record in records if not record.error()]
    finally:
        consumer.close()
    times.sort()
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0)


def play(servers: Servers, image: Image | None, rate: int, seconds: int, min_ready_s: float | None) -> dict[str, Any]:
    """Both rollouts under load; the figures. Broken where something does not go as it should."""
    template = Template.read(MANIFEST.read_text())
    if min_ready_s is not None:
        template = Template(**{**_fields(template), "min_ready_s": min_ready_s})
    with ExitStack() as everything, outbox(servers, "rollout") as made:
        config, changed, broken = (_configuration(servers, made.name, kind) for kind in ("old", "new", "broken"))
        run(servers, config, "init", "--notify")
        cluster = Cluster(template, servers, image, everything)
        for _ in range(template.replicas):
            if not cluster.wait_ready(cluster.start(config), 90):
                raise Broken("the first pods do not become ready")
        records = rate * seconds
        load = ("--topic", made.name, "--records", str(records), "--rate", str(rate), "--keys", "100", "--late", "0.02")
        with running(servers, config, "pump", *load) as pump:
            _until(lambda: made.gone() > rate, 60, "records flow")
            began = time.monotonic()
            stops = cluster.roll_out(changed, 90)
            took = time.monotonic() - began
            if pump.poll() is not None:
                raise Broken("the load ended before the rollout did: give it more --seconds")
            stuck = _stuck(cluster, broken, made)
            pump.wait(seconds + 120)
        _until(lambda: not made.rows(), 60, "the outbox is empty")
        ready = max(pod.took_to_ready_s for pod in cluster.pods)
        for pod in list(cluster.pods):
            cluster.stop(pod)
        said = json.loads(run(servers, config, "verify", "--topic", made.name, "--json", ends=None))
        return {
            "pods": "image" if image else "processes",
            "records": said["inserted"],
            "rate_per_s": rate,
            "lost": said["lost"],
            "repeated": said["duplicates"],
            "out_of_order": said["order_violations"],
            "rollout_s": round(took, 1),
            "to_ready_s": round(ready, 1),
            "stops_s": [round(each, 1) for each in stops],
            "longest_pause_ms": longest_pause_ms(servers, made.name),
            "broken_rollout_stopped": stuck,
        }


def _stuck(cluster: Cluster, broken: Path, made: Outbox) -> bool:
    """A rollout that cannot work: its first pod does not become ready, and those that were there go on."""
    before, gone = list(cluster.pods), made.gone()
    new = cluster.start(broken)
    if cluster.wait_ready(new, _STUCK_S):
        raise Broken("a pod without Kafka became ready")
    if not all(cluster.probe(pod) for pod in before):
        raise Broken("a broken rollout reached the pods that were there")
    _until(lambda: made.gone() > gone, 30, "records flow beside the broken rollout")
    cluster.pods.remove(new)
    (new.container or new.process).kill()
    return True


def _fields(template: Template) -> dict[str, Any]:
    return {name: getattr(template, name) for name in template.__slots__}


def _configuration(servers: Servers, name: str, kind: str) -> Path:
    """The same with another setting, as the checksum of a changed ConfigMap would start a rollout; or without Kafka."""
    import psycopg

    bootstrap = _NOWHERE if kind == "broken" else servers.bootstrap
    lines = [
        f"data_source = {json.dumps(psycopg.conninfo.make_conninfo(servers.dsn, dbname=name))}",
        f"leader_group_id = {json.dumps(name)}",
        "[base_kafka_config]",
        f'"bootstrap.servers" = {json.dumps(bootstrap)}',
        '"broker.address.family" = "v4"',
        "[limits]",
        f"shards = {4 if kind == 'new' else 2}",
    ]
    file = servers.place / f"{kind}.toml"
    file.write_text("\n".join(lines) + "\n")
    file.chmod(0o644)
    return file


def _until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise Broken(f"after {timeout_s:g} s it is not so that {what}")
        time.sleep(0.05)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing was lost or repeated, and the broken rollout stopped."""
    parser = argparse.ArgumentParser(prog="scripts/rollout", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=int, default=300, help="records per second [300]")
    parser.add_argument("--seconds", type=int, default=90, help="how long records are written [90]")
    parser.add_argument("--min-ready", type=float, help="instead of the manifest's minReadySeconds")
    parser.add_argument("--image", action="store_true", help="pods are containers of the image of scripts/image")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="harvester-rollout-") as scratch:
        place = Path(scratch)
        place.chmod(0o755)
        image = built() if given.image else None
        info = stack.up(place / "stack", stack.StackOptions(durable=False, kafka_heap_mb=512))
        try:
            servers = Servers(info.dsn, info.bootstrap, "", "", Path(sys.executable), place)
            found = play(servers, image, given.rate, given.seconds, given.min_ready)
        except Broken as error:
            for log in sorted(place.glob("harvester-*.log")):
                print(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}", file=sys.stderr)
            print(f"rollout: {error}", file=sys.stderr)
            return 1
        finally:
            stack.down(place / "stack", delete=True)
    print(json.dumps(found))
    return 1 if found["lost"] or found["repeated"] or found["out_of_order"] else 0


if __name__ == "__main__":
    sys.exit(main())
