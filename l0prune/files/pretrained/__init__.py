"""Smaller models in files: read without a pickle, put on the class that they are of."""
