"""The job `lake`: docs/pipeline.md. `job` is where it begins."""
