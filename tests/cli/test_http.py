"""A running harvester over HTTP: what Prometheus, a load balancer and a browser see of it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from confluent_kafka import Consumer
from harvester_cli.dashboard.live import status_line
from harvester_cli.dashboard.render import render
from prometheus_client.parser import text_string_to_metric_families
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from harvester.http import web_server
from harvester.http.server import WebServer
from harvester.status import LastEvent, State, Status, adapter
from tests.conftest import MakeTopic
from tests.support.browser import dump_dom
from tests.support.cli import RunningCli
from tests.support.harvesting import Scene, kill_family, log_lines, messages, wait_leads
from tests.support.hooks import Fault
from tests.support.longs import long
from tests.support.proxy import Proxy
from tests.support.servers import Servers
from tests.support.topics import Topics
from tests.support.wait import eventually
from tests.unit.http.test_pages import BUSY, Shown

pytest_plugins = ["tests.support.scenes"]

HTTP = {"listen": "127.0.0.1:0"}


def base_url(running: RunningCli) -> str:
    """Where it says that it serves."""
    return running.wait_for_line(r"serving (http://127\.0\.0\.1:\d+)/")[1]


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metrics(url: str) -> dict[str, float]:
    """By name and the value of the one label, if there is one: `harvester_state.leading`."""
    found = {}
    for family in text_string_to_metric_families(get(f"{url}/metrics")[1]):
        for sample in family.samples:
            found[".".join([sample.name, *sample.labels.values()])] = sample.value
    return found


def total(url: str, name: str) -> float:
    """Over all shards."""
    return sum(value for found, value in metrics(url).items() if found.startswith(f"{name}."))


def test_metrics_of_a_life(scene: Scene) -> None:
    """Published, refused and quarantined records, a shard that died: each is in its figure."""
    scene.plan.add(Fault(error="MSG_SIZE_TOO_LARGE", key="poison", times=10))
    with scene.cli(http=HTTP, max_attempts=2, env=scene.plan.env) as running:
        url = base_url(running)
        wait_leads(running)
        scene.add(*((f"k{number}", "1") for number in range(20)), ("poison", "1"))
        scene.wait_left()
        expected = {
            "harvester_quarantine_records": 1,
            "harvester_quarantined_records_total": 1,
            "harvester_settled_records_total": 21,  # the quarantined one included
            "harvester_latency_seconds_count": 20,
            "harvester_backlog_records": 0,
            "harvester_leader": 1,
            "harvester_state.leading": 1,
            "harvester_term": scene.term(),
            "harvester_shards": 2,
            "harvester_repeats_suspected_total": 0,
        }
        try:
            eventually(lambda: expected.items() <= metrics(url).items(), what="the figures")
        except AssertionError:
            found = metrics(url)
            assert {name: found.get(name) for name in expected} == expected
        shown = json.loads(get(f"{url}/status")[1])
        assert (shown["delivered"], shown["quarantined"]) == (20, 1)
        eventually(lambda: total(url, "harvester_shard_errors_total") >= 1, what="the refused deliveries")

        with scene.plan.blocked("shard.purged") as reached:
            scene.add(("a", "1"))
            reached()  # published and deleted; the supervisor has not heard of it
            os.kill(int((scene.plan.directory / "shard.purged.reached").read_text().split()[0]), signal.SIGKILL)
            eventually(
                lambda: metrics(url)["harvester_repeats_suspected_total"] == 1, what="the repeat that is suspected"
            )
        eventually(lambda: total(url, "harvester_shard_restarts_total") == 1, what="the restart")
        eventually(lambda: metrics(url)["harvester_remarks_total"] >= 1, what="the remark")
        assert running.stop() == 0


def test_health_readiness_and_leadership(scene: Scene) -> None:
    with scene.cli(http=HTTP) as running:
        url = base_url(running)
        assert get(f"{url}/healthz") == (200, "ok\n")  # also while it starts
        wait_leads(running)
        assert get(f"{url}/readyz")[0] == 200
        code, text = get(f"{url}/leader")
        assert (code, json.loads(text)["term"]) == (200, scene.term())
        with scene.cli(http=HTTP, name="second") as standby:
            url = base_url(standby)
            eventually(lambda: get(f"{url}/readyz") == (200, "standby\n"), 60, "a standby that is ready")
            assert get(f"{url}/leader")[0] == 503
            assert get(f"{url}/healthz")[0] == 200
            assert json.loads(get(f"{url}/status")[1])["name"] == "second"
            assert running.stop() == 0
            eventually(lambda: get(f"{url}/leader")[0] == 200, 60, "the standby to lead")
            assert standby.stop() == 0


def is_ready(url: str) -> bool:
    return get(f"{url}/readyz")[0] == 200


def database_of(scene: Scene) -> str:
    """The address of its server."""
    parts = conninfo_to_dict(scene.dsn)
    return f"{parts['host']}:{parts['port']}"


def state_of(url: str) -> str:
    return str(json.loads(get(f"{url}/status")[1])["state"])


def test_it_is_ready_only_while_kafka_answers(scene: Scene) -> None:
    with (
        Proxy(scene.bootstrap, kafka=True) as kafka,
        scene.cli(http=HTTP, base_kafka_config={"bootstrap.servers": kafka.address}) as running,
    ):
        url = base_url(running)
        eventually(lambda: state_of(url) == "standby", what="it to ask for a place in the group")
        code, text = get(f"{url}/readyz")
        assert (code, text.partition(":")[0]) == (503, "standby")
        kafka.open()
        eventually(lambda: is_ready(url) and state_of(url) == "leading", 60, "readiness")
        kafka.cut()
        eventually(lambda: state_of(url) == "fenced", what="the fence")
        assert not is_ready(url)
        eventually(lambda: state_of(url) == "standby", what="the end of its session with the group")
        assert not is_ready(url)
        kafka.open()
        eventually(lambda: is_ready(url), 60, "readiness after the outage")
        assert running.stop() == 0


def test_an_outage_of_both_servers_is_a_few_lines(scene: Scene) -> None:
    said = lines_of_an_outage(
        scene, lambda url: eventually(lambda: state_of(url) == "standby", 60, "the end of its session with the group")
    )
    assert len(said) <= 60, said
    assert sum(text.startswith("database: ") and "recovered" not in text for text in said) <= 6
    assert any(text.startswith("group: ") for text in said)


@long
def test_a_minute_without_both_servers_is_at_most_a_hundred_lines(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    said = lines_of_an_outage(scene, lambda _url: Event().wait(60))
    with capsys.disabled():
        print(f"\nlines logged in an outage of 60 s, with 8 shards, and until all is well: {len(said)}")
        for text in said:
            print(f"  {text}")
    assert len(said) <= 100


def lines_of_an_outage(scene: Scene, lasts: Callable[[str], object]) -> list[str]:
    """What a leader with 8 shards logs while both servers are away, and until it has delivered what came meanwhile."""
    with (
        Proxy(scene.bootstrap, kafka=True) as kafka,
        Proxy(database_of(scene)) as database,
    ):
        kafka.open()
        database.open()
        away: dict[str, Any] = {
            "base_kafka_config": {"bootstrap.servers": kafka.address},
            "data_source": make_conninfo(scene.dsn, host="127.0.0.1", port=database.port),
        }
        with scene.cli(http=HTTP, shards=8, **away) as running:
            url = base_url(running)
            wait_leads(running)
            eventually(lambda: metrics(url)["harvester_shards"] == total(url, "harvester_shard_ready"), 60, "8 shards")
            scene.add(*((f"k{number}", "1") for number in range(100)))
            scene.wait_left()
            before = len(log_lines(running))
            scene.add(*((f"k{number}", "2") for number in range(100)))
            kafka.cut()
            database.cut()
            lasts(url)
            kafka.open()
            database.open()
            running.wait_for_line("database: recovered after ")
            scene.wait_left(timeout_s=90)
            assert running.stop() == 0
    return [line["message"] for line in log_lines(running)[before:]]


def test_a_standby_is_ready_while_both_servers_answer(scene: Scene) -> None:
    with scene.cli() as leader, Proxy(scene.bootstrap, kafka=True) as kafka, Proxy(database_of(scene)) as database:
        wait_leads(leader)
        kafka.open()
        database.open()
        away: dict[str, Any] = {
            "base_kafka_config": {"bootstrap.servers": kafka.address},
            "data_source": make_conninfo(scene.dsn, host="127.0.0.1", port=database.port),
        }
        with scene.cli(http=HTTP, name="standby", **away) as standby:
            url = base_url(standby)
            for server, what in ((kafka, "group"), (database, "database")):
                eventually(lambda: get(f"{url}/readyz") == (200, "standby\n"), 60, "readiness")
                server.cut()
                eventually(lambda: not is_ready(url), what="an outage that shows")
                assert what in get(f"{url}/readyz")[1]
                assert get(f"{url}/healthz")[0] == 200
                server.open()
            eventually(lambda: is_ready(url), 60, "readiness")
            assert standby.stop() == 0
        assert leader.stop() == 0


def test_who_waits_for_a_dead_member_says_so_and_until_when(scene: Scene) -> None:
    with scene.cli(session_timeout="12s") as killed:
        wait_leads(killed)
        kill_family(killed.pid)
    with scene.cli(http=HTTP, session_timeout="12s") as running:
        url = base_url(running)

        def shown() -> Status:
            status: Status = adapter(Status).validate_json(get(f"{url}/status")[1])
            return status

        def waiting_shown() -> Status | None:
            status = shown()
            return status if status.waits_until_at is not None else None

        waiting = eventually(waiting_shown, what="the wait for the dead one")
        assert waiting is not None
        assert waiting.waits_until_at is not None
        assert 0 <= (waiting.waits_until_at - waiting.at).total_seconds() <= 12
        assert scene.group in (waiting.waits_for or "")
        drawn = render(waiting, 80, 24).plain.split("\n")
        assert drawn[2].startswith(f"until {waiting.waits_until_at:%H:%M:%S} UTC at the latest: joins group")
        leader_id, term = wait_leads(running)
        eventually(lambda: shown().state is State.LEADING, what="the leader")
        assert shown().waits_for is None
        assert shown().waits_until_at is None
        assert shown().events[-1].text == f"leads under term {term} as {leader_id[:8]}"
        assert running.stop() == 0


def test_a_standby_says_that_it_waits_for_a_leader_that_died_beside_it(scene: Scene) -> None:
    """Nothing tells it before the group gives up the dead one's session; until then it is a member, and ready."""
    times: dict[str, Any] = {"session_timeout": "12s", "heartbeat_timeout": "2s"}
    with ExitStack() as stack:
        leader = stack.enter_context(scene.cli(**times))
        wait_leads(leader)
        running = stack.enter_context(scene.cli(name="standby", http=HTTP, **times))
        url = base_url(running)
        eventually(lambda: get(f"{url}/readyz") == (200, "standby\n"), what="a standby of the group")

        def shown() -> Status:
            status: Status = adapter(Status).validate_json(get(f"{url}/status")[1])
            return status

        assert shown().waits_for is None
        kill_family(leader.pid)
        eventually(lambda: shown().waits_for is not None, what="the wait for the dead one")
        waiting, (code, text) = shown(), get(f"{url}/readyz")
        assert waiting.waits_until_at is not None
        until = f"until {waiting.waits_until_at:%H:%M:%S} UTC at the latest: the leader is silent; group {scene.group}"
        assert (code, text.startswith("standby: until ")) == (200, True)
        assert "at the latest: the leader is silent" in text
        assert render(waiting, 80, 24).plain.split("\n")[2].startswith(until[:70])
        assert re.search('waits_for="the leader is silent.*" waits_until=', status_line(waiting))
        wait_leads(running)
        assert datetime.now(UTC) < waiting.waits_until_at + timedelta(seconds=3)
        eventually(lambda: shown().state is State.LEADING, what="the leader")
        assert (shown().waits_for, get(f"{url}/readyz")) == (None, (200, "leading\n"))
        assert running.stop() == 0


def test_it_is_not_ready_while_it_drains(scene: Scene) -> None:
    with scene.cli(http=HTTP, env=scene.plan.env) as running:
        url = base_url(running)
        wait_leads(running)
        with scene.plan.blocked("shard.purged") as reached:
            scene.add(("a", "1"))
            reached()
            assert is_ready(url)
            running.process.send_signal(signal.SIGTERM)
            drains = (503, "draining: neither leads nor could take over\n")
            eventually(lambda: get(f"{url}/readyz") == drains, what="the drain")
            assert get(f"{url}/healthz")[0] == 200
        assert running.wait() == 0


def test_it_is_not_ready_while_others_have_its_group(scene: Scene) -> None:
    """Members with another assignor: Kafka lets nobody in whose assignor they do not know."""
    others = Consumer(
        {"bootstrap.servers": scene.bootstrap, "group.id": scene.group, "partition.assignment.strategy": "range"}
    )
    try:
        others.subscribe([scene.topic])
        eventually(lambda: others.poll(0.1) or others.assignment(), 60, "the group to be theirs")
        with scene.cli(http=HTTP) as running:
            url = base_url(running)
            refused = (503, "standby: group: leader topic: JoinGroup failed: Broker: Inconsistent group protocol\n")
            eventually(lambda: get(f"{url}/readyz") == refused, 60, "the refusal")
            others.close()
            eventually(lambda: is_ready(url), 60, "readiness")
            assert running.stop() == 0
    finally:
        others.close()


def test_it_is_not_ready_while_the_leader_topic_takes_no_heartbeat(
    scene: Scene, servers: Servers, make_topic: MakeTopic
) -> None:
    """The page, the status and the log say so; it is ready without a restart when the topic takes them."""
    topic = make_topic(partitions=1, config={"max.message.bytes": "100"})
    refused = f"the leader topic {topic!r} accepts no heartbeats, so nobody can lead: "
    with scene.cli(http=HTTP, leader_topic=topic) as running:
        url = base_url(running)
        eventually(lambda: refused in get(f"{url}/readyz")[1], 60, "the refusal")
        assert not is_ready(url)
        eventually(lambda: refused in (json.loads(get(f"{url}/status")[1])["problem"] or ""), what="the status")
        assert [line for line in messages(running) if refused in line]
        Topics(servers).configure(topic, "max.message.bytes", "1000000")
        eventually(lambda: is_ready(url), 60, "readiness")
        assert running.stop() == 0


def test_a_database_that_is_away_is_no_reason_to_restart(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    away = f"host=127.0.0.1 port={port} user=nobody dbname=nothing"
    with scene.cli(http=HTTP, data_source=away) as running:
        url = base_url(running)
        eventually(lambda: metrics(url)["harvester_trouble.database"] == 1, what="the trouble")
        assert metrics(url)["harvester_troubles_total.database"] >= 1
        assert get(f"{url}/healthz")[0] == 200
        code, text = get(f"{url}/readyz")
        assert code == 503
        assert text.startswith("starting: database: ")
        assert running.stop() == 0


def test_clients_that_are_stuck_do_not_hold_up_the_relay(scene: Scene) -> None:
    with scene.cli(http=HTTP) as running, ExitStack() as stuck:
        address = base_url(running).removeprefix("http://").split(":")
        wait_leads(running)
        for _ in range(3 * WebServer.most_clients):
            client = stuck.enter_context(socket.create_connection((address[0], int(address[1]))))
            client.sendall(b"GET /metrics HTTP/1.0\r\n")
        scene.add(*((f"k{number}", "1") for number in range(50)))
        scene.wait_left()
        assert get(f"http://{':'.join(address)}/healthz")[0] == 200  # nor the probe of a service manager
        assert running.stop() == 0  # nor its end


def test_a_taken_port_is_named_and_the_relay_goes_on(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with scene.cli(http={"listen": listen}) as running:
            running.wait_for_line(f"http: cannot listen on {re.escape(listen)}: Address already in use")
            wait_leads(running)
            scene.add(("a", "1"))
            scene.wait_left()
            assert running.stop() == 0


class _Texts(HTMLParser):
    """Text by the id of the element around it, and what is loaded."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.by_id: dict[str, str] = {}
        self.loaded: list[str] = []
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "link", "img", "iframe"):
            self.loaded.append(values.get("src") or values.get("href") or "")
        if tag not in ("meta", "link", "br", "img"):
            self._open.append(values.get("id") or "")

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in filter(None, self._open):
            self.by_id[element] = self.by_id.get(element, "") + data + "|"


@pytest.mark.timeout(300)
def test_the_page_in_a_browser(scene: Scene, tmp_path: Path) -> None:
    with scene.cli(http=HTTP) as running:
        url = base_url(running)
        wait_leads(running)
        scene.add(*((f"k{number}", "1") for number in range(30)))
        scene.wait_left()
        eventually(lambda: json.loads(get(f"{url}/status")[1])["delivered"] == 30, what="30 delivered")
        page = _Texts(dump_dom(f"{url}/", tmp_path))
        assert running.stop() == 0
    assert page.by_id["name"] == "test|"
    assert page.by_id["state"] == "leading|"
    assert "delivered|30|" in page.by_id["figures"]
    assert f"term|{scene.term()}|" in page.by_id["figures"]
    assert "in quarantine|0|" in page.by_id["figures"]
    assert page.by_id["shards"].count("ready") == 2
    assert f"leads under term {scene.term()} as" in page.by_id["events"]
    assert "problem" not in page.by_id
    assert page.loaded == ["data:,", "status.css", "status.js"]  # nothing from elsewhere


def test_the_page_of_a_standby_shows_what_it_waits_for(tmp_path: Path) -> None:
    at = datetime(2026, 3, 14, 15, 9, 26, tzinfo=UTC)
    waiting = replace(BUSY, state=State.STANDBY, problem=None, waits_for="the leader is silent", waits_until_at=at)
    source = Shown(waiting)
    server = web_server("127.0.0.1:0", source, lambda _text: None, lambda *_: None)
    server.start()
    try:
        assert server.listening.wait(30)
        page = _Texts(dump_dom(f"http://{server.address}/", tmp_path))
    finally:
        server.stop()
    assert page.by_id["waits"] == "until 15:09:26 UTC at the latest: the leader is silent|"


def test_the_page_of_a_harvester_that_does_not_answer_any_more_shows_nothing_stale(tmp_path: Path) -> None:
    class Ending(Shown):
        """Answers once."""

        def status(self) -> Status:
            if asked.is_set():
                raise OSError("gone")
            asked.set()
            return super().status()

    asked = Event()
    server = web_server("127.0.0.1:0", Ending(BUSY), lambda _text: None, lambda *_: None)
    server.start()
    try:
        assert server.listening.wait(30)
        html = dump_dom(f"http://{server.address}/", tmp_path, budget_ms=3_500, may_fail=True)
    finally:
        server.stop()
    page = _Texts(html)
    assert page.by_id["name"] == f"{BUSY.name}|"
    assert page.by_id["state"] == "no answer|"
    assert "at" not in page.by_id
    assert f"<title>no answer · {BUSY.name}</title>" in html


MARKUP = '<img src=x onerror="alert(1)"> <b>'


class Counting(Shown):
    """Has delivered one more at each look; its texts are markup."""

    looks = 0

    def status(self) -> Status:
        self.looks += 1
        events = (LastEvent(BUSY.at, MARKUP),)
        return replace(BUSY, delivered=1_000 + self.looks, outbox=MARKUP, problem=MARKUP, events=events)


@pytest.mark.timeout(300)
def test_the_page_is_live_and_takes_texts_for_texts(tmp_path: Path) -> None:
    """Each look shows the figures of its moment; markup in a text stays text."""
    source = Counting()
    server = web_server("127.0.0.1:0", source, lambda _text: None, lambda _text: None)
    server.start()
    try:
        assert server.listening.wait(30)
        page = _Texts(dump_dom(f"http://{server.address}/", tmp_path, budget_ms=5_500))
    finally:
        server.stop()
    shown = re.search(r"delivered\|1,(\d+)\|", page.by_id["figures"])
    assert shown is not None
    assert 3 <= int(shown[1]) <= source.looks
    for place in ("problem", "where", "events"):
        assert MARKUP in page.by_id[place]
    assert page.loaded == ["data:,", "status.css", "status.js"]
