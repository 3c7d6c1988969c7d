"""Saving a halted run through its framework's own functions, so that the checkpoint loads without holter."""
