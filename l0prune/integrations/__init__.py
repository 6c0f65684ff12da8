"""Callbacks for the training loops of other packages; each has a module of that package's name."""
