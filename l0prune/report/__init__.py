"""Survey and report of a run."""
