"""The job `metrics`: docs/pipeline-metrics.md. `job` is where it begins."""
