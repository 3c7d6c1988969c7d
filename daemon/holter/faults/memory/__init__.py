"""Memory that grows without bound, or has run out."""
