"""`python -m holter.cli`, for a process that must not depend on where the `holter` script lies."""

import sys

from holter.cli import main

sys.exit(main())
