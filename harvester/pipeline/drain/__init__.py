"""The job `drain`: docs/pipeline-drain.md. `job` is the entry point."""
