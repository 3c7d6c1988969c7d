"""Where holter meets a framework: the plain loop is the base, the others add what only they know."""
