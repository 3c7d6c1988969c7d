"""Nothing, or the wrong thing, is learning."""
