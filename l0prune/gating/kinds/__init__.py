"""The kinds of gates: how a slot's parameter becomes its multiplier."""
