"""The job `lake`: docs/pipeline.md. `job` is the entry point."""
