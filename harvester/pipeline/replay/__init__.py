"""The job `replay`: docs/pipeline-replay.md. `job` is where it begins."""
