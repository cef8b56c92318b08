"""The Spark session of a job: its settings, its connectors, and clear errors for what cannot work."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from harvester.errors import StackError
from harvester.pipeline.errors import ConnectorMismatch, PipelineError, SparkUnavailable
from harvester.stack import java
from harvester.stack.processes import run

if TYPE_CHECKING:
    from pyspark import StorageLevel
    from pyspark.sql import DataFrame, SparkSession

JARS = "HARVESTER_SPARK_JARS"
_PYTHON = "spark.pyspark.python"
_GATEWAY = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit: the port of its Java process."""
_DEFAULT = re.compile(r"\s*([^\s=:#!][^\s=:]*)\s*[=:]?\s*(.*)")  # a line of java.util.Properties
# Spark ships these: a second copy in another version would take precedence.
OF_SPARK = ("org.apache.hadoop", "org.scala-lang", "org.slf4j", "org.lz4", "org.xerial.snappy", "org.antlr")


_SCALA = "2.13"
_VERSION = re.compile(r"(\d+)\.(\d+)\.\d+")
_KAFKA = re.compile(r"spark-sql-kafka-0-10_(\d+\.\d+)[-:](\d+\.\d+\.\d+)")
_AVRO = re.compile(r"spark-avro_(\d+\.\d+)[-:](\d+\.\d+\.\d+)")
_DELTA_JAR = re.compile(r"delta-spark(?:_(\d+\.\d+))?_(\d+\.\d+)[-:](\d+\.\d+)")
FORMAT = "spark.harvester.format"
"""The table format: DELTA, the default, or ICEBERG. A setting that Spark itself does not know."""
DELTA, ICEBERG = "delta", "iceberg"
AVRO = "spark.harvester.avro"
"""`true` adds Spark's connector for Avro. Another setting that Spark itself does not know."""


@dataclass(frozen=True, slots=True)
class Coordinate:
    group: str
    artifact: str
    version: str

    def __str__(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"


_POSTGRES = Coordinate("org.postgresql", "postgresql", "42.7.8")
# Each is built for one minor version of Spark. Delta's artifacts name it since 4.1. https://docs.delta.io/releases
_DELTA = {
    (4, 0): Coordinate("io.delta", f"delta-spark_{_SCALA}", "4.0.0"),
    (4, 1): Coordinate("io.delta", f"delta-spark_4.1_{_SCALA}", "4.1.0"),
}
_ICEBERG = {(4, 0): Coordinate("org.apache.iceberg", f"iceberg-spark-runtime-4.0_{_SCALA}", "1.10.0")}


def connectors(pyspark_version: str, format_: str = DELTA, *, avro: bool = False) -> tuple[Coordinate, ...]:
    """Kafka source, Delta Lake, PostgreSQL driver, for the format ICEBERG also Iceberg, and Avro, for this PySpark.

    Raises ConnectorMismatch if one does not exist for it.
    """
    found = [_kafka(pyspark_version), _built("Delta Lake", _DELTA, pyspark_version), _POSTGRES]
    found += [_built("Iceberg", _ICEBERG, pyspark_version)] if format_ == ICEBERG else []
    found += [_of_spark("spark-avro", pyspark_version)] if avro else []
    return tuple(found)


def check_connectors(pyspark_version: str, jars: Iterable[str]) -> None:
    """Raises ConnectorMismatch if one of these jars (paths or coordinates) was built for another Spark or Scala.

    Checks only our connectors; other jars are the user's responsibility.
    """
    kafka, delta, _ = connectors(pyspark_version)
    major, minor, _ = kafka.version.split(".")
    for jar in jars:
        if found := _KAFKA.search(jar):
            fits, expected = found.groups() == (_SCALA, kafka.version), kafka
        elif found := _AVRO.search(jar):
            expected = _of_spark("spark-avro", pyspark_version)
            fits = found.groups() == (_SCALA, expected.version)
        elif found := _DELTA_JAR.search(jar):
            spark, scala, line = found.groups()
            # If the name does not contain Spark's version, Delta's own version equals it.
            fits, expected = scala == _SCALA and (spark or line) == f"{major}.{minor}", delta
        else:
            continue
        if not fits:
            raise ConnectorMismatch(
                f"{jar.rsplit('/', 1)[-1]} was not built for PySpark {pyspark_version}",
                hint=f"it needs {expected}; name no connectors to have the right ones downloaded",
            )


def _kafka(version: str) -> Coordinate:
    return _of_spark("spark-sql-kafka-0-10", version)


def _of_spark(name: str, version: str) -> Coordinate:
    found = _VERSION.match(version)  # 4.1.0.dev3 uses the connectors of 4.1.0
    if found is None:
        raise ConnectorMismatch(f"PySpark reports the version {version!r}, which is not a version of Spark")
    return Coordinate("org.apache.spark", f"{name}_{_SCALA}", found[0])


def _built(name: str, known_ones: Mapping[tuple[int, int], Coordinate], version: str) -> Coordinate:
    major, minor, _ = _kafka(version).version.split(".")
    try:
        return known_ones[int(major), int(minor)]
    except KeyError:
        known = ", ".join(f"{major}.{minor}" for major, minor in sorted(known_ones))
        raise ConnectorMismatch(
            f"no {name} is known for PySpark {version}, only for {known}",
            hint=f"pip install 'pyspark=={known.split(', ')[-1]}.*'",
        ) from None


def connector_jars(
    pyspark_version: str, format_: str = DELTA, *, avro: bool = False, progress: Callable[[str], None] = lambda _: None
) -> list[Path]:
    """The jars of the `connectors` and their dependencies; downloads them once (20 MB, with Iceberg 65 MB).

    $HARVESTER_SPARK_JARS overrides them with a directory of jars. Raises ConnectorMismatch, SparkUnavailable,
    StackError.
    """
    if given := os.environ.get(JARS):
        jars = sorted(Path(given).absolute().glob("*.jar"))
        if not any("spark-sql-kafka" in jar.name for jar in jars):
            raise SparkUnavailable(
                f"{JARS}={given}: no Kafka connector for Spark in this directory",
                hint="set it to a directory that contains the connectors' jars, or unset it",
            )
        check_connectors(pyspark_version, (jar.name for jar in jars))
        return jars
    wanted = connectors(pyspark_version, format_)
    home = java.cached_jars(
        "spark-" + "-".join((pyspark_version, *(coordinate.version for coordinate in wanted[1:]))),
        lambda directory: resolve(wanted, directory),
        announce=lambda: progress(f"downloading the connectors for Spark {pyspark_version} (once)"),
    )
    found = sorted(home.glob("*.jar"))
    if avro:
        # In a directory of its own, so that what is there need not be downloaded again for it.
        connector = _of_spark("spark-avro", pyspark_version)
        home = java.cached_jars(
            f"spark-avro-{connector.version}",
            lambda directory: resolve([connector], directory, (*OF_SPARK, *_WITH_KAFKA)),
            announce=lambda: progress(f"downloading the connector for Avro for Spark {pyspark_version} (once)"),
        )
        found += sorted(home.glob("*.jar"))
    return found


# What the connector for Avro needs is in Spark, or comes with the one for Kafka.
_WITH_KAFKA = (f"org.apache.spark:spark-tags_{_SCALA}", "org.scala-lang.modules", "org.tukaani")


def resolve(wanted: Iterable[Coordinate], directory: Path, without: Iterable[str] = OF_SPARK) -> None:
    """Downloads artifacts and their dependencies with PySpark's Apache Ivy, as `spark-submit --packages` does.

    `without`: groups, or modules GROUP:ARTIFACT, to exclude.
    """
    # Located without importing pyspark, which would take half a second.
    found = importlib.util.find_spec("pyspark")
    jars = Path(found.origin).parent / "jars" if found is not None and found.origin is not None else Path()
    ivy = next(iter(sorted(jars.glob("ivy-*.jar"))), None)
    if ivy is None:
        raise StackError(
            "Apache Ivy, which downloads the connectors for Spark, is not installed",
            hint="pip install 'outbox-harvester[spark]'",
        )
    runtime = java.find()
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="ivy-") as scratch:
        work = Path(scratch)
        (work / "ivy.xml").write_text(_module(wanted, without))
        command = [
            str(runtime.program),
            *java.trust_options(runtime, work),
            "-jar",
            str(ivy),
            *("-ivy", str(work / "ivy.xml")),
            *("-cache", str(work / "cache")),
            *("-retrieve", str(directory / "[artifact]-[revision](-[classifier]).[ext]")),
            *("-confs", "default"),
            *("-types", "jar", "bundle"),
        ]
        try:
            run(command, what="downloading the connectors for Spark", timeout_s=600.0)
        except StackError as error:
            raise StackError(
                error.message,
                hint=f"it needs network access once; or set {JARS} to a directory of jars that you already have",
            ) from error


def _module(wanted: Iterable[Coordinate], without: Iterable[str]) -> str:
    lines = [
        f'    <dependency org="{one.group}" name="{one.artifact}" rev="{one.version}" conf="default->default"/>'
        for one in wanted
    ]
    for group, _, artifact in (one.partition(":") for one in without):
        lines.append(f'    <exclude org="{group}" module="{artifact or "*"}"/>')
    return (
        '<ivy-module version="2.0">\n'
        '  <info organisation="harvester" module="connectors"/>\n'
        '  <configurations><conf name="default"/></configurations>\n'
        "  <dependencies>\n" + "\n".join(lines) + "\n  </dependencies>\n</ivy-module>\n"
    )


NEWEST_JAVA = 21
"""Spark 4 runs on 17 and 21; from 24 on, Hadoop's login fails without the removed security manager."""

_EXTENSIONS, _DELTA_EXTENSION = "spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension"
_NEEDED = {
    "spark.sql.session.timeZone": "UTC",  # days and displayed times are the same on every machine
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
# Nearly all values of these columns differ: looking for equal ones takes a tenth of the time for writing.
_UNALIKE = ("value", "headers.list.element.value", "id", "offset", "sequence", "created_us", "created_at", "timestamp")
_USUAL = {
    # A user's own catalog, such as Unity's, also supports Delta.
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.adaptive.enabled": "true",
    # A batch of the lake uses more than the 100 pieces of compiled code that Spark keeps by default. Evicted before
    # their reuse, all would be compiled again in every batch, which would take a third of the time.
    "spark.sql.codegen.cache.maxEntries": "2000",
    # The log of a lake's table is small: Delta's default of 50 tasks to read it would take longer than reading it.
    "spark.databricks.delta.snapshotPartitions": "4",
    # Each commit would also write a list of its table's files, which nothing reads; and in time zones other than UTC,
    # Delta would read the whole log again to compare it with that list.
    "spark.databricks.delta.allFilesInCrc.enabled": "false",
    # A task writes the files of a few days concurrently; otherwise it would first sort its records by day.
    "spark.sql.maxConcurrentOutputFileWriters": "16",
    # Compaction skips files of this size. With Delta's 1 GB it would rewrite a day's records again and again.
    "spark.databricks.delta.optimize.minFileSize": str(64 * 2**20),
    "spark.databricks.delta.optimize.maxFileSize": str(256 * 2**20),
    **{f"spark.hadoop.parquet.enable.dictionary#{column}": "false" for column in _UNALIKE},
}
# Avro allocates whatever length a value claims to have. Without limits, one such value would end the Java process with
# an OutOfMemoryError, at each start again. No record that Kafka takes has strings as large.
_AVRO_LIMITS = {
    "org.apache.avro.limits.string.maxLength": 64 * 2**20,
    "org.apache.avro.limits.bytes.maxLength": 64 * 2**20,
    "org.apache.avro.limits.collectionItems.maxLength": 16 * 2**20,
}
_OF_EXECUTORS = "spark.executor.defaultJavaOptions"
"""Options that Spark puts before those of `spark.executor.extraJavaOptions`: of two, Java takes the latter."""
_GOES_ON = "nothing is lost: after a restart it continues where it stopped"


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The settings of a session. `master`: as for spark-submit; None: the submitted one, or else local[*].

    `conf` overrides the settings that Spark got elsewhere (`given_elsewhere`); both override our defaults, except
    what the jobs need. `log_level` applies to Spark's own log, which reports each failure with a stack trace.
    """

    name: str
    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    log_level: str = "FATAL"


def spark_version() -> str:
    """The version of the installed PySpark, found without importing it. Raises SparkUnavailable if there is none."""
    if importlib.util.find_spec("pyspark") is None:
        raise SparkUnavailable("the pipeline needs Apache Spark", hint="pip install 'outbox-harvester[spark]'")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pyspark")
    except PackageNotFoundError:
        import pyspark  # a cluster's own Spark on PYTHONPATH, without metadata

        return str(pyspark.__version__)


def given_elsewhere() -> dict[str, str]:
    """The settings given to spark-submit, if it started this process, or else those of spark-defaults.conf.

    {} if that file does not exist.
    """
    if _GATEWAY in os.environ:
        from pyspark import SparkConf, SparkContext

        SparkContext._ensure_initialized()  # connects to the Java process of spark-submit
        return dict(SparkConf().getAll())
    # Located as spark-submit does, which PySpark runs to start a Java process.
    from pyspark.find_spark_home import _find_spark_home

    directory = os.environ.get("SPARK_CONF_DIR") or f"{_find_spark_home()}/conf"  # type: ignore[no-untyped-call]
    try:
        text = Path(directory, "spark-defaults.conf").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return {line[1]: line[2].rstrip() for line in map(_DEFAULT.match, lines) if line is not None}


def options(
    settings: SessionSettings,
    pyspark_version: str,
    progress: Callable[[str], None],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """All settings for the session's builder. Checks the connectors that the user names, or adds ours.

    Settings given `elsewhere` are kept, except those that the jobs need. Under spark-submit the Java process already
    runs, with the jars given there.
    """
    given = {**elsewhere, **settings.conf}
    named = [*_listed(settings.conf, "spark.jars"), *_listed(settings.conf, "spark.jars.packages")]
    check_connectors(pyspark_version, named)
    usual = {**_USUAL, **_sized(settings.master or given.get("spark.master", "local[*]"))}
    left = {name: value for name, value in usual.items() if name not in elsewhere}
    merged = {**left, **settings.conf, **_NEEDED}
    if not any("spark-sql-kafka" in name for name in named) and _GATEWAY not in os.environ:
        is_theirs = any("iceberg-spark-runtime" in name for name in named)
        format_ = DELTA if is_theirs else given.get(FORMAT, DELTA)
        avro = given.get(AVRO) == "true"
        ours = map(str, connector_jars(pyspark_version, format_, avro=avro, progress=progress))
        merged["spark.jars"] = ",".join([*_listed(given, "spark.jars"), *ours])
    limits = [f"-D{name}={limit}" for name, limit in _AVRO_LIMITS.items()]
    merged[_OF_EXECUTORS] = " ".join([*limits, given.get(_OF_EXECUTORS, "")]).strip()
    merged[_EXTENSIONS] = ",".join(dict.fromkeys([*_listed(given, _EXTENSIONS), _DELTA_EXTENSION]))
    return merged


def _listed(conf: Mapping[str, str], name: str) -> list[str]:
    return [one.strip() for one in conf.get(name, "").split(",") if one.strip()]


_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,\d+)?\])?")


def is_one_process(master: str) -> bool:
    """True if the driver is the only executor, so that data kept by Spark is lost only if the job ends."""
    return _LOCAL.fullmatch(master) is not None


def keep(rows: DataFrame, until: ExitStack, level: StorageLevel | None = None, *, eager: bool = True) -> DataFrame:
    """The rows, computed once, and kept until the end of `until`. `eager`: now; otherwise when they are first used.

    `level`: None: in memory as far as there is room. If Spark is one process, no row can get lost, and Spark can forget
    how they were computed: planning what builds on them would take a third of an audit's time. They are kept as they
    are, which is faster than as columns. On a cluster, the rows of a lost executor are computed again.
    """
    from pyspark import StorageLevel

    level = level or StorageLevel.MEMORY_AND_DISK_DESER
    if is_one_process(str(rows.sparkSession.sparkContext.master)):
        kept = rows.localCheckpoint(eager, level)
        until.callback(_forget, kept)
    else:
        kept = rows.persist(level)
        until.callback(kept.unpersist)
    return kept


def _forget(kept: DataFrame) -> None:
    from py4j.protocol import Py4JError

    with suppress(Py4JError):  # not a public interface of Spark, which forgets them when Java collects its garbage
        rows: Any = kept._jdf
        rows.queryExecution().analyzed().rdd().unpersist(False)


def _sized(master: str) -> dict[str, str]:
    """A shuffle's number of tasks on one machine, where Spark's 200 would cost more time than their work."""
    found = _LOCAL.fullmatch(master)
    if found is None:
        return {}
    cores = len(os.sched_getaffinity(0)) if found[1] == "*" else int(found[1] or 1)
    return {"spark.sql.shuffle.partitions": str(cores)}


def use_java() -> None:
    """Makes Spark use the first suitable Java: JAVA_HOME, PATH, the wheel. Raises SparkUnavailable if there is none."""
    try:
        found = java.find(newest=NEWEST_JAVA)
    except StackError as error:
        raise SparkUnavailable(error.message, hint="install Java 17 or 21, or set JAVA_HOME to one") from error
    os.environ["JAVA_HOME"] = str(found.program.resolve().parents[1])


@contextmanager
def session(settings: SessionSettings, *, progress: Callable[[str], None] = lambda _: None) -> Iterator[SparkSession]:
    """Starts Spark, and stops it at the end. Raises SparkUnavailable, ConnectorMismatch, StackError."""
    version = spark_version()
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        elsewhere = given_elsewhere()
    except (Py4JError, OSError) as error:
        raise SparkUnavailable(
            f"the Java process of spark-submit does not answer: {error}", hint=f"unset {_GATEWAY} if there is none"
        ) from error
    conf = options(settings, version, progress, elsewhere)
    if _GATEWAY not in os.environ:
        use_java()
        given = {**elsewhere, **conf}
        if is_one_process(settings.master or given.get("spark.master", "local[*]")) and _PYTHON not in given:
            # Spark would take the first python3 on PATH, which may have none of our packages.
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

    # It would also print a stack trace for each error that it raises.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    builder = SparkSession.builder.appName(settings.name)
    if settings.master is not None:
        builder = builder.master(settings.master)
    for name, value in conf.items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except (PySparkException, Py4JError, OSError) as error:
        raise SparkUnavailable(f"Spark did not start: {reason(error)}", hint="see its output above") from error
    spark.sparkContext.setLogLevel(settings.log_level)
    try:
        _limit_avro(spark)
        yield spark
    finally:
        with suppress(Py4JError, OSError):  # the Java process may have been killed
            spark.stop()


def _limit_avro(spark: SparkSession) -> None:
    """Limits Avro in the driver's Java process, whoever started it: Avro looks for limits when it first decodes."""
    system = getattr(spark.sparkContext._jvm, "java.lang.System")
    for name, limit in _AVRO_LIMITS.items():
        if system.getProperty(name) is None:
            system.setProperty(name, str(limit))


@contextmanager
def clear_errors(what: str, error_type: type[PipelineError] = PipelineError, hint: str = _GOES_ON) -> Iterator[None]:
    """Converts errors of Spark or its Java process into an error of one line that begins with `what`."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError, OSError, EOFError) as error:
        raise error_type(f"{what}: {reason(error)}", hint=hint) from error


def reason(error: BaseException) -> str:
    """The innermost cause in an error of Spark, without the stack trace.

    A cause about a file is preferred: the object store's error inside it does not name the file.
    """
    text = str(error)
    causes = [line.partition("Caused by:")[2].strip() for line in text.splitlines() if "Caused by:" in line]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, OSError | EOFError) or type(error).__name__ == "Py4JNetworkError":
        return "Spark's Java process is gone"
    # An error that Python raised in a batch comes back through Java, with both stack traces.
    causes = [cause for cause in causes if "py4j.Py4JException" not in cause] or _raised(text)
    # The line after the name of the call is the error.
    told = [line.removeprefix(": ") for line in lines if not line.startswith("An error occurred while calling ")]
    causes = [one for one in (*told, *causes) if one.startswith("java.nio.file.")] or causes
    return causes[-1] if causes else (told or [type(error).__name__])[0]


def _raised(text: str) -> list[str]:
    """The exceptions at the ends of Python tracebacks in a text."""
    found, within = [], False
    for line in text.splitlines():
        if line.endswith("Traceback (most recent call last):"):
            within = True
        elif within and line.strip() and not line[0].isspace():
            within = False
            found.append(line)
    return found
