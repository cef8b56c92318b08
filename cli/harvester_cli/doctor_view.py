"""A report for people: a line for each finding, what to do below it, and a verdict. Levels are words."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from harvester.doctor import CheckLevel, CheckResult, DoctorReport

_STYLES = {
    CheckLevel.OK: "green",
    CheckLevel.SKIPPED: "dim",
    CheckLevel.WARNING: "yellow",
    CheckLevel.PROBLEM: "bold red",
}
_INDENT = 9


def lines_of(report: DoctorReport) -> Iterator[Text]:
    """In the report's order; the last line sums up."""
    for finding in report.findings:
        yield _line(finding)
        if finding.advice and finding.level is not CheckLevel.OK:
            yield Text(f"{'':{_INDENT}}do: {finding.advice}")
    yield Text("")
    yield _verdict(report)


def _line(finding: CheckResult) -> Text:
    level = f"{finding.level.value:{_INDENT}}"
    return Text.assemble((level, _STYLES[finding.level]), (finding.check, "bold"), f": {finding.found}")


def _verdict(report: DoctorReport) -> Text:
    problems, warnings = len(report.of(CheckLevel.PROBLEM)), len(report.of(CheckLevel.WARNING))
    if problems:
        return Text(f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}", style="bold red")
    if warnings:
        return Text(f"no problem, {_count(warnings, 'warning')}", style="yellow")
    return Text("all is well", style="green")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
