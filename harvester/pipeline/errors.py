"""The errors of pipeline jobs: a branch of the tree in `harvester.errors`."""

from __future__ import annotations

from harvester.errors import ExitCode, HarvesterError


class PipelineError(HarvesterError):
    """A pipeline job cannot continue; what it has written is consistent, and it can be started again."""


class SparkUnavailable(PipelineError):
    """Spark, or a Java version that it supports, is not installed."""

    exit_code = ExitCode.ENGINE


class ConnectorMismatch(PipelineError):
    """A connector was built for another Spark version than the installed one."""

    exit_code = ExitCode.CONNECTOR


class RegistryUnavailable(PipelineError):
    """The schema registry cannot be reached, or refuses the login. The batch is repeated after a restart."""

    exit_code = ExitCode.UNAVAILABLE


class InputMissing(PipelineError):
    """A topic to be read does not exist, or records were removed before they were read."""

    exit_code = ExitCode.INPUT


class TableMismatch(PipelineError):
    """A table to be written has a different schema, or was filled by another job."""

    exit_code = ExitCode.TABLE


class CheckpointMismatch(PipelineError):
    """The checkpoint belongs to other topics or another job, cannot be read, or does not fit its tables."""

    exit_code = ExitCode.CHECKPOINT
