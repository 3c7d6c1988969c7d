"""Steps that change nothing, or the wrong thing."""
