"""Steps that change nothing, or not what they should."""
