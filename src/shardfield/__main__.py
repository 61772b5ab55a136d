"""`python -m shardfield`, for launchers that start modules."""

import sys

from .cli import main

sys.exit(main())
