"""Dtypes that are not what they should be, and values that do not fit into them."""
