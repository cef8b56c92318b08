"""The job `drain`: docs/pipeline-drain.md. `job` is where it begins."""
