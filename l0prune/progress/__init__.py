"""Progress of long work: stages, how much of each is done, and their display on stderr."""
