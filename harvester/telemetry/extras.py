"""Whether what a setting asks for is installed."""

from __future__ import annotations

from harvester.errors import ConfigurationError, Problem


def require_tracing() -> None:
    """Raises ConfigurationError where spans cannot be made or exported."""
    try:
        from harvester.telemetry.tracing import check_tracing
    except ModuleNotFoundError as error:
        problem = Problem("tracing.enabled", f"needs {error.name}, which is not installed", "or false")
        raise ConfigurationError([problem], hint="pip install 'harvester[otel]'") from None
    check_tracing()
