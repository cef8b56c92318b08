"""Telemetry: log lines, figures and traces. Nothing here decides anything.

`logging` formats lines, `metrics` counts and rates, `latency` keeps histograms, `process` reads CPU and memory,
`notify` tells the service manager, `tracing` continues traces.
"""
