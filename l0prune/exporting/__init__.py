"""Export: fold the gates, slice the network, prove it, write it."""
