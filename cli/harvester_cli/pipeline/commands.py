"""`harvester pipeline`: jobs on Apache Spark that turn the harvested topics into tables."""

from __future__ import annotations

from typing import Annotated

import typer
from harvester_cli.pipeline.audit import audit
from harvester_cli.pipeline.drain import drain
from harvester_cli.pipeline.lake import erase, lake, rebuild, views
from harvester_cli.pipeline.metrics import metrics
from harvester_cli.pipeline.options import FormatOption, say
from harvester_cli.pipeline.replay import replay

app = typer.Typer(no_args_is_help=True, help="Jobs on Apache Spark over the harvested topics.")

AvroOption = Annotated[bool, typer.Option("--avro", help="Also the connector for Avro, which `lake --typed` needs.")]

app.command("lake")(lake)
app.command("rebuild")(rebuild)
app.command("views")(views)
app.command("erase")(erase)
app.command("drain")(drain)
app.command("replay")(replay)
app.command("metrics")(metrics)
app.command("audit")(audit)


@app.command("packages")
def packages(format_: FormatOption = None, avro: AvroOption = False) -> None:
    """Print the connectors for the installed PySpark, for `spark-submit --packages`."""
    from harvester.pipeline.session import DELTA, connectors, spark_version

    print(",".join(str(one) for one in connectors(spark_version(), format_ or DELTA, avro=avro)))


@app.command("fetch")
def fetch(format_: FormatOption = None, avro: AvroOption = False) -> None:
    """Download the connectors into the cache now, so that a later job needs no network."""
    from harvester.pipeline.session import DELTA, connector_jars, spark_version

    connector_jars(spark_version(), format_ or DELTA, avro=avro, progress=say)
