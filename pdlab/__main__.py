"""`python -m pdlab` is the command `pdlab`."""

import sys

from pdlab.cli import main

sys.exit(main())
