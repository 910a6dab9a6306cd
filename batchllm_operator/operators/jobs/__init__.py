"""Kubernetes Jobs as tasks: the pods' template, the Job's owner, how it is watched, its end."""
