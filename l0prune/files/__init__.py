"""Files: atomic writing, reading of untrusted input; models and user code by name."""
