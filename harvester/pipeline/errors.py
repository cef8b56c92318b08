"""Why a job of the pipeline cannot go on: a branch of the tree in `harvester.errors`."""

from __future__ import annotations

from harvester.errors import ExitCode, HarvesterError


class PipelineError(HarvesterError):
    """A job of the pipeline cannot go on; what was written before is whole, and the job can be started again."""


class SparkUnavailable(PipelineError):
    """Spark is not installed, or there is no Java that it runs on."""

    exit_code = ExitCode.ENGINE


class ConnectorMismatch(PipelineError):
    """A connector was made for another Spark than the one that is installed."""

    exit_code = ExitCode.CONNECTOR


class InputMissing(PipelineError):
    """A topic that is to be read does not exist, or records of it that were not read exist no more."""

    exit_code = ExitCode.INPUT


class TableMismatch(PipelineError):
    """A table that is to be written exists with another schema, or was filled by somebody else."""

    exit_code = ExitCode.TABLE


class CheckpointMismatch(PipelineError):
    """The checkpoint belongs to another input."""

    exit_code = ExitCode.CHECKPOINT
