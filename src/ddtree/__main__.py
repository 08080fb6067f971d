"""`python -m ddtree`."""

import sys

from ddtree.cli import main

sys.exit(main())
