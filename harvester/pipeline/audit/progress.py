"""How far Spark is: a line now and then while its stages run, as figures come from few and long actions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVERY_S = 5.0


@contextmanager
def stages_told(spark: SparkSession, tell: Callable[[str], None], every_s: float = EVERY_S) -> Iterator[None]:
    """Tell how many tasks are done of the stages that run, every so often, until left."""
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(spark, tell, every_s, ended), name="spark progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(spark: SparkSession, tell: Callable[[str], None], every_s: float, ended: threading.Event) -> None:
    from py4j.protocol import Py4JError

    tracker = spark.sparkContext.statusTracker()
    before = ""
    while not ended.wait(every_s):
        try:
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        except (Py4JError, OSError):
            return  # the Java process has ended; whoever works with it says why
        done = sum(stage.numCompletedTasks for stage in stages if stage is not None)
        tasks = sum(stage.numTasks for stage in stages if stage is not None)
        line = f"{done:,} of {tasks:,} tasks done"
        if tasks and line != before:
            tell(line)
            before = line
