"""What can go wrong between a harvester and whoever controls it."""

from __future__ import annotations

from harvester.errors import ExitCode, HarvesterError


class ControlError(HarvesterError):
    """Base of all of them; by itself: the harvester answered, and the answer is no."""


class NotUnderstood(ControlError):
    """Bytes on a control socket that are no request or no answer, or of another version."""


class NoHarvester(ControlError):
    """No harvester that could be asked runs, or it does not answer."""

    exit_code = ExitCode.UNAVAILABLE


class SeveralHarvesters(ControlError):
    """More than one runs, and it was not said which is meant."""

    exit_code = ExitCode.USAGE


class NoPlace(ControlError):
    """There is no safe place for the socket, or somebody else has it."""
