"""What a request does to a harvester."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from harvester.control.protocol import Answer, Request
from harvester.control.snapshot import key_to_json, to_json
from harvester.errors import HarvesterError
from harvester.status import KeyStatus, Status

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

LONGEST_SCALE_S = 60.0
_QUESTIONS = ("status", "key")
_FREE = (*_QUESTIONS, "stop")  # these wait for nobody


class Controlled(Protocol):
    """What is controlled: `harvester.Harvester`."""

    def status(self) -> Status: ...

    def key(self, key: str) -> KeyStatus: ...

    def pause(self) -> bool: ...

    def resume(self) -> bool: ...

    def remark(self) -> None: ...

    def scale(self, shards: int, within_s: float) -> bool: ...

    def set_log_level(self, level: str) -> None: ...

    def stop_soon(self) -> None: ...


class Desk:
    """Commands that change something are performed one after the other, whoever asks."""

    def __init__(self, harvester: Controlled, log: Log) -> None:
        self._harvester, self._log = harvester, log
        self._busy = threading.Lock()

    def obey(self, request: Request, who: str) -> Answer:
        """The answer, a refusal included; `who` asks is for the log."""
        free = request.command in _FREE
        if request.command not in _QUESTIONS:
            arguments = "".join(f" {value}" for value in request.arguments.values())
            self._log.info("control: %s%s (%s)", request.command, arguments, who)
        if not free and not self._busy.acquire(blocking=False):
            return Answer(error="another command is under way", hint="try again when it is done")
        try:
            return Answer(self._perform(request))
        except HarvesterError as error:
            return Answer(error=error.message, hint=error.hint)
        except Exception as error:  # noqa: BLE001 - whoever asked is told, and the harvester goes on
            self._log.exception("control: %s failed", request.command)
            return Answer(error=f"internal error: {error!r}", hint="the harvester's log has more; please report this")
        finally:
            if not free:
                self._busy.release()

    def _perform(self, request: Request) -> Mapping[str, Any]:
        harvester, arguments = self._harvester, request.arguments
        match request.command:
            case "status":
                return to_json(harvester.status())
            case "key":
                return key_to_json(harvester.key(arguments["key"]))
            case "pause":
                return self._told(changed=harvester.pause())
            case "resume":
                return self._told(changed=harvester.resume())
            case "remark":
                harvester.remark()
                return self._told()
            case "scale":
                return self._scaled(arguments["shards"], min(arguments["within_s"], LONGEST_SCALE_S))
            case "loglevel":
                harvester.set_log_level(arguments["level"])
                return self._told()
            case _:
                harvester.stop_soon()
                return self._told()

    def _scaled(self, shards: int, within_s: float) -> Mapping[str, Any]:
        before = len(self._harvester.status().shards)
        if before != shards and not self._harvester.scale(shards, within_s):
            raise HarvesterError(
                f"still {before} shards: not everything under way was settled within {within_s:g} s",
                hint="see what is retried or held up (`harvester watch`), then try again",
            )
        return {**self._told(changed=before != shards), "before": before, "shards": shards}

    def _told(self, *, changed: bool = True) -> dict[str, Any]:
        """What a client says about it to a person."""
        status = self._harvester.status()
        return {
            "changed": changed,
            "name": status.name,
            "state": status.state.value,
            "in_flight": status.in_flight,
            "shards": len(status.shards),
        }
