"""`scripts/first-hour`: the first hour of a developer on a laptop, an operator on a machine, a team on Kubernetes."""
