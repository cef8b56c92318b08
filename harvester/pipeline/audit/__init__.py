"""The job `audit`: docs/pipeline-audit.md. `job` is where it begins."""
