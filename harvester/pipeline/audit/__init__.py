"""The job `audit`: docs/pipeline-audit.md. `job` is the entry point."""
