"""The job `replay`: docs/pipeline-replay.md. `job` is the entry point."""
