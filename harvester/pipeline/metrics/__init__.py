"""The job `metrics`: docs/pipeline-metrics.md. `job` is the entry point."""
