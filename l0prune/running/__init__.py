"""What evaluation, scoring and training share: tasks, batches, devices, processes."""
