"""Saving a halted run through its framework's own functions, so that the checkpoint can be loaded without holter."""
