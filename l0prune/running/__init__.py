"""Shared by evaluation, scoring and training: tasks, batches, devices, processes."""
